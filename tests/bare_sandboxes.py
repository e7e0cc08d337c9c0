"""A backend without any wall: plain child processes in a folder. For tests that must see an attempt succeed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from asyncrl.protocols import ExecResult, Outcome, SandboxLimits
from asyncrl.sandbox import SandboxSettings


class BareSandbox:
    """A folder."""

    def __init__(self, directory: Path) -> None:
        self.sandbox_id = directory.name
        self.wall = "none"
        self._directory = directory

    async def exec(self, argv: Sequence[str], **more: Any) -> ExecResult:
        """Run a command as it is."""
        done = await trio.run_process(argv, cwd=self._directory, capture_stdout=True, capture_stderr=True, check=False)
        total = len(done.stdout) + len(done.stderr)
        return ExecResult(
            outcome=Outcome.OK, exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr, output_bytes=total
        )

    async def __aenter__(self) -> BareSandbox:
        return self

    async def __aexit__(self, *args: object) -> None:
        return None


class BareBackend:
    """Folders."""

    wall = "none"
    python = (sys.executable,)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def open(self, files: Any, *, limits: SandboxLimits) -> BareSandbox:
        """Return a new folder."""
        return BareSandbox(Path(tempfile.mkdtemp(dir=self._directory)))


class LeakingSandbox(BareSandbox):
    """Runs nothing, and answers like one in which every attempt succeeds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._num_reads = 0

    async def exec(self, argv: Sequence[str], **more: Any) -> ExecResult:
        """Answer that the attempt got through."""
        return ExecResult(outcome=Outcome.OK, exit_code=0, stdout=b"TRIED\nREACHED the host\n", stderr=b"")

    async def read(self, path: str) -> bytes:
        """Return something else each time, as where a stray process goes on writing."""
        self._num_reads += 1
        return b"%d" % self._num_reads


class LeakingBackend(BareBackend):
    """What opens them."""

    async def open(self, files: Any, *, limits: SandboxLimits) -> LeakingSandbox:
        """Return one."""
        return LeakingSandbox(self._directory)


@asynccontextmanager
async def open_leaking(settings: SandboxSettings, *, directory: Path) -> AsyncIterator[LeakingBackend]:
    """Yield what leaks."""
    yield LeakingBackend(directory)


@asynccontextmanager
async def open_bare(settings: SandboxSettings, *, directory: Path) -> AsyncIterator[BareBackend]:
    """Yield folders below `directory`."""
    yield BareBackend(directory)
