"""What the buffer and the journal cost: per trajectory, per byte and per resume, each beside something plain.

The buffer holds groups of 8 trajectories of 512 tokens; half of all groups make a step, so that what a step chooses
among grows with the buffer. It is timed in CPU seconds, the best of several rounds: it waits for nothing, and whatever
else runs only adds. The journal is compared with the same bytes written and synced in the same pieces by nothing but
`os.write` and `os.fdatasync`, in turns, since disks and their neighbours differ from minute to minute.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import trio

from asyncrl.buffers import Fsync, GroupBuffer, GroupCommit, Journal
from asyncrl.protocols import Watch
from asyncrl.run_history import read_history
from asyncrl.run_journal import GroupAdmitted, JournalledSampler, Kind, RunJournal
from asyncrl.types import (
    Completion,
    FinishReason,
    Group,
    Logprobs,
    Segment,
    Task,
    TokenIds,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
)

TOKENS = 512
"""Of one trajectory."""
PROMPT_TOKENS = 64
"""Of those, not sampled."""
_GROUP_SIZE = 8
_ROUNDS = 5  # one in five may meet a busy neighbour
_PER_TRAJECTORY_BYTES = 12 * 2**10  # arrays and records together, generously: what memory is asked for before building
_TASK = Task(task_id="bench", environment="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCost:
    """The buffer at one size."""

    trajectories: int
    shared_arrays: bool
    """All trajectories hold the same token arrays, because memory did not allow one each; the records are their own."""
    insertions_per_second: float
    """Of CPU time; trajectories, in groups of 8, admitted and handed in."""
    takes_per_second: float
    """Of CPU time; trajectories, in groups of 8, taken in two steps."""
    bytes_per_token: float | None
    """Of resident memory, records included; None with shared arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCost:
    """The journal under one policy."""

    fsync: str
    record_bytes: int
    megabytes_per_second: float
    plain_megabytes_per_second: float
    """The same bytes in the same pieces, synced as often."""
    ratio: float
    """Of the two, from 0 on; the median of neighbouring pairs."""


def bench_buffer(sizes: Sequence[int], directory: Path, *, megabytes: int, always_records: int) -> dict[str, Any]:
    """Return all figures. `megabytes` are written per round and policy, below `directory`; with `always`, where every
    record waits for the disk, `always_records` records.
    """
    costs = [trio.run(_buffer_cost, size) for size in sizes]
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=directory) as scratch:
        journals = [_journal_cost(Path(scratch), fsync, megabytes, always_records) for fsync in Fsync]
        resume = _resume_cost(Path(scratch) / "resume", megabytes)
    return {
        "tokens_per_trajectory": TOKENS,
        "buffer": [asdict(cost) for cost in costs],
        "slowest_insertion_over_fastest": _spread([cost.insertions_per_second for cost in costs]),
        "slowest_take_over_fastest": _spread([cost.takes_per_second for cost in costs]),
        "journal": [asdict(cost) for cost in journals],
        "resume": resume,
    }


def _spread(rates: Sequence[float]) -> float:
    """Return how many times longer the slowest takes; 1 is flat."""
    return max(rates) / min(rates)


# --- the buffer -----------------------------------------------------------------------------------------------


def make_group(group_id: int, shared: Segment | None = None) -> Group:
    """Return a group of 8 trajectories of 512 tokens, 64 of them a prompt."""
    return Group(
        group_id=group_id,
        task=_TASK,
        trajectories=tuple(
            Trajectory(
                trajectory_id=f"{group_id}-{index}",
                task_id=_TASK.task_id,
                environment=_TASK.environment,
                segments=(shared or make_segment(group_id + index),),
                reward=1.0,
                status=TrajectoryStatus.COMPLETED,
                num_turns=1,
            )
            for index in range(_GROUP_SIZE)
        ),
    )


def make_segment(seed: int) -> Segment:
    """Return a segment of 512 tokens, the last 448 sampled by version 0."""
    return Segment(
        token_ids=TokenIds(array("i", [seed % 50_000]) * TOKENS),
        loss_mask=bytes(PROMPT_TOKENS) + b"\1" * (TOKENS - PROMPT_TOKENS),
        behaviour_logprobs=Logprobs(array("f", [-0.5]) * TOKENS),
        spans=(TokenSpan(start=PROMPT_TOKENS, end=TOKENS, version=0),),
    )


async def _buffer_cost(trajectories: int) -> BufferCost:
    num_groups = trajectories // _GROUP_SIZE
    shares = trajectories * _PER_TRAJECTORY_BYTES > _available_bytes() / 2
    shared = make_segment(0) if shares else None
    before = resident_bytes()
    groups = [make_group(group_id, shared) for group_id in range(num_groups)]
    grown = resident_bytes() - before
    insertions, takes = list[float](), list[float]()
    gc.collect()
    gc.freeze()  # the records would be walked over and over; a run, too, makes them long before
    for _ in range(max(_ROUNDS, _ROUNDS * 10**5 // trajectories)):
        buffer = GroupBuffer(groups_per_step=(num_groups + 1) // 2, max_off_policyness=1)
        started = time.process_time()
        for group in groups:
            buffer.admit(group.group_id)
            buffer.put(group)
        buffer.end_admission()
        insertions.append(time.process_time() - started)
        started = time.process_time()
        for version in (1, 2):
            assert len(await buffer.take()) in (num_groups // 2, (num_groups + 1) // 2)
            buffer.pulled(version)
        takes.append(time.process_time() - started)
    gc.unfreeze()
    return BufferCost(
        trajectories=trajectories,
        shared_arrays=shares,
        insertions_per_second=trajectories / min(insertions),
        takes_per_second=trajectories / min(takes),
        bytes_per_token=None if shares else grown / (trajectories * TOKENS),
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def resident_bytes() -> int:
    """Return the memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


# --- the journal ----------------------------------------------------------------------------------------------


def _journal_cost(directory: Path, fsync: Fsync, megabytes: int, always_records: int) -> JournalCost:
    """Time the journal and plain writes in turns; a group of 8 records is synced together."""
    payload = _episode_payload()
    count = always_records if fsync is Fsync.ALWAYS else megabytes * 10**6 // len(payload)
    ours, plain = list[float](), list[float]()
    for _ in range(_ROUNDS):
        plain.append(_seconds(lambda: _write_plain(directory / "plain", payload, count, fsync)))
        with Journal(directory / fsync, run_id="bench", fsync=fsync) as journal:
            ours.append(_seconds(lambda journal=journal: _write_journal(journal, payload, count)))  # type: ignore[misc]
        shutil.rmtree(directory / fsync)
    total = count * len(payload) / 1e6
    return JournalCost(
        fsync=fsync,
        record_bytes=len(payload),
        megabytes_per_second=total / median(ours),
        plain_megabytes_per_second=total / median(plain),
        ratio=median(p / o for p, o in zip(plain, ours, strict=True)),
    )


def _episode_payload() -> bytes:
    """Return the payload of a finished episode of 512 tokens."""
    kept: list[bytes] = []

    class Log:
        def append_nowait(self, kind: int, payload: bytes) -> int:
            kept.append(payload)
            return 0

    journal = RunJournal(Log())  # type: ignore[arg-type]
    record = journal.trajectory(make_group(0).trajectories[0])
    journal.append_nowait(Kind.TRAJECTORY_FINISHED, record, group_id=0)
    return kept[0]


def _write_journal(journal: Journal, payload: bytes, count: int) -> None:
    for number in range(count):
        journal.append(Kind.TRAJECTORY_FINISHED, payload)
        if number % _GROUP_SIZE == _GROUP_SIZE - 1:
            journal.flush()
    journal.flush()


def _write_plain(path: Path, payload: bytes, count: int, fsync: Fsync) -> None:
    each = {Fsync.ALWAYS: 1, Fsync.GROUP: _GROUP_SIZE, Fsync.NEVER: 0}[fsync]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for number in range(count):
            os.write(descriptor, payload)
            if each and number % each == each - 1:
                os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


# --- resuming -------------------------------------------------------------------------------------------------


def _resume_cost(directory: Path, megabytes: int) -> dict[str, float]:
    """Return what reading the journal of an interrupted run costs: turns, episodes and groups of 8, all to be kept."""
    with Journal(directory, run_id="bench", fsync=Fsync.NEVER) as journal:
        num_groups = trio.run(_write_run, journal, megabytes * 10**6)
        num_bytes = journal.statistics().num_bytes
    started = time.perf_counter()
    history = read_history(directory, run_id="bench", state={})
    seconds = time.perf_counter() - started
    assert sum(attempt.finished is not None for attempt in history.attempts.values()) == num_groups
    return {
        "bytes": num_bytes,
        "groups": num_groups,
        "seconds": seconds,
        "seconds_per_gib": seconds / num_bytes * 2**30,
    }


async def _write_run(file: Journal, num_bytes: int) -> int:
    async def inline(work: Callable[[], Any]) -> Any:
        return work()

    journal = RunJournal(GroupCommit(file, run_blocking=inline))
    num_groups = 0
    while file.statistics().num_bytes < num_bytes:
        group = make_group(num_groups)
        admitted = GroupAdmitted(draw_id=num_groups, task=_TASK, version=0, fresh=True)
        journal.append_nowait(Kind.GROUP_ADMITTED, admitted, group_id=num_groups)
        sampler = JournalledSampler(_Answers(group), journal, num_groups)
        for trajectory in group.trajectories:
            prompt = TokenIds(trajectory.segments[0].token_ids[:PROMPT_TOKENS])
            await sampler.sample(prompt, max_tokens=TOKENS, trajectory_id=trajectory.trajectory_id)
            sampler.keep_nowait(trajectory)
        sampler.finish_nowait(group)
        await journal.flush()
        num_groups += 1
    return num_groups


class _Answers:
    """Samples what the trajectories of a group hold."""

    def __init__(self, group: Group) -> None:
        self._segments = {trajectory.trajectory_id: trajectory.segments[0] for trajectory in group.trajectories}

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        segment = self._segments[trajectory_id]
        return Completion(
            token_ids=TokenIds(segment.token_ids[PROMPT_TOKENS:]),
            behaviour_logprobs=Logprobs(segment.behaviour_logprobs[PROMPT_TOKENS:]),
            spans=(TokenSpan(start=0, end=TOKENS - PROMPT_TOKENS, version=0),),
            finish_reason=FinishReason.STOP,
        )
