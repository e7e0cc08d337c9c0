"""What a role serves on its host, started as the orchestrator would have started it at home."""

from __future__ import annotations

import importlib.util
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from asyncrl.children import Child
from asyncrl.configs.loader import build
from asyncrl.engine_processes import start_server
from asyncrl.engines import EngineSettings
from asyncrl.environments.loading import environment_class
from asyncrl.environments.service import EnvironmentService
from asyncrl.errors import ConfigError, EngineError, LearnerError, SandboxError
from asyncrl.learner_processes import start_learner_processes
from asyncrl.preflight import check_model
from asyncrl.protocols import SandboxBackend
from asyncrl.sandbox import SandboxSettings, abuse_names, open_backend, self_test
from asyncrl.sandbox.server import SandboxServer
from asyncrl.serving import listen, serve

_SEEDS_APART = 1024  # between two servers of one process; the orchestrator gives each process another seed


# --- engine -----------------------------------------------------------------------------------------------------------


class EngineRole:
    """Serves vLLM, and starts it again when it dies. A `roles.Role`."""

    kind = "engine"

    def __init__(self, logs: Path, *, model: Path | None = None) -> None:
        """`model` lies here instead of where the orchestrator has it."""
        self._logs = logs
        self._model = model

    @asynccontextmanager
    async def serve(
        self, job: Mapping[str, Any], *, seed: int, note: Callable[[str], None]
    ) -> AsyncIterator[_EngineServed]:
        """See `roles.Role`."""
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("vLLM is not installed on this host: pip install asyncrl[cpu] or asyncrl[gpu]")
        model = self._model or Path(job["model"])
        check_model(model, "on this host: --model")
        weights = Path(job["weights"])
        if not weights.is_dir():
            raise ConfigError(f"directory: there is no {weights} on this host, which it must share ([weight_sync])")
        settings = build(EngineSettings, job["engine"], section="engine")
        yield _EngineServed(settings, model, seed, self._logs / "engine.log", note)


class _EngineServed:
    token = ""

    def __init__(
        self, settings: EngineSettings, model: Path, seed: int, log_path: Path, note: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._model = model
        self._seed = seed
        self._log_path = log_path
        self._note = note
        self._port: int | None = None
        self._has_answered = False

    async def dial(self) -> trio.abc.Stream:
        """See `roles.Served`."""
        if self._port is None:
            raise ConnectionRefusedError("the server is being started again")
        stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        self._has_answered = True
        return stream

    async def wait_over(self) -> None:
        """See `roles.Served`; raises EngineError where the server cannot be started, or dies too often."""
        restarts, settings = 0, self._settings
        while True:
            seed = self._seed + _SEEDS_APART * restarts
            # whatever it starts from is replaced by the run's newest weights before it serves
            starting = start_server(settings, 0, self._model, 0, seed=seed, log_path=self._log_path)
            async with starting as server:
                self._port = urlsplit(server.url).port
                end = await server.wait_exit()
            self._port = None
            if not self._has_answered:
                raise EngineError(end)  # whatever ended it would end it again
            if restarts == settings.restarts:
                raise EngineError(f"{end}\nit was started again {restarts} times ([engine] restarts)")
            restarts += 1
            self._note(f"{end}\nstarting it again, {restarts} of {settings.restarts} times")


# --- sandbox and environment ------------------------------------------------------------------------------------------


@asynccontextmanager
async def _sandboxes(job: Mapping[str, Any]) -> AsyncIterator[SandboxBackend]:
    """Yield this host's sandboxes, whose walls have been tested. Raises: ConfigError, SandboxError."""
    settings = build(SandboxSettings, job["sandbox"], section="sandbox")
    with tempfile.TemporaryDirectory(prefix="asyncrl-role-") as directory:
        async with open_backend(settings, directory=directory) as backend:
            tried = await self_test(backend, only=abuse_names(main_only=True))
            if reached := [abuse.name for abuse in tried if not abuse.stopped]:
                raise SandboxError(f"the wall on this host does not hold, so nothing is served: {', '.join(reached)}")
            yield backend


class SandboxRole:
    """Opens sandboxes. A `roles.Role`."""

    kind = "sandbox"

    @asynccontextmanager
    async def serve(
        self, job: Mapping[str, Any], *, seed: int, note: Callable[[str], None]
    ) -> AsyncIterator[_SandboxesServed]:
        """See `roles.Role`."""
        async with _sandboxes(job) as backend, trio.open_nursery() as nursery:
            listener = listen("127.0.0.1", 0, setting="the sandbox server's port")
            token, port = secrets.token_urlsafe(32), listener.getsockname()[1]
            await nursery.start(serve, SandboxServer(backend, token=token), listener)
            yield _SandboxesServed(token, port)
            nursery.cancel_scope.cancel()


class _SandboxesServed:
    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self._port = port

    async def dial(self) -> trio.abc.Stream:
        """See `roles.Served`."""
        return await trio.open_tcp_stream("127.0.0.1", self._port)

    async def wait_over(self) -> None:
        """See `roles.Served`."""
        await trio.sleep_forever()


class EnvironmentRole:
    """Plays the run's environment, in sandboxes of this host. A `roles.Role`."""

    kind = "environment"

    @asynccontextmanager
    async def serve(
        self, job: Mapping[str, Any], *, seed: int, note: Callable[[str], None]
    ) -> AsyncIterator[_EnvironmentServed]:
        """See `roles.Role`."""
        environment_class(job["environment"])
        async with _sandboxes(job) as backend, trio.open_nursery() as nursery:
            yield _EnvironmentServed(EnvironmentService(job["environment"], backend, token=""), nursery)
            nursery.cancel_scope.cancel()


class _EnvironmentServed:
    token = ""

    def __init__(self, service: EnvironmentService, nursery: trio.Nursery) -> None:
        """`nursery` holds the connections."""
        self._service = service
        self._nursery = nursery

    async def dial(self) -> trio.abc.Stream:
        """See `roles.Served`."""
        ours, theirs = trio.socket.socketpair()
        self._nursery.start_soon(self._service.serve, trio.SocketStream(theirs))
        return trio.SocketStream(ours)

    async def wait_over(self) -> None:
        """See `roles.Served`."""
        await trio.sleep_forever()


# --- learner ----------------------------------------------------------------------------------------------------------


class LearnerRole:
    """Steps the optimizer, on all ranks of one host. A `roles.Role`."""

    kind = "learner"

    def __init__(self, logs: Path, *, model: Path | None = None) -> None:
        """`model` lies here instead of where the orchestrator has it."""
        self._logs = logs
        self._model = model

    @asynccontextmanager
    async def serve(
        self, job: Mapping[str, Any], *, seed: int, note: Callable[[str], None]
    ) -> AsyncIterator[_LearnerServed]:
        """See `roles.Role`."""
        run, settings = Path(job["directory"]), dict(job["settings"])
        shown = run / "run_id"
        if not shown.is_file() or shown.read_text(encoding="utf-8") != job["run_id"]:
            raise ConfigError(
                f"the run directory {run} is not on this host, which must share it: checkpoints lie there"
            )
        if self._model is not None:
            settings["model"] = str(self._model.absolute())
        check_model(Path(settings["model"]), "on this host: --model")
        self._logs.mkdir(parents=True, exist_ok=True)
        path = self._logs / "learner.json"
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        place, run_id = settings["weight_sync"]["directory"], settings["run_id"]
        async with AsyncExitStack() as stack:
            children, ours = await start_learner_processes(
                path,
                ranks=job["ranks"],
                run_id=run_id,
                published=[f"{place}/asyncrl-{run_id}-*", f"{place}/asyncrl-{run_id}.lock"],
                stack=stack,
            )
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            stack.push_async_callback(stream.aclose)
            yield _LearnerServed(children, stream)


class _LearnerServed:
    token = ""

    def __init__(self, children: list[Child], stream: trio.SocketStream) -> None:
        self._children = children
        self._stream: trio.SocketStream | None = stream

    async def dial(self) -> trio.abc.Stream:
        """See `roles.Served`; there is one connection, and a learner ends with it."""
        if self._stream is None:
            raise ConnectionRefusedError("the learner has had its connection")
        stream, self._stream = self._stream, None
        return stream

    async def wait_over(self) -> None:
        """See `roles.Served`; over once the run has let it go, or is gone. Raises: LearnerError where a rank fails."""
        async with trio.open_nursery() as nursery:
            for child in self._children:
                nursery.start_soon(_wait_end, child)


async def _wait_end(child: Child) -> None:
    end = await child.wait_exit()
    if end.code:
        raise LearnerError(end.describe())
