"""What a run writes into its journal, and how: every finished turn, episode and group before it counts as finished.

    admitted -> turn, turn, ... -> episode -> ... -> group finished -> trained | dropped

A record's payload is the id of its group, then the msgpack bytes of one of the shapes below. What a weight version's
tokens were sampled under is told by the digest of the published weights, since a run that goes back to a checkpoint
gives the same version numbers to other weights. `asyncrl.run_history` reads it all back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.buffers import GroupCommit, JournalStatistics
from asyncrl.protocols import Sampler, Watch
from asyncrl.types import Completion, Group, PolicyVersion, Task, TokenIds, Trajectory, Turn

GROUP_ID = struct.Struct("<q")
"""Begins every payload, so that a reader may pass over a group without decoding it."""
NO_GROUP = -1

Weights = Mapping[PolicyVersion, str]
"""version -> digest of its weights; the weights that a run starts with have the digest ""."""


class Kind(IntEnum):
    """Of a record; the number is on disk."""

    GROUP_ADMITTED = 1
    TURN_FINISHED = 2
    TRAJECTORY_FINISHED = 3
    GROUP_FINISHED = 4
    GROUP_DROPPED = 5
    GROUPS_TRAINED = 6
    RESUMED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A task that was drawn: it is trained on once, or dropped with a reason, in whichever groups it takes."""

    draw_id: int
    """The id of the first group that ran it."""
    task: Task


class GroupAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A group has a slot and starts."""

    draw_id: int
    task: Task
    version: PolicyVersion
    """What the engines hold."""
    fresh: bool
    """The environment has just drawn the task; otherwise it was drawn for an earlier group."""


class TurnFinished(msgspec.Struct, frozen=True, kw_only=True):
    """An engine has answered; the environment has not."""

    trajectory_id: str
    turn: Turn
    weights: dict[PolicyVersion, str]


class TrajectoryFinished(msgspec.Struct, frozen=True, kw_only=True):
    """An episode is scored. A later record of the same one replaces it."""

    trajectory: Trajectory
    weights: dict[PolicyVersion, str]


class GroupFinished(msgspec.Struct, frozen=True, kw_only=True):
    """All episodes are scored; the group waits for the learner unless it is dropped."""

    trajectory_ids: list[str]
    admitted_version: PolicyVersion


class GroupDropped(msgspec.Struct, frozen=True, kw_only=True):
    """The group will not be trained on."""

    reason: str
    redrawn: bool
    """Its task is drawn again."""


class GroupsTrained(msgspec.Struct, frozen=True, kw_only=True):
    """These groups were trained into the weights of a version, which the engines may pull from now on."""

    group_ids: list[int]
    version: PolicyVersion
    weights: str


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """The run goes on from a checkpoint: what was done to later versions before is another line."""

    version: PolicyVersion
    weights: str


SHAPES: Mapping[Kind, type[msgspec.Struct]] = {
    Kind.GROUP_ADMITTED: GroupAdmitted,
    Kind.TURN_FINISHED: TurnFinished,
    Kind.TRAJECTORY_FINISHED: TrajectoryFinished,
    Kind.GROUP_FINISHED: GroupFinished,
    Kind.GROUP_DROPPED: GroupDropped,
    Kind.GROUPS_TRAINED: GroupsTrained,
    Kind.RESUMED: Resumed,
}


class RunJournal:
    """Writes the records of one run; without a log it keeps nothing, as a simulation wants it.

    The `..._nowait` methods hand a record in, in the order of the run's own bookkeeping, and return its position;
    `flush` waits for the disk. Raises: JournalError.
    """

    def __init__(self, log: GroupCommit | None = None) -> None:
        self._log = log
        self._weights: dict[PolicyVersion, str] = {}

    @property
    def position(self) -> int:
        """The position of the next record: a checkpoint that names it knows of all before."""
        return self._log.next_position if self._log else 0

    def note_weights(self, weights: Weights, *, forget_before: PolicyVersion) -> None:
        """Note the digests of versions that tokens will be sampled under, and forget older ones."""
        self._weights = {v: d for v, d in {**self._weights, **weights}.items() if v >= forget_before}

    @property
    def weights(self) -> Weights:
        """The digests of the versions that are remembered."""
        return self._weights

    def append_nowait(self, kind: Kind, record: msgspec.Struct, *, group_id: int = NO_GROUP) -> int:
        """Hand a record in and return its position."""
        if self._log is None:
            return 0
        return self._log.append_nowait(kind, GROUP_ID.pack(group_id) + wire.encode(record))

    async def append(self, kind: Kind, record: msgspec.Struct, *, group_id: int = NO_GROUP) -> None:
        """Return once a record, and all before it, outlive the process."""
        if self._log is not None:
            await self._log.append(kind, GROUP_ID.pack(group_id) + wire.encode(record))

    async def flush(self) -> None:
        """Return once everything that was handed in is as safe as the `fsync` setting promises."""
        if self._log is not None:
            await self._log.flush()

    async def release(self, before_position: int) -> None:
        """Free the disk of what no checkpoint needs."""
        if self._log is not None:
            await self._log.release(before_position)

    def statistics(self) -> JournalStatistics | None:
        """Return what lies on disk; None without a log."""
        return self._log.statistics() if self._log else None

    def turn(self, trajectory_id: str, turn: Turn) -> TurnFinished:
        """Return the record of a turn."""
        return TurnFinished(
            trajectory_id=trajectory_id, turn=turn, weights=self._of(span.version for span in turn.completion.spans)
        )

    def trajectory(self, trajectory: Trajectory) -> TrajectoryFinished:
        """Return the record of an episode."""
        versions = (span.version for segment in trajectory.segments for span in segment.spans)
        return TrajectoryFinished(trajectory=trajectory, weights=self._of(versions))

    def _of(self, versions: Iterable[PolicyVersion]) -> dict[PolicyVersion, str]:
        return {version: self._weights.get(version, "") for version in versions}


@dataclass(slots=True, kw_only=True)
class KeptTurn:
    """A turn that was sampled before the run was interrupted."""

    prompt: TokenIds
    completion: Completion


@dataclass(slots=True, kw_only=True)
class KeptWork:
    """What is left of a group that was interrupted."""

    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    """Finished episodes, by trajectory id."""
    turns: dict[str, list[KeptTurn]] = field(default_factory=dict)
    """Turns of the others, in order."""


class JournalledSampler:
    """The sampler of one group: what it returns is in the journal. A `Sampler` that `KeepsTrajectories`.

    A request that was answered before the run was interrupted gets that answer again, and costs the engine nothing:
    its log-probs and versions are those that it was really sampled under. A turn is known by its whole prompt, so that
    an environment which answers otherwise than before is answered by the engine.
    """

    def __init__(self, sampler: Sampler, journal: RunJournal, group_id: int, kept: KeptWork | None = None) -> None:
        self._sampler = sampler
        self._journal = journal
        self._group_id = group_id
        self._kept = kept or KeptWork()
        self._seen: dict[str, TokenIds] = {}  # trajectory id -> prompt and completion of its last record from here
        self._recorded = dict(self._kept.trajectories)

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """See `protocols.Sampler`. Raises: JournalError."""
        turns = self._kept.turns.get(trajectory_id, [])
        for place, kept in enumerate(turns):
            if kept.prompt == token_ids:
                del turns[place]
                return kept.completion
        completion = await self._sampler.sample(
            token_ids, max_tokens=max_tokens, trajectory_id=trajectory_id, stop_token_ids=stop_token_ids, watch=watch
        )
        turn = self._note(trajectory_id, token_ids, completion)
        record = self._journal.turn(trajectory_id, turn)
        await self._journal.append(Kind.TURN_FINISHED, record, group_id=self._group_id)
        return completion

    def kept_trajectory(self, trajectory_id: str) -> Trajectory | None:
        """Return an episode that was finished before the run was interrupted, or None."""
        return self._kept.trajectories.get(trajectory_id)

    def keep_nowait(self, trajectory: Trajectory) -> None:
        """Hand in a finished episode, unless it is in the journal as it is."""
        if self._recorded.get(trajectory.trajectory_id) != trajectory:
            self._recorded[trajectory.trajectory_id] = trajectory
            record = self._journal.trajectory(trajectory)
            self._journal.append_nowait(Kind.TRAJECTORY_FINISHED, record, group_id=self._group_id)

    def finish_nowait(self, group: Group) -> None:
        """Hand in that the group is finished, and those of its episodes that were not handed in."""
        for trajectory in group.trajectories:
            self.keep_nowait(trajectory)
        finished = GroupFinished(
            trajectory_ids=[trajectory.trajectory_id for trajectory in group.trajectories],
            admitted_version=group.admitted_version,
        )
        self._journal.append_nowait(Kind.GROUP_FINISHED, finished, group_id=self._group_id)

    def _note(self, trajectory_id: str, token_ids: TokenIds, completion: Completion) -> Turn:
        """Return the turn that `token_ids` and their completion are, after what the episode had before."""
        before = self._seen.get(trajectory_id, TokenIds())
        goes_on = bool(before) and token_ids[: len(before)] == before
        self._seen[trajectory_id] = TokenIds(token_ids + completion.token_ids)
        context = TokenIds(token_ids[len(before) :]) if goes_on else token_ids
        return Turn(context_token_ids=context, completion=completion, starts_segment=not goes_on)


def decode(kind: Kind, payload: bytes) -> Any:
    """Return the record of a payload. Raises: msgspec.DecodeError or ValidationError."""
    return wire.decode(memoryview(payload)[GROUP_ID.size :], SHAPES[kind])
