"""The run's side of an environment that lives elsewhere: in a child process, or served by another machine.

[environment]
name = "served"

[environment.options]
urls = ["10.0.0.5:8795"]
token_file = "token"
options = { max_turns = 4 }

or, for an environment whose dependencies are its own:

[environment.options]
python = "/opt/other/bin/python"
environment = "my_package.my_module:Class"
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from asyncrl.environments import service_messages as messages
from asyncrl.environments.served_links import ChildProcess, Connection, Items, Link, LostError, Memory, Place, Service
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.sandbox.access import read_token
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

_WHERE = "[environment.options]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSettings:
    """Where the environment is, and what it is told."""

    urls: tuple[str, ...] = ()
    """"HOST:PORT" of services that `asyncrl serve environment` started; groups go to the least busy, tasks come from
    the first."""
    token_file: str = ""
    """A file that holds the token which these services ask for."""
    environment: str = ""
    """Instead of `urls`: "module:Class", played by a child process of this run."""
    python: str = ""
    """The Python of that child, with asyncrl and what the environment needs; empty takes this run's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own settings."""
    connect_s: float = 60.0
    """Seconds in which a service must answer, at the start and after a connection broke; groups that waited longer have
    failed (`failed_environment`)."""
    longest_episode_s: float = 0.0
    """Seconds that an episode may take by the environment's own deadlines, as [buffer] group_deadline_s reads it."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for settings that name no environment, or two."""
        if bool(self.urls) == bool(self.environment):
            raise ConfigError(f'either urls, or environment = "module:Class", must be given ({_WHERE})')
        if self.python and not self.environment:
            raise ConfigError(f"python is of a child process, and urls are given: leave it out ({_WHERE})")
        if not (math.isfinite(self.connect_s) and self.connect_s > 0):
            raise ConfigError(f"connect_s must be > 0 and finite seconds, got {self.connect_s} ({_WHERE})")
        for url in self.urls:
            host, _, port = url.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 65536):
                raise ConfigError(f'urls must be "HOST:PORT", got {url!r} ({_WHERE})')


class ServedEnvironment:
    """Passes tasks, groups and completions between the run and an environment elsewhere.

    A connection that breaks loses nothing: the groups that were played over it are asked for again, their finished
    episodes are kept, and completions that were sampled before are not sampled anew. Fulfils
    `protocols.ReportsTrajectories`, `RunsAlongside`, `FetchesItems` and `LearnsFromGroups`.
    """

    name = "served"
    """Before the environment has been reached; its own from then on."""
    settings_type = ServedSettings

    def __init__(
        self,
        settings: ServedSettings,
        *,
        renderer: ChatRenderer,
        sandboxes: SandboxBackend | None,
        seed: int = 0,
        places: Sequence[Place] | None = None,
        token: str | None = None,
    ) -> None:
        """`places` are where it is, and `token` what they ask for, instead of what the settings say.

        Raises: ConfigError where there is no token.
        """
        del sandboxes  # the environment has its own, where it is
        self._settings = settings
        if token is None:
            token = read_token(settings.token_file, where=_WHERE) if settings.urls else secrets.token_urlsafe(32)
        hello = messages.Hello(
            protocol=messages.PROTOCOL,
            token=token,
            renderer=renderer.record(),
            options=dict(settings.options),
            seed=seed,
        )
        if places is None:
            child = ChildProcess(settings.environment, settings.python, token)
            places = [Service(url) for url in settings.urls] or [child]
        self._links = [Link(place, hello, self._note) for place in places]
        self._items = Items()
        self._held_out: Sequence[Task] = ()
        self._changed = trio.lowlevel.ParkingLot()

    # --- the connections ----------------------------------------------------------------------------------------

    async def serve(self, directory: Path, *, task_status: trio.TaskStatus[None]) -> None:
        """See `protocols.RunsAlongside`."""
        async with trio.open_nursery() as nursery:
            for link in self._links:
                nursery.start_soon(link.keep, directory)
            with trio.move_on_after(self._settings.connect_s):
                while not all(link.connection for link in self._links):
                    await self._changed.park()
            for link in self._links:
                if link.connection is None:
                    raise EnvironmentFault(
                        f"the environment at {link.place.name} did not answer in {self._settings.connect_s:g} s: "
                        f"{link.trouble or 'no answer'} (connect_s, {_WHERE})"
                    )
            task_status.started()

    def _note(self, link: Link, welcome: messages.Welcome | None) -> None:
        """Note that a link has a connection, or has it no more; the first one's environment draws the tasks."""
        if welcome is not None:
            self.name, self._held_out = welcome.name, welcome.held_out
        if welcome is not None and link is self._links[0]:
            assert link.connection is not None
            self._items.begin(link.connection, welcome, self._changed.unpark_all)
        self._changed.unpark_all()

    # --- what the run asks --------------------------------------------------------------------------------------

    async def wait_item(self, count: int = 1) -> None:
        """See `protocols.FetchesItems`. Raises: EnvironmentFault where the service is gone for too long."""
        with trio.move_on_after(self._settings.connect_s):
            while not self._items.has(count):
                self._items.want(count)  # again over a connection that is new
                await self._changed.park()
            return
        raise EnvironmentFault(
            f"no task came from {self._links[0].place.name} in {self._settings.connect_s:g} s: "
            f"{self._links[0].trouble or 'it draws none'} (connect_s, {_WHERE})"
        )

    def get_item(self) -> Task:
        """Return the next task, once `wait_item` has returned. Raises StopIteration when the tasks are used up."""
        return self._items.take()

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on; none before the environment has been reached."""
        return self._held_out

    def state(self) -> Mapping[str, Any]:
        """Return the environment's state after the last task that was given out."""
        return {"state": self._items.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._items.restore(state["state"])

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Pass on a finished group, where the environment learns from it."""
        first = self._links[0].connection
        if first is not None and first.learns:
            first.post(messages.Observe(task=task, trajectories=list(trajectories)))

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """See `protocols.ReportsTrajectories`. Raises: EnvironmentFault with what the environment's own code raised."""
        memory = Memory(sampler)

        def note(trajectory: Trajectory) -> None:
            memory.finished[trajectory.trajectory_id] = trajectory
            if on_trajectory:
                on_trajectory(trajectory)

        names = [f"{group_id}-{index}" for index in range(group_size)]
        while (connection := await self._least_busy()) is not None:
            with suppress(LostError):
                return await connection.collect(
                    task,
                    memory,
                    group_id=group_id,
                    group_size=group_size,
                    kept=memory.kept(names),
                    on_trajectory=note,
                )
            memory.rewind()
        return [memory.finished.get(name) or self._unreached(task, name) for name in names]

    async def aclose(self) -> None:
        """Release nothing: leaving `serve` closes the connections."""

    async def _least_busy(self) -> Connection | None:
        """Return the connection with the fewest groups; None where there was none for too long."""
        with trio.move_on_after(self._settings.connect_s):
            while True:
                up = [link.connection for link in self._links if link.connection is not None]
                if up:
                    return min(up, key=lambda connection: connection.num_groups)
                await self._changed.park()
        return None

    def _unreached(self, task: Task, trajectory_id: str) -> Trajectory:
        where = ", ".join(f"{link.place.name}: {link.trouble or 'no answer'}" for link in self._links)
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=task.environment,
            segments=(),
            reward=None,
            status=TrajectoryStatus.FAILED_ENVIRONMENT,
            detail=f"the environment was out of reach for {self._settings.connect_s:g} s (connect_s); {where}",
        )
