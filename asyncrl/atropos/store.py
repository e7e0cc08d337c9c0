"""Groups that wait for a trainer of Atropos: in order, on disk before they are acknowledged, and lent with a lease.

A batch is lent. It is the trainer's for good once the trainer asks for the next one, or says that it has it; one that
registers again has lost what it was lent, and gets it again. The journal holds every group that came, and after it the
state of all else whenever that changes.

    posted -> waiting -> lent -> done
                 ^--------'  the trainer registers again
"""

from __future__ import annotations

import secrets
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.atropos.messages import DIGEST_BYTES, BadField, Registration, ScoredGroup, group_json
from asyncrl.atropos.packing import Waiting, choose_batch
from asyncrl.atropos.roster import Roster, WaitingCounts
from asyncrl.buffers import Damage, Fsync, GroupCommit, Journal, read_journal
from asyncrl.buffers.journal import DEFAULT_FILE_BYTES
from asyncrl.gateway.http import Refused

_RUN_ID = "atropos"
_HEAD = struct.Struct(f"<qI{DIGEST_BYTES}s")  # env_id (-1: none), sequences, digest; what was posted follows


class _Kind(IntEnum):
    """Of a record; the number is on disk."""

    GROUP = 1
    STATE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group that waits, or is lent."""

    position: int
    """Of its record, which is its place in the order."""
    env_id: int | None
    size: int
    digest: bytes
    body: bytes
    """As it was posted."""


class _State(msgspec.Struct, kw_only=True):
    """All but the groups, as it is on disk."""

    registration: Registration | None = None
    takes: bool = False
    step: int = 0
    """That of the next batch."""
    next_batch: int = 1
    lent: dict[str, list[int]] = {}
    """batch -> positions"""
    waiting: list[int] = []
    members: list[dict[str, Any]] = []


class Store:
    """The queue of a trainer that asks over HTTP. A `door.Trainer`."""

    vocab_size: int | None = None

    def __init__(self, log: GroupCommit, *, ghost_s: float, max_bytes: int) -> None:
        """`max_bytes` of groups in memory: further ones are answered 503, which environments try again."""
        self._log = log
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._waiting: list[StoredGroup] = []
        self._lent: dict[int, list[StoredGroup]] = {}
        self._next_batch = 1
        self._step = 0
        self._latest: bytes | None = None
        self.registration: Registration | None = None
        self.takes = False
        self.roster = Roster(ghost_s=ghost_s)
        self.waiting = WaitingCounts()
        self.dropped: Counter[str] = Counter()
        """reason -> groups"""

    @property
    def max_group_size(self) -> int | None:
        """A whole batch."""
        return self.registration.batch_size if self.registration else None

    @property
    def current_step(self) -> int:
        """The trainer's starting step, and the batches that it was lent since."""
        return self._step

    @property
    def latest(self) -> bytes | None:
        """The last group that came, as JSON."""
        return self._latest and group_json(self._latest)

    @property
    def groups(self) -> Sequence[StoredGroup]:
        """All groups that wait or are lent, in order."""
        return sorted([*self._waiting, *(g for lent in self._lent.values() for g in lent)], key=lambda g: g.position)

    async def note_environments(self) -> None:
        """See `door.Trainer`."""
        await self._note()

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        """See `door.Trainer`; returns when they survive a kill."""
        if self._num_bytes > self._max_bytes:
            raise Refused(503, f"{self._num_bytes} bytes of groups wait already", retry_after_s=5)
        for group in groups:
            head = _HEAD.pack(-1 if group.env_id is None else group.env_id, group.size, group.digest)
            position = self._log.append_nowait(_Kind.GROUP, head + group.body)
            self._keep(
                StoredGroup(
                    position=position, env_id=group.env_id, size=group.size, digest=group.digest, body=group.body
                )
            )
        await self._log.flush()

    # --- the trainer ------------------------------------------------------------------------------------------

    async def register(self, said: Registration) -> int:
        """Note how a trainer trains, and take back what an earlier one was lent; return a 128-bit number.

        The same words as before go on where that trainer was; others begin at their own step. Groups that wait stay,
        but for those larger than the new batches. Raises: BadField.
        """
        if said.batch_size < 1:
            raise BadField("batch_size", f"must be >= 1 sequences, got {said.batch_size}")
        for lent in self._lent.values():
            for group in lent:
                self.waiting.add(group.env_id, group.size)
        self._step -= len(self._lent)
        self._waiting, self._lent = list(self.groups), {}
        if said != self.registration:
            self._step = said.starting_step
            self._drop([group for group in self._waiting if group.size > said.batch_size], "larger than a batch")
        self.registration = said
        await self._note()
        return secrets.randbits(128)

    async def lend(self, *, received: int | None = None) -> tuple[int, bytes] | None:
        """Return the next batch's number and JSON, or None while there are too few groups.

        Whoever never says what it has `received` has what it was lent before. One that says so gets again what it has
        not. Raises: Refused where no trainer has registered.
        """
        assert self.registration is not None
        changed = not self.takes
        self.takes = True
        for batch in [b for b in self._lent if received is None or b <= received]:
            self._num_bytes -= sum(len(group.body) for group in self._lent.pop(batch))
            changed = True
        if self._lent:  # its answer was lost on the way
            batch = min(self._lent)
            return batch, _batch_json(self._lent[batch])
        places = choose_batch(
            [Waiting(env_id=group.env_id, size=group.size) for group in self._waiting],
            self.registration.batch_size,
            self.roster.minima,
        )
        if places is not None:
            groups = [self._waiting[place] for place in places]
            chosen = {group.position for group in groups}
            self._waiting = [group for group in self._waiting if group.position not in chosen]
            for group in groups:
                self.waiting.remove(group.env_id, group.size)
            self._lent[self._next_batch] = groups
            self._next_batch += 1
            self._step += 1
        if changed or places is not None:
            await self._note()
        return None if places is None else (self._next_batch - 1, _batch_json(groups))

    async def reset(self) -> None:
        """Forget everything: groups, environments, the trainer."""
        self._drop(list(self.groups), "reset")
        self._lent, self._latest = {}, None
        self.registration, self.takes, self._step = None, False, 0
        self.roster.members.clear()
        await self._note()

    # --- the disk ---------------------------------------------------------------------------------------------

    def replay(self, groups: dict[int, StoredGroup], state: _State) -> None:
        """Go on with what the journal holds."""
        lent = {int(batch): positions for batch, positions in state.lent.items()}
        taken = {position for positions in lent.values() for position in positions}
        self.registration, self.takes = state.registration, state.takes
        self._step, self._next_batch = state.step, state.next_batch
        self.roster.restore(state.members)
        for position, group in sorted(groups.items()):
            if position not in taken:
                self._keep(group)
            else:
                self._num_bytes += len(group.body)
        self._lent = {batch: [groups[position] for position in positions] for batch, positions in lent.items()}

    def _keep(self, group: StoredGroup) -> None:
        self._waiting.append(group)
        self.waiting.add(group.env_id, group.size)
        self._num_bytes += len(group.body)
        self._latest = group.body

    def _drop(self, groups: Sequence[StoredGroup], reason: str) -> None:
        gone = {group.position for group in groups}
        for group in groups:
            self._num_bytes -= len(group.body)
        for group in self._waiting:
            if group.position in gone:
                self.waiting.remove(group.env_id, group.size)
        self._waiting = [group for group in self._waiting if group.position not in gone]
        if groups:
            self.dropped[reason] += len(groups)

    async def _note(self) -> None:
        """Write the state, and free the disk of what is before all that is needed."""
        state = _State(
            registration=self.registration,
            takes=self.takes,
            step=self._step,
            next_batch=self._next_batch,
            lent={str(batch): [group.position for group in groups] for batch, groups in self._lent.items()},
            waiting=[group.position for group in self._waiting],
            members=self.roster.state(),
        )
        position = self._log.append_nowait(_Kind.STATE, msgspec.json.encode(state))
        needed = min([position, *state.waiting, *(p for positions in state.lent.values() for p in positions)])
        await self._log.flush()
        await self._log.release(needed)


@asynccontextmanager
async def open_store(
    directory: Path,
    *,
    ghost_s: float = 60.0,
    max_bytes: int = 2**32,
    fsync: Fsync = Fsync.GROUP,
    file_bytes: int = DEFAULT_FILE_BYTES,
) -> AsyncIterator[Store]:
    """Open the queue that lies in a directory, and go on with what is in it.

    Raises: JournalError where another process has it open, or where its files are another program's.
    """
    with closing(Journal(directory, run_id=_RUN_ID, fsync=fsync, file_bytes=file_bytes)) as journal:
        groups, state, num_damaged = _read(directory)
        store = Store(GroupCommit(journal), ghost_s=ghost_s, max_bytes=max_bytes)
        store.replay(groups, state)
        if num_damaged:
            store.dropped["damaged on disk"] = num_damaged
        yield store


def _read(directory: Path) -> tuple[dict[int, StoredGroup], _State, int]:
    """Return the groups by position, the last state, and how many records cannot be read."""
    groups: dict[int, StoredGroup] = {}
    state, num_damaged = _State(), 0
    for record in read_journal(directory, run_id=_RUN_ID):
        if isinstance(record, Damage):
            num_damaged += 1 if record.num_records is None else record.num_records
        elif record.kind == _Kind.GROUP:
            env_id, size, digest = _HEAD.unpack_from(record.payload)
            groups[record.position] = StoredGroup(
                position=record.position,
                env_id=None if env_id < 0 else env_id,
                size=size,
                digest=digest,
                body=record.payload[_HEAD.size :],
            )
        else:
            state = msgspec.json.decode(record.payload, type=_State)
            needed = {*state.waiting, *(p for positions in state.lent.values() for p in positions)}
            groups = {position: group for position, group in groups.items() if position in needed}
    return groups, state, num_damaged


def _batch_json(groups: Sequence[StoredGroup]) -> bytes:
    return b'{"batch":[' + b",".join(group_json(group.body) for group in groups) + b"]}"
