"""`asyncrl serve atropos`: the server between environments and a trainer of Atropos."""

from __future__ import annotations

import argparse
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import trio

from asyncrl.atropos.store import open_store
from asyncrl.atropos.trainer import serve_store
from asyncrl.errors import ConfigError
from asyncrl.serving import listen, until_signalled

_MIB = 2**20


def add_service(services: Any) -> None:
    """Declare the service's command line to `serve`'s subparsers."""
    atropos = services.add_parser(
        "atropos",
        help="the server between environments and a trainer of Atropos",
        description="Speaks the contract of atroposlib 0.4 to unmodified environments and trainers. What is posted "
        "lies in --directory before it is acknowledged, and a server that is started again goes on with it.",
    )
    atropos.add_argument("--directory", type=Path, required=True, metavar="DIR", help="where the queue lies")
    atropos.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    atropos.add_argument("--port", type=int, default=8000, help="0 takes a free one and prints it (default: 8000)")
    atropos.add_argument("--max-body-mib", type=int, default=64, metavar="N", help="of a post, unpacked (default: 64)")
    atropos.add_argument(
        "--max-queue-mib",
        type=int,
        default=4096,
        metavar="N",
        help="of waiting groups; further posts are answered 503, which environments try again (default: 4096)",
    )
    atropos.add_argument(
        "--ghost-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="without a word from an environment, after which no batch waits for it (default: 60)",
    )
    atropos.set_defaults(command=_atropos)


def _atropos(arguments: argparse.Namespace) -> int:
    for name, found in (("max-body-mib", arguments.max_body_mib), ("max-queue-mib", arguments.max_queue_mib)):
        if found < 1:
            raise ConfigError(f"--{name} must be >= 1, got {found}")
    if not 0 < arguments.ghost_seconds < float("inf"):
        raise ConfigError(f"--ghost-seconds must be > 0, got {arguments.ghost_seconds}")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {arguments.port}")
    with closing(listen(arguments.host, arguments.port, setting="--port")) as listener:
        trio.run(_serve_atropos, arguments, listener)
    return 0


async def _serve_atropos(arguments: argparse.Namespace, listener: socket.socket) -> None:
    host, port = listener.getsockname()
    async with (
        until_signalled(),
        open_store(
            arguments.directory, ghost_s=arguments.ghost_seconds, max_bytes=arguments.max_queue_mib * _MIB
        ) as store,
        trio.open_nursery() as nursery,
    ):
        print(f"{store.waiting.groups} groups wait in {arguments.directory}")
        max_body_bytes = arguments.max_body_mib * _MIB

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            await serve_store(store, listener, max_body_bytes=max_body_bytes, task_status=task_status)

        await nursery.start(serve)
        print(f"serving Atropos environments and trainers at http://{host}:{port}", flush=True)
