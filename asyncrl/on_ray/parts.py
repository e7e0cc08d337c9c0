"""The parts of a run that Ray places: engines, the learner's ranks, servers of sandboxes, environment workers."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio

from asyncrl.children import Watched
from asyncrl.configs import Config
from asyncrl.engines import LEFT_BEHIND, StartServer, command
from asyncrl.environments import load_environment
from asyncrl.environments.served import ServedEnvironment, ServedSettings
from asyncrl.environments.served_links import Service
from asyncrl.errors import BoundaryError, EngineError, EnvironmentFault, LearnerError, SandboxError
from asyncrl.learner_processes import SHUTDOWN_S
from asyncrl.on_ray.actor import Order
from asyncrl.on_ray.bundles import bundles_of
from asyncrl.on_ray.cluster import place, remove
from asyncrl.on_ray.roles import Role, RoleProcess
from asyncrl.protocols import Environment, SandboxBackend
from asyncrl.run_directory import RunDirectory
from asyncrl.sandbox import open_backend
from asyncrl.sandbox.remote import open_remote_at
from asyncrl.tokens import ChatRenderer
from asyncrl.types import PolicyVersion

_REMOVE_S = 30.0
_KNOCK_S = 0.25  # between two looks at whether a server listens
_PORT = "{port}"


class OnRay:
    """Starts the processes of one run on Ray. A `hosts.Hosts`."""

    def __init__(
        self,
        config: Config,
        config_path: Path,
        roles: Mapping[str, Sequence[Role]],
        nursery: trio.Nursery,
        say: Callable[[str], None],
    ) -> None:
        """All nodes see `config_path`, the resolved configuration; `nursery`, which lasts as long, keeps servers."""
        self._config = config
        self._config_path = config_path
        self._roles = roles
        self._nursery = nursery
        self._say = say
        self._token = secrets.token_urlsafe(32)

    @property
    def engine_token(self) -> str:
        """See `Hosts`."""
        return self._token if self._roles["engine"] else ""

    # --- engines ----------------------------------------------------------------------------------------------

    def engine_starts(self, directory: RunDirectory, model: Path, version: PolicyVersion) -> Mapping[str, StartServer]:
        """See `Hosts`. Once weights have been published, a server starts from the model of the configuration."""
        return {
            f"engine {index}": self._engine_start(index, role, model, version)
            for index, role in enumerate(self._roles["engine"])
        }

    def _engine_start(self, index: int, role: Role, model: Path, version: PolicyVersion) -> StartServer:
        config = self._config

        @asynccontextmanager
        async def start(restarts: int, published: bool) -> AsyncIterator[EngineServer]:
            seed = config.run.seed + index + config.engine.count * restarts  # no two may sample alike
            served, called = (config.model.path, 0) if published else (model, version)
            argv, environment = command(
                config.engine,
                str(served.absolute()),
                0,
                seed=seed,
                host="{host}",
                token=self._token,
            )
            argv[argv.index("--port") + 1] = _PORT
            order = Order(
                name=role.name,
                argv=argv[1:],
                environment=environment,
                niceness=config.engine.niceness,
                remove_on_exit=LEFT_BEHIND,
                own_scratch=True,
            )
            async with role.started(order, EngineError) as process:
                yield EngineServer(process, called)

        return start

    # --- the learner ------------------------------------------------------------------------------------------

    async def start_learner(
        self,
        settings_path: Path,
        *,
        run_id: str,
        published: Sequence[str],
        stack: AsyncExitStack,
        say: Callable[[str], None],
    ) -> tuple[Sequence[Watched], socket.socket]:
        """See `Hosts`. The first rank's frames are carried by Ray."""
        ranks = self._roles["learner"]
        processes: list[RoleProcess] = []
        meeting = await ranks[0].free_address(LearnerError) if len(ranks) > 1 else ""
        for index, role in enumerate(ranks):
            argv = ["-m", "asyncrl.learner", "--settings", str(settings_path.absolute())]
            if self._config.learner.own_cores:
                argv.append("--own-cores")
            if index == 0:
                argv += ["--fd", "{stream}"]
            if len(ranks) > 1:
                argv += ["--rank", str(index), "--ranks", str(len(ranks)), "--rendezvous", f"tcp://{meeting}"]
                argv += ["--local-rank", "0", "--local-ranks", "1"]  # of those that see the GPUs which Ray gives it
            order = Order(
                name=role.name,
                argv=argv,
                grace_s=SHUTDOWN_S,
                remove_on_exit=[] if index else [str(Path(pattern).absolute()) for pattern in published],
            )
            processes.append(await stack.enter_async_context(role.started(order, LearnerError)))
        ours, theirs = socket.socketpair()
        self._nursery.start_soon(processes[0].carry, trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
        return processes, ours

    # --- sandboxes and environments ---------------------------------------------------------------------------

    @asynccontextmanager
    async def open_sandboxes(self, directory: Path) -> AsyncIterator[SandboxBackend]:
        """See `Hosts`."""
        settings = self._config.sandbox
        if not self._roles["sandbox"]:
            async with open_backend(settings, directory=directory) as backend:
                yield backend
            return
        argv = ["-m", "asyncrl", "sandbox", "serve", str(self._config_path.absolute())]
        servers = [self._served(role, argv, SandboxError) for role in self._roles["sandbox"]]
        for server in servers:
            await self._nursery.start(server.keep)
        async with open_remote_at([server.find_url for server in servers], settings, token=self._token) as remote:
            yield remote

    def load_environment(self, renderer: ChatRenderer, sandboxes: SandboxBackend) -> Environment:
        """See `Hosts`."""
        settings, seed, ray = self._config.environment, self._config.run.seed, self._config.ray
        if not self._roles["environment"]:
            return load_environment(settings, renderer=renderer, sandboxes=sandboxes, seed=seed)
        argv = ["-m", "asyncrl", "serve", "environment", settings.name, str(self._config_path.absolute())]
        workers = [self._served(role, argv, EnvironmentFault) for role in self._roles["environment"]]
        for worker in workers:
            self._nursery.start_soon(worker.keep)
        return ServedEnvironment(
            ServedSettings(environment=settings.name, options=settings.options, connect_s=ray.start_timeout_s),
            renderer=settings.chat.rendering(renderer),
            sandboxes=sandboxes,
            seed=seed,
            places=[ServedPlace(worker) for worker in workers],
            token=self._token,
        )

    def _served(self, role: Role, argv: Sequence[str], error: type[BoundaryError]) -> RoleServer:
        argv = [*argv, "--host", "{host}", "--port", _PORT, "--token-file", "{token_file}"]
        order = Order(name=role.name, argv=argv, token=self._token)
        ray = self._config.ray
        return RoleServer(role, order, error, self._say, restarts=ray.restarts, start_timeout_s=ray.start_timeout_s)


@asynccontextmanager
async def placed(config: Config, config_path: Path, say: Callable[[str], None]) -> AsyncIterator[OnRay]:
    """Take the run's places on Ray and yield who starts its processes there; leaving ends them and gives all back.

    Ray must be connected (`cluster.connected`). Raises: ConfigError where the places are not to be had.
    """
    bundles = bundles_of(config)
    say(f"taking {len(bundles)} places on Ray")
    group = await place(bundles, config.ray)
    try:
        roles: dict[str, list[Role]] = {"learner": [], "engine": [], "sandbox": [], "environment": []}
        for index, bundle in enumerate(bundles):
            roles[bundle.role].append(Role(bundle, group, index, comes_back=bundle.role != "learner"))
        async with trio.open_nursery() as nursery:
            yield OnRay(config, config_path, roles, nursery, say)
            nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(_REMOVE_S, shield=True):
            await remove(group)


class EngineServer:
    """A vLLM server on a node. An `engines.Server`."""

    def __init__(self, process: RoleProcess, version: PolicyVersion) -> None:
        self.url = f"http://{process.address}"
        self.version = version
        self._process = process

    async def wait_exit(self) -> str:
        """Return how it ended, in words."""
        return (await self._process.wait_exit()).describe()


class RoleServer:
    """A server that is started again where it is lost, on another node if Ray says so, and can be found again."""

    def __init__(
        self,
        role: Role,
        order: Order,
        error: type[BoundaryError],
        say: Callable[[str], None],
        *,
        restarts: int,
        start_timeout_s: float,
    ) -> None:
        self.name = role.name
        self._role = role
        self._order = order
        self._error = error
        self._say = say
        self._restarts = restarts
        self._start_timeout_s = start_timeout_s
        self._address = ""
        self._listens = trio.Event()

    async def find(self) -> str:
        """Return "HOST:PORT" of where it listens, once it does."""
        while not self._address:
            await self._listens.wait()
        return self._address

    async def find_url(self) -> str:
        """Return its URL once it listens."""
        return f"http://{await self.find()}"

    async def keep(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep it running; has started when it listens.

        Raises: `error` where it does not come to listen in time, or is lost more often than it may be.
        """
        for lost in range(self._restarts + 1):
            async with self._role.started(self._order, self._error) as process:
                end = await self._attend(process, task_status if lost == 0 else trio.TASK_STATUS_IGNORED)
            self._address, self._listens = "", trio.Event()
            self._say(f"{end}\nit was lost {lost + 1} times, {self._restarts} are allowed (restarts, [ray])")
        raise self._error(f"{self.name} was lost {self._restarts + 1} times ([ray] restarts); the last: {end}")

    async def _attend(self, process: RoleProcess, task_status: trio.TaskStatus[None]) -> str:
        end = ""

        async def watch() -> None:
            nonlocal end
            end = (await process.wait_exit()).describe()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with trio.move_on_after(self._start_timeout_s) as patience:
                await _wait_listening(process.address)
            if patience.cancelled_caught:
                raise self._error(
                    f"{self.name} at {process.address} does not listen after {self._start_timeout_s:g} s "
                    "(start_timeout_s, [ray])"
                )
            self._address = process.address
            self._listens.set()
            task_status.started()
            await trio.sleep_forever()
        return end


async def _wait_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            stream = await trio.open_tcp_stream(host, int(port))
        except OSError:
            await trio.sleep(_KNOCK_S)
        else:
            await stream.aclose()
            return


class ServedPlace:
    """Where an environment worker is. A `served_links.Place`."""

    def __init__(self, worker: RoleServer) -> None:
        self.name = worker.name
        self._worker = worker

    @asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[trio.abc.Stream]:
        """See `Place`."""
        async with Service(await self._worker.find()).open(directory) as stream:
            yield stream
