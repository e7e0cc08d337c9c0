"""Who waits for whom: what every running episode does, and the chain from the learner to the one that all wait for.

An episode is either in an engine (it has asked for tokens and has none yet) or in its environment (tools, tests,
sandboxes, grading). Both are seen from outside, at the sampler, so that no environment has to say what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from asyncrl.buffers import BufferStatistics, GateStatistics
from asyncrl.protocols import Sampler, Watch
from asyncrl.types import Completion, TokenIds

_NAMED = 3  # stragglers and episodes that are told apart by name; of the rest there is only the number


@dataclass(slots=True)
class Activity:
    """What one episode does now."""

    since: float
    """On the orchestrator's clock, in seconds."""
    turns: int = 0
    """Completions that it has asked for."""
    sampling: bool = True


@dataclass(slots=True)
class RunningGroup:
    """A group under way."""

    group_id: int
    task_id: str
    since: float
    episodes: dict[str, Activity] = field(default_factory=dict)
    """trajectory id -> what it does; of those that have asked for tokens."""


class WatchedSampler:
    """The sampler of one group: what its episodes do is noted in `running`. A `Sampler`."""

    def __init__(self, sampler: Sampler, running: RunningGroup) -> None:
        self._sampler = sampler
        self._running = running

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """See `protocols.Sampler`."""
        activity = self._running.episodes.setdefault(trajectory_id, Activity(trio.current_time()))
        activity.since, activity.sampling = trio.current_time(), True
        activity.turns += 1
        try:
            return await self._sampler.sample(
                token_ids,
                max_tokens=max_tokens,
                trajectory_id=trajectory_id,
                stop_token_ids=stop_token_ids,
                watch=watch,
            )
        finally:
            activity.since, activity.sampling = trio.current_time(), False


class Queue(Protocol):
    """What has a queue of its own: the engines, the sandboxes."""

    def statistics(self) -> Any:
        """Return counts that have `waiting`, and `running` or `open`; `absent`, if there, says who is not ready."""
        ...


def explain(
    *,
    phase: str,
    waiting_for: str,
    phase_seconds: float,
    groups_per_step: int,
    straggler: int | None,
    gate: GateStatistics,
    buffer: BufferStatistics,
    running: Mapping[int, RunningGroup],
    tasks_ended: bool,
    queues: Mapping[str, Queue],
) -> list[str]:
    """Return the chain, one link a line: each waits for what the next line names."""
    now = trio.current_time()
    lines = [f"learner: {phase} for {phase_seconds:.0f} s" + (f", {waiting_for}" if waiting_for else "")]
    if phase == "waiting for groups":
        needed = "" if straggler is None else f"; it cannot do without group {straggler}"
        lines[0] += f" ({buffer.num_ready} of the {groups_per_step} that a step eats are finished{needed})"
        lines += [_group_line(group, now) for group in _stragglers(running)]
        hidden = len(running) - _NAMED
        if hidden > 0:
            lines.append(f"{hidden} more groups are running, begun later")
    for name, queue in queues.items():
        lines += _queue_lines(name, queue.statistics())
    holders = ", ".join(str(group_id) for group_id in sorted(gate.holders)[: 2 * _NAMED])
    more = len(gate.holders) - 2 * _NAMED
    held = f" by groups {holders}" + (f" and {more} more" if more > 0 else "") if gate.holders else ""
    full = "no group may start until the engines hold a step's weights" if gate.held >= gate.num_slots else "open"
    lines.append(f"gate: {gate.held} of {gate.num_slots} slots held{held}; {full}")
    lines.append("tasks: used up" if tasks_ended else "tasks: there are more")
    return lines


def _stragglers(running: Mapping[int, RunningGroup]) -> list[RunningGroup]:
    """Return the groups that were admitted first: a step waits for them before any other."""
    return [running[group_id] for group_id in sorted(running)[:_NAMED]]


def _group_line(group: RunningGroup, now: float) -> str:
    line = f"group {group.group_id} (task {group.task_id}): running for {now - group.since:.0f} s"
    if not group.episodes:
        return f"{line}, no episode has asked for tokens yet"
    slowest = sorted(group.episodes.items(), key=lambda entry: (entry[1].since, entry[0]))[:_NAMED]
    return f"{line}; longest without news: " + ", ".join(
        f"{trajectory_id} {'in an engine' if activity.sampling else 'in its environment'} "
        f"for {now - activity.since:.0f} s (turn {activity.turns})"
        for trajectory_id, activity in slowest
    )


def _queue_lines(name: str, counts: Any) -> list[str]:
    busy = getattr(counts, "running", None)
    words = f"{busy} requests running" if busy is not None else f"{counts.open} open"
    return [f"{name}: {words}, {counts.waiting} waiting", *getattr(counts, "absent", ())]
