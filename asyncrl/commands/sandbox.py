"""Test the walls of the sandboxes, and remove what killed programs left.

  asyncrl sandbox self-test
  asyncrl sandbox self-test configs/demo.toml --json
  asyncrl sandbox reap runs

`self-test` tries to break out of a sandbox in each of the known ways and says which were stopped; exit code 1 when one
was not. `reap` looks for the ledgers of sandboxes below a directory and removes what belongs to programs that are gone;
it leaves those of running programs alone.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from asyncrl.configs.loader import apply_overrides, build, read_toml
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandbox import AbuseResult, SandboxSettings, abuse_names, open_backend, reap, self_test

HELP = "test the sandboxes' walls; remove what killed programs left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    verbs = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    testing = verbs.add_parser("self-test", help="try to break out, in every known way")
    _add_settings(testing)
    testing.add_argument("--only", action="append", metavar="NAME", help="try this one; may be given several times")
    testing.add_argument("--json", action="store_true", help="print a list of {name, stopped, detail}")
    testing.set_defaults(command=_self_test)
    reaping = verbs.add_parser("reap", help="remove the sandboxes of programs that are gone")
    reaping.add_argument(
        "directories", type=Path, nargs="*", default=[Path("runs")], metavar="DIRECTORY", help="default: runs"
    )
    reaping.add_argument("--json", action="store_true", help="print the names of the leases that were settled")
    reaping.set_defaults(command=_reap)


def main(arguments: argparse.Namespace) -> int:
    """Never called: each action has its own."""
    raise AssertionError(arguments)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.toml", help="whose [sandbox] is taken; the defaults without one"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="sandbox.KEY=VALUE", help="replace one setting of [sandbox]"
    )


def load_settings(path: Path | None, overrides: Sequence[str]) -> SandboxSettings:
    """Return the [sandbox] section of a configuration, which need not be whole otherwise. Raises ConfigError."""
    tables = apply_overrides({} if path is None else read_toml(path), overrides)
    if strangers := [override for override in overrides if not override.startswith("sandbox.")]:
        raise ConfigError(f"--set takes sandbox.KEY=VALUE here, got {strangers[0]!r}")
    table = tables.get("sandbox", {})
    if not isinstance(table, dict):
        raise ConfigError(f"sandbox must be a section, got {table!r}")
    return build(SandboxSettings, table, section="sandbox")


def _self_test(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.config, arguments.set)
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
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-self-test-"))
        try:
            backend = await stack.enter_async_context(open_backend(settings, directory=directory))
        except SandboxError as error:
            raise ConfigError(f"{error} ([sandbox])") from None
        return backend.wall, await self_test(backend, only=only)
    raise AssertionError("unreachable")


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
