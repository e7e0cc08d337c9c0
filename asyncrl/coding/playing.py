"""Plays a coding task without any model: as it stands, or with its reference, from its first step to its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.coding.grading import Grader
from asyncrl.coding.places import apply_reference, begin_step, open_place
from asyncrl.coding.tasks import CodingTask, TaskStep
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of a task."""

    task_id: str
    reward: float
    """See `reward_of`."""
    solved: bool
    """Whether every step was reached, and solved."""
    wall: str
    verdicts: Mapping[str, Verdict]
    """By the step's name, or its number from 1 on; those that were reached."""


async def play(backend: SandboxBackend, grader: Grader, task: CodingTask, *, solution: bool) -> Played:
    """Return how a task comes out, each step with its reference applied or as it is found.

    Raises: ConfigError where a step has no reference, SandboxError, EnvironmentFault.
    """
    verdicts: dict[str, Verdict] = {}
    sandbox = await open_place(backend, task)
    try:
        for number, step in enumerate(task.steps, start=1):
            await begin_step(sandbox, task, step)
            if solution:
                if step.reference is None:
                    raise ConfigError(f"{task.task_id}: it brings no reference solution; leave --solution out")
                sandbox = await apply_reference(backend, task, step.reference, sandbox)
            verdict = await grader.grade(task, step, sandbox)
            verdicts[step.name or str(number)] = verdict
            if not lets_go_on(step, verdict):
                break
    finally:
        await sandbox.aclose()
    return Played(
        task_id=task.task_id,
        reward=reward_of(task, list(verdicts.values())),
        solved=len(verdicts) == len(task.steps) and all(verdict.solved for verdict in verdicts.values()),
        wall=sandbox.wall,
        verdicts=verdicts,
    )


def lets_go_on(step: TaskStep, verdict: Verdict) -> bool:
    """Return whether a step's rewards let the next one begin; a reward that was not given does not."""
    rewards = verdict.rewards or {"reward": verdict.reward}
    return all(rewards.get(name, float("-inf")) >= least for name, least in step.min_reward.items())


def reward_of(task: CodingTask, verdicts: Sequence[Verdict]) -> float:
    """Return the task's reward from the steps that were reached: that of its last step, or the mean over all.

    A step that was not reached counts 0, as it does in training (`rewards`); Harbor leaves it out of its mean.
    """
    rewards = [verdict.reward for verdict in verdicts] + [0.0] * (len(task.steps) - len(verdicts))
    return rewards[-1] if task.last_step_counts else sum(rewards) / len(rewards)
