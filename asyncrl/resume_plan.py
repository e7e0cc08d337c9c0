"""What an interrupted run begins with: which of the work under way is kept, and which tasks are drawn again.

Relative to the checkpoint, every task that was ever drawn is trained on once or dropped with a reason:

- A finished group goes back into the buffer, under its own id.
- A group that was running goes on under its own id; its finished episodes are kept, and its other turns are answered
  from the journal.
- A group that was trained on and may be once more (`max_uses`) is put back with the uses that it had.
- A group of which nothing is left has its task drawn again, before any new one.
- A group that holds tokens of weights that the run does not have any more is of a lost line: the run went on from the
  checkpoint, was interrupted, and will go on from the checkpoint to other weights of the same number. `lost_line` tells
  what becomes of it.

Kept groups hold slots of the gate and have deadlines, like every other (STALENESS.md). Those that were under way when
the checkpoint was written could be scheduled then and can be now. What was admitted since is kept as far as S(v) holds
with it, and so is a kept group of a lost line, whose tokens count as so many steps old as lead back to the version at
which the lines part, and on from there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.buffers import LOST, BufferSettings, LostLine
from asyncrl.run_history import Admitted, Attempt, RunHistory
from asyncrl.run_journal import Draw, KeptWork
from asyncrl.types import Group, PolicyVersion, Task, Trajectory

LOST_LINE = "lost_line"
"""Reason of groups whose weights the run does not have any more."""
TOO_OLD = "too_old_at_resume"
"""Reason of groups that could not be trained on in time any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """A group that goes on under its own id."""

    group_id: int
    draw: Draw
    position: int
    """Of its admission in the journal."""
    admitted_version: PolicyVersion
    oldest_version: PolicyVersion
    """What its oldest token counts as."""
    group: Group | None
    """The group, where it is finished."""
    uses: int = 0
    """Steps that have trained on it."""
    work: KeptWork
    """What it has, where it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a run begins with; of a new one all is empty."""

    version: PolicyVersion = 0
    """Of the checkpoint."""
    weights: Mapping[PolicyVersion, str] = field(default_factory=dict)
    """version -> digest, of the line that the checkpoint is of."""
    is_new: bool = True
    """Nothing was done before."""
    history: RunHistory = field(default_factory=RunHistory)
    kept: Sequence[KeptGroup] = ()
    """In order of admission."""
    redraw: Sequence[Draw] = ()
    """Tasks to draw again, the first drawn first."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """group id -> reason, of groups that were under way and are not kept."""
    num_expired_uses: int = 0
    """Groups that waited for a further use, and that are too old for it."""
    num_lost_uses: int = 0
    """Groups that waited for a further use, and of which too little is left for it."""
    next_group_id: int = 0
    notes: Sequence[str] = ()
    """What is kept and what is not, and what of the journal cannot be read, a line each."""


def plan_resumption(
    state: Mapping[str, Any],
    version: PolicyVersion,
    history: RunHistory,
    *,
    settings: BufferSettings,
    lost_line: LostLine = LostLine.REDRAW,
) -> Resumption:
    """Return what a run that goes on from a checkpoint's `state` and `version` begins with.

    An empty state and version 0 are the start of the run, which then has no checkpoint yet.
    """
    line = {int(v): digest for v, digest in state.get("weights", {}).items()}
    draws = [Draw(draw_id=entry["draw_id"], task=Task(**entry["task"])) for entry in state.get("draws", ())]
    draws += [event.attempt.draw for event in history.events if isinstance(event, Admitted) and event.fresh]
    attempts = defaultdict[int, list[Attempt]](list)
    for attempt in history.attempts.values():
        attempts[attempt.draw.draw_id].append(attempt)
    candidates: list[KeptGroup] = []
    redraw: dict[int, Draw] = {}
    dropped: dict[int, str] = {}
    for draw in draws:
        if any(attempt.dropped and not attempt.dropped.redrawn for attempt in attempts[draw.draw_id]):
            continue
        live = [attempt for attempt in attempts[draw.draw_id] if attempt.dropped is None]
        dropped |= {attempt.group_id: LOST for attempt in live[:-1]}
        kept = _keep(live[-1], line, version, history.resumes, lost_line) if live else LOST
        if isinstance(kept, KeptGroup):
            candidates.append(kept)
        else:
            redraw[draw.draw_id] = draw
            dropped |= {attempt.group_id: kept for attempt in live[-1:]}
    waiting = _waiting_for_a_use(state.get("reusable", {}), line, version, history, lost_line)
    reused = [kept for kept in waiting if kept.oldest_version + settings.max_off_policyness >= version]
    candidates.sort(key=lambda kept: kept.group_id)
    scheduled = _schedule(candidates, version, settings, num_slots=settings.num_slots - len(reused))
    in_time = {kept.group_id for kept in scheduled}
    for candidate in candidates:
        if candidate.group_id not in in_time:
            redraw[candidate.draw.draw_id] = candidate.draw
            dropped[candidate.group_id] = TOO_OLD
    return Resumption(
        version=version,
        weights=line,
        is_new=not state and not history.events,
        history=history,
        kept=sorted([*reused, *scheduled], key=lambda kept: kept.group_id),
        redraw=[redraw[draw_id] for draw_id in sorted(redraw)],
        dropped=dropped,
        num_expired_uses=len(waiting) - len(reused),
        num_lost_uses=len(state.get("reusable", {})) - len(waiting),
        next_group_id=max(state.get("next_group_id", 0), history.next_group_id),
    )


def _waiting_for_a_use(
    uses: Mapping[str, int],
    line: Mapping[PolicyVersion, str],
    version: PolicyVersion,
    history: RunHistory,
    lost_line: LostLine,
) -> list[KeptGroup]:
    """Return the groups that were trained on and wait for a further use, those of which nothing is left not.

    Steps that used them after the checkpoint are taken again. They held their slots when it was written, beside the
    groups that were open then, so that all of these have room now.
    """
    waiting: list[KeptGroup] = []
    for group_id, num_steps in uses.items():
        attempt = history.attempts.get(int(group_id))
        kept = _keep(attempt, line, version, history.resumes, lost_line) if attempt and attempt.finished else LOST
        if isinstance(kept, KeptGroup):
            waiting.append(replace(kept, uses=num_steps))
    return waiting


def _keep(
    attempt: Attempt,
    line: Mapping[PolicyVersion, str],
    version: PolicyVersion,
    resumes: Sequence[PolicyVersion],
    lost_line: LostLine,
) -> KeptGroup | str:
    """Return the group as it is kept, or the reason why it is not."""
    group = attempt.finished
    usable = group is None or any(trajectory.reward is not None for trajectory in group.trajectories)
    if not attempt.sampled_under or not usable:
        return LOST
    counts_as: dict[PolicyVersion, PolicyVersion] = {}
    for sampled, digest, num_resumes in attempt.sampled_under:
        if line.get(sampled, "") == digest:
            continue
        parted = min([sampled, version, *resumes[num_resumes:]])
        if lost_line is LostLine.REDRAW or group is None or parted == sampled:
            return LOST_LINE
        counts_as[sampled] = min(2 * parted - sampled, counts_as.get(sampled, sampled))
    if group is not None and counts_as:
        group = replace(group, trajectories=tuple(_relabelled(t, counts_as) for t in group.trajectories))
    return KeptGroup(
        group_id=attempt.group_id,
        draw=attempt.draw,
        position=attempt.position,
        admitted_version=attempt.version,
        oldest_version=min(counts_as.get(sampled, sampled) for sampled, _, _ in attempt.sampled_under),
        group=group,
        work=attempt.work,
    )


def _relabelled(trajectory: Trajectory, counts_as: Mapping[PolicyVersion, PolicyVersion]) -> Trajectory:
    segments = tuple(
        replace(segment, spans=tuple(replace(s, version=counts_as.get(s.version, s.version)) for s in segment.spans))
        for segment in trajectory.segments
    )
    return replace(trajectory, segments=segments)


def _schedule(
    candidates: Sequence[KeptGroup], version: PolicyVersion, settings: BufferSettings, *, num_slots: int
) -> list[KeptGroup]:
    """Return the groups, the first admitted first, that can all be trained on in time, within so many slots."""
    kept: list[KeptGroup] = []
    due: Counter[PolicyVersion] = Counter()
    for candidate in candidates:
        deadline = candidate.oldest_version + settings.max_off_policyness
        due[deadline] += 1
        if len(kept) < num_slots and _is_schedulable(due, version, settings.groups_per_step):
            kept.append(candidate)
        else:
            due[deadline] -= 1
    return kept


def _is_schedulable(due: Mapping[PolicyVersion, int], version: PolicyVersion, groups_per_step: int) -> bool:
    """Tell whether S(version) of STALENESS.md holds for so many groups due at each version."""
    num_due = 0
    for deadline in sorted(due):
        num_due += due[deadline]
        if num_due > max(0, deadline - version + 1) * groups_per_step:
            return False
    return True
