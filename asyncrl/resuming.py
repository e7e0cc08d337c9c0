"""How a run goes on from a checkpoint: environment, books and counters are told again what happened since.

What becomes of the work that was under way is planned before (`asyncrl.resume_plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.buffers import LOST, BufferSettings, Ledger, Stage
from asyncrl.protocols import Environment, FetchesItems, LearnsFromGroups
from asyncrl.resume_plan import Resumption
from asyncrl.run_history import Admitted, Dropped, Finished, RunHistory, Sampled
from asyncrl.run_journal import Draw, GroupDropped, Kind, Resumed, RunJournal
from asyncrl.status import RunStatus
from asyncrl.types import PolicyVersion, Task


def go_on(
    plan: Resumption,
    *,
    environment: Environment,
    ledger: Ledger,
    status: RunStatus,
    journal: RunJournal,
    settings: BufferSettings,
) -> Resumption:
    """Bring environment, books and counters from the checkpoint to the interruption, drop what is not kept, and return
    the plan with what came out of that.
    """
    if plan.is_new:
        return plan
    journal.note_weights(plan.weights, forget_before=plan.version - settings.max_off_policyness)
    again = replay(plan.history, environment, ledger, status, settings, version=plan.version)
    status.expired_reuse += plan.num_expired_uses
    status.lost_reuse += plan.num_lost_uses
    resumed = Resumed(version=plan.version, weights=plan.weights.get(plan.version, ""))
    journal.append_nowait(Kind.RESUMED, resumed)
    for group_id in sorted({*plan.dropped, *ledger.open_groups} - {kept.group_id for kept in plan.kept}):
        reason = plan.dropped.get(group_id, LOST)
        journal.append_nowait(Kind.GROUP_DROPPED, GroupDropped(reason=reason, redrawn=True), group_id=group_id)
        drop(group_id, reason, ledger, status)
        attempt = plan.history.attempts.get(group_id)
        if attempt is not None and attempt.finished is not None:
            status.select(Stage.DROPPED, attempt.finished.trajectories, plan.version)
    unrecorded = [Draw(draw_id=plan.next_group_id + i, task=task) for i, task in enumerate(again.unrecorded)]
    return replace(
        plan,
        redraw=[*plan.redraw, *unrecorded],
        next_group_id=plan.next_group_id + len(unrecorded),
        notes=[*_describe(plan, again), *plan.history.damage],
    )


async def wait_drawn(plan: Resumption, environment: Environment, state: Mapping[str, Any]) -> None:
    """Let an environment whose tasks take time to come fetch all that `go_on` draws again after a checkpoint's `state`.

    Raises: EnvironmentFault where they do not come.
    """
    if not isinstance(environment, FetchesItems) or plan.is_new:
        return
    if state:
        environment.restore(state["environment"])
    draws = sum(isinstance(event, Admitted) and event.fresh for event in plan.history.events)
    await environment.wait_item(draws + plan.history.num_lost)


def _describe(plan: Resumption, again: Replayed) -> list[str]:
    reused = sum(kept.uses > 0 for kept in plan.kept)
    finished = sum(kept.group is not None for kept in plan.kept) - reused
    lines = [
        f"{finished} finished groups are put back, {len(plan.kept) - finished - reused} go on where they were, and "
        f"{len(plan.redraw) + len(again.unrecorded)} tasks are drawn again"
    ]
    if reused or plan.num_lost_uses:
        lines.append(f"{reused} groups wait for a further use, and {plan.num_lost_uses} more did that are not left")
    reasons = Counter(plan.dropped.values())
    lines += [f"{count} groups are dropped: {reason}" for reason, count in sorted(reasons.items())]
    if again.unrecorded:
        lines.append(f"{len(again.unrecorded)} of these tasks have no record that can be read")
    if again.num_other:
        lines.append(f"the environment draws {again.num_other} tasks otherwise than before; those of before are kept")
    return lines


@dataclass(slots=True)
class Replayed:
    """What telling an environment again gave."""

    unrecorded: list[Task] = field(default_factory=list)
    """Tasks that it had drawn before and whose record in the journal is damaged, as the order of its draws shows."""
    num_other: int = 0
    """Tasks that it drew otherwise than before."""


def replay(
    history: RunHistory,
    environment: Environment,
    ledger: Ledger,
    status: RunStatus,
    settings: BufferSettings,
    *,
    version: PolicyVersion,
) -> Replayed:
    """Tell environment, books and counters what happened since the checkpoint, in order."""
    replayed, num_lost = Replayed(), history.num_lost
    for event in history.events:
        match event:
            case Admitted():
                ledger.admit(event.attempt.group_id, num_trajectories=settings.group_size_of(event.attempt.draw.task))
                if event.fresh:
                    num_lost = _draw_again(environment, event.attempt.draw.task, replayed, num_lost)
            case Sampled():
                ledger.sample(event.group_id, event.trajectory_id, event.num_tokens)
                status.tokens_generated += event.num_tokens
            case Finished():
                ledger.finish(event.group)
                status.count_group(event.group)
                status.select(Stage.GENERATED, event.group.trajectories, version)
                if isinstance(environment, LearnsFromGroups):
                    environment.observe(event.group.task, event.group.trajectories)
            case Dropped():
                drop(event.group_id, event.reason, ledger, status)
    return replayed


def _draw_again(environment: Environment, task: Task, replayed: Replayed, num_lost: int) -> int:
    """Draw until the task comes, passing over as many as records may be lost; return how many more may be."""
    for _ in range(num_lost + 1):
        try:
            drawn = environment.get_item()
        except StopIteration:
            break
        if drawn.task_id == task.task_id:
            return num_lost
        if num_lost == 0:
            break
        replayed.unrecorded.append(drawn)
        num_lost -= 1
    replayed.num_other += 1
    return num_lost


def drop(group_id: int, reason: str, ledger: Ledger, status: RunStatus) -> None:
    """Count a group that an interruption ended, or that ended before one.

    Groups of which too little was left are in the books alone: the counters are of groups that were generated.
    """
    if group_id in ledger.open_groups:
        ledger.drop(group_id, reason)
    if reason != LOST:
        status.groups_dropped[reason] += 1
