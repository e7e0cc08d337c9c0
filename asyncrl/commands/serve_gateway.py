"""`asyncrl serve gateway`: a model for agents that ask over HTTP, and their episodes as trajectories, without a run."""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import trio

from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, at_home, load_config
from asyncrl.engine_processes import engine_clients, engine_starts, make_pool
from asyncrl.errors import ConfigError
from asyncrl.gateway import Operating, shown_trajectory
from asyncrl.preflight import check_engine, check_model
from asyncrl.run_directory import RunDirectory
from asyncrl.run_gateway import make_gateway, write_access
from asyncrl.serving import listen, until_signalled
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Trajectory

_RUN_ID = "gateway"


def add_service(services: Any) -> None:
    """Declare the service's command line to `serve`'s subparsers."""
    gateway = services.add_parser(
        "gateway",
        help="a model for agents that ask over HTTP; their sessions end as trajectories",
        description="Serves [model] by the servers of [engine]. Sessions are opened and closed with the token in "
        "--access-file, which is written when the gateway answers and removed at the end.",
    )
    add_config_arguments(gateway)
    gateway.add_argument(
        "--access-file", type=Path, required=True, metavar="FILE", help="gets the gateway's url and token"
    )
    gateway.add_argument("--trajectories", type=Path, metavar="FILE", help="gets each trajectory as a line of JSON")
    gateway.set_defaults(command=_serve_gateway)


def _serve_gateway(arguments: argparse.Namespace) -> int:
    config = at_home(load_config(arguments.config, arguments.set))
    check_model(config.model.path)
    check_engine(config)
    for name, path in (("--access-file", arguments.access_file), ("--trajectories", arguments.trajectories)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{name}: there is no directory {path.parent}")
    with (
        closing(listen(config.gateway.host, config.gateway.port, setting="[gateway] port")) as listener,
        tempfile.TemporaryDirectory(prefix="asyncrl-gateway-") as scratch,
    ):
        trio.run(_serve, config, listener, RunDirectory(Path(scratch)), arguments.access_file, arguments.trajectories)
    return 0


async def _serve(
    config: Config, listener: socket.socket, directory: RunDirectory, access: Path, trajectories: Path | None
) -> None:
    renderer = ChatRenderer.load(config.model.path)
    make_engine = engine_clients(config, renderer, _RUN_ID, 0)
    pool = make_pool(config, make_engine)
    gateway = make_gateway(config, renderer, pool)
    operating = Operating(
        gateway,
        pool,
        pool=pool,
        make_engine=make_engine,
        on_trajectory=partial(_append, trajectories) if trajectories else lambda trajectory: None,
    )
    async with until_signalled(), trio.open_nursery() as nursery:
        print("starting the engine", flush=True)
        starts = engine_starts(config, directory, config.model.path, 0)
        await nursery.start(partial(pool.serve, starts, say=lambda words: print(words, flush=True)))
        await nursery.start(operating.serve)
        await nursery.start(partial(gateway.serve, listener, routes=operating.routes()))
        try:
            write_access(access, gateway)
            print(f"serving {config.model.path} at {gateway.url}", flush=True)
            await trio.sleep_forever()
        finally:
            access.unlink(missing_ok=True)
    await pool.aclose()


def _append(path: Path, trajectory: Trajectory) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(shown_trajectory(trajectory)) + "\n")
