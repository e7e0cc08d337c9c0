"""Tasks from a file, and episodes that a foreign piece of code leads: what the adapters of other frameworks share."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from asyncrl.boundary import boundary
from asyncrl.environments.rows import check_percent, read_split, task_id_of
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.rollout import EpisodeEnvironment, TaskSource
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


class FileTaskEnvironment(EpisodeEnvironment):
    """Asks the lines of a file; `play` leads one episode. Fulfils `protocols.ReportsTrajectories`."""

    def __init__(
        self, settings: FileTaskSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """Raises: ConfigError naming the file and line that cannot be read, or a split without tasks to train on."""
        del sandboxes  # foreign code is the user's own, and runs here
        self.limits = settings
        self.renderer = renderer
        split = read_split(settings.path, self._task, held_out_percent=settings.held_out_percent)
        self._all = split.all_tasks
        tasks = TaskSource(lambda epoch: split.train, seed=seed, epochs=settings.epochs)
        super().__init__(tasks=tasks, held_out=split.held_out)

    @abc.abstractmethod
    async def play(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """Return the trajectory of one episode.

        Raises: EngineError, SandboxError, EnvironmentFault where infrastructure failed; it is then played again.
        """

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of both splits, in the file's order."""
        return self._all

    async def run_episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """See `EpisodeEnvironment.run_episode`. What infrastructure ended is played again, `max_retries` times."""
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
        return Task(task_id=task_id_of(row, where), environment=self.name, data=row)
