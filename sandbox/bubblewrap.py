"""The bubblewrap backend: the trio side of the launcher."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import trio

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import BackendStatistics, Outcome, SandboxLimits, Snapshot
from asyncrl.sandbox import leases
from asyncrl.sandbox.calls import CalledSandbox, Closable, Reply, os_errors_as_sandbox_errors, without_group
from asyncrl.sandbox.channel import NO_NAMESPACES, Channel
from asyncrl.sandbox.machine import configuration, launcher_command
from asyncrl.sandbox.settings import SandboxSettings

_CLOSE_GRACE_S = 10.0  # closing kills, so it takes milliseconds; by then the launcher itself hangs
_REPLY_GRACE_S = 30.0  # beyond a command's own limit: waiting for its turn to start, and for its end


class BubblewrapSnapshot(Closable):
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


async def _let_go(channel: Channel, snapshot_id: str) -> None:
    with trio.move_on_after(_CLOSE_GRACE_S, shield=True), suppress(SandboxError):
        await channel.request("release", timeout_s=_CLOSE_GRACE_S, layer=snapshot_id)


class BubblewrapSandbox(CalledSandbox):
    """One sandbox: a tmpfs that its commands share, a control group, a user of its own."""

    def __init__(self, backend: BubblewrapBackend, sandbox_id: str, limits: SandboxLimits) -> None:
        """Take over the place that `backend` holds on behalf of `sandbox_id`."""
        super().__init__(limits, reply_grace_s=_REPLY_GRACE_S, close_grace_s=_CLOSE_GRACE_S)
        self.sandbox_id = sandbox_id
        self.wall = backend.wall
        self._backend = backend

    async def _request(self, operation: str, blobs: Sequence[bytes], *, timeout_s: float, **header: Any) -> Reply:
        return await self._backend.channel.request(operation, blobs, timeout_s=timeout_s, box=self.sandbox_id, **header)

    async def snapshot(self) -> BubblewrapSnapshot:
        """Return the working directory as it is now. Raises SandboxError, UnsafeFilesError."""
        async with self._lock:
            return await self._backend.new_snapshot("snapshot", box=self.sandbox_id)

    async def fork(self) -> BubblewrapSandbox:
        """Return a new sandbox over a copy of what was changed here. Raises SandboxError, UnsafeFilesError."""
        async with self._lock:
            return await self._backend.new_sandbox("fork", self._limits, box=self.sandbox_id)

    async def aclose(self) -> None:
        """End every process and remove every trace."""
        if self._closed:
            return
        self._closed = True
        await self._backend.close(self.sandbox_id)


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
        image: str = "",
    ) -> BubblewrapSandbox:
        """Return a new sandbox, waiting for one to be closed where `max_open` are open.

        Raises: SandboxError, also where `files` do not fit into its limits; ConfigError for an image.
        """
        if image:
            raise ConfigError(
                f"the sandbox backend 'bubblewrap' runs no images, and {image!r} is wanted: set backend = 'container', "
                "with podman or docker, or leave such tasks out ([sandbox] backend)"
            )
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
        with os_errors_as_sandbox_errors("no snapshot could be made"):
            try:
                reply = await self.channel.request(
                    operation, blobs, timeout_s=_REPLY_GRACE_S, layer=snapshot_id, **header
                )
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
        with os_errors_as_sandbox_errors("no sandbox could be opened"):
            async with AsyncExitStack() as undo:
                undo.push_async_callback(self.close, sandbox_id)
                await self.channel.request(operation, blobs, timeout_s=_REPLY_GRACE_S, **header)
                undo.pop_all()
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
        with without_group():
            async with trio.open_nursery() as nursery:  # holds only the two tasks that carry frames
                channel = Channel(stream)
                nursery.start_soon(channel.serve_sends)
                nursery.start_soon(channel.serve_replies)
                reply, _ = await channel.request("configure", blobs, timeout_s=_REPLY_GRACE_S, **header)
                backend = BubblewrapBackend(channel, reply["wall"], python, settings.max_open)
                await _require_working(backend, settings.limits)
                yield backend
                nursery.cancel_scope.cancel()
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
