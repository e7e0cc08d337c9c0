"""What the verbs of all roles share: where the orchestrator is, and how a role is played until its run ends."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import trio

from asyncrl.errors import ConfigError
from asyncrl.roles import Door, Role, attend
from asyncrl.roles.settings import split_address
from asyncrl.sandbox.access import read_token

EPILOG = """\
The orchestrator says what to do, as its configuration has it. A connection that breaks is made again; within the run's
lost_s nothing of what is under way is lost by that. A role that is started again under its old --name takes its old
place. It ends with the run (exit code 0), when it is refused (2), or when the orchestrator is out of reach for too long
or its own work fails (1). The token travels as it is where there is no --tls-ca: take TLS where others could listen.
"""


def add_role_arguments(parser: argparse.ArgumentParser, kind: str, *, required: bool = True) -> None:
    """Declare how an orchestrator is reached."""
    parser.add_argument(
        "--connect", required=required, metavar="HOST:PORT", help="where the orchestrator listens ([roles] listen)"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the same token as the orchestrator's [roles] token_file"
    )
    parser.add_argument("--name", default="", metavar="IDENTITY", help=f"default: this host's name and -{kind}")
    parser.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="speak TLS, and accept certificates of these authorities (PEM; a self-signed one is its own)",
    )
    parser.add_argument(
        "--give-up-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end after so long without an orchestrator (600)",
    )
    parser.epilog = EPILOG


def add_places(parser: argparse.ArgumentParser) -> None:
    """Declare where a role that starts processes finds the model and writes its logs."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="the starting model on this host; default: the orchestrator's path"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="where its processes' output goes; default: runs/roles/IDENTITY"
    )


def identity(arguments: argparse.Namespace, kind: str) -> str:
    """Return the role's name. Raises: ConfigError."""
    name: str = arguments.name or f"{socket.gethostname()}-{kind}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}", name):
        raise ConfigError(f"--name must be up to 60 letters, digits, '.', '_' and '-', got {name!r}")
    return name


def logs_of(arguments: argparse.Namespace, kind: str) -> Path:
    """Return where a role writes."""
    return arguments.logs or Path("runs") / "roles" / identity(arguments, kind)


def play(arguments: argparse.Namespace, role: Role) -> int:
    """Play a role until its run ends or a signal comes; return the exit code."""
    host, port = split_address(arguments.connect, "--connect")
    if not 0 < arguments.give_up_s < float("inf"):
        raise ConfigError(f"--give-up-s must be > 0 and finite seconds, got {arguments.give_up_s}")
    door = Door(
        host=host,
        port=port,
        token=read_token(str(arguments.token_file), where="--token-file") if arguments.token_file else "",
        name=identity(arguments, role.kind),
        tls=_trust(arguments.tls_ca) if arguments.tls_ca else None,
        give_up_s=arguments.give_up_s,
        devices=_devices(),
    )
    over = trio.run(_attend, door, role, lambda words: print(words, flush=True))
    print(f"{role.kind} {door.name} ends: {over}", flush=True)
    return 0


async def _attend(door: Door, role: Role, say: Callable[[str], None]) -> str:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_at_signal, stop, nursery.cancel_scope)
        over = await attend(door, role, say=say, stop=stop)
        nursery.cancel_scope.cancel()
    return over or "at once, it was told to stop twice"


async def _stop_at_signal(stop: trio.Event, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            if stop.is_set():
                scope.cancel()
            stop.set()


def _trust(path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-ca: {path} cannot be used: {error}") from None


def _devices() -> str:
    cores, cards = len(os.sched_getaffinity(0)), len(list(Path("/dev").glob("nvidia[0-9]*")))
    return f"{cores} cores" + f", {cards} GPUs" * bool(cards)
