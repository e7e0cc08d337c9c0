"""`asyncrl serve environment`: an environment's tasks, played for runs on other machines."""

from __future__ import annotations

import argparse
import socket
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import trio

from asyncrl.commands.arguments import add_sandbox_arguments, sandbox_settings_of
from asyncrl.environments.loading import environment_class
from asyncrl.environments.service import EnvironmentService
from asyncrl.errors import ConfigError
from asyncrl.sandbox import SandboxSettings, open_backend
from asyncrl.sandbox.access import make_token, read_token
from asyncrl.serving import listen, until_signalled

_LOST_CLIENT_MS = 30_000  # a run whose machine is gone acknowledges nothing for as long; then its groups end


def add_service(services: Any) -> None:
    """Declare the service's command line to `serve`'s subparsers."""
    environment = services.add_parser("environment", help="play an environment's tasks for runs that connect")
    environment.add_argument("name", metavar="ENVIRONMENT", help='"module:Class", or a name of `environments list`')
    add_sandbox_arguments(environment)
    environment.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    environment.add_argument("--port", type=int, default=8795, help="default 8795; 0 takes a free one")
    environment.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="holds the token; made if missing"
    )
    environment.add_argument(
        "--max-groups", type=int, default=0, metavar="N", help="groups at a time; further ones wait (default: no limit)"
    )
    environment.set_defaults(command=_serve_environment)


def _serve_environment(arguments: argparse.Namespace) -> int:
    environment_class(arguments.name)
    if arguments.max_groups < 0:
        raise ConfigError(f"--max-groups must be >= 0, got {arguments.max_groups}")
    settings = sandbox_settings_of(arguments.config, arguments.set)
    make_token(arguments.token_file)
    token = read_token(str(arguments.token_file), where="--token-file")
    listener = listen(arguments.host, arguments.port, setting="--port")
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_CLIENT_MS)  # accepted ones inherit these
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with closing(listener):
        trio.run(_serve_until_stopped, arguments.name, settings, token, arguments.max_groups, listener)
    return 0


async def _serve_until_stopped(
    name: str, settings: SandboxSettings, token: str, max_groups: int, listener: socket.socket
) -> None:
    host, port = listener.getsockname()
    with tempfile.TemporaryDirectory(prefix="asyncrl-serve-") as directory:
        async with (
            until_signalled(),
            open_backend(settings, directory=Path(directory)) as sandboxes,
            trio.open_nursery() as nursery,
        ):
            service = EnvironmentService(name, sandboxes, token=token, max_groups=max_groups)
            listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
            await nursery.start(trio.serve_listeners, service.serve, listeners)
            print(f"serving environment {name} at {host}:{port}", flush=True)
