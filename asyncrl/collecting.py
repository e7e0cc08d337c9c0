"""The trajectories of one group: collected in time, failed episodes started again, late ones masked.

An environment may be one that does not keep deadlines, or never returns. The group's own deadline then ends what still
runs. Episodes that have ended by then are kept where the environment tells of each as it ends
(`protocols.ReportsTrajectories`); without that, nothing of a group that is cut short is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from asyncrl.errors import EnvironmentFault
from asyncrl.protocols import Environment, Sampler, reports_trajectories
from asyncrl.rollout import refuse_bad_numbers
from asyncrl.types import Task, Trajectory, TrajectoryStatus


async def collect_from(
    environment: Environment,
    task: Task,
    sampler: Sampler,
    *,
    group_id: str,
    group_size: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Sequence[Trajectory]:
    """Collect a group; `on_trajectory` is told of each episode as it ends by an environment that tells of it."""
    more: dict[str, Any] = {}
    if on_trajectory and reports_trajectories(environment):
        more["on_trajectory"] = on_trajectory
    return await environment.collect_trajectories(task, sampler, group_id=group_id, group_size=group_size, **more)


class GroupCollector:
    """Collects groups from one environment."""

    def __init__(self, environment: Environment, *, deadline_s: float = 0.0, retries: int = 0) -> None:
        """`deadline_s` is counted from the beginning of `collect`; 0 is none."""
        self._environment = environment
        self._deadline_s = deadline_s
        self._retries = retries

    async def collect(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
        on_retry: Callable[[Sequence[Trajectory]], None] = lambda failed: None,
    ) -> list[Trajectory]:
        """Return `group_size` trajectories of `task`, or as many as the task itself says.

        Where it says 0, as many as come, failed ones are not started again.

        `on_trajectory` is told of each as it ends, where the environment tells of it, and `on_retry` of failed ones
        that another attempt replaces.

        Late ones have failed (`failed_deadline`), with no reward. Raises: EnvironmentFault where the environment
        returns anything but what it was asked for.
        """
        group_size = task.group_size or group_size
        trajectories: list[Trajectory] = []
        ended: dict[str, Trajectory] = {}  # of the first attempt, while it runs

        def keep(trajectory: Trajectory) -> None:
            on_trajectory(refuse_bad_numbers(trajectory))

        def note(trajectory: Trajectory) -> None:
            ended[trajectory.trajectory_id] = refuse_bad_numbers(trajectory)
            keep(trajectory)

        with trio.move_on_after(self._deadline_s or math.inf):
            trajectories += await self._attempt(task, sampler, group_id, group_size, note)
            for attempt in range(1, 1 if task.has_any_size else self._retries + 1):
                failed = [place for place, trajectory in enumerate(trajectories) if trajectory.reward is None]
                if not failed:
                    break
                again = await self._attempt(task, sampler, f"{group_id}.{attempt}", len(failed), keep)
                on_retry([trajectories[place] for place in failed])
                for place, trajectory in zip(failed, again, strict=True):
                    trajectories[place] = trajectory
        return trajectories or self._cut_short(task, group_id, group_size, ended)

    async def _attempt(
        self,
        task: Task,
        sampler: Sampler,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None],
    ) -> list[Trajectory]:
        collected = await collect_from(
            self._environment,
            task,
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory,
        )
        ids = {trajectory.trajectory_id for trajectory in collected}
        wanted = max(1, len(collected)) if task.has_any_size else group_size
        if not len(ids) == len(collected) == wanted:
            asked = "at least one was" if task.has_any_size else f"{group_size} were"
            raise EnvironmentFault(
                f"environment {task.environment}: group {group_id} (task {task.task_id}) came back with "
                f"{len(collected)} trajectories of {len(ids)} different ids, {asked} asked for"
            )
        return [refuse_bad_numbers(trajectory) for trajectory in collected]

    def _cut_short(
        self, task: Task, group_id: str, group_size: int, ended: Mapping[str, Trajectory]
    ) -> list[Trajectory]:
        """Return what had ended, and a failure for each episode that had not; for one, where nobody knows how many."""
        names = [name for index in range(2 * group_size) if (name := f"{group_id}-{index}") not in ended]
        late = [
            Trajectory(
                trajectory_id=name,
                task_id=task.task_id,
                environment=task.environment,
                segments=(),
                reward=None,
                status=TrajectoryStatus.FAILED_DEADLINE,
                seconds=self._deadline_s,
                detail=f"it still ran when its group was {self._deadline_s:g} s old (group_deadline_s)",
            )
            for name in names[: 1 if task.has_any_size else group_size - len(ended)]
        ]
        return [*ended.values(), *late]
