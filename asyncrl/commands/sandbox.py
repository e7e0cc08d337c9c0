"""Test the walls of the sandboxes, serve sandboxes to other machines, and remove what killed programs left.

  asyncrl sandbox self-test
  asyncrl sandbox self-test configs/demo.toml --json
  asyncrl sandbox serve --token-file token --host 0.0.0.0
  asyncrl sandbox --connect train-0:8780 --token-file token
  asyncrl sandbox reap runs

`self-test` tries to break out of a sandbox in each of the known ways and says which were stopped; exit code 1 when one
was not. `reap` looks for the ledgers of sandboxes below a directory and removes what belongs to programs that are gone;
it leaves those of running programs alone.

`serve` answers runs whose [sandbox] has backend = "remote", this machine's address in `urls`, and the same token. It
speaks plain HTTP: on a network that others can listen to, put it behind a proxy with TLS, or a tunnel.

`--connect` opens sandboxes for one run of another host, which waits for them ([roles] sandboxes): this host comes to
the run, and needs no port that others reach.
"""

from __future__ import annotations

import argparse
import difflib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from asyncrl.commands.arguments import add_sandbox_arguments, sandbox_settings_of
from asyncrl.commands.role_arguments import add_role_arguments, play
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import SandboxBackend
from asyncrl.role_services import SandboxRole
from asyncrl.sandbox import AbuseResult, SandboxSettings, abuse_names, open_backend, reap, self_test
from asyncrl.sandbox.access import make_token, read_token
from asyncrl.sandbox.server import SandboxServer
from asyncrl.serving import listen, serve, until_signalled

HELP = "test the sandboxes' walls, serve sandboxes to other machines, remove what killed programs left"

_LOST_CLIENT_MS = (
    30_000  # a client whose machine is gone acknowledges nothing for as long; then its sandboxes are closed
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_role_arguments(parser, "sandbox", required=False)
    verbs = parser.add_subparsers(title="actions", metavar="ACTION")
    testing = verbs.add_parser("self-test", help="try to break out, in every known way")
    add_sandbox_arguments(testing)
    testing.add_argument("--only", action="append", metavar="NAME", help="try this one; may be given several times")
    testing.add_argument("--json", action="store_true", help="print a list of {name, stopped, detail}")
    testing.set_defaults(command=_self_test)
    serving = verbs.add_parser("serve", help="open sandboxes for runs on other machines")
    add_sandbox_arguments(serving)
    serving.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    serving.add_argument("--port", type=int, default=8790, help="default 8790; 0 takes a free one")
    serving.add_argument(
        "--token-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="holds the token; made if missing",
    )
    serving.add_argument(
        "--max-waiting", type=int, default=64, metavar="N", help="requests that wait for a place (default 64)"
    )
    serving.set_defaults(command=_serve)
    reaping = verbs.add_parser("reap", help="remove the sandboxes of programs that are gone")
    reaping.add_argument(
        "directories", type=Path, nargs="*", default=[Path("runs")], metavar="DIRECTORY", help="default: runs"
    )
    reaping.add_argument("--json", action="store_true", help="print the names of the leases that were settled")
    reaping.set_defaults(command=_reap)


def main(arguments: argparse.Namespace) -> int:
    """Be the role; the actions have their own. Returns the exit code."""
    if arguments.connect is None:
        raise ConfigError("an action (self-test, serve, reap) or --connect HOST:PORT must be given")
    return play(arguments, SandboxRole())


def _self_test(arguments: argparse.Namespace) -> int:
    settings = sandbox_settings_of(arguments.config, arguments.set)
    for name in arguments.only or ():
        if name not in abuse_names():
            near = difflib.get_close_matches(name, abuse_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(abuse_names())}"
            raise ConfigError(f"--only: there is no attempt {name!r}{hint}")
    wall, results = trio.run(_try_all, settings, arguments.only)
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        Console().print(_table(wall, results))
    return 0 if all(result.stopped for result in results) else 1


async def _try_all(settings: SandboxSettings, only: Sequence[str] | None) -> tuple[str, Sequence[AbuseResult]]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-self-test-") as directory:
        async with _opened(settings, Path(directory)) as backend:
            return backend.wall, await self_test(backend, only=only)


def _serve(arguments: argparse.Namespace) -> int:
    settings = sandbox_settings_of(arguments.config, arguments.set)
    if settings.backend == "remote":
        raise ConfigError("backend must be a local one to be served, got 'remote' ([sandbox])")
    if arguments.max_waiting < 0:
        raise ConfigError(f"--max-waiting must be >= 0, got {arguments.max_waiting}")
    make_token(arguments.token_file)
    token = read_token(str(arguments.token_file))
    listener = listen(arguments.host, arguments.port, setting="--port")
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_CLIENT_MS)  # accepted ones inherit it
    with closing(listener), tempfile.TemporaryDirectory(prefix="asyncrl-serve-") as directory:
        trio.run(_serve_until_stopped, settings, Path(directory), token, arguments.max_waiting, listener)
    return 0


async def _serve_until_stopped(
    settings: SandboxSettings, directory: Path, token: str, max_waiting: int, listener: socket.socket
) -> None:
    host, port = listener.getsockname()
    async with until_signalled(), _opened(settings, directory) as backend:
        reached = [abuse for abuse in await self_test(backend, only=abuse_names(main_only=True)) if not abuse.stopped]
        if reached:
            raise SandboxError(
                "the wall does not hold, so nothing is served: " + "; ".join(one.name for one in reached)
            )
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, SandboxServer(backend, token=token, max_waiting=max_waiting), listener)
            print(f"serving {backend.wall} sandboxes at http://{host}:{port}", flush=True)


@asynccontextmanager
async def _opened(settings: SandboxSettings, directory: Path) -> AsyncIterator[SandboxBackend]:
    """Open a backend; that it cannot be opened here is for the user to set right."""
    async with AsyncExitStack() as stack:
        try:
            backend = await stack.enter_async_context(open_backend(settings, directory=directory))
        except SandboxError as error:
            raise ConfigError(f"{error} ([sandbox])") from None
        yield backend


def _table(wall: str, results: Sequence[AbuseResult]) -> Table:
    stopped = sum(result.stopped for result in results)
    table = Table(title=f"{wall}: {stopped} of {len(results)} attempts stopped")
    for column in ("attempt", "stopped", "what came of it"):
        table.add_column(column)
    for result in results:
        table.add_row(result.name, "yes" if result.stopped else "NO", result.detail)
    return table


def _reap(arguments: argparse.Namespace) -> int:
    settled: list[str] = []
    for directory in arguments.directories:
        if not directory.is_dir() and arguments.directories != [Path("runs")]:
            raise ConfigError(f"there is no directory {directory}")
        settled += reap(directory)
    if arguments.json:
        print(json.dumps(settled))
    else:
        print(f"{len(settled)} leases of programs that are gone were settled" + "".join(f"\n  {n}" for n in settled))
    return 0
