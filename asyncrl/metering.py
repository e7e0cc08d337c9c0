"""Sandboxes that are counted: how they start, how their commands end, and how long both take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import trio

from asyncrl.errors import SandboxError
from asyncrl.protocols import (
    BackendStatistics,
    ExecResult,
    FileEntry,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    Snapshot,
)
from asyncrl.tallies import SECONDS, Buckets


class SandboxFigures:
    """What a backend's sandboxes have done since the start."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter({"ok": 0, "failed": 0})
        self.start_seconds = Buckets(SECONDS)
        """Of those that came about; waiting for a place included."""
        self.commands: Counter[str] = Counter()
        """`protocols.Outcome` -> commands."""
        self.command_seconds: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(SECONDS))
        """"exec" or "shell" -> how long they took."""

    def count_command(self, kind: str, result: ExecResult) -> ExecResult:
        """Count a command that has ended, and return its result."""
        self.commands[result.outcome.value] += 1
        self.command_seconds[kind].add(result.seconds)
        return result


class MeteredBackend:
    """A `SandboxBackend` around another one.

    Example:
        >>> backend = MeteredBackend(backend)                                   # doctest: +SKIP
        >>> async with await backend.open({}, limits=SandboxLimits()) as box:   # doctest: +SKIP
        ...     await box.exec(["true"])
        >>> backend.figures.commands["ok"]                                      # doctest: +SKIP
        1
    """

    def __init__(self, backend: SandboxBackend, note: Callable[[str, str, float, str], None] | None = None) -> None:
        """`note` hears of each start and command that has ended: the sandbox, what, since when, and how it ended."""
        self._backend = backend
        self._note = note
        self.wall = backend.wall
        self.python = backend.python
        self.figures = SandboxFigures()

    def statistics(self) -> BackendStatistics:
        """See `protocols.SandboxBackend`."""
        return self._backend.statistics()

    async def prepare(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> Snapshot:
        """See `protocols.SandboxBackend`."""
        return await self._backend.prepare(files, executable=executable)

    async def open(
        self,
        files: Mapping[str, bytes] | Snapshot,
        *,
        limits: SandboxLimits,
        work: str = "/task",
        places: Mapping[str, Snapshot | None] = MappingProxyType({}),
        image: str = "",
    ) -> Sandbox:
        """See `protocols.SandboxBackend`."""
        began = trio.current_time()
        try:
            sandbox = await self._backend.open(files, limits=limits, work=work, places=places, image=image)
        except SandboxError:
            self.figures.starts["failed"] += 1
            raise
        return self._started(sandbox, began)

    def commanded(self, sandbox_id: str, kind: str, began: float, result: ExecResult) -> ExecResult:
        """Count a command that has ended, and return its result."""
        if self._note is not None:
            self._note(sandbox_id, kind, began, result.outcome.value)
        return self.figures.count_command(kind, result)

    def _started(self, sandbox: Sandbox, began: float) -> Sandbox:
        if self._note is not None:
            self._note(sandbox.sandbox_id, "start", began, "ok")
        self.figures.starts["ok"] += 1
        self.figures.start_seconds.add(trio.current_time() - began)
        return _MeteredSandbox(sandbox, self)

    async def fork(self, sandbox: Sandbox) -> Sandbox:
        """Return a fork of one of the backend's own sandboxes, counted as a start. Raises: SandboxError."""
        began = trio.current_time()
        try:
            forked = await sandbox.fork()
        except SandboxError:
            self.figures.starts["failed"] += 1
            raise
        return self._started(forked, began)


class _MeteredSandbox:
    """A `Sandbox` around another one."""

    def __init__(self, sandbox: Sandbox, backend: MeteredBackend) -> None:
        self._sandbox = sandbox
        self._backend = backend
        self.sandbox_id = sandbox.sandbox_id
        self.wall = sandbox.wall

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """See `protocols.Sandbox`."""
        began = trio.current_time()
        result = await self._sandbox.exec(
            argv, stdin=stdin, wall_s=wall_s, output_bytes=output_bytes, kept_output_bytes=kept_output_bytes
        )
        return self._backend.commanded(self.sandbox_id, "exec", began, result)

    async def shell(
        self,
        command: str,
        *,
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """See `protocols.Sandbox`."""
        began = trio.current_time()
        result = await self._sandbox.shell(
            command, wall_s=wall_s, output_bytes=output_bytes, kept_output_bytes=kept_output_bytes
        )
        return self._backend.commanded(self.sandbox_id, "shell", began, result)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `protocols.Sandbox`."""
        await self._sandbox.write(path, data, executable=executable)

    async def read(self, path: str, *, max_bytes: int = 1 * 2**20) -> bytes:
        """See `protocols.Sandbox`."""
        return await self._sandbox.read(path, max_bytes=max_bytes)

    async def list(self, path: str = ".") -> Sequence[str]:
        """See `protocols.Sandbox`."""
        return await self._sandbox.list(path)

    async def walk(self, path: str = ".", *, max_entries: int = 10_000) -> Sequence[FileEntry]:
        """See `protocols.Sandbox`."""
        return await self._sandbox.walk(path, max_entries=max_entries)

    async def snapshot(self) -> Snapshot:
        """See `protocols.Sandbox`."""
        return await self._sandbox.snapshot()

    async def fork(self) -> Sandbox:
        """See `protocols.Sandbox`."""
        return await self._backend.fork(self._sandbox)

    async def kill(self) -> None:
        """See `protocols.Sandbox`."""
        await self._sandbox.kill()

    async def aclose(self) -> None:
        """See `protocols.Sandbox`."""
        await self._sandbox.aclose()

    async def __aenter__(self) -> Sandbox:
        await self._sandbox.__aenter__()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()
