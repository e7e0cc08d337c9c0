"""Solve rate on tasks, by the same episodes that training runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import trio

from asyncrl.collecting import GroupCollector
from asyncrl.errors import EnvironmentFault
from asyncrl.protocols import Environment, Sampler
from asyncrl.solve_rates import interval, pass_at
from asyncrl.status import EvaluationResult
from asyncrl.types import PolicyVersion, Task, Trajectory


async def evaluate(
    environment: Environment,
    sampler: Sampler,
    tasks: Sequence[Task],
    *,
    samples: int,
    version: PolicyVersion,
    concurrent_tasks: int,
    deadline_s: float = 0.0,
    on_task: Callable[[int], None] = lambda done: None,
) -> EvaluationResult:
    """Return the solve rate over `samples` episodes of each task; `on_task` hears how many tasks are done.

    The tasks of one environment have different ids.

    Episodes of a task that still run `deadline_s` after it began have failed; 0 is no deadline.

    Raises: EnvironmentFault when no episode at all carries a reward.
    """
    collector = GroupCollector(environment, deadline_s=deadline_s)
    limit = trio.CapacityLimiter(concurrent_tasks)
    results: dict[str, Sequence[Trajectory]] = {}
    started = trio.current_time()
    mixed = len({task.environment for task in tasks}) > 1  # parts of a mixture may ask tasks of the same id
    names = {f"{task.environment}/{task.task_id}" if mixed else task.task_id: task for task in tasks}

    async def one(name: str, task: Task) -> None:
        async with limit:
            group_id = f"evaluation-{version}-{name}"
            results[name] = await collector.collect(task, sampler, group_id=group_id, group_size=samples)
        on_task(len(results))

    async with trio.open_nursery() as nursery:
        for name, task in names.items():
            nursery.start_soon(one, name, task)
    scored = [t for name in names for t in results[name] if t.reward is not None]
    failed = sum(len(trajectories) for trajectories in results.values()) - len(scored)
    if not scored:
        details = {t.detail for trajectories in results.values() for t in trajectories}
        raise EnvironmentFault(f"no episode of the evaluation carries a reward: {'; '.join(sorted(details)[:3])}")
    done = {name: [t for t in results[name] if t.reward is not None] for name in names}
    counts = [(sum(map(is_solved, own)), len(own)) for own in done.values()]
    chances = (pass_at(counts, k) for k in range(1, samples + 1))
    return EvaluationResult(
        version=version,
        solve_rate=fmean(is_solved(t) for t in scored),
        mean_reward=fmean(t.reward or 0.0 for t in scored),
        num_tasks=len(tasks),
        num_samples=len(scored),
        num_failed=failed,
        by_task={name: fmean(map(is_solved, own)) for name, own in done.items() if own},
        seconds=trio.current_time() - started,
        interval=interval(counts),
        pass_at=[chance for chance in chances if chance is not None],
    )


def is_solved(trajectory: Trajectory) -> bool:
    """Tell whether an episode solved its task."""
    return trajectory.is_solved
