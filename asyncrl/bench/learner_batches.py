"""The batches that `asyncrl bench learner` measures on: real text in segments of known lengths, nothing sampled.

The text is the source of Python's own modules, so that log-probs have the size that they have in training.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer

from asyncrl.bench.learner_settings import LearnerBench
from asyncrl.errors import ConfigError
from asyncrl.learner.credit import select
from asyncrl.learner.settings import LearnerSettings
from asyncrl.packing import Batch
from asyncrl.types import Group, Logprobs, Segment, Task, TokenIds, TokenSpan, Trajectory, TrajectoryStatus

_MODULES = ("argparse", "inspect", "tarfile", "typing", "decimal", "_pydecimal", "datetime", "zipfile", "doctest")
_BEHAVIOUR_LOGPROB = -2.0  # nats a token; any number will do where nothing was sampled


def ragged_lengths(count: int, *, shortest: int, longest: int, total: int = 0) -> list[int]:
    """Return `count` lengths evenly spread from `shortest` to `longest`, or as many as reach `total`, shuffled."""
    if total:
        count = max(2, -(-2 * total // (shortest + longest)))
    lengths = [shortest + (longest - shortest) * place // max(1, count - 1) for place in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


class Tokens(Protocol):
    """What gives out the tokens of a batch."""

    def take(self, count: int) -> list[int]:
        """Return the next `count`."""


class Text:
    """Tokens of a long text, given out from its beginning."""

    def __init__(self, model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._tokens: list[int] = []
        self._given = 0
        for name in _MODULES:
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            text = Path(found.origin).read_text(encoding="utf-8")
            self._tokens += tokenizer(text, add_special_tokens=False)["input_ids"]

    def take(self, count: int) -> list[int]:
        """Return the next `count` tokens. Raises: ConfigError where the text ends before."""
        if self._given + count > len(self._tokens):
            raise ConfigError(f"the benchmark's text has {len(self._tokens)} tokens, and more were asked for")
        self._given += count
        return self._tokens[self._given - count : self._given]


def ragged_groups(text: Tokens, lengths: Sequence[int], *, prompt_tokens: int) -> list[Group]:
    """Return a group of one trajectory for each length: a prompt, then trained tokens, rewards of 1 and -1 in turns."""
    groups = []
    for place, length in enumerate(lengths):
        prompt = min(prompt_tokens, length - 1)
        segment = _segment(text.take(length), prompt)
        groups.append(_group(place, [segment], [1.0 - 2.0 * (place % 2)]))
    return groups


def ragged_batch(bench: LearnerBench, text: Text) -> Batch:
    """Return the batch that every variant sees; each token's advantage is its reward."""
    lengths = ragged_lengths(bench.segments, shortest=bench.shortest, longest=bench.longest)
    groups = ragged_groups(text, lengths, prompt_tokens=bench.prompt_tokens)
    return select(groups, LearnerSettings(baseline="none", scale="none")).batch


def sharing_groups(text: Tokens, count: int, *, size: int, prompt_tokens: int, completion_tokens: int) -> list[Group]:
    """Return `count` groups of `size` trajectories, whose segments begin with the same prompt."""
    groups = []
    for place in range(count):
        prompt = text.take(prompt_tokens)
        segments = [_segment(prompt + text.take(completion_tokens), prompt_tokens) for _ in range(size)]
        groups.append(_group(place, segments, [1.0 - 2.0 * (index % 2) for index in range(size)]))
    return groups


def _segment(tokens: Sequence[int], prompt_tokens: int) -> Segment:
    mask = [0] * prompt_tokens + [1] * (len(tokens) - prompt_tokens)
    return Segment(
        token_ids=TokenIds(tokens),
        loss_mask=bytes(mask),
        behaviour_logprobs=Logprobs([_BEHAVIOUR_LOGPROB * trained for trained in mask]),
        spans=(TokenSpan(start=prompt_tokens, end=len(tokens), version=0),),
    )


def _group(place: int, segments: Sequence[Segment], rewards: Sequence[float]) -> Group:
    task_id = f"bench-{place}"
    return Group(
        group_id=place,
        task=Task(task_id=task_id, environment="bench"),
        trajectories=tuple(
            Trajectory(
                trajectory_id=f"{task_id}/{index}",
                task_id=task_id,
                environment="bench",
                segments=(segment,),
                reward=reward,
                status=TrajectoryStatus.COMPLETED,
                num_turns=1,
            )
            for index, (segment, reward) in enumerate(zip(segments, rewards, strict=True))
        ),
    )
