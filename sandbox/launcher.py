"""The process that starts the sandboxes and outlives nothing. Standard library only, one thread.

It exists because `bwrap --die-with-parent` follows the *thread* that started it: one started from a worker thread of
trio dies when that thread has been idle for ten seconds. The end of its socket means that the owner is gone, however
that came: then it kills every sandbox, removes their groups and leases, and ends. Its mounts are in a namespace of its
own and end with it.

bubblewrap.py starts it with an empty environment and sends it requests as `messages` frames them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.sandbox import cgroups, kernel, leases, messages, profile, safe_files
from asyncrl.sandbox.commands import Box, Command, Stream, exit_code, outcome, reported
from asyncrl.sandbox.spawn import spawn, user

_READ_BYTES = 65536
_REMOVE_TRIES = 200  # a group stays busy for some ms after its last process; at 10 ms each, two seconds
_KILL_GRACE_S = 10.0  # a process that is not gone by then hangs in the kernel; the sandbox is given up


class RequestError(Exception):
    """A request that cannot be carried out; `kind` tells the other side which error to raise."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Launcher:
    """All sandboxes of one owner."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._on_channel)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._running = True
        self._boxes: dict[str, Box] = {}
        self._commands: list[Command] = []
        self._waiting: list[tuple[int, dict[str, Any], bytes]] = []
        self._dying: list[tuple[cgroups.Group, str, int]] = []
        self._num_opened = 0
        self._stage: profile.Stage | None = None
        self._hierarchy: cgroups.Hierarchy | None = None
        self._ledger: leases.Ledger | None = None
        self._seccomp = b""
        self._max_starting = 1
        self._starting: set[int] = set()

    def serve(self) -> None:
        """Answer requests until the owner is gone, then remove everything."""
        try:
            while self._running:
                self._step()
        finally:
            self._remove_everything()

    def _step(self) -> None:
        """Wait for something to happen, and handle it."""
        for key, _ in self._selector.select(self._next_deadline()):
            watched = self._selector.get_map().get(key.fd)
            if watched is not None and watched.data is key.data:  # not forgotten by one before it
                key.data()
        self._end_late_commands()

    # --- the channel ------------------------------------------------------------------------------------------

    def _on_channel(self) -> None:
        if self._outgoing:
            self._send(b"")
        while True:
            try:
                data = self._channel.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self._running = False
                self._selector.unregister(self._channel)
                return
            self._incoming += data
        while (length := messages.frame_bytes(self._incoming)) is not None and len(self._incoming) >= length:
            header, blobs = messages.decode(self._incoming[:length])
            del self._incoming[:length]
            self._handle(header, blobs)

    def _handle(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        request = header["id"]
        operations: dict[str, Callable[..., None]] = {
            "configure": self._configure, "open": self._open, "exec": self._exec, "kill": self._kill,
            "read": self._read, "write": self._write, "list": self._list, "close": self._close,
        }  # fmt: skip
        try:
            operations[header["op"]](request, header, blobs)
        except RequestError as error:
            self._reply(request, {"error": error.kind, "message": str(error)})
        except safe_files.UnsafePathError as error:
            self._reply(request, {"error": "unsafe", "message": str(error)})
        except cgroups.CgroupsUnavailableError as error:
            self._reply(request, {"error": "cgroups", "message": str(error)})
        except OSError as error:
            message = f"{header['op']}: {error.strerror} {error.filename or ''}".rstrip()
            self._reply(request, {"error": "os", "message": message, "errno": error.errno or 0})

    def _reply(self, request: int, header: dict[str, Any], blobs: tuple[bytes, ...] = ()) -> None:
        self._send(messages.encode({"id": request, **header}, blobs))

    def _send(self, data: bytes) -> None:
        if not self._running:
            return
        self._outgoing += data
        try:
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outgoing.clear()  # the end of the channel is seen when it is read
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._channel, events, self._on_channel)

    # --- requests ---------------------------------------------------------------------------------------------

    def _configure(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._seccomp = blobs[0]
        self._max_starting = header["max_starting"]
        self._ledger = leases.Ledger.open(header["ledger"], header["owner_pid"])
        wall = "bubblewrap"
        try:
            with open("/proc/self/mountinfo", encoding="utf-8") as mountinfo, open("/proc/self/cgroup") as membership:
                own = cgroups.own_groups(mountinfo.read(), membership.read())
            hierarchy = cgroups.Hierarchy(own, self._ledger.owner, header["owner_pid"])
            self._ledger.write("launcher", {"groups": hierarchy.directories(), "pid": os.getpid()})
            hierarchy.make()
            self._hierarchy = hierarchy
        except cgroups.CgroupsUnavailableError:
            if not header["allow_weaker"]:
                raise
            wall = "bubblewrap-rlimits"
        uid = user(0)
        try:
            self._stage = profile.build_stage(header["bubblewrap"], header["python_prefix"], header["hidden"], uid)
        except OSError as error:
            raise RequestError("namespaces", f"{error.strerror} {error.filename or ''}".rstrip()) from None
        self._reply(request, {"wall": wall, "pid": os.getpid()})

    def _open(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        assert self._stage is not None
        assert self._ledger is not None
        name, limits = header["box"], header["limits"]
        self._num_opened += 1
        uid = user(self._num_opened)
        path = os.path.join(self._stage.root, "box", name)
        self._ledger.write(name, {"box": name, "pid": os.getpid()})
        group = None
        directory = -1
        try:
            if self._hierarchy is not None:
                # two more: bubblewrap outside and its first process inside
                max_pids = limits["max_pids"] + 2
                group = self._hierarchy.create(name, memory_bytes=limits["memory_bytes"], max_pids=max_pids)
            os.mkdir(path, 0o755)
            options = f"size={limits['disk_bytes']},nr_inodes={limits['max_files'] + 4},mode=755"
            kernel.mount("asyncrl", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
            for below, mode in (("task", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
                os.mkdir(os.path.join(path, below))
                os.chmod(os.path.join(path, below), mode)
                if uid is not None:
                    os.chown(os.path.join(path, below), uid, uid)
            directory = os.open(os.path.join(path, "task"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for file, content in zip(header["paths"], blobs, strict=True):
                safe_files.write_file(directory, file, content, uid)
        except BaseException:
            if directory >= 0:
                os.close(directory)
            self._remove_box(name, path, group)
            raise
        self._boxes[name] = Box(name=name, path=path, uid=uid, limits=limits, group=group, directory=directory)
        self._reply(request, {})

    def _box(self, header: dict[str, Any]) -> Box:
        try:
            return self._boxes[header["box"]]
        except KeyError:
            raise RequestError("closed", f"the sandbox {header['box']} is closed") from None

    def _exec(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        box = self._box(header)
        if len(self._starting) >= self._max_starting or self._waiting:
            self._waiting.append((request, header, blobs[0]))
            return
        if box.command is not None:
            raise RequestError("busy", f"the sandbox {box.name} is running another command")
        self._start(request, box, header["argv"], blobs[0], header["wall_s"])

    def _start_waiting(self) -> None:
        while self._waiting and len(self._starting) < self._max_starting:
            request, header, stdin = self._waiting.pop(0)
            waiting, self._waiting = self._waiting, []
            self._handle({**header, "id": request}, [stdin])
            self._waiting = self._waiting + waiting

    def _kill(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._forget_waiting(header["box"])
        box = self._boxes.get(header["box"])
        if box is not None and box.command is not None:
            box.command.when_ended.append(partial(self._reply, request, {}))
            self._end(box.command, "closed")
        else:
            self._reply(request, {})

    def _read(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        data = safe_files.read_file(self._box(header).directory, header["path"], header["max_bytes"])
        self._reply(request, {}, (data,))

    def _write(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        box = self._box(header)
        safe_files.write_file(box.directory, header["path"], blobs[0], box.uid)
        self._reply(request, {})

    def _list(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._reply(request, {"names": safe_files.list_directory(self._box(header).directory, header["path"])})

    def _close(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._forget_waiting(header["box"])
        box = self._boxes.pop(header["box"], None)
        if box is None:
            self._reply(request, {})
        elif box.command is None:
            self._discard(request, box)
        else:
            box.command.when_ended.append(partial(self._discard, request, box))
            self._end(box.command, "closed")

    def _discard(self, request: int, box: Box) -> None:
        os.close(box.directory)
        self._remove_box(box.name, box.path, box.group)
        self._reply(request, {})

    def _forget_waiting(self, name: str) -> None:
        """Drop a command that waits for its turn; its caller has gone away."""
        self._waiting = [entry for entry in self._waiting if entry[1]["box"] != name]

    # --- commands ---------------------------------------------------------------------------------------------

    def _start(self, request: int, box: Box, argv: list[str], stdin: bytes, wall_s: float) -> None:
        assert self._stage is not None
        before = box.group.counters() if box.group is not None else cgroups.Counters()
        spawned = spawn(self._stage, box, argv, has_input=bool(stdin), seccomp=self._seccomp)
        started = time.monotonic()
        outputs = Stream(box.limits["kept_output_bytes"]), Stream(box.limits["kept_output_bytes"])
        command = Command(
            request=request,
            box=box,
            pid=spawned.pid,
            pidfd=os.pidfd_open(spawned.pid),
            started=started,
            deadline=started + wall_s,
            before=before,
            streams={spawned.stdout: outputs[0], spawned.stderr: outputs[1]},
            outputs=outputs,
            status=spawned.status,
            stdin=spawned.stdin,
            pending=stdin,
        )
        box.command = command
        self._commands.append(command)
        self._starting.add(command.pid)
        for descriptor in command.streams:
            self._watch(descriptor, selectors.EVENT_READ, partial(self._on_output, command, descriptor))
        self._watch(command.status, selectors.EVENT_READ, partial(self._on_status, command))
        self._watch(command.pidfd, selectors.EVENT_READ, partial(self._on_exit, command))
        if command.stdin is not None:
            self._watch(command.stdin, selectors.EVENT_WRITE, partial(self._on_stdin, command))

    def _watch(self, descriptor: int, events: int, handler: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, events, handler)

    def _on_output(self, command: Command, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._forget(descriptor)
            del command.streams[descriptor]
            self._finish_if_ended(command)
            return
        command.streams[descriptor].add(data)
        if command.num_bytes > command.box.limits["output_bytes"]:
            self._end(command, "output")

    def _on_stdin(self, command: Command) -> None:
        assert command.stdin is not None
        try:
            command.pending = command.pending[os.write(command.stdin, command.pending[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            command.pending = b""
        if not command.pending:
            self._forget(command.stdin)
            command.stdin = None

    def _on_status(self, command: Command) -> None:
        """bubblewrap reports its child when that has begun, and the exit code when the set-up had worked."""
        data = os.read(command.status, _READ_BYTES)
        command.status_text += data
        if not data:
            self._forget(command.status)
            command.status = -1
            self._finish_if_ended(command)
        elif (
            command.init is None
            and not command.init_gone
            and (pid := reported(command.status_text, "child-pid")) is not None
        ):
            self._watch_init(command, pid)
        self._starting.discard(command.pid)
        self._start_waiting()

    def _watch_init(self, command: Command, pid: int) -> None:
        try:
            command.init = os.pidfd_open(pid)
        except ProcessLookupError:
            command.init_gone = True
        else:
            self._watch(command.init, selectors.EVENT_READ, partial(self._on_init_exit, command))

    def _on_init_exit(self, command: Command) -> None:
        assert command.init is not None
        self._selector.unregister(command.init)
        command.init_gone = True
        self._finish_if_ended(command)

    def _reap_init(self, command: Command) -> None:
        """Wait for the first process inside, which bubblewrap leaves to its own parent when it is faster than that."""
        if command.init is None:
            return
        if not command.init_gone:
            self._selector.unregister(command.init)
        with contextlib.suppress(ChildProcessError):  # bubblewrap has waited
            os.waitid(os.P_PIDFD, command.init, os.WEXITED | os.WNOHANG)
        os.close(command.init)

    def _on_exit(self, command: Command) -> None:
        self._reap(command)
        self._finish_if_ended(command)

    def _reap(self, command: Command) -> None:
        if command.exit_status is None:
            _, command.exit_status = os.waitpid(command.pid, 0)
            self._forget(command.pidfd)
            self._starting.discard(command.pid)

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _end(self, command: Command, reason: str) -> None:
        if command.ended_by is None:
            command.ended_by = reason
            command.deadline = time.monotonic() + _KILL_GRACE_S
        if command.box.group is not None:
            command.box.group.kill()
            command.box.was_killed = True
        if command.exit_status is None:
            signal.pidfd_send_signal(command.pidfd, signal.SIGKILL)

    def _next_deadline(self) -> float | None:
        times = [command.deadline for command in self._commands]
        if self._dying:
            times.append(time.monotonic() + 0.01)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_late_commands(self) -> None:
        now = time.monotonic()
        for command in list(self._commands):
            if now >= command.deadline:
                if command.ended_by is None:
                    self._end(command, "wall")
                else:
                    self._finish(command, stuck=True)
        self._remove_dying()

    def _finish_if_ended(self, command: Command) -> None:
        if (
            command.exit_status is not None
            and not command.streams
            and command.status < 0
            and (command.init is None or command.init_gone)
        ):
            self._finish(command)

    def _finish(self, command: Command, stuck: bool = False) -> None:
        """Answer the request, with the outcome told from counters."""
        if command not in self._commands:
            return
        self._commands.remove(command)
        box = command.box
        box.command = None
        for descriptor in (*command.streams, command.status, command.stdin):
            if descriptor is not None and descriptor >= 0:
                self._forget(descriptor)
        self._reap_init(command)
        counters = box.group.counters() if box.group is not None else cgroups.Counters()
        (stdout, cut), (stderr, cut_too) = command.outputs[0].result(), command.outputs[1].result()
        code = exit_code(command, stderr)
        ended, detail = outcome(command, counters, code, stderr)
        if stuck:
            ended, detail = "infrastructure", "a process could not be killed"
        reply = {
            "outcome": ended,
            "exit_code": None if command.ended_by is not None or ended == "infrastructure" else code,
            "truncated": cut or cut_too,
            "output_bytes": command.num_bytes,
            "seconds": time.monotonic() - command.started,
            "peak_memory_bytes": counters.peak_memory_bytes,
            "peak_pids": counters.peak_pids,
            "detail": detail,
        }
        self._reply(command.request, reply, (stdout, stderr))
        for action in command.when_ended:
            action()
        self._start_waiting()

    # --- removal ----------------------------------------------------------------------------------------------

    def _remove_box(self, name: str, path: str, group: cgroups.Group | None) -> None:
        try:
            kernel.unmount(path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
        if os.path.isdir(path):
            os.rmdir(path)
        if group is not None:
            group.kill()
            self._dying.append((group, name, 0))
            self._remove_dying()
        elif self._ledger is not None:
            self._ledger.remove(name)

    def _remove_dying(self) -> None:
        if self._ledger is None:  # not configured: there is nothing yet that could die
            return
        left = []
        for group, name, tries in self._dying:
            if group.remove():
                self._ledger.remove(name)
            elif tries < _REMOVE_TRIES:
                left.append((group, name, tries + 1))
        self._dying = left  # what stays busy too long keeps its lease, and the next start removes it

    def _remove_everything(self) -> None:
        self._waiting.clear()
        for command in self._commands:
            self._end(command, "closed")
        while self._commands:
            self._step()
        for box in self._boxes.values():
            self._remove_box(box.name, box.path, box.group)
        while self._dying:
            self._remove_dying()
            time.sleep(0.002)
        if self._ledger is not None and (self._hierarchy is None or self._hierarchy.remove()):
            self._ledger.remove("launcher")


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until its other end is closed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the owner ends this process by closing the socket
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    kernel.adopt_orphans()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each running command takes seven
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    Launcher(channel).serve()
    sys.exit(0)
