"""What the sandboxes of every backend do alike, on the side of whoever uses them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import trio

from asyncrl.errors import SandboxError
from asyncrl.protocols import ExecResult, FileEntry, FileKind, Outcome, SandboxLimits
from asyncrl.sandbox.results import cannot_run, check_caps, infrastructure

Reply = tuple[dict[str, Any], list[bytes]]
"""Header and byte strings, as `messages` frames them."""


class Closable(ABC):
    """What `async with` closes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Give up what is held. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


class CheckedSandbox(Closable):
    """Answers commands that no system could start by itself, and fills in the limits of the others."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._lock = trio.Lock()
        """Held while a command runs."""
        self._closed = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run one command to its end; several at a time wait for each other."""
        if not argv:
            return cannot_run("the command is empty")
        if reason := next(filter(None, map(_unsendable, argv)), ""):
            return cannot_run(f"an argument holds {reason}")
        return await self._run_exec(argv, stdin, check_caps(self._limits, wall_s, output_bytes, kept_output_bytes))

    async def shell(
        self,
        command: str,
        *,
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run shell text in the sandbox's one persistent shell; several at a time wait for each other."""
        if reason := _unsendable(command):
            return cannot_run(f"the command holds {reason}")
        return await self._run_shell(command, check_caps(self._limits, wall_s, output_bytes, kept_output_bytes))

    @abstractmethod
    async def _run_exec(self, argv: Sequence[str], stdin: bytes, caps: dict[str, Any]) -> ExecResult: ...

    @abstractmethod
    async def _run_shell(self, command: str, caps: dict[str, Any]) -> ExecResult: ...


def _unsendable(text: str) -> str:
    """Return what of a text no program can be given; empty for nothing."""
    if "\0" in text:
        return "a NUL byte"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "half a character (a lone surrogate)"
    return ""


class CalledSandbox(CheckedSandbox):
    """A sandbox that another process holds: whatever is asked of it is one request and one reply."""

    def __init__(self, limits: SandboxLimits, *, reply_grace_s: float, close_grace_s: float) -> None:
        """A reply may take `reply_grace_s` beyond a command's own limit, an ending `close_grace_s`."""
        super().__init__(limits)
        self._reply_grace_s = reply_grace_s
        self._close_grace_s = close_grace_s

    @abstractmethod
    async def _request(self, operation: str, blobs: Sequence[bytes], *, timeout_s: float, **header: Any) -> Reply:
        """Return the reply of whoever holds the sandbox. Raises SandboxError, OSError."""

    async def _ask(self, operation: str, blobs: Sequence[bytes] = (), **header: Any) -> Reply:
        return await self._request(operation, blobs, timeout_s=self._reply_grace_s, **header)

    async def _run_exec(self, argv: Sequence[str], stdin: bytes, caps: dict[str, Any]) -> ExecResult:
        return await self._run("exec", [stdin], caps, argv=list(argv))

    async def _run_shell(self, command: str, caps: dict[str, Any]) -> ExecResult:
        return await self._run("shell", [], caps, text=command)

    async def _run(self, operation: str, blobs: Sequence[bytes], caps: dict[str, Any], **header: Any) -> ExecResult:
        timeout_s = caps["wall_s"] + self._reply_grace_s
        async with self._lock:
            try:
                reply, (stdout, stderr) = await self._request(
                    operation, blobs, timeout_s=timeout_s, caps=caps, **header
                )
            except (SandboxError, OSError) as error:
                return infrastructure(str(error))
            except trio.Cancelled:
                await self._end("kill")
                raise
        return ExecResult(**{**reply, "outcome": Outcome(reply["outcome"])}, stdout=stdout, stderr=stderr)

    async def _end(self, operation: str) -> None:
        """Ask for an end, whatever happens meanwhile. Who is gone has ended everything already."""
        with trio.move_on_after(self._close_grace_s, shield=True), suppress(SandboxError):
            await self._request(operation, (), timeout_s=self._close_grace_s)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file; what an agent put at or before `path` cannot lead it astray.

        Raises: OSError (ENOSPC where the disk is full), SandboxError, UnsafeFilesError.
        """
        await self._ask("write", [data], path=path, executable=executable)

    async def read(self, path: str, *, max_bytes: int = 1 * 2**20) -> bytes:
        """Return a regular file's content. Raises FileNotFoundError, OSError, UnsafeFilesError (also if larger)."""
        _, (data,) = await self._ask("read", path=path, max_bytes=max_bytes)
        return data

    async def list(self, path: str = ".") -> Sequence[str]:
        """Return the names in a directory, sorted. Raises FileNotFoundError, OSError, UnsafeFilesError."""
        reply, _ = await self._ask("list", path=path)
        return tuple(reply["names"])

    async def walk(self, path: str = ".", *, max_entries: int = 10_000) -> Sequence[FileEntry]:
        """Return all that lies below a directory, sorted. Raises FileNotFoundError, OSError, UnsafeFilesError."""
        reply, _ = await self._ask("walk", path=path, max_entries=max_entries)
        return [FileEntry(path=name, kind=FileKind(kind), num_bytes=size) for name, kind, size in reply["entries"]]

    async def kill(self) -> None:
        """End every process, waiting for none but the last to be gone."""
        await self._ask("kill")


@contextmanager
def os_errors_as_sandbox_errors(what: str) -> Iterator[None]:
    """Turn an OSError of the body into a SandboxError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"{what}: {error}") from None


@contextmanager
def without_group() -> Iterator[None]:
    """Raise the error of a body's nursery by itself where there is only one: the user's own, as it was raised."""
    try:
        yield
    except BaseExceptionGroup as group:  # a lone KeyboardInterrupt counts too; raised again on every path
        if len(group.exceptions) != 1:
            raise
        raise group.exceptions[0] from None
