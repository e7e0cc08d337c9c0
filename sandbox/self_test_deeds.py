"""Attempts to break out that take more than one command, or the owner's own hands: what is left behind, and traps.

Each is tried by `self_test`, and raises where it could not be made.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from asyncrl.errors import SandboxError
from asyncrl.protocols import ExecResult, Outcome, Sandbox, SandboxBackend, SandboxLimits

LIMITS = SandboxLimits(wall_s=20.0, cpu_s=10.0, memory_bytes=96 * 2**20, disk_bytes=16 * 2**20, max_pids=32)
_READS = 300  # of a path that is swapped all the time; a reader that checks first was led astray in one of four


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseResult:
    """What came of one attempt."""

    name: str
    stopped: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One attempt."""

    name: str
    run: Callable[[SandboxBackend], Awaitable[AbuseResult]]
    main: bool = False
    """Tried before every training, not only by the full self-test."""


def python_command(backend: SandboxBackend, source: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the argument list that runs a Python program inside."""
    return [*backend.python, "-I", "-S", "-B", "-c", source, *arguments]


def _require_done(result: ExecResult, name: str) -> None:
    if result.outcome is not Outcome.OK or result.exit_code != 0:
        said = result.stderr.decode(errors="replace").strip()
        raise SandboxError(f"the attempt {name!r} could not be made: {result.outcome} {result.detail} {said[-300:]}")


_A_WHILE = "import time; time.sleep(0.1)"  # time to count to twenty: nothing tells that a process does not count

_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        count = 0
        while True:
            count += 1
            with open("/task/count.new", "w") as file:
                file.write(str(count))
            os.rename("/task/count.new", "/task/count")
            time.sleep(0.005)
    os._exit(0)
while not os.path.exists("/task/count"):
    time.sleep(0.005)
os._exit(0)
"""


async def _daemon(backend: SandboxBackend) -> AbuseResult:
    """A process that has left its session and its parent, counting in a file after its command has ended."""
    async with await backend.open({}, limits=LIMITS) as sandbox:
        _require_done(await sandbox.exec(python_command(backend, _DAEMON)), "daemon")
        first = await sandbox.read("count")
        await sandbox.exec(python_command(backend, _A_WHILE))
        second = await sandbox.read("count")
    return AbuseResult(name="daemon", stopped=first == second, detail=f"counted from {first!r} to {second!r}")


async def _background_writer(backend: SandboxBackend) -> AbuseResult:
    """The same, left behind by the shell, where such a process may live: until the agent's processes are ended."""
    async with await backend.open({}, limits=LIMITS) as sandbox:
        started = await sandbox.shell(shlex.join(python_command(backend, _DAEMON)))
        _require_done(started, "background writer")
        await sandbox.kill()
        await sandbox.write("count", b"verdict")
        await sandbox.exec(python_command(backend, _A_WHILE))
        found = await sandbox.read("count")
    return AbuseResult(name="background writer", stopped=found == b"verdict", detail=f"the verdict became {found!r}")


_TRAPS = """
import os
os.symlink("/etc/passwd", "link")
os.symlink("/", "directory")
os.symlink("/proc/self/environ", "magic")
os.mkfifo("pipe")
open("plain", "w").close()
os.link("plain", "hard")
with open("large", "wb") as file:
    file.truncate(8 * 2**20)
"""


async def _traps_in_files(backend: SandboxBackend) -> AbuseResult:
    """Names that lead a careless reader out of the sandbox, or hang it."""
    passed = []
    outside = "../../../etc/passwd", "/etc/passwd"
    async with await backend.open({}, limits=LIMITS) as sandbox:
        _require_done(await sandbox.exec(python_command(backend, _TRAPS)), "traps in files")
        for path in ("link", "directory/etc/passwd", "magic", "pipe", "hard", "large", *outside):
            if await _can_be_read(sandbox, path):
                passed.append(path)
    return AbuseResult(name="traps in files", stopped=not passed, detail=f"read through: {passed}")


async def _can_be_read(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.read(path)
    except (SandboxError, OSError):
        return False
    return True


_SWAPS = """
import os
os.mkdir("a")
open("a/passwd", "w").write("inside")
os.symlink("/etc", "link")
if os.fork() == 0:
    os.setsid()
    open("/task/swapping", "w").close()
    while True:
        os.rename("a", "b"); os.rename("link", "a")
        os.rename("a", "link"); os.rename("b", "a")
while not os.path.exists("/task/swapping"):
    pass
os._exit(0)
"""


async def _link_in_a_race(backend: SandboxBackend) -> AbuseResult:
    """A directory that is a link at every other moment."""
    led_astray = inside = 0
    async with await backend.open({}, limits=LIMITS) as sandbox:
        started = await sandbox.shell(shlex.join(python_command(backend, _SWAPS)))
        _require_done(started, "link swapped in a race")
        for _ in range(_READS):
            try:
                content = await sandbox.read("a/passwd")
            except (SandboxError, OSError):
                continue
            inside += content == b"inside"
            led_astray += content != b"inside"
    detail = f"{led_astray} of {_READS} reads were led outside, {inside} read the file"
    return AbuseResult(name="link swapped in a race", stopped=led_astray == 0, detail=detail)


DEEDS = (
    Deed(name="daemon", run=_daemon, main=True),
    Deed(name="background writer", run=_background_writer),
    Deed(name="traps in files", run=_traps_in_files),
    Deed(name="link swapped in a race", run=_link_in_a_race),
)
