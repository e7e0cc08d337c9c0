"""What a run's journal tells after an interruption: which groups were under way, with all that they had finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffers import Damage, Journal, JournalSettings, Record, read_journal
from asyncrl.run_journal import (
    GROUP_ID,
    Draw,
    GroupAdmitted,
    GroupDropped,
    GroupFinished,
    KeptTurn,
    KeptWork,
    Kind,
    Resumed,
    TrajectoryFinished,
    TurnFinished,
    decode,
)
from asyncrl.types import Group, PolicyVersion, TokenIds


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One group that ran a draw's task."""

    group_id: int
    draw: Draw
    position: int
    """Of its admission."""
    version: PolicyVersion
    """What the engines held at its admission."""
    work: KeptWork = field(default_factory=KeptWork)
    finished: Group | None = None
    """The group as it was finished; None while it was not, or where one of its episodes could not be read then."""
    dropped: GroupDropped | None = None
    sampled_under: set[tuple[PolicyVersion, str, int]] = field(default_factory=set)
    """(version, digest, resumes of the run before the record) of every sampled token."""

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """The oldest version that sampled a token of the group, turns without an episode included."""
        return min((version for version, _, _ in self.sampled_under), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group started."""

    attempt: Attempt
    fresh: bool
    """The environment had just drawn its task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """An engine answered."""

    group_id: int
    trajectory_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group was complete."""

    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group was given up."""

    group_id: int
    reason: str


Event = Admitted | Sampled | Finished | Dropped


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """The journal, read for going on from one checkpoint."""

    position: int = 0
    """Of the checkpoint: it knows of all records before."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """group id -> what became of it, in order of admission; of groups that the checkpoint knows as settled, nothing."""
    events: list[Event] = field(default_factory=list)
    """What happened since the checkpoint, in order."""
    resumes: list[PolicyVersion] = field(default_factory=list)
    """Versions to which the run went back, in order, as far as the journal reaches."""
    next_group_id: int = 0
    num_lost: int = 0
    """Records since the checkpoint that cannot be read; where nothing tells how many, one."""
    damage: list[str] = field(default_factory=list)
    """What of the journal could not be read, a line each."""


def read_history(directory: Path, *, run_id: str, state: Mapping[str, Any]) -> RunHistory:
    """Return what the journal in `directory` tells, for going on from a checkpoint's `state` (empty: from the start).

    Damage is reported in the history, and what it hit is as if it had not happened. Raises: JournalError.
    """
    bounds = state.get("journal", {"position": 0, "needed_from": 0})
    settled_below = state.get("next_group_id", 0)
    history = RunHistory(position=bounds["position"], next_group_id=settled_below)
    held = {entry["group_id"] for entry in state.get("draws", ())} | {int(name) for name in state.get("reusable", ())}
    reader = _Reader(history, settled_below, held)
    end = bounds["needed_from"]
    for item in read_journal(directory, run_id=run_id, from_position=bounds["needed_from"]):
        if isinstance(item, Damage):
            history.damage.append(str(item))
            lost = 1 if item.num_records is None else item.num_records
            history.num_lost += max(0, item.position + lost - max(item.position, history.position))
        else:
            end = item.position + 1
            reader.read(item)
    if end < history.position:
        history.damage.append(
            f"{directory}: it ends before position {end} and the checkpoint knows of all before {history.position}; "
            f"what its open groups had finished is sampled again"
        )
    return history


@contextmanager
def opened_journal(
    directory: Path, settings: JournalSettings, *, run_id: str, state: Mapping[str, Any]
) -> Iterator[tuple[Journal, RunHistory]]:
    """Yield a run's journal for writing, and what it tells for going on from a checkpoint's `state`.

    Raises: JournalError.
    """
    position = state.get("journal", {}).get("position", 0)
    with Journal(
        directory, run_id=run_id, fsync=settings.fsync, file_bytes=settings.file_mib * 2**20, at_least=position
    ) as journal:
        history = read_history(directory, run_id=run_id, state=state)
        if journal.cut is not None:
            history.damage.append(f"{journal.cut}; it is cut off")
        yield journal, history


class _Reader:
    """Turns records into a history, one by one."""

    def __init__(self, history: RunHistory, settled_below: int, open_groups: set[int | None]) -> None:
        self._history = history
        self._settled_below = settled_below
        self._open_groups = open_groups
        self._prompts: dict[str, TokenIds] = {}  # trajectory id -> prompt and completion of its last turn
        self._handlers: Mapping[Kind, Callable[[int, int, Any], None]] = {
            Kind.GROUP_ADMITTED: self._admitted,
            Kind.TURN_FINISHED: self._turn,
            Kind.TRAJECTORY_FINISHED: self._trajectory,
            Kind.GROUP_FINISHED: self._finished,
            Kind.GROUP_DROPPED: self._dropped,
            Kind.RESUMED: self._resumed,
        }

    def read(self, item: Record) -> None:
        """Note one record."""
        (group_id,) = GROUP_ID.unpack_from(item.payload)
        self._history.next_group_id = max(self._history.next_group_id, group_id + 1)
        if item.kind == Kind.GROUP_ADMITTED and item.position >= self._history.position:
            self._open_groups.add(group_id)  # its id may have been given before, when it began to wait for a slot
        if 0 <= group_id < self._settled_below and group_id not in self._open_groups:
            return  # trained on or dropped, as the checkpoint knows
        handler = self._handlers.get(Kind(item.kind))
        if handler is None:
            return
        try:
            record = decode(Kind(item.kind), item.payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self._history.damage.append(f"record {item.position} of the journal is of another shape: {error}")
            return
        handler(group_id, item.position, record)

    def _admitted(self, group_id: int, position: int, record: GroupAdmitted) -> None:
        attempt = Attempt(
            group_id=group_id,
            draw=Draw(draw_id=record.draw_id, task=record.task),
            position=position,
            version=record.version,
        )
        self._history.attempts[group_id] = attempt
        self._happened(position, Admitted(attempt=attempt, fresh=record.fresh))

    def _turn(self, group_id: int, position: int, record: TurnFinished) -> None:
        attempt, name = self._history.attempts.get(group_id), record.trajectory_id
        if attempt is None:  # its admission is damaged
            return
        num_tokens = len(record.turn.completion.token_ids)
        self._happened(position, Sampled(group_id=group_id, trajectory_id=name, num_tokens=num_tokens))
        self._sampled(attempt, record.weights)
        before = TokenIds() if record.turn.starts_segment else self._prompts.get(name)
        if before is None:  # the turn before it is damaged
            return
        prompt = TokenIds(before + record.turn.context_token_ids)
        self._prompts[name] = TokenIds(prompt + record.turn.completion.token_ids)
        attempt.work.turns.setdefault(name, []).append(KeptTurn(prompt=prompt, completion=record.turn.completion))

    def _trajectory(self, group_id: int, position: int, record: TrajectoryFinished) -> None:
        attempt = self._history.attempts.get(group_id)
        if attempt is None:
            return
        name = record.trajectory.trajectory_id
        self._sampled(attempt, record.weights)
        attempt.work.trajectories[name] = record.trajectory
        attempt.work.turns.pop(name, None)
        self._prompts.pop(name, None)

    def _finished(self, group_id: int, position: int, record: GroupFinished) -> None:
        attempt = self._history.attempts.get(group_id)
        if attempt is None:
            return
        known = attempt.work.trajectories
        if known.keys() >= {*record.trajectory_ids}:
            attempt.finished = Group(
                group_id=group_id,
                task=attempt.draw.task,
                trajectories=tuple(known[trajectory_id] for trajectory_id in record.trajectory_ids),
                admitted_version=record.admitted_version,
            )
            self._happened(position, Finished(group=attempt.finished))

    def _dropped(self, group_id: int, position: int, record: GroupDropped) -> None:
        if group_id in self._history.attempts:
            self._history.attempts[group_id].dropped = record
            self._happened(position, Dropped(group_id=group_id, reason=record.reason))

    def _resumed(self, group_id: int, position: int, record: Resumed) -> None:
        self._history.resumes.append(record.version)

    def _sampled(self, attempt: Attempt, weights: Mapping[PolicyVersion, str]) -> None:
        resumes = len(self._history.resumes)
        attempt.sampled_under |= {(version, digest, resumes) for version, digest in weights.items()}

    def _happened(self, position: int, event: Event) -> None:
        if position >= self._history.position:
            self._history.events.append(event)
