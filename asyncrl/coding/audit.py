"""What recorded attempts say of the judges of their tasks: who was likely failed wrongly, and who passed wrongly.

It works on the lines that a run writes to trajectories/, and proves nothing: it tells a person where to look.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.coding.evidence import KEY as EVIDENCE
from asyncrl.coding.tasks import CodingTask
from asyncrl.coding.untold import untold_names
from asyncrl.errors import ConfigError

_SOLVED = 1.0 - 1e-6
_LEAST_ATTEMPTS = 4  # all failed: fewer say little of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One episode, as it was recorded."""

    trajectory_id: str
    task_id: str
    reward: float
    solved: bool
    evidence: Sequence[Mapping[str, Any]]
    """As `asyncrl.coding.evidence` writes it; empty where the environment keeps none."""

    @property
    def group(self) -> str:
        """What names its group, whichever attempt at it this was."""
        return self.trajectory_id.rpartition("-")[0].partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedWrongly:
    """A task that nobody solved, though something says that it can be solved."""

    task_id: str
    attempts: int
    best_reward: float
    always_failing: tuple[str, ...]
    """Checks that failed in every attempt which says so."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedWrongly:
    """An attempt whose solution should be read."""

    task_id: str
    trajectory_id: str
    solved: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undiffering:
    """A task with groups whose attempts came to the same."""

    task_id: str
    groups: int
    """In all."""
    equal_rewards: int
    equal_answers: int
    """Of those, groups in which all attempts left the same files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All that was found."""

    attempts: int
    without_evidence: int
    failed_wrongly: tuple[FailedWrongly, ...]
    passed_wrongly: tuple[PassedWrongly, ...]
    undiffering: tuple[Undiffering, ...]


def read_attempts(trajectories: Path) -> list[Attempt]:
    """Return the scored episodes of a run, by its folder of trajectories; a torn last line is left out.

    Raises: ConfigError where there are none, or a line is no episode.
    """
    attempts: list[Attempt] = []
    for path in sorted(trajectories.glob("version-*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
            try:
                record = json.loads(line)
                if record["reward"] is not None:
                    attempts.append(_attempt(record))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path}, line {number} is no recorded episode: {error!r}") from None
    if not attempts:
        raise ConfigError(f"{trajectories} holds no scored episodes: nothing can be audited")
    return attempts


def _attempt(record: Mapping[str, Any]) -> Attempt:
    reward = float(record["reward"])
    return Attempt(
        trajectory_id=record["trajectory_id"],
        task_id=record["task_id"],
        reward=reward,
        solved=record["reward_parts"].get("solved", reward) >= _SOLVED,
        evidence=tuple(record.get("extras", {}).get(EVIDENCE, ())),
    )


def audit(
    attempts: Sequence[Attempt],
    *,
    task: Callable[[str], CodingTask | None],
    solved_elsewhere: Mapping[str, Collection[str]],
    proven: Collection[str],
) -> Audit:
    """Return what the attempts say.

    Args: `task` returns a task by its id, None where it is no coding task; `solved_elsewhere` is run -> ids of tasks
    that were solved there; `proven` are ids of tasks whose reference was seen to pass.
    """
    by_task: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_task[attempt.task_id].append(attempt)
    failed = []
    for task_id, tried in by_task.items():
        if len(tried) < _LEAST_ATTEMPTS or any(attempt.solved for attempt in tried):
            continue
        failing = _always_failing(tried)
        reasons = [f"solved in {run}" for run, ids in solved_elsewhere.items() if task_id in ids]
        reasons += ["the reference passes"] * (task_id in proven)
        reasons += _untold(task(task_id), failing)
        if reasons:
            best = max(attempt.reward for attempt in tried)
            failed.append(
                FailedWrongly(
                    task_id=task_id,
                    attempts=len(tried),
                    best_reward=best,
                    always_failing=failing,
                    reasons=tuple(reasons),
                )
            )
    return Audit(
        attempts=len(attempts),
        without_evidence=sum(not attempt.evidence for attempt in attempts),
        failed_wrongly=tuple(failed),
        passed_wrongly=tuple(filter(None, map(_passed_wrongly, attempts))),
        undiffering=tuple(filter(None, map(_undiffering, by_task.values()))),
    )


def untold_by_task(tasks: Iterable[CodingTask]) -> dict[str, tuple[str, ...]]:
    """Return task id -> in words, what its hidden tests ask for that nobody told; only tasks with something."""
    return {task.task_id: found for task in tasks if (found := tuple(_untold(task, None)))}


def _untold(task: CodingTask | None, failing: Collection[str] | None) -> list[str]:
    """Return, in words, which names failing tests ask for that nobody told; of all tests where `failing` is None."""
    if task is None:
        return []
    found = []
    for step in task.steps:
        for test, names in untold_names(task, step).items():
            if not failing or any(check.startswith((test, "call ")) for check in failing):
                found.append(f"{test} asks for {', '.join(names)}, which nothing tells")
    return found


def _always_failing(tried: Sequence[Attempt]) -> tuple[str, ...]:
    sets = [{name for step in a.evidence for name in step.get("failed", ())} for a in tried if a.evidence]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def _passed_wrongly(attempt: Attempt) -> PassedWrongly | None:
    reasons: list[str] = []
    for step in attempt.evidence:
        reasons += [f"its solution holds {sign.replace('_', ' ')}" for sign in step.get("signs", ())]
        if step.get("tampered"):
            reasons.append("it tampered with its judge")
        visible = step.get("visible")
        if visible and visible[0] == visible[1]:
            reasons.append(
                f"it passes the {visible[1]} visible calls and fails {len(step.get('failed', ()))} hidden ones"
            )
        if step.get("outside") and step.get("solved"):
            reasons.append(f"it edits what the task does not allow: {', '.join(step['outside'][:3])}")
    if not reasons:
        return None
    return PassedWrongly(
        task_id=attempt.task_id, trajectory_id=attempt.trajectory_id, solved=attempt.solved, reasons=tuple(reasons)
    )


def _undiffering(tried: Sequence[Attempt]) -> Undiffering | None:
    groups: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in tried:
        groups[attempt.group].append(attempt)
    several = [group for group in groups.values() if len(group) > 1]
    equal = [group for group in several if len({attempt.reward for attempt in group}) == 1]
    same = [group for group in equal if len({_answer(attempt) for attempt in group}) == 1 and group[0].evidence]
    if not equal:
        return None
    return Undiffering(task_id=tried[0].task_id, groups=len(several), equal_rewards=len(equal), equal_answers=len(same))


def _answer(attempt: Attempt) -> tuple[str, ...]:
    return tuple(step.get("answer", "") for step in attempt.evidence)
