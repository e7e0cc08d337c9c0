"""The bubblewrap backend: the trio side of the launcher."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import trio

from asyncrl.errors import SandboxError
from asyncrl.protocols import BackendStatistics, ExecResult, FileEntry, FileKind, Outcome, SandboxLimits, Snapshot
from asyncrl.sandbox import leases
from asyncrl.sandbox.channel import NO_NAMESPACES, Channel, Reply
from asyncrl.sandbox.machine import configuration, launcher_command
from asyncrl.sandbox.results import cannot_run, check_caps
from asyncrl.sandbox.settings import SandboxSettings

_CLOSE_GRACE_S = 10.0  # closing kills, so it takes milliseconds; by then the launcher itself hangs
_REPLY_GRACE_S = 30.0  # beyond a command's own limit: waiting for its turn to start, and for its end


class BubblewrapSnapshot:
    """A layer of the launcher's."""

    def __init__(self, channel: Channel, snapshot_id: str, reply: Reply) -> None:
        self.snapshot_id = snapshot_id
        self.num_bytes = int(reply[0]["num_bytes"])
        self.num_files = int(reply[0]["num_files"])
        self._channel = channel
        self._closed = False

    async def aclose(self) -> None:
        """Give the files up; sandboxes over them go on."""
        if self._closed:
            return
        self._closed = True
        await _let_go(self._channel, self.snapshot_id)

    async def __aenter__(self) -> BubblewrapSnapshot:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


async def _let_go(channel: Channel, snapshot_id: str) -> None:
    with trio.move_on_after(_CLOSE_GRACE_S, shield=True), suppress(SandboxError):
        await channel.request("release", timeout_s=_CLOSE_GRACE_S, layer=snapshot_id)


class BubblewrapSandbox:
    """One sandbox: a tmpfs that its commands share, a control group, a user of its own."""

    def __init__(self, backend: BubblewrapBackend, sandbox_id: str, limits: SandboxLimits) -> None:
        """Take over the place that `backend` holds on behalf of `sandbox_id`."""
        self.sandbox_id = sandbox_id
        self.wall = backend.wall
        self._backend = backend
        self._channel = backend.channel
        self._limits = limits
        self._lock = trio.Lock()
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
        if not argv or any("\0" in argument for argument in argv):
            return cannot_run("the command is empty" if not argv else "an argument holds a NUL byte")
        caps = check_caps(self._limits, wall_s, output_bytes, kept_output_bytes)
        return await self._run("exec", [stdin], caps, argv=list(argv))

    async def shell(
        self,
        command: str,
        *,
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run shell text in the sandbox's one persistent shell; several at a time wait for each other."""
        if "\0" in command:
            return cannot_run("the command holds a NUL byte")
        caps = check_caps(self._limits, wall_s, output_bytes, kept_output_bytes)
        return await self._run("shell", [], caps, text=command)

    async def _run(self, operation: str, blobs: Sequence[bytes], caps: dict[str, Any], **header: Any) -> ExecResult:
        async with self._lock:
            timeout_s = caps["wall_s"] + _REPLY_GRACE_S
            try:
                reply, (stdout, stderr) = await self._ask(operation, blobs, timeout_s=timeout_s, **caps, **header)
            except (SandboxError, OSError) as error:
                return ExecResult(
                    outcome=Outcome.INFRASTRUCTURE, exit_code=None, stdout=b"", stderr=b"", detail=str(error)
                )
            except trio.Cancelled:
                with trio.move_on_after(_CLOSE_GRACE_S, shield=True), suppress(SandboxError):
                    await self._ask("kill", timeout_s=_CLOSE_GRACE_S)
                raise
        return ExecResult(**{**reply, "outcome": Outcome(reply["outcome"])}, stdout=stdout, stderr=stderr)

    async def _ask(
        self, operation: str, blobs: Sequence[bytes] = (), *, timeout_s: float = _REPLY_GRACE_S, **header: Any
    ) -> Reply:
        return await self._channel.request(operation, blobs, timeout_s=timeout_s, box=self.sandbox_id, **header)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file; what an agent put at or before `path` cannot lead it astray.

        Raises: OSError (ENOSPC where the disk is full), UnsafeFilesError.
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

    async def snapshot(self) -> BubblewrapSnapshot:
        """Return the working directory as it is now. Raises SandboxError, UnsafeFilesError."""
        async with self._lock:
            return await self._backend.new_snapshot("snapshot", box=self.sandbox_id)

    async def fork(self) -> BubblewrapSandbox:
        """Return a new sandbox over a copy of what was changed here. Raises SandboxError, UnsafeFilesError."""
        async with self._lock:
            return await self._backend.new_sandbox("fork", self._limits, box=self.sandbox_id)

    async def kill(self) -> None:
        """End every process, waiting for none but the last to be gone."""
        await self._ask("kill")

    async def aclose(self) -> None:
        """End every process and remove every trace."""
        if self._closed:
            return
        self._closed = True
        await self._backend.close(self.sandbox_id)

    async def __aenter__(self) -> BubblewrapSandbox:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


class BubblewrapBackend:
    """Sandboxes of one launcher."""

    def __init__(self, channel: Channel, wall: str, python: tuple[str, ...], max_open: int) -> None:
        self.wall = wall
        self.python = python
        self.channel = channel
        self._slots = trio.CapacityLimiter(max_open)
        self._num_opened = 0
        self._num_snapshots = 0

    def statistics(self) -> BackendStatistics:
        """Return the present counts."""
        slots = self._slots.statistics()
        return BackendStatistics(open=slots.borrowed_tokens, opened=self._num_opened, waiting=slots.tasks_waiting)

    async def prepare(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> BubblewrapSnapshot:
        """Return `files` as a layer for many sandboxes. Raises SandboxError."""
        return await self.new_snapshot("prepare", list(files.values()), paths=list(files), executable=list(executable))

    async def open(
        self,
        files: Mapping[str, bytes] | Snapshot,
        *,
        limits: SandboxLimits,
        work: str = "/task",
        places: Mapping[str, Snapshot | None] = MappingProxyType({}),
    ) -> BubblewrapSandbox:
        """Return a new sandbox, waiting for one to be closed where `max_open` are open.

        Raises: SandboxError, also where `files` do not fit into its limits.
        """
        written = files if isinstance(files, Mapping) else {}
        return await self.new_sandbox(
            "open",
            limits,
            list(written.values()),
            limits=asdict(limits),
            paths=list(written),
            layer=None if isinstance(files, Mapping) else files.snapshot_id,
            work=work,
            places={path: None if place is None else place.snapshot_id for path, place in places.items()},
        )

    async def new_snapshot(self, operation: str, blobs: Sequence[bytes] = (), **header: Any) -> BubblewrapSnapshot:
        """Return what an operation made of files. Raises SandboxError."""
        self._num_snapshots += 1
        snapshot_id = f"layer-{self._num_snapshots}"
        try:
            reply = await self.channel.request(operation, blobs, timeout_s=_REPLY_GRACE_S, layer=snapshot_id, **header)
        except OSError as error:
            raise SandboxError(f"no snapshot could be made: {error}") from None
        except trio.Cancelled:
            await _let_go(self.channel, snapshot_id)
            raise
        return BubblewrapSnapshot(self.channel, snapshot_id, reply)

    async def new_sandbox(
        self, operation: str, its_limits: SandboxLimits, blobs: Sequence[bytes] = (), **header: Any
    ) -> BubblewrapSandbox:
        """Return what an operation opened. Raises SandboxError."""
        self._num_opened += 1
        sandbox_id = f"box-{self._num_opened}"
        header["new" if operation == "fork" else "box"] = sandbox_id
        await self._slots.acquire_on_behalf_of(sandbox_id)
        try:
            await self.channel.request(operation, blobs, timeout_s=_REPLY_GRACE_S, **header)
        except BaseException as error:
            await self.close(sandbox_id)
            if isinstance(error, OSError):
                raise SandboxError(f"no sandbox could be opened: {error}") from None
            raise
        return BubblewrapSandbox(self, sandbox_id, its_limits)

    async def close(self, sandbox_id: str) -> None:
        """Close a sandbox whatever happens meanwhile. A launcher that is gone has closed it already."""
        with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
            try:
                with suppress(SandboxError):
                    await self.channel.request("close", timeout_s=_CLOSE_GRACE_S, box=sandbox_id)
            finally:
                self._slots.release_on_behalf_of(sandbox_id)


@asynccontextmanager
async def open_bubblewrap(settings: SandboxSettings, *, directory: Path) -> AsyncIterator[BubblewrapBackend]:
    """Start a launcher, with its ledger in `directory`, and yield its sandboxes; leaving removes everything.

    Raises: ConfigError where a program is missing, SandboxError where the machine does not let sandboxes be made.
    """
    ledger = directory / leases.DIRECTORY
    ledger.mkdir(parents=True, exist_ok=True)
    await trio.to_thread.run_sync(leases.reap, str(ledger))
    header, blobs, python = await trio.to_thread.run_sync(configuration, settings, ledger)
    ours, theirs = trio.socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        process = await trio.lowlevel.open_process(
            launcher_command(theirs.fileno()),
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # the terminal's Ctrl-C is the owner's to handle
        )
    stream = trio.SocketStream(ours)
    try:
        async with trio.open_nursery() as nursery:  # holds only the two tasks that carry frames
            channel = Channel(stream)
            nursery.start_soon(channel.serve_sends)
            nursery.start_soon(channel.serve_replies)
            reply, _ = await channel.request("configure", blobs, timeout_s=_REPLY_GRACE_S, **header)
            backend = BubblewrapBackend(channel, reply["wall"], python, settings.max_open)
            await _require_working(backend, settings.limits)
            yield backend
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        raise group.exceptions[0] from None  # the body's own: the nursery's tasks raise nothing
    finally:
        with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
            await stream.aclose()
            await process.wait()
        if process.returncode is None:
            process.kill()


async def _require_working(backend: BubblewrapBackend, limits: SandboxLimits) -> None:
    """Run nothing in a sandbox once, so that a machine that cannot is told of now and not by every episode."""
    async with await backend.open({}, limits=limits) as sandbox:
        result = await sandbox.exec([*backend.python, "-I", "-S", "-c", "pass"])
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise SandboxError(f"{NO_NAMESPACES}; {result.detail}")
    if result.outcome is not Outcome.OK or result.exit_code != 0:
        raise SandboxError(
            f"{backend.python[0]} does not run in the sandbox ({result.outcome}, exit code {result.exit_code}, "
            f"{result.stderr.decode(errors='replace').strip()[-300:]!r}): set python in [sandbox]"
        )
