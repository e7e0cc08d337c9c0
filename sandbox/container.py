"""The container backend: podman or docker, for tasks that come with an image, and for gVisor's wall.

Every sandbox is a container that waits, in which commands are run, and a second one for the shell once it is asked for.
Their files lie out here, on a sized tmpfs of their own, so that they are read, copied and laid over each other in the
same way as bubblewrap's, whatever the engine and its runtime.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import trio

from asyncrl.errors import ConfigError, SandboxError, UnsafeFilesError
from asyncrl.protocols import BackendStatistics, ExecResult, FileEntry, FileKind, Outcome, SandboxLimits, Snapshot
from asyncrl.sandbox import kernel, leases, safe_files
from asyncrl.sandbox.boxes import Boxes, RequestError
from asyncrl.sandbox.calls import CheckedSandbox, Closable, os_errors_as_sandbox_errors, without_group
from asyncrl.sandbox.commands import NEW_SHELL, Box
from asyncrl.sandbox.container_commands import Holder, run_command, run_in_shell
from asyncrl.sandbox.engine import Engine, find_engine, find_image
from asyncrl.sandbox.layers import Layer
from asyncrl.sandbox.machine import standard_library_command
from asyncrl.sandbox.results import infrastructure
from asyncrl.sandbox.seccomp import container_profile
from asyncrl.sandbox.settings import SandboxSettings

_USER = 1000
_OPEN_FILES = 256
_MAX_PROCESSES = 4096  # of one user on the whole machine; the container's own limit is far below
_HELD_PROCESSES = 4  # the two that wait, and what starts a command
_GVISOR_THREADS = 512  # of its own, in the group whose limit counts them; without them it dies
_STAGE_BYTES = 2**20  # directories to mount on
_WAITING = "while :; do sleep 1000000 & wait; done"  # and buries what commands leave behind

T = TypeVar("T")


async def _blocking(action: Callable[..., T], *arguments: Any) -> T:
    """Return what `action` does in a thread. Raises SandboxError, UnsafeFilesError, OSError."""
    try:
        return await trio.to_thread.run_sync(partial(action, *arguments))
    except safe_files.UnsafePathError as error:
        raise UnsafeFilesError(str(error)) from None
    except RequestError as error:
        raise SandboxError(str(error)) from None


class ContainerSnapshot(Closable):
    """A layer out here."""

    def __init__(self, boxes: Boxes, layer: Layer) -> None:
        self.snapshot_id = layer.name
        self.num_bytes, self.num_files = layer.totals()
        self._boxes = boxes

    async def aclose(self) -> None:
        """Give the files up; sandboxes over them go on."""
        await _blocking(self._boxes.release, self.snapshot_id)


class ContainerSandbox(CheckedSandbox):
    """A box of files, and the containers that show it."""

    def __init__(self, backend: ContainerBackend, box: Box, limits: SandboxLimits) -> None:
        super().__init__(limits)
        self.sandbox_id = box.name
        self.wall = backend.wall
        self._backend = backend
        self._box = box
        self._main: Holder | None = None
        self._shell: Holder | None = None
        self._num_shells = 0
        self._expired = ""

    async def start(self) -> None:
        """Start the container that commands run in. Raises SandboxError."""
        self._main = await self._backend.hold(self._box, "main")

    async def _run_exec(self, argv: Sequence[str], stdin: bytes, caps: dict[str, Any]) -> ExecResult:
        async with self._lock:
            if self._main is None or self._closed:
                return infrastructure(self._expired or f"the sandbox {self.sandbox_id} is closed")
            try:
                return await run_command(self._main, self._box, argv, stdin, caps)
            except SandboxError as error:
                return infrastructure(str(error))

    async def _run_shell(self, command: str, caps: dict[str, Any]) -> ExecResult:
        async with self._lock:
            if self._closed:
                return infrastructure(self._expired or f"the sandbox {self.sandbox_id} is closed")
            try:
                is_new = self._shell is None
                if self._shell is None:
                    self._num_shells += 1
                    self._shell = await self._backend.hold(self._box, f"shell-{self._num_shells}")
                if self._closed:  # its lifetime was over meanwhile
                    self._shell.is_over = True
                    raise SandboxError(self._expired)
                result = await run_in_shell(self._shell, self._box, command, caps)
            except SandboxError as error:
                return infrastructure(str(error))
            finally:
                if self._shell is not None and self._shell.is_over:
                    over, self._shell = self._shell, None
                    with trio.CancelScope(shield=True):
                        await self._backend.drop(over)
        if is_new and self._num_shells > 1 and result.outcome is not Outcome.INFRASTRUCTURE:
            return replace(result, detail=NEW_SHELL)
        return result

    async def _file(self, action: Callable[..., T], path: str, *arguments: Any, **more: Any) -> T:
        def act() -> T:
            boxes = self._backend.boxes
            with boxes.writable(boxes.get(self.sandbox_id), path) as (directory, below):
                return action(directory, below, *arguments, **more)

        if self._closed:
            raise SandboxError(self._expired or f"the sandbox {self.sandbox_id} is closed")
        return await _blocking(act)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file. Raises OSError (ENOSPC where the disk is full), UnsafeFilesError."""
        await self._file(safe_files.write_file, path, data, _USER, executable=executable)

    async def read(self, path: str, *, max_bytes: int = 1 * 2**20) -> bytes:
        """Return a regular file's content. Raises FileNotFoundError, OSError, UnsafeFilesError (also if larger)."""
        return await self._file(safe_files.read_file, path, max_bytes)

    async def list(self, path: str = ".") -> Sequence[str]:
        """Return the names in a directory, sorted. Raises FileNotFoundError, OSError, UnsafeFilesError."""
        return tuple(await self._file(safe_files.list_directory, path))

    async def walk(self, path: str = ".", *, max_entries: int = 10_000) -> Sequence[FileEntry]:
        """Return all that lies below a directory, sorted. Raises FileNotFoundError, OSError, UnsafeFilesError."""
        found = await self._file(safe_files.walk, path, max_entries)
        return [FileEntry(path=name, kind=FileKind(kind), num_bytes=size) for name, kind, size in found]

    async def snapshot(self) -> ContainerSnapshot:
        """Return the working directory as it is now. Raises SandboxError, UnsafeFilesError."""
        async with self._lock:
            name = self._backend.new_name("layer")
            layer = await _blocking(self._backend.boxes.snapshot, name, self._box)
        return ContainerSnapshot(self._backend.boxes, layer)

    async def fork(self) -> ContainerSandbox:
        """Return a new sandbox over a copy of what was changed here. Raises SandboxError, UnsafeFilesError."""
        async with self._lock:
            make = partial(self._backend.boxes.fork, box=self._box)
            return await self._backend.new_sandbox(make, self._limits)

    async def kill(self) -> None:
        """End every process inside; the files stay."""
        if self._main is not None:
            self._main.stop()
            await self._main.end_strays()
        shell = self._shell
        if shell is not None:
            shell.stop()
            shell.is_over = True
            async with self._lock:
                if self._shell is shell:
                    self._shell = None
                    await self._backend.drop(shell)

    async def live(self) -> None:
        """Return when the sandbox's lifetime is over, having closed its containers."""
        await trio.sleep(self._limits.lifetime_s)
        self._expired = (
            f"the sandbox is closed: its lifetime of {self._limits.lifetime_s:g} s is over (limits.lifetime_s)"
        )
        self._closed = True
        await self._discard()

    async def _discard(self) -> None:
        for holder in (self._main, self._shell):
            if holder is not None:
                holder.stop()
                await self._backend.drop(holder)
        self._main = self._shell = None

    async def aclose(self) -> None:
        """End every process and remove every trace."""
        if self.sandbox_id in self._backend.open_ones:
            self._closed = True
            with trio.CancelScope(shield=True):
                await self._discard()
                await self._backend.give_back(self)


class ContainerBackend:
    """Sandboxes of one engine."""

    python: tuple[str, ...] = ("python3",)

    def __init__(
        self,
        engine: Engine,
        boxes: Boxes,
        options: Sequence[str],
        image: tuple[str, Sequence[str]],
        settings: SandboxSettings,
        owner: str,
    ) -> None:
        """Open sandboxes of `engine` with its `options`; `image` has further ones of its own."""
        self.boxes = boxes
        self.wall = "container-runsc" if engine.is_gvisor else "container"
        self.open_ones: dict[str, trio.CancelScope] = {}
        """Name -> what ends the watch over the sandbox's lifetime."""
        self.nursery: trio.Nursery | None = None
        """Of the backend's owner, for the watches over lifetimes."""
        self._engine = engine
        self._options = options
        self._images = {"": image}
        """What was asked for -> name and options of the image; the backend's own for nothing."""
        self._owner = owner
        self._slots = trio.CapacityLimiter(settings.max_open)
        self._starting = trio.CapacityLimiter(settings.max_starting)
        self._num_names = 0
        self._num_opened = 0

    def statistics(self) -> BackendStatistics:
        """Return the present counts."""
        slots = self._slots.statistics()
        return BackendStatistics(open=slots.borrowed_tokens, opened=self._num_opened, waiting=slots.tasks_waiting)

    def new_name(self, kind: str) -> str:
        """Return a name that no other has."""
        self._num_names += 1
        return f"{kind}-{self._num_names}"

    async def prepare(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> ContainerSnapshot:
        """Return `files` as a layer for many sandboxes. Raises SandboxError."""
        with os_errors_as_sandbox_errors("no snapshot could be made"):
            layer = await _blocking(self.boxes.prepare, self.new_name("layer"), files, executable)
        return ContainerSnapshot(self.boxes, layer)

    async def open(
        self,
        files: Mapping[str, bytes] | Snapshot,
        *,
        limits: SandboxLimits,
        work: str = "/task",
        places: Mapping[str, Snapshot | None] = MappingProxyType({}),
        image: str = "",
    ) -> ContainerSandbox:
        """Return a new sandbox, waiting for one to be closed where `max_open` are open.

        Raises: SandboxError, also where an image is not here: pulling is not for the middle of a run.
        """
        if image and image not in self._images:
            try:
                self._images[image] = await find_image(self._engine, image)
            except ConfigError as error:
                raise SandboxError(str(error)) from None
        make = partial(
            self.boxes.open,
            limits=asdict(limits),
            layer=None if isinstance(files, Mapping) else files.snapshot_id,
            work=work,
            places={path: None if place is None else place.snapshot_id for path, place in places.items()},
            files=files if isinstance(files, Mapping) else {},
            image=image,
        )
        return await self.new_sandbox(make, limits)

    async def new_sandbox(self, make: Callable[[str], Box], limits: SandboxLimits) -> ContainerSandbox:
        """Return a sandbox whose files `make` makes under the name it is given. Raises SandboxError."""
        assert self.nursery is not None
        self._num_opened += 1
        name = self.new_name("box")
        await self._slots.acquire_on_behalf_of(name)
        with os_errors_as_sandbox_errors("no sandbox could be opened"):
            async with AsyncExitStack() as undo:
                undo.callback(self._slots.release_on_behalf_of, name)
                sandbox = ContainerSandbox(self, await _blocking(make, name), limits)
                undo.pop_all()  # from here on the sandbox has the place, and gives it back
                undo.push_async_callback(sandbox.aclose)
                watch = self.open_ones[name] = trio.CancelScope()
                await sandbox.start()
                undo.pop_all()

        async def live() -> None:
            with watch:
                await sandbox.live()

        self.nursery.start_soon(live)
        return sandbox

    async def give_back(self, sandbox: ContainerSandbox) -> None:
        """Remove a sandbox's files, and free its place."""
        name = sandbox.sandbox_id
        self.open_ones.pop(name).cancel()
        try:
            box = self.boxes.take(name)
            if box is not None:
                await _blocking(self.boxes.discard, box)
        finally:
            self._slots.release_on_behalf_of(name)

    async def hold(self, box: Box, kind: str) -> Holder:
        """Start a container that shows the files of `box` and waits. Raises SandboxError."""
        name = f"asyncrl-{self._owner}-{box.name}-{kind}"
        self.boxes.lease(box, containers=[name], engine=self._engine.program)
        image, more = self._images[box.image]
        async with self._starting:
            options = [
                *self._options,
                *more,
                *_limit_options(self._engine, box),
                *_mounts(box),
                f"--workdir={box.work}",
            ]
            await self._engine.call("run", "--name", name, *options, "--entrypoint=/bin/sh", image, "-c", _WAITING)
        pid = await self._engine.call("inspect", "--format", "{{.State.Pid}}", name)
        return Holder(self._engine, name, int(pid))

    async def drop(self, holder: Holder) -> None:
        """Remove a container; one that is gone already is removed."""
        with suppress(SandboxError):
            await holder.aclose()


def _limit_options(engine: Engine, box: Box) -> list[str]:
    limits = box.limits
    cpu_s = max(1, round(limits["cpu_s"]))
    return [
        f"--memory={limits['memory_bytes']}", f"--memory-swap={limits['memory_bytes']}",
        f"--pids-limit={limits['max_pids'] + _HELD_PROCESSES + (_GVISOR_THREADS if engine.is_gvisor else 0)}",
        f"--ulimit=cpu={cpu_s}:{cpu_s + 1}", f"--ulimit=fsize={limits['disk_bytes']}:{limits['disk_bytes']}",
        f"--ulimit=nofile={_OPEN_FILES}:{_OPEN_FILES}", f"--ulimit=nproc={_MAX_PROCESSES}:{_MAX_PROCESSES}",
        "--ulimit=core=0:0",
    ]  # fmt: skip


def _mounts(box: Box) -> list[str]:
    shown = [("/tmp", f"{box.path}/tmp", True), ("/dev/shm", f"{box.path}/shm", True)]
    shown += [(box.work, f"{box.path}/task", True), *box.binds]
    return [
        f"--mount=type=bind,source={source},target={target}{'' if writable else ',readonly'}"
        for target, source, writable in shown
    ]


def _fixed_options(engine: Engine, owner: str, profile: Path) -> list[str]:
    options = [
        "--detach", "--pull=never", f"--label=asyncrl={owner}", "--network=none", "--read-only", "--cap-drop=all",
        "--security-opt=no-new-privileges", f"--security-opt=seccomp={profile}", f"--user={_USER}:{_USER}",
        "--hostname=sandbox", "--stop-signal=SIGKILL", "--env=HOME=/tmp", "--env=LANG=C.UTF-8",
    ]  # fmt: skip
    if engine.is_podman:
        options.append("--read-only-tmpfs=false")  # else /run and /var/tmp may be filled without a limit
    return options


@asynccontextmanager
async def open_container(settings: SandboxSettings, *, directory: Path) -> AsyncIterator[ContainerBackend]:
    """Find engine and image, and yield their sandboxes; leaving removes everything.

    Raises: ConfigError where the engine, the image or the rights are missing; SandboxError where no container starts.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            "the backend 'container' needs root, to give every sandbox a disk of limited size; without root take "
            "backend 'bubblewrap', or 'remote' with containers served from where you are root ([sandbox] backend)"
        )
    engine = await find_engine(settings.engine, settings.runtime)
    image = await find_image(engine, settings.image)
    folder = directory / leases.DIRECTORY
    folder.mkdir(parents=True, exist_ok=True)
    await trio.to_thread.run_sync(leases.reap, str(folder))
    ledger = leases.Ledger.open(str(folder), os.getpid())
    root = directory / "containers"
    ledger.write("containers", {"host_mounts": [str(root)], "engine": engine.program})
    janitor = await trio.lowlevel.open_process(
        standard_library_command("janitor", f"{folder}/{ledger.owner}"),
        env={"PATH": os.environ.get("PATH", os.defpath)}, cwd="/", stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        root.mkdir(exist_ok=True)
        kernel.mount("asyncrl", str(root), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={_STAGE_BYTES},mode=711")
        for name in ("box", "layer"):
            (root / name).mkdir()
        profile = root / "seccomp.json"
        profile.write_text(json.dumps(container_profile()))
        boxes = Boxes(str(root), None, ledger, choose_user=lambda number: _USER)
        options = _fixed_options(engine, ledger.owner, profile)
        backend = ContainerBackend(engine, boxes, options, image, settings, ledger.owner)
        with without_group():
            async with trio.open_nursery() as nursery:  # watches over lifetimes
                backend.nursery = nursery
                await _require_working(backend, settings.limits)
                yield backend
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await _remove(engine, ledger, root, janitor)


async def _require_working(backend: ContainerBackend, limits: SandboxLimits) -> None:
    """Run nothing in a sandbox once, so that an engine that cannot is told of now and not by every episode."""
    async with await backend.open({}, limits=limits) as sandbox:
        result = await sandbox.exec(["true"])
    if result.outcome is not Outcome.OK or result.exit_code != 0:
        said = result.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(
            f"nothing runs in a container of this engine: {result.outcome} {result.detail} {said}; `asyncrl sandbox "
            "self-test` may be tried with another engine or runtime ([sandbox] engine, runtime)"
        )


async def _remove(engine: Engine, ledger: leases.Ledger, root: Path, janitor: trio.Process) -> None:
    """Remove what is left of all sandboxes, and end the janitor."""
    left = await engine.call("ps", "--all", "--quiet", f"--filter=label=asyncrl={ledger.owner}")
    if left:
        await engine.call("rm", "--force", "--volumes", *left.split())
    await trio.to_thread.run_sync(leases.unmount_below, str(root))
    ledger.clear()
    assert janitor.stdin is not None
    await janitor.stdin.aclose()
    await janitor.wait()
