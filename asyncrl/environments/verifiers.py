"""Environments of verifiers 0.4, unmodified, in a process with a Python of its own; their agents ask the run's gateway.

[environment]
verifiers = "my_taskset"

[environment.options]
python = ".venv-verifiers/bin/python"
config = { taskset = { split = "easy" }, agent = { max_turns = 4 } }
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from asyncrl.boundary import boundary
from asyncrl.environments.rows import check_percent, is_held_out
from asyncrl.environments.verifiers_link import Episode, Listed, VerifiersProcess, started
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.gateway import Gateway, Session
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.rollout import EpisodeEnvironment, TaskSource, play_again
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

_WHERE = "[environment.options]"
_DEATHS = 3  # of the process one after the other, none of which had played anything: it will not play at all
_CUT = {"max_turns": TrajectoryStatus.TRUNCATED_TURNS}
"""A trace's stop condition -> what it means; every other truncation is one of length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSettings:
    """Which environment of verifiers is played, and the limits of its episodes."""

    taskset: str
    """The module that brings the task set, as verifiers finds it: a package that `python` can import, or one of
    verifiers' own."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What verifiers calls the environment's config ([env]): `id` of another kind of environment, the task set's own
    settings in `taskset`, and those of its roles (`agent`: `harness`, `runtime`, `max_turns`, ...)."""
    python: str = ""
    """A Python with verifiers 0.4 and what the environment needs; empty takes this run's own."""
    num_tasks: int = 0
    """The first tasks alone; 0 takes all. A task set without end needs a number."""
    max_tokens: int = 1024
    """Sampled tokens of one completion, whatever the environment asks for."""
    episode_timeout_s: float = 600.0
    """Of the agent, where its own config gives it no time; what it has done is then graded as it stands."""
    grading_timeout_s: float = 300.0
    """Of all else in an episode together: setting up, tools, grading. Longer counts as a failed environment."""
    max_retries: int = 1
    """How often an episode that infrastructure ended is started again."""
    max_running: int = 64
    """Episodes at a time, of all groups; others wait, and their time does not run."""
    start_s: float = 120.0
    """Seconds in which the process must have loaded the tasks."""
    held_out_percent: int = 10
    """Share of the tasks that is never trained on; chosen by their ids alone."""
    epochs: int = 0
    """Times that each training task is asked before the tasks are used up; 0 never ends."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range, or a Python that is none."""
        least = {"num_tasks": 0, "max_tokens": 1, "max_retries": 0, "max_running": 1, "epochs": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ({_WHERE})")
        for name in ("episode_timeout_s", "grading_timeout_s", "start_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name} must be > 0 and finite seconds, got {getattr(self, name)} ({_WHERE})")
        check_percent(self.held_out_percent)
        if not self.taskset:
            raise ConfigError(f'taskset must name a module, got "" ({_WHERE})')
        if self.python and shutil.which(self.python) is None:
            raise ConfigError(f"python = {self.python!r} is no program that can be run ({_WHERE})")
        taskset = self.config.get("taskset", {})
        if not isinstance(taskset, Mapping) or taskset.get("id", self.taskset) != self.taskset:
            raise ConfigError(f"config.taskset must be settings of {self.taskset!r}, got {taskset!r} ({_WHERE})")

    @property
    def longest_episode_s(self) -> float:
        """Seconds that an episode may take by its own deadlines."""
        return self.episode_timeout_s + self.grading_timeout_s


class VerifiersEnvironment(EpisodeEnvironment):
    """Plays an environment of verifiers, an episode a session of the gateway. Fulfils `protocols.RunsAlongside`."""

    name = "verifiers"
    settings_type = VerifiersSettings
    needs_gateway = True

    def __init__(
        self, settings: VerifiersSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """The tasks are known once `serve` has started."""
        del sandboxes  # where things run is verifiers' own to say
        self._renderer = renderer
        self.settings = settings
        self._all: Sequence[Task] = ()
        self._train: Sequence[Task] = ()
        super().__init__(tasks=TaskSource(lambda epoch: self._train, seed=seed, epochs=settings.epochs))
        self._gateway: Gateway | None = None
        self._running = trio.CapacityLimiter(settings.max_running)
        self._process: VerifiersProcess | None = None
        self._changed = trio.lowlevel.ParkingLot()

    def use_gateway(self, gateway: Gateway) -> None:
        """See `gateway.NeedsGateway`."""
        self._gateway = gateway

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of both splits, in the task set's order."""
        return self._all

    async def serve(self, directory: Path, *, task_status: trio.TaskStatus[None]) -> None:
        """See `protocols.RunsAlongside`. Raises: ConfigError where the environment cannot be played at all."""
        settings = self.settings
        begin = {
            "kind": "begin",
            "config": {**settings.config, "taskset": {**settings.config.get("taskset", {}), "id": settings.taskset}},
            "num_tasks": settings.num_tasks,
            "agent_timeout_s": settings.episode_timeout_s,
        }
        deaths = 0
        while True:
            async with started(settings.python or sys.executable, directory / "verifiers.log") as process:
                listed: Sequence[Listed] | None = None
                with trio.move_on_after(settings.start_s):
                    listed = await process.begin(begin)
                if listed is None:
                    raise EnvironmentFault(
                        f"verifiers' tasks did not load in {settings.start_s:g} s (start_s, {_WHERE})"
                    )
                if not self._all:
                    self._split(listed)
                    task_status.started()
                elif [task.task_id for task in self._all] != [one.id for one in listed]:
                    raise EnvironmentFault("the process of verifiers died, and its tasks are others since")
                self._process = process
                self._changed.unpark_all()
                try:
                    await process.run()
                except EnvironmentFault:
                    deaths = 1 if process.num_played else deaths + 1
                    if deaths == _DEATHS:
                        raise
                finally:
                    self._process = None

    def _split(self, listed: Sequence[Listed]) -> None:
        self._all = [
            Task(task_id=one.id, environment=self.name, data={**one.data, "place": place})
            for place, one in enumerate(listed)
        ]
        percent = self.settings.held_out_percent
        self._held_out = tuple(task for task in self._all if is_held_out(task.task_id, percent))
        self._train = [task for task in self._all if not is_held_out(task.task_id, percent)]
        if not self._train:
            raise ConfigError(
                f"held_out_percent = {percent} leaves nothing of the {len(listed)} tasks of {self.settings.taskset!r} "
                f"to train on ({_WHERE})"
            )

    async def run_episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """See `EpisodeEnvironment.run_episode`. What infrastructure ended is started again, `max_retries` times."""

        async def attempt() -> Trajectory:
            async with self._running:
                return await self._try(task, sampler, trajectory_id)

        return await play_again(attempt, max_retries=self.settings.max_retries)

    async def _try(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        if self._gateway is None:
            raise EnvironmentFault("environment 'verifiers' needs a gateway, and nobody has given it one")
        limit_s = self.settings.longest_episode_s
        opened = self._gateway.session(
            sampler,
            task=task,
            trajectory_id=trajectory_id,
            deadline_s=limit_s,
            max_tokens=self.settings.max_tokens,
            renderer=self._renderer,
        )
        async with opened as session:
            async with boundary() as caught:
                with trio.move_on_after(limit_s):
                    while (process := self._process) is None:
                        await self._changed.park()
                    episode = await process.play(task.data["place"], session, self._gateway.model.name)
                    return _trajectory(session, episode)
                raise EnvironmentFault(f"the episode took longer than {limit_s:g} s (grading_timeout_s)")
            assert caught.status is not None
            return session.fail(caught.status, caught.detail)


def _trajectory(session: Session, episode: Episode) -> Trajectory:
    """Return what an episode is worth. Raises: EnvironmentFault where it has failed."""
    session.stop("its agent has ended")
    if session.failure is not None:
        return session.close(0.0)  # which masks it, with what failed
    failed = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if failed:
        raise EnvironmentFault(f"verifiers: {failed[-1].type}: {failed[-1].message[-2000:]}")
    if len(episode.traces) != 1:
        agents = ", ".join(trace.agent for trace in episode.traces) or "none"
        raise EnvironmentFault(f"the episode was played by {len(episode.traces)} agents ({agents}), allowed is one")
    (trace,) = episode.traces
    status = None
    if trace.timed_out:
        status = TrajectoryStatus.TIMED_OUT
    elif trace.truncated:
        status = _CUT.get(trace.stop, TrajectoryStatus.TRUNCATED_LENGTH)
    return session.close(
        trace.reward, status=status, reward_parts={**trace.metrics, **trace.rewards}, extras={"stop": trace.stop}
    )
