"""The process that starts the sandboxes and outlives nothing. Standard library only, one thread.

It exists because `bwrap --die-with-parent` follows the *thread* that started it: one started from a worker thread of
trio dies when that thread has been idle for ten seconds. The end of its socket means that the owner is gone, however
that came: then it kills every sandbox, removes their groups and leases, and ends. Its mounts are in a namespace of its
own and end with it.

bubblewrap.py starts it with an empty environment and sends it requests as `messages` frames them.
"""

from __future__ import annotations

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
from asyncrl.sandbox.boxes import Boxes, RequestError
from asyncrl.sandbox.commands import Box
from asyncrl.sandbox.running import Runner
from asyncrl.sandbox.spawn import user

_READ_BYTES = 65536
_DYING_S = 0.01  # between tries to remove a group whose last process is going


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
        self._waiting: list[tuple[int, dict[str, Any], list[bytes]]] = []
        self._runner = Runner(self._selector, self._reply, self._start_waiting)
        self._boxes: Boxes | None = None

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
        self._runner.end_late()
        if self._boxes is not None:
            self._boxes.remove_dying()
            self._close_expired(self._boxes)

    def _next_deadline(self) -> float | None:
        times = [self._runner.next_deadline()]
        if self._boxes is not None:
            times += [box.deadline for box in self._boxes]
            if self._boxes.is_dying():
                times.append(time.monotonic() + _DYING_S)
        soonest = min(times)
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _close_expired(self, boxes: Boxes) -> None:
        now = time.monotonic()
        for box in boxes:
            if now >= box.deadline:
                box.deadline = float("inf")
                boxes.expire(box)
                self._forget_waiting(box.name, "its lifetime is over")
                boxes.take(box.name)
                self._runner.kill(box, partial(boxes.discard, box))

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
            "configure": self._configure, "open": self._open, "exec": self._exec, "shell": self._exec,
            "kill": self._kill, "read": self._read, "write": self._write, "list": self._list, "walk": self._walk,
            "prepare": self._prepare, "snapshot": self._snapshot, "fork": self._fork, "release": self._release,
            "close": self._close,
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
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            # a request of another shape than the protocol's: its sender's mistake, and not the end of all sandboxes
            self._reply(request, {"error": "request", "message": f"{header['op']}: {type(error).__name__}: {error}"})

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
        self._runner.seccomp = blobs[0]
        self._runner.max_starting = header["max_starting"]
        ledger = leases.Ledger.open(header["ledger"], header["owner_pid"])
        wall = "bubblewrap"
        hierarchy = None
        try:
            with open("/proc/self/mountinfo", encoding="utf-8") as mountinfo, open("/proc/self/cgroup") as membership:
                own = cgroups.own_groups(mountinfo.read(), membership.read())
            found = cgroups.Hierarchy(own, ledger.owner, header["owner_pid"])
            ledger.write("launcher", {"groups": found.directories(), "pid": os.getpid()})
            found.make()
            hierarchy = found
        except cgroups.CgroupsUnavailableError:
            if not header["allow_weaker"]:
                raise
            wall = "bubblewrap-rlimits"
        try:
            stage = profile.build_stage(header["bubblewrap"], header["python_prefix"], header["hidden"], user(0))
        except OSError as error:
            raise RequestError("namespaces", f"{error.strerror} {error.filename or ''}".rstrip()) from None
        self._runner.stage = stage
        self._boxes = Boxes(stage.root, hierarchy, ledger)
        self._reply(request, {"wall": wall, "pid": os.getpid()})

    @property
    def _sandboxes(self) -> Boxes:
        assert self._boxes is not None
        return self._boxes

    def _box(self, header: dict[str, Any]) -> Box:
        return self._sandboxes.get(header["box"])

    def _open(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        files = dict(zip(header["paths"], blobs, strict=True))
        self._sandboxes.open(
            header["box"], header["limits"], layer=header["layer"], work=header["work"], places=header["places"],
            files=files,
        )  # fmt: skip
        self._reply(request, {})

    def _prepare(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        files = dict(zip(header["paths"], blobs, strict=True))
        layer = self._sandboxes.prepare(header["layer"], files, set(header["executable"]))
        self._reply(request, {"num_bytes": layer.num_bytes, "num_files": layer.num_files})

    def _snapshot(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        num_bytes, num_files = self._sandboxes.snapshot(header["layer"], self._box(header)).totals()
        self._reply(request, {"num_bytes": num_bytes, "num_files": num_files})

    def _fork(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._sandboxes.fork(header["new"], self._box(header))
        self._reply(request, {})

    def _release(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._sandboxes.release(header["layer"])
        self._reply(request, {})

    def _exec(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        box = self._box(header)
        starts = header["op"] == "exec" or box.shell is None
        if starts and (self._waiting or not self._runner.may_start()):
            self._waiting.append((request, header, blobs))
            return
        if box.command is not None or (box.shell is not None and box.shell.request is not None):
            raise RequestError("busy", f"the sandbox {box.name} is running another command")
        if self._runner.after_end(box, partial(self._handle, {**header, "id": request}, blobs)):
            return
        if header["op"] == "exec":
            self._runner.start(request, box, header["argv"], blobs[0], header["caps"])
        else:
            self._runner.run_in_shell(request, box, header["text"], header["caps"])

    def _start_waiting(self) -> None:
        while self._waiting and self._runner.may_start():
            request, header, blobs = self._waiting.pop(0)
            waiting, self._waiting = self._waiting, []
            self._handle({**header, "id": request}, blobs)
            self._waiting = self._waiting + waiting

    def _forget_waiting(self, name: str, reason: str) -> None:
        """Answer the commands of a sandbox that wait for their turn: they will not run."""
        forgotten = [entry for entry in self._waiting if entry[1]["box"] == name]
        self._waiting = [entry for entry in self._waiting if entry[1]["box"] != name]
        for request, _, _ in forgotten:
            self._reply(request, {"error": "closed", "message": f"the sandbox {name} is closed: {reason}"})

    def _kill(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._forget_waiting(header["box"], "its processes were ended")
        self._runner.kill(self._box(header), partial(self._reply, request, {}))

    def _read(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        with self._sandboxes.writable(self._box(header), header["path"]) as (directory, path):
            data = safe_files.read_file(directory, path, header["max_bytes"])
        self._reply(request, {}, (data,))

    def _write(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        box = self._box(header)
        with self._sandboxes.writable(box, header["path"]) as (directory, path):
            safe_files.write_file(directory, path, blobs[0], box.uid, executable=header["executable"])
        self._reply(request, {})

    def _list(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        with self._sandboxes.writable(self._box(header), header["path"]) as (directory, path):
            names = safe_files.list_directory(directory, path)
        self._reply(request, {"names": names})

    def _walk(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        with self._sandboxes.writable(self._box(header), header["path"]) as (directory, path):
            entries = safe_files.walk(directory, path, header["max_entries"])
        self._reply(request, {"entries": entries})

    def _close(self, request: int, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._forget_waiting(header["box"], "its owner has closed it")
        boxes = self._sandboxes
        boxes.forget(header["box"])
        box = boxes.take(header["box"])
        if box is None:
            self._reply(request, {})
            return

        def discard() -> None:
            boxes.discard(box)
            self._reply(request, {})

        self._runner.kill(box, discard)

    # --- removal ----------------------------------------------------------------------------------------------

    def _remove_everything(self) -> None:
        self._waiting.clear()
        if self._boxes is None:
            return
        for box in self._boxes:
            self._runner.kill(box, lambda: None)
        while self._runner.is_busy():
            self._step()
        self._boxes.remove_all()


def main(descriptor: str) -> None:
    """Serve the socket `descriptor` until its other end is closed."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the owner ends this process by closing the socket
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.umask(0o022)  # what is made here is for the sandboxes' users to see, whatever the owner's files are
    kernel.adopt_orphans()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each running command takes seven
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    Launcher(channel).serve()
    sys.exit(0)
