"""Groups that environments of Atropos post to a run: the run asks for a group at a time, and takes the next that comes.

What an environment samples is sampled for the oldest group that the run has asked for and does not have yet, with that
group's sampler; while the run asks for none, requests wait. So generation is bounded by the run's own gate, and goes
through its books and journal, though nobody can say beforehand which group a completion will belong to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import trio

from asyncrl.atropos.matching import SampledTokens
from asyncrl.atropos.messages import KEYS, UNTRAINED, BadField, Registration, ScoredGroup, group_json
from asyncrl.atropos.roster import Roster, WaitingCounts
from asyncrl.gateway.http import Refused
from asyncrl.protocols import Sampler, Watch
from asyncrl.tokens import ChatRenderer, build_segments
from asyncrl.types import (
    Completion,
    FinishReason,
    Logprobs,
    Segment,
    Task,
    TokenIds,
    Trajectory,
    TrajectoryStatus,
)

_MAX_WAITING = 1024  # groups; environments that mind their queue never come near
_OVER = 1_000_000  # steps: above any environment's `total_steps`, so that it ends
_TEACHERS = ("distill_token_ids", "distill_logprobs")
_SEQUENCE_EXTRAS = ("overrides",)
_GROUP_EXTRAS = ("generation_params", "group_overrides")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedSequence:
    """One sequence of a posted group, as it will be trained on."""

    segments: tuple[Segment, ...]
    reward: float
    num_turns: int
    truncated: bool
    extras: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedGroup:
    """A group that waits for the run to ask for it."""

    env_id: int | None
    sequences: tuple[PostedSequence, ...]

    def trajectories(self, task: Task, group_id: str) -> list[Trajectory]:
        """Return the episodes of the group that the run asked for."""
        return [
            Trajectory(
                trajectory_id=f"{group_id}-{place}",
                task_id=task.task_id,
                environment=task.environment,
                segments=sequence.segments,
                reward=sequence.reward,
                status=TrajectoryStatus.TRUNCATED_LENGTH if sequence.truncated else TrajectoryStatus.COMPLETED,
                num_turns=sequence.num_turns,
                truncated=sequence.truncated,
                extras=sequence.extras,
            )
            for place, sequence in enumerate(self.sequences)
        ]


class RunTrainer:
    """A run, as environments see it. A `door.Trainer`, and the `Sampler` of what they ask for."""

    def __init__(
        self, registration: Registration, renderer: ChatRenderer, *, ghost_s: float, max_sampled_tokens: int
    ) -> None:
        """`registration.batch_size` of 0 is set when environments ask: as many groups as the run asks for at once."""
        self._said = registration
        self._renderer = renderer
        self._post, self._posted = trio.open_memory_channel[PostedGroup](_MAX_WAITING)
        self._places: dict[str, Sampler] = {}  # group id -> of the groups that the run has asked for, in order
        self._most_places = 0
        self._asked = trio.Event()
        self._latest: bytes | None = None
        self.takes = False
        self.sampled = SampledTokens(max_tokens=max_sampled_tokens, end_token_ids=renderer.end_token_ids)
        self.roster = Roster(ghost_s=ghost_s)
        self.waiting = WaitingCounts()

    # --- what environments see --------------------------------------------------------------------------------

    @property
    def registration(self) -> Registration | None:
        """How the run trains.

        An environment runs three batches' worth of groups at a time, so that a third of what the run asks for is a
        batch: then each group that is begun has a place when it is posted.
        """
        if self._said.batch_size:
            return self._said
        size = max((member.group_size for member in self.roster.members), default=1)
        return msgspec.structs.replace(self._said, batch_size=max(size, self._most_places * size // 3))

    @property
    def vocab_size(self) -> int | None:
        """The model's."""
        return self._renderer.vocab_size

    @property
    def max_group_size(self) -> int | None:
        """There is none: groups of all sizes are trained on."""
        return None

    @property
    def current_step(self) -> int:
        """The newest version that sampled a token; after the last step of the run, one that ends every environment."""
        version, last = self.sampled.newest_version, self._said.num_steps
        return version + _OVER if 0 < last <= version else version

    @property
    def latest(self) -> bytes | None:
        """The last group that came, as JSON."""
        return self._latest and group_json(self._latest)

    async def note_environments(self) -> None:
        """See `door.Trainer`: a run that is resumed begins with none."""
        await trio.lowlevel.checkpoint()

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        """See `door.Trainer`. Raises: Refused where a group's tokens were not sampled here."""
        if self.waiting.groups + len(groups) > _MAX_WAITING:
            raise Refused(503, f"{self.waiting.groups} groups wait already", retry_after_s=5)
        for group in [self._matched(group) for group in groups]:
            self.waiting.add(group.env_id, len(group.sequences))
            self._post.send_nowait(group)
        self._latest = groups[-1].body
        await trio.lowlevel.checkpoint()

    def _matched(self, group: ScoredGroup) -> PostedGroup:
        for name in _TEACHERS:
            if name in group.raw:
                raise BadField(name, "a run takes its teacher from [learner.teacher], and from no environment")
        shared, each = self._extras(group)
        sequences = []
        for place, (tokens, mask) in enumerate(zip(group.tokens, group.masks, strict=True)):
            for position, (token_id, value) in enumerate(zip(tokens, mask, strict=True)):
                if value not in (token_id, UNTRAINED):
                    raise BadField(f"masks.{place}.{position}", f"must be -100 or the token's own id, got {value}")
            found = self.sampled.match(
                place, tokens, mask, group.inference_logprobs[place] if group.inference_logprobs else None
            )
            (segment,) = build_segments(
                found.turns, end_token_ids=self._renderer.end_token_ids, vocab_size=self.vocab_size
            )
            own = {name: values[place] for name, values in each.items()}
            unsampled = {"unsampled_tokens": found.num_unsampled} if found.num_unsampled else {}
            sequences.append(
                PostedSequence(
                    segments=(self._with_fields(segment, group, place),),
                    reward=group.scores[place],
                    num_turns=len(found.turns),
                    truncated=found.turns[-1].completion.finish_reason is FinishReason.LENGTH,
                    extras={**shared, **own, **unsampled},
                )
            )
        return PostedGroup(env_id=group.env_id, sequences=tuple(sequences))

    def _extras(self, group: ScoredGroup) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return what is kept of a group for all its sequences, and of each: unknown fields, and what it overrides."""
        shared: dict[str, Any] = {}
        if group.env_id is not None and group.env_id < len(self.roster.members):
            shared["atropos_environment"] = self.roster.member(group.env_id).name
        each: dict[str, list[Any]] = {}
        for name in group.raw.keys() - {*KEYS} | ({*_SEQUENCE_EXTRAS, *_GROUP_EXTRAS} & group.raw.keys()):
            value = group.value(name)
            if _per_token(value, group):
                continue
            if isinstance(value, list) and len(value) == group.size:
                each[name] = value
            else:
                shared[name] = value
        return shared, each

    def _with_fields(self, segment: Segment, group: ScoredGroup, place: int) -> Segment:
        """Return a segment with what the environment says of single tokens."""
        length = len(segment.token_ids)
        fields = {
            name: Logprobs(value[place][:length])
            for name in group.raw.keys() - {*KEYS} | ({"ref_logprobs"} & group.raw.keys())
            if _per_token(value := group.value(name), group)
        }
        advantages = group.advantages[place] if group.advantages else None
        overrides = group.value("overrides")
        if overrides and overrides[place].get("set_advantage_to_zero"):
            advantages = [0.0] * len(group.tokens[place])
        return replace(
            segment,
            advantages=None if advantages is None else Logprobs(advantages[:length]),
            token_fields=fields,
        )

    # --- what the run sees ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def place(self, group_id: str, sampler: Sampler) -> AsyncIterator[None]:
        """Ask for a group: environments sample for it with `sampler` until the end of the body."""
        self._places[group_id] = sampler
        self._most_places = max(self._most_places, len(self._places))
        self.takes = True
        self._asked.set()
        self._asked = trio.Event()
        try:
            yield
        finally:
            del self._places[group_id]

    async def next_group(self) -> PostedGroup:
        """Wait for the next group and take it; in the order of the calls."""
        group = await self._posted.receive()
        self.waiting.remove(group.env_id, len(group.sequences))
        return group

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Return a completion, sampled for the oldest group that the run has asked for; wait while there is none."""
        while not self._places:
            await self._asked.wait()
        group_id, sampler = next(iter(self._places.items()))
        return await sampler.sample(
            token_ids,
            max_tokens=max_tokens,
            trajectory_id=f"{group_id}-{trajectory_id}",
            stop_token_ids=stop_token_ids,
            watch=watch,
        )


def _per_token(value: Any, group: ScoredGroup) -> bool:
    """Tell whether a field is a number for each token of each sequence."""
    return (
        isinstance(value, list)
        and len(value) == group.size
        and all(
            isinstance(row, list)
            and len(row) == len(tokens)
            and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in row)
            for row, tokens in zip(value, group.tokens, strict=True)
        )
    )
