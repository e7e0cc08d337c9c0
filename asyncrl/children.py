"""Child processes that cannot outlive the run: each is started under `asyncrl.keeper` and owned by an `async with`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from asyncrl import keeper

_LAST_LINES = 15  # enough for the end of a Python traceback; the whole output is in the log file
_KEEPER_MARGIN_S = 5.0  # what the keeper may take after the child's grace before it is killed itself


class Ending(Protocol):
    """How a process ended."""

    def describe(self) -> str:
        """Return one paragraph for a person."""
        ...


class Watched(Protocol):
    """A process that somebody needs alive, wherever it runs."""

    async def wait_exit(self) -> Ending:
        """Return how it ended, once it has."""
        ...

    async def fail_on_exit(self, error: type[Exception]) -> None:
        """Raise `error` when it ends by itself: run this in the nursery that needs it alive."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExit:
    """How a child ended."""

    name: str
    code: int
    """Exit code, or 128 + N where signal N ended it."""
    last_lines: str
    log_path: Path

    def describe(self) -> str:
        """Return one paragraph for a person: who, how, and the last lines it wrote."""
        how = f"was ended by signal {self.code - 128}" if self.code > 128 else f"exited with code {self.code}"
        return f"{self.name} {how}; the last lines of {self.log_path}:\n{self.last_lines or '(no output)'}"


class Child:
    """One running child. Its output goes to `log_path`."""

    def __init__(self, name: str, process: trio.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int:
        """Process id of the keeper, the child's parent."""
        return self._process.pid

    async def wait_exit(self) -> ChildExit:
        """Return how the child ended, once it has."""
        code = await self._process.wait()
        return ChildExit(
            name=self.name, code=code, last_lines=last_lines(self.log_path, _LAST_LINES), log_path=self.log_path
        )

    async def fail_on_exit(self, error: type[Exception]) -> None:
        """Raise `error` when the child ends by itself: run this in the nursery that needs the child alive."""
        raise error((await self.wait_exit()).describe())


@asynccontextmanager
async def start_child(
    name: str,
    argv: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    grace_s: float = 10.0,
    remove_on_exit: Sequence[str] = (),
    own_scratch: bool = False,
) -> AsyncIterator[Child]:
    """Start `argv` under a keeper; on leaving, end it and everything that came from it within `grace_s` seconds.

    `remove_on_exit` are glob patterns of files that must not outlive the child, after kill -9 of this process neither.
    With `own_scratch` the child's temporary files have a directory of their own, which is removed too, and `{scratch}`
    in a pattern stands for the name of each of its entries. `environment` is added to this process's own.
    """
    scratch = tempfile.mkdtemp(prefix="asyncrl-") if own_scratch else ""
    pipe_read, pipe_write = os.pipe()
    options = ["--pipe", str(pipe_read), "--grace", str(grace_s)]
    for fd in pass_fds:
        options += ["--pass-fd", str(fd)]
    for pattern in remove_on_exit:
        options += ["--remove", pattern]
    if scratch:
        options += ["--scratch", scratch]
    command = [sys.executable, "-I", "-S", keeper.__file__, *options, "--", *argv]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), **({"TMPDIR": scratch} if scratch else {})},
                pass_fds=[pipe_read, *pass_fds],
                start_new_session=True,  # a terminal's Ctrl-C reaches the orchestrator alone, which drains
            )
        os.close(pipe_read)
        pipe_read = -1
        try:
            yield Child(name, process, log_path)
        finally:
            os.close(pipe_write)
            pipe_write = -1
            with trio.move_on_after(grace_s + _KEEPER_MARGIN_S, shield=True) as patience:
                await process.wait()
            if patience.cancelled_caught:
                process.kill()
                with trio.CancelScope(shield=True):  # bounded: SIGKILL cannot be refused
                    await process.wait()
    finally:
        for fd in (pipe_read, pipe_write):
            if fd >= 0:
                os.close(fd)
        keeper.remove(remove_on_exit, scratch)  # the keeper has, unless it was killed itself


def last_lines(path: Path, count: int, *, max_bytes: int = 65536) -> str:
    """Return the last `count` lines of a text file, or "" where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        return b"\n".join(deque(file.read().splitlines(), maxlen=count)).decode("utf-8", "replace")
