"""The engines of a run: vLLM servers started here, or clients of those that run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from asyncrl.children import Child, start_child
from asyncrl.configs import Config
from asyncrl.engines import EnginePool, VLLMEngine, command, free_port
from asyncrl.errors import BoundaryError, EngineError
from asyncrl.protocols import SyncReport
from asyncrl.run_directory import RunDirectory
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, PolicyVersion, TokenIds, WeightManifest


class NoEngines:
    """Stands for the engines of a run that samples nothing. A `Sampler` and `WeightPuller`."""

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return: there is nothing to wait for."""

    async def sample(
        self, token_ids: TokenIds, *, max_tokens: int, trajectory_id: str, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Raise EngineError: nobody may ask."""
        raise EngineError("this run was started without an engine, and something was sampled")

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Return no report."""
        return ()


async def open_engines(
    config: Config,
    directory: RunDirectory,
    renderer: ChatRenderer,
    model: Path,
    run_id: str,
    version: PolicyVersion,
    stack: AsyncExitStack,
    children: dict[Child, type[BoundaryError]],
) -> EnginePool:
    """Start the vLLM server, unless servers elsewhere are named, and return the clients. They do not answer yet."""
    urls = config.engine.urls
    if not urls:
        child, url = await _start_engine(config, directory, model, stack)
        urls, children[child] = (url,), EngineError
    pool = _connect_engines(config, renderer, urls, run_id, version)
    stack.push_async_callback(pool.aclose)
    return pool


async def _start_engine(
    config: Config, directory: RunDirectory, model: Path, stack: AsyncExitStack
) -> tuple[Child, str]:
    """Start a vLLM server; return it and its URL. It does not answer yet."""
    port = config.engine.port or free_port()
    argv, environment = command(config.engine, str(model), port, seed=config.run.seed)
    if config.engine.niceness:
        argv = ["nice", "-n", str(config.engine.niceness), *argv]
    log_path = directory.logs / "engine-0.log"
    child = await stack.enter_async_context(start_child("engine 0", argv, environment=environment, log_path=log_path))
    return child, f"http://127.0.0.1:{port}"


def _connect_engines(
    config: Config, renderer: ChatRenderer, urls: Sequence[str], run_id: str, version: PolicyVersion
) -> EnginePool:
    """Return the clients of the servers at `urls`."""
    return EnginePool(
        [
            VLLMEngine(
                f"engine {index}",
                url,
                config.engine,
                config.sampling,
                end_token_ids=sorted(renderer.end_token_ids),
                run_id=run_id,
                version=version,
            )
            for index, url in enumerate(urls)
        ]
    )
