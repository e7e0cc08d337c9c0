"""The engines of a run: vLLM servers started here, or clients of those that run elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import trio

from asyncrl.checkpoint import Checkpoint
from asyncrl.children import Child, start_child
from asyncrl.configs import Config
from asyncrl.engines import (
    LEFT_BEHIND,
    Canary,
    EnginePool,
    EngineSettings,
    StartServer,
    VLLMEngine,
    command,
    free_port,
)
from asyncrl.errors import EngineError
from asyncrl.protocols import SyncReport, Watch
from asyncrl.run_directory import RunDirectory
from asyncrl.sandbox.access import read_token
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, PolicyVersion, TokenIds, WeightManifest


class NoEngines:
    """Stands for the engines of a run that samples nothing. A `Sampler` and `WeightPuller`."""

    async def serve(
        self,
        starts: Mapping[str, StartServer],
        *,
        say: Callable[[str], None],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Return: there is nothing to keep in service."""
        task_status.started()

    def count_quarantines(self) -> int:
        """Return 0: nothing is sent anywhere."""
        return 0

    async def aclose(self) -> None:
        """Close nothing."""

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Raise EngineError: nobody may ask."""
        raise EngineError("this run was started without an engine, and something was sampled")

    async def sleep(self) -> None:
        """Do nothing: there is nobody to wake."""

    async def make_room(self) -> Collection[PolicyVersion]:
        """Return nothing: nobody reads."""
        return ()

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Return no report."""
        return ()


def engine_clients(
    config: Config,
    renderer: ChatRenderer,
    run_id: str,
    version: PolicyVersion,
    canary: Canary | None = None,
    token: str = "",
) -> Callable[[str, str], VLLMEngine]:
    """Return what makes the client of a run's server, by its name and URL; nobody is asked.

    `token` is what servers that were started for the run ask for; of others [engine] says it.
    Raises: ConfigError where the token's file cannot be read.
    """
    if config.engine.token_file:
        token = read_token(config.engine.token_file, where="[engine]")

    def make(name: str, url: str) -> VLLMEngine:
        return VLLMEngine(
            name,
            url,
            config.engine,
            config.sampling,
            end_token_ids=sorted(renderer.end_token_ids),
            run_id=run_id,
            version=version,
            canary=canary,
            token=token,
        )

    return make


def make_pool(
    config: Config, make: Callable[[str, str], VLLMEngine], guests: Mapping[str, str] = MappingProxyType({})
) -> EnginePool:
    """Return the clients of all engines, by `make` (`engine_clients`); nobody is asked before the pool's `serve`.

    `guests` are those of other hosts, name -> URL.
    """
    urls = config.engine.urls or ("",) * config.engine.count
    places = guests or {f"engine {index}": url for index, url in enumerate(urls)}
    return EnginePool([make(name, url) for name, url in places.items()], config.engine)


def model_to_serve(config: Config, checkpoint: Checkpoint | None) -> tuple[Path, PolicyVersion]:
    """Return the model that a run's servers are started from, and what its weights are called.

    A checkpoint of adapters is no model: servers then begin with the model below them, and have to be sent the adapter.
    """
    if checkpoint is None or config.learner.lora.enabled:
        return config.model.path, 0
    return checkpoint.model_directory, checkpoint.version


def engine_starts(
    config: Config, directory: RunDirectory, model: Path, version: PolicyVersion
) -> dict[str, StartServer]:
    """Return by an engine's name who starts its server, from `model`; none where servers elsewhere are named.

    Once weights have been published, a server starts from the model of the configuration: the checkpoint that a resumed
    run began with may have been removed, and the newest weights replace these before it serves.
    """

    if config.engines_elsewhere:
        return {}

    def starter(index: int) -> StartServer:
        def start(restarts: int, published: bool) -> AbstractAsyncContextManager[ServerProcess]:
            seed = config.run.seed + index + config.engine.count * restarts  # no two may sample alike
            log_path = directory.logs / f"engine-{index}.log"
            served = (config.model.path, 0) if published else (model, version)
            return start_server(config.engine, index, *served, seed=seed, log_path=log_path)

        return start

    return {f"engine {index}": starter(index) for index in range(config.engine.count)}


class ServerProcess:
    """A vLLM server that was started here. An `engines.Server`."""

    def __init__(self, child: Child, url: str, version: PolicyVersion) -> None:
        self.url = url
        self.version = version
        self.child = child

    async def wait_exit(self) -> str:
        """Return how it ended, with its last lines."""
        return (await self.child.wait_exit()).describe()


@asynccontextmanager
async def start_server(
    settings: EngineSettings, index: int, model: Path, version: PolicyVersion, *, seed: int, log_path: Path
) -> AsyncIterator[ServerProcess]:
    """Start a vLLM server of `model`, which is called `version`; it does not answer yet, and is ended on leaving."""
    port = settings.ports[index] if settings.ports else free_port()
    argv, environment = command(settings, str(model), port, seed=seed, index=index)
    if settings.niceness:
        argv = ["nice", "-n", str(settings.niceness), *argv]
    starting = start_child(
        f"engine {index}",
        argv,
        environment=environment,
        log_path=log_path,
        remove_on_exit=LEFT_BEHIND,
        own_scratch=True,
    )
    async with starting as child:
        yield ServerProcess(child, f"http://127.0.0.1:{port}", version)
