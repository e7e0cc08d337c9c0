"""The gateway of a run: it listens where the run's agents need it, or where a port is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import trio

from asyncrl.configs import Config
from asyncrl.engines import Engine, EnginePool
from asyncrl.gateway import Gateway, NeedsGateway, Operating, cache_use_of
from asyncrl.private_files import write_privately
from asyncrl.protocols import Environment
from asyncrl.serving import listen
from asyncrl.tokens import ChatRenderer

ACCESS_FILE = "gateway.json"
"""In the run's directory while it runs: `url`, and the `token` with which engines are added, listed and removed."""


def wants_gateway(config: Config, environment: Environment) -> bool:
    """Tell whether a run opens a gateway."""
    needed = isinstance(environment, NeedsGateway) and environment.needs_gateway
    return needed or config.gateway.port != 0


async def serve_gateway(
    config: Config,
    directory: Path,
    renderer: ChatRenderer,
    environment: Environment,
    pool: EnginePool,
    make_engine: Callable[[str, str], Engine],
    *,
    say: Callable[[str], None],
    task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the run's gateway, which is what it has started with, and hand it to the environment where it needs one.

    Raises: ConfigError where its port is taken.
    """
    gateway = make_gateway(config, renderer, pool)
    operating = Operating(gateway, pool=pool, make_engine=make_engine)
    listener = listen(config.gateway.host, config.gateway.port, setting="[gateway] port")
    if isinstance(environment, NeedsGateway) and environment.needs_gateway:
        environment.use_gateway(gateway)
    access = directory / ACCESS_FILE
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: gateway.serve(listener, routes=operating.routes(), task_status=task_status)
        )
        try:
            write_access(access, gateway)
            say(f"gateway at {gateway.url}")
            task_status.started(gateway)
            await trio.sleep_forever()
        finally:
            access.unlink(missing_ok=True)


def make_gateway(config: Config, renderer: ChatRenderer, pool: EnginePool) -> Gateway:
    """Return the gateway of a configuration before a pool."""
    return Gateway(
        config.environment.chat.rendering(renderer),
        config.gateway,
        temperature=config.sampling.temperature,
        max_model_len=config.engine.max_model_len,
        model_name=config.run.name,
        cache_use=cache_use_of(pool, limit=config.gateway.max_cache_use),
    )


def write_access(path: Path, gateway: Gateway) -> None:
    """Write how to reach a gateway that serves, for its owner's eyes alone."""
    write_privately(path, json.dumps({"url": gateway.url, "token": gateway.token}))
