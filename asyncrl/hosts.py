"""Where the processes of a run are: on this machine, as children of the orchestrator, or wherever else a `Hosts` says.

The orchestrator's own program is the same either way: it asks for engines, a learner, sandboxes and an environment.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Protocol

from asyncrl.children import Watched
from asyncrl.configs import Config
from asyncrl.engine_processes import engine_starts
from asyncrl.engines import StartServer
from asyncrl.environments import load_environment
from asyncrl.learner_processes import accept_learner, start_learner_processes
from asyncrl.protocols import Environment, SandboxBackend
from asyncrl.run_directory import RunDirectory
from asyncrl.sandbox import open_backend
from asyncrl.tokens import ChatRenderer
from asyncrl.types import PolicyVersion


class Hosts(Protocol):
    """Starts the processes of one run."""

    @property
    def engine_token(self) -> str:
        """What the servers that it starts ask for; empty where they ask for none."""
        ...

    def open_sandboxes(self, directory: Path) -> AbstractAsyncContextManager[SandboxBackend]:
        """Return what yields the sandboxes; what it needs to remember lies in `directory`."""
        ...

    def load_environment(self, renderer: ChatRenderer, sandboxes: SandboxBackend) -> Environment:
        """Return the environment."""
        ...

    def engine_starts(self, directory: RunDirectory, model: Path, version: PolicyVersion) -> Mapping[str, StartServer]:
        """Return by an engine's name who starts its server; see `engine_processes.engine_starts`."""
        ...

    async def start_learner(
        self,
        settings_path: Path,
        *,
        run_id: str,
        published: Sequence[str],
        stack: AsyncExitStack,
        say: Callable[[str], None],
    ) -> tuple[Sequence[Watched], socket.socket]:
        """Return the learner's processes, the first's first or none where others start them, and the first's socket.

        `published` are the files that must not outlive the first rank, as glob patterns; `stack` ends the processes.
        """
        ...


class Here:
    """This machine, and what the settings say runs elsewhere. A `Hosts`."""

    engine_token = ""

    def __init__(self, config: Config) -> None:
        self._config = config

    def open_sandboxes(self, directory: Path) -> AbstractAsyncContextManager[SandboxBackend]:
        """See `Hosts`."""
        return open_backend(self._config.sandbox, directory=directory)

    def load_environment(self, renderer: ChatRenderer, sandboxes: SandboxBackend) -> Environment:
        """See `Hosts`."""
        settings, seed = self._config.environment, self._config.run.seed
        return load_environment(settings, renderer=renderer, sandboxes=sandboxes, seed=seed)

    def engine_starts(self, directory: RunDirectory, model: Path, version: PolicyVersion) -> Mapping[str, StartServer]:
        """See `Hosts`."""
        return engine_starts(self._config, directory, model, version)

    async def start_learner(
        self,
        settings_path: Path,
        *,
        run_id: str,
        published: Sequence[str],
        stack: AsyncExitStack,
        say: Callable[[str], None],
    ) -> tuple[Sequence[Watched], socket.socket]:
        """See `Hosts`."""
        learner = self._config.learner
        if learner.start == "by_hand":
            return [], await accept_learner(settings_path, ranks=learner.ranks, say=say, own_cores=learner.own_cores)
        return await start_learner_processes(
            settings_path,
            ranks=learner.ranks,
            run_id=run_id,
            published=published,
            stack=stack,
            own_cores=learner.own_cores,
        )
