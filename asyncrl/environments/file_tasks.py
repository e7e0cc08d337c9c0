"""Tasks from a file, and episodes that a foreign piece of code leads: what the adapters of other frameworks share."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from asyncrl.environments.rows import check_percent, is_held_out, read_rows
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.rollout import TaskSource, boundary, collect_episodes
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTaskSettings:
    """Which tasks are asked, and the limits of an episode."""

    path: Path
    """JSON lines, one task each; `id` names the line, else its number does. The rest is the foreign code's."""
    max_tokens: int = 256
    """Sampled tokens of one completion."""
    max_episode_tokens: int = 2048
    """Of the whole sequence, prompts included; at most the engine's longest context."""
    episode_timeout_s: float = 600.0
    """From an episode's first request to its reward; longer counts as a failed environment."""
    max_retries: int = 1
    """How often an episode that infrastructure ended is started again."""
    held_out_percent: int = 10
    """Share of the lines that is never trained on; chosen by their ids alone."""
    epochs: int = 0
    """Times that each training line is asked before the tasks are used up; 0 never ends."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        least = {"max_tokens": 1, "max_episode_tokens": 2, "max_retries": 0, "epochs": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ([environment.options])")
        if not (math.isfinite(self.episode_timeout_s) and self.episode_timeout_s > 0):
            raise ConfigError(
                f"episode_timeout_s must be > 0 and finite seconds, got {self.episode_timeout_s} "
                "([environment.options])"
            )
        check_percent(self.held_out_percent)

    @property
    def longest_episode_s(self) -> float:
        """Seconds that an episode may take by its own deadline."""
        return self.episode_timeout_s


class FileTaskEnvironment(abc.ABC):
    """Asks the lines of a file; `play` leads one episode. Fulfils `protocols.ReportsTrajectories`."""

    name: str

    def __init__(
        self, settings: FileTaskSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """Raises: ConfigError naming the file and line that cannot be read, or a split without tasks to train on."""
        del sandboxes  # foreign code is the user's own, and runs here
        self.limits = settings
        self.renderer = renderer
        self._all = read_rows(settings.path, self._task)
        train = [task for task in self._all if not is_held_out(task.task_id, settings.held_out_percent)]
        if not train:
            raise ConfigError(
                f"held_out_percent = {settings.held_out_percent} leaves nothing of the {len(self._all)} lines of "
                f"{settings.path} to train on ([environment.options])"
            )
        self._train = train
        self._tasks = TaskSource(lambda epoch: train, seed=seed, epochs=settings.epochs)

    @abc.abstractmethod
    async def play(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """Return the trajectory of one episode.

        Raises: EngineError, SandboxError, EnvironmentFault where infrastructure failed; it is then played again.
        """

    def get_item(self) -> Task:
        """Return the next task to train on. Raises StopIteration when the tasks are used up."""
        return self._tasks.next()

    @property
    def task_epochs(self) -> int:
        """Times that the training tasks are asked; 0 never ends."""
        return self._tasks.epochs

    def training_tasks(self, epoch: int) -> Sequence[Task]:
        """Return the tasks of an epoch, for a curriculum to choose from."""
        return self._train

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on."""
        return [task for task in self._all if is_held_out(task.task_id, self.limits.held_out_percent)]

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of both splits, in the file's order."""
        return self._all

    def state(self) -> Mapping[str, Any]:
        """Return the position in the tasks."""
        return self._tasks.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._tasks.restore(state)

    async def aclose(self) -> None:  # noqa: B027 - most hold nothing
        """Release nothing."""

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Play `group_size` episodes beside each other; a failed one has a failure status and no reward."""
        return await collect_episodes(
            lambda trajectory_id: self._play(task, sampler, trajectory_id),
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory,
        )

    async def _play(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        retries = 0
        while True:
            async with boundary() as caught:
                with trio.move_on_after(self.limits.episode_timeout_s):
                    return await self.play(task, sampler, trajectory_id)
                raise EnvironmentFault(
                    f"the episode took longer than {self.limits.episode_timeout_s:g} s (episode_timeout_s)"
                )
            assert caught.status is not None
            if retries == self.limits.max_retries:
                break
            retries += 1
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=task.environment,
            segments=(),
            reward=None,
            status=caught.status,
            detail=caught.detail,
            extras={"retries": retries} if retries else {},
        )

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        return Task(task_id=str(row.get("id", where.rpartition(" ")[2])), environment=self.name, data=row)
