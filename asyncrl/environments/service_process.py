"""An environment in a child process of a run, over a socket that it inherits: `python -m` this, by `served_links`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

import trio

from asyncrl.environments.service import EnvironmentService
from asyncrl.sandbox import SandboxSettings, open_backend


def main() -> int:
    """Play until the run has closed its side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", help='"module:Class", or a name of asyncrl')
    parser.add_argument("--fd", type=int, required=True, help="the socket")
    arguments = parser.parse_args()
    token = os.environ.pop("ASYNCRL_ENVIRONMENT_TOKEN")
    trio.run(_serve, arguments.environment, socket.socket(fileno=arguments.fd), token)
    return 0


async def _serve(name: str, connection: socket.socket, token: str) -> None:
    with tempfile.TemporaryDirectory(prefix="asyncrl-environment-") as directory:
        async with open_backend(SandboxSettings(), directory=Path(directory)) as sandboxes:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            await EnvironmentService(name, sandboxes, token=token).serve(stream)


if __name__ == "__main__":
    sys.exit(main())
