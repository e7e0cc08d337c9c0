"""Functions in the form of slime's: `generate` leads an episode, `reward` scores it, a filter may drop a group.

[environment]
name = "slime"

[environment.options]
path = "prompts.jsonl"
generate = "my_rollout:generate"
reward = "my_rollout:reward"

`await generate(args, sample, sampling_params)` asks for completions by `await args.generate(payload)`, which answers
what SGLang's `/generate` does, in place of a request to a router's URL: `text` or `input_ids`, and `sampling_params`
with `max_new_tokens`. What it leaves in `sample.tokens` is matched with what was sampled, by its ids.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import trio

from asyncrl.atropos.matching import SampledTokens
from asyncrl.atropos.messages import UNTRAINED, BadField
from asyncrl.boundary import boundary
from asyncrl.dynamic_sampling import FILTERED
from asyncrl.environments.file_tasks import FileTaskEnvironment, FileTaskSettings
from asyncrl.environments.foreign import call, load_function
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.tokens import ChatRenderer, build_segments
from asyncrl.types import FinishReason, Task, TokenIds, Trajectory, TrajectoryStatus


class SampleStatus(StrEnum):
    """How a sample's generation ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Sample:
    """What `generate` fills in, with slime's names."""

    Status = SampleStatus
    index: str = ""
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """The line's object."""
    tokens: list[int] = field(default_factory=list)
    """Of prompt and response."""
    response: str = ""
    response_length: int = 0
    """Tokens at the end of `tokens` that are the response."""
    loss_mask: list[int] | None = None
    """Over the response: 1 where it is trained on; None is everywhere."""
    rollout_log_probs: list[float] | None = None
    """Not read: each token has the log-prob that it was sampled with."""
    reward: Any = None
    """Where `generate` has scored already; a number, or a mapping with `reward_key`."""
    status: SampleStatus = SampleStatus.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeSettings(FileTaskSettings):
    """Which functions lead an episode."""

    generate: str
    """"package.module:function": `async generate(args, sample, sampling_params)`, which returns the sample. On trio."""
    reward: str = ""
    """"package.module:function": `reward(args, sample)` returns a number, or a mapping with `reward_key`; empty where
    `generate` sets `sample.reward`."""
    filter: str = ""
    """"package.module:function": `filter(args, samples)` of a finished group returns (keep, reason), or an object with
    these; a group that is not kept is dropped and counted. Empty keeps all."""
    reward_key: str = "reward"
    input_key: str = "prompt"
    """Of a line: text, or a list of messages."""
    label_key: str = "label"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `args`."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        FileTaskSettings.__post_init__(self)
        for setting in ("generate", "reward", "filter"):
            if name := getattr(self, setting):
                load_function(name, setting=setting)


class SlimeEnvironment(FileTaskEnvironment):
    """Lets slime-style functions lead episodes."""

    name = "slime"
    settings_type = SlimeSettings

    def __init__(
        self, settings: SlimeSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        self.settings = settings
        super().__init__(settings, renderer=renderer, sandboxes=sandboxes, seed=seed)
        self._generate = load_function(settings.generate, setting="generate")
        self._reward = load_function(settings.reward, setting="reward") if settings.reward else None
        self._filter = load_function(settings.filter, setting="filter") if settings.filter else None
        self._samples: dict[str, Sample] = {}  # trajectory id -> of groups under way

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Play a group, and mark all of it where the filter does not keep it."""
        found = await super().collect_trajectories(
            task,
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=None if self._filter else on_trajectory,  # a filter may change what they are
        )
        samples = [self._samples.pop(t.trajectory_id) for t in found if t.trajectory_id in self._samples]
        if self._filter is None or not samples:
            return found
        async with boundary() as caught:
            keep, reason = _verdict(await call(self._filter, self._arguments(), samples))
            return found if keep else [replace(t, extras={**t.extras, FILTERED: reason}) for t in found]
        assert caught.status is not None
        return [
            replace(t, segments=(), reward=None, status=caught.status, detail=t.detail or caught.detail) for t in found
        ]

    async def play(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """See `FileTaskEnvironment.play`."""
        started = trio.current_time()
        sampled = SampledTokens(max_tokens=sys.maxsize, end_token_ids=self.renderer.end_token_ids)
        generator = _Generator(self.renderer, sampler, sampled, self.settings, trajectory_id)
        arguments = self._arguments(generate=generator.generate)
        sample = Sample(
            index=trajectory_id,
            prompt=task.data[self.settings.input_key],
            label=task.data.get(self.settings.label_key),
            metadata=dict(task.data),
        )
        parameters = {"max_new_tokens": self.settings.max_tokens}
        sample = await call(self._generate, arguments, sample, parameters)
        if not isinstance(sample, Sample):
            raise EnvironmentFault(f"{self.settings.generate} must return one sample, got {type(sample).__name__}")
        if sample.status == SampleStatus.ABORTED:
            raise EngineError(f"{self.settings.generate} says that the sample was aborted")
        if sample.status == SampleStatus.FAILED:
            raise EnvironmentFault(f"{self.settings.generate} says that the sample failed")
        if self._reward is not None:
            sample.reward = await call(self._reward, arguments, sample)
        self._samples[trajectory_id] = sample
        return self._trajectory(task, trajectory_id, sample, sampled, trio.current_time() - started)

    def _arguments(self, **more: Any) -> SimpleNamespace:
        own = {"tokenizer": self.renderer, "reward_key": self.settings.reward_key}
        return SimpleNamespace(**own, **self.settings.arguments, **more)

    def _trajectory(
        self, task: Task, trajectory_id: str, sample: Sample, sampled: SampledTokens, seconds: float
    ) -> Trajectory:
        try:
            matched = sampled.match(0, sample.tokens, _labels(sample))
        except BadField as error:
            raise EnvironmentFault(f"{self.settings.generate}: {error}") from error
        reasons = [turn.completion.finish_reason for turn in matched.turns]
        cut = sample.status == SampleStatus.TRUNCATED
        if sample.status == SampleStatus.PENDING:
            cut = reasons[-1] is FinishReason.LENGTH
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=task.environment,
            segments=build_segments(
                matched.turns, end_token_ids=self.renderer.end_token_ids, vocab_size=self.renderer.vocab_size
            ),
            reward=_reward(sample.reward, self.settings.reward_key),
            status=TrajectoryStatus.TRUNCATED_LENGTH if cut else TrajectoryStatus.COMPLETED,
            num_turns=len(matched.turns),
            seconds=seconds,
            truncated=cut or FinishReason.LENGTH in reasons,
            extras={"unsampled_tokens": matched.num_unsampled} if matched.num_unsampled else {},
        )

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        if self.settings.input_key not in row:
            raise ConfigError(f"{where}: {self.settings.input_key} is missing (input_key)")
        return super()._task(row, where)


class _Generator:
    """Answers what SGLang's `/generate` does, for one episode."""

    def __init__(
        self,
        renderer: ChatRenderer,
        sampler: Sampler,
        sampled: SampledTokens,
        settings: SlimeSettings,
        trajectory_id: str,
    ) -> None:
        self._renderer = renderer
        self._sampler = sampler
        self._sampled = sampled
        self._settings = settings
        self._trajectory_id = trajectory_id

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return a completion of `text` or `input_ids`; an empty one, cut at its length, where no room is left.

        Raises: EnvironmentFault for what is not served, EngineError.
        """
        wanted = dict(payload.get("sampling_params") or {})
        if wanted.get("stop") or wanted.get("n", 1) != 1:
            raise EnvironmentFault("args.generate serves no stop and no n: ask once for each, and cut the text")
        ids = payload.get("input_ids")
        prompt = self._renderer.encode(payload["text"]) if ids is None else TokenIds(ids)
        room = self._settings.max_episode_tokens - len(prompt)
        limit = min(room, self._settings.max_tokens, wanted.get("max_new_tokens") or room)
        if limit < 1:
            return _answer("", [], [], "length", "")
        completion = await self._sampler.sample(
            prompt,
            max_tokens=limit,
            trajectory_id=self._trajectory_id,
            stop_token_ids=(*self._renderer.stop_token_ids, *(wanted.get("stop_token_ids") or ())),
        )
        self._sampled.add(prompt, completion)
        newest = max((span.version for span in completion.spans), default=0)
        return _answer(
            self._renderer.decode(completion.token_ids),
            list(completion.token_ids),
            list(completion.behaviour_logprobs),
            str(completion.finish_reason),
            str(newest),
        )


def _answer(text: str, ids: list[int], logprobs: list[float], finish_reason: str, version: str) -> dict[str, Any]:
    pairs = [[logprob, token_id, None] for logprob, token_id in zip(logprobs, ids, strict=True)]
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {
            "output_token_logprobs": pairs,
            "finish_reason": {"type": finish_reason},
            "completion_tokens": len(ids),
            "weight_version": version,
        },
    }


def _labels(sample: Sample) -> list[int]:
    """Return a mask as Atropos has it: the token's own id where it is trained on. Raises: EnvironmentFault."""
    length, given = sample.response_length, sample.loss_mask
    if not 0 < length <= len(sample.tokens):
        raise EnvironmentFault(f"response_length must be from 1 to {len(sample.tokens)} tokens, got {length}")
    mask = [1] * length if given is None else given
    if len(mask) != length:
        raise EnvironmentFault(f"loss_mask has {len(mask)} entries for a response of {length} tokens")
    start = len(sample.tokens) - length
    response = zip(sample.tokens[start:], mask, strict=True)
    return [UNTRAINED] * start + [token_id if one else UNTRAINED for token_id, one in response]


def _reward(said: Any, key: str) -> float:
    value: Any = said.get(key) if isinstance(said, Mapping) else said
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"the reward must be a number, or a mapping with {key!r}, got {said!r}") from error
    if not math.isfinite(number):
        raise EnvironmentFault(f"the reward must be finite, got {number}")
    return number


def _verdict(said: Any) -> tuple[bool, str]:
    """Return what a filter said. Raises: EnvironmentFault."""
    if isinstance(said, tuple) and len(said) == 2:
        keep, reason = said
    elif hasattr(said, "keep"):
        keep, reason = said.keep, getattr(said, "reason", "")
    elif isinstance(said, bool):
        keep, reason = said, ""
    else:
        raise EnvironmentFault(f"a filter must return (keep, reason), got {said!r}")
    return bool(keep), str(reason or "")
