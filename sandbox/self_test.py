"""Tries to break out of a backend's sandboxes, so that a wall with a hole is found before an agent finds it.

Each attempt runs in a sandbox of its own and is judged by what it reached, not by what it says: an attempt that did not
run at all raises.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from asyncrl.errors import SandboxError
from asyncrl.protocols import ExecResult, Outcome, Sandbox, SandboxBackend, SandboxLimits

_LIMITS = SandboxLimits(wall_s=20.0, cpu_s=10.0, memory_bytes=96 * 2**20, disk_bytes=16 * 2**20, max_pids=32)
_INHERITED = ("PATH", "HOME", "LANG", "PWD", "SHLVL", "OLDPWD", "_", "HOSTNAME", "LC_ALL", "TERM")
"""Variables whose value inside may be the same as outside without having come from there."""

# Every attempt is given, as arguments: port, name of the abstract socket, process id to signal, what it may use up.
_HEAD = """
import errno, os, socket, sys, time
port, abstract, owner = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
memory, disk, pids, files = map(int, sys.argv[4:8])
def reached(text):
    print("REACHED", text, flush=True)
def system_call(number, *arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in arguments])
print("TRIED", flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseResult:
    """What came of one attempt."""

    name: str
    stopped: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abuse:
    """One attempt: a Python program that prints REACHED when it got through."""

    name: str
    source: str
    main: bool = False
    """Tried before every training, not only by the full self-test."""
    outcomes: tuple[Outcome, ...] = (Outcome.OK,)
    """Others than these count as not stopped in the way that is promised."""
    evidence: Callable[[ExecResult], str] | None = None
    """Says what got through beside what the attempt itself reports; empty for nothing."""


def _leaked_variables(result: ExecResult) -> str:
    """Return the names of this process's variables whose values were seen inside."""
    outside = {key: f"{key}={value}".encode() for key, value in os.environ.items() if key not in _INHERITED and value}
    return " ".join(key for key, pair in outside.items() if pair in result.stdout)


def _signalled(result: ExecResult) -> str:
    """Say so where the owner was signalled; the same number in a namespace of its own is another process."""
    same = os.readlink("/proc/self/ns/pid").encode() in result.stdout
    return "the owner" if same and b"signalled" in result.stdout else ""


def _kept_writing(result: ExecResult) -> str:
    return f"{result.output_bytes} bytes" if result.output_bytes >= 32 * 2**20 else ""


ABUSES = (
    Abuse(
        name="fork bomb",
        main=True,
        outcomes=(Outcome.PIDS, Outcome.OK),
        source="""
count = 0
try:
    while count < 8 * pids:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        count += 1
    reached("processes without end")
except OSError:
    print("processes", count)
os._exit(0)
""",
    ),
    Abuse(
        name="memory bomb",
        main=True,
        outcomes=(Outcome.MEMORY, Outcome.OK),
        source="""
try:
    hoard = []
    for _ in range(4 * memory // 2**20):
        hoard.append(b"x" * 2**20)
    reached("four times the memory")
except MemoryError:
    pass
""",
    ),
    Abuse(
        name="memory bomb of many processes",
        outcomes=(Outcome.MEMORY,),
        source="""
import signal
signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(0))  # one was killed
read, write = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        hoard = b"x" * (memory * 6 // 10)
        os.write(write, b"x")
        time.sleep(10)
        os._exit(0)
held = 0
os.close(write)
while os.read(read, 1):
    held += 1
    if held == 4:
        reached("more memory in all than one sandbox has")
        os._exit(0)
""",
    ),
    Abuse(
        name="disk fill",
        outcomes=(Outcome.DISK, Outcome.MEMORY, Outcome.OK),
        source="""
for place in ("/task", "/tmp", "/dev/shm", "/", "/dev", "/usr", "/etc", "/proc", "/run", "/var/tmp"):
    written = 0
    try:
        while written < 2 * disk:  # in many files: a limit on the size of one is none on the disk
            with open(os.path.join(place, f"fill{written}"), "wb") as file:
                written += file.write(b"x" * 2**20)
        reached(place)
    except OSError as error:
        print(place, written, error.strerror)
""",
    ),
    Abuse(
        name="many files",
        outcomes=(Outcome.DISK, Outcome.OK),
        source="""
try:
    for number in range(2 * files):
        open(f"/task/{number}", "w").close()
    reached("files without end")
except OSError as error:
    print(number, error.strerror)
""",
    ),
    Abuse(
        name="sparse file",
        source="""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    os.truncate(os.open("/task/sparse", os.O_CREAT | os.O_RDWR), 2**40)
    reached("a file of 1 TiB")
except OSError as error:
    print(error.strerror)
""",
    ),
    Abuse(
        name="endless output",
        outcomes=(Outcome.OUTPUT,),
        source="""
for _ in range(64):
    sys.stdout.write("x" * 2**20)
reached("64 MiB of output")
""",
        evidence=_kept_writing,
    ),
    Abuse(
        name="secrets of the owner",
        main=True,
        source="""
for pid in ["self"] + [name for name in os.listdir("/proc") if name.isdigit()]:
    try:
        print(pid, open(f"/proc/{pid}/environ", "rb").read(), open(f"/proc/{pid}/cmdline", "rb").read())
    except OSError:
        pass
""",
        evidence=_leaked_variables,
    ),
    Abuse(
        name="connection to the host's loopback",
        main=True,
        source="""
try:
    socket.create_connection(("127.0.0.1", port), 2)
    reached("the host's port")
except OSError as error:
    print(error)
""",
    ),
    Abuse(
        name="metadata service and private network",
        source="""
for address in ("169.254.169.254", "10.0.0.1", "8.8.8.8"):
    try:
        socket.create_connection((address, 80), 1)
        reached(address)
    except OSError as error:
        print(error)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
    reached("a datagram out")
except OSError as error:
    print(error)
""",
    ),
    Abuse(
        name="abstract socket of the host",
        main=True,
        source="""
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + abstract)
    reached("the host's socket")
except OSError as error:
    print(error)
""",
    ),
    Abuse(
        name="vsock and other families",
        main=True,
        source="""
for family in (40, 38, 17, 21, 44, 2**32 + 40):
    if system_call({"x86_64": 41, "aarch64": 198}[os.uname().machine], family, 1, 0) >= 0:
        reached(f"a socket of family {family}")
""",
    ),
    Abuse(
        name="signal to the owner",
        source="""
try:
    os.kill(owner, 0)
    print("signalled", owner)
except OSError as error:
    print(error)
print(os.readlink("/proc/self/ns/pid"))
""",
        evidence=_signalled,
    ),
    Abuse(
        name="ptrace",
        source="""
child = os.fork()
if child == 0:
    time.sleep(5)
    os._exit(0)
number = {"x86_64": 101, "aarch64": 117}[os.uname().machine]
if system_call(number, 16, child, 0, 0) == 0:
    reached("a child's memory")
if system_call(number, 16, owner, 0, 0) == 0:
    reached("the owner's memory")
os.kill(child, 9)
""",
    ),
    Abuse(
        name="calls into rarely used parts of the kernel",
        main=True,
        source="""
import ctypes
room = ctypes.create_string_buffer(256)
at = ctypes.addressof(room)
x86 = os.uname().machine == "x86_64"
calls = {
    "io_uring_setup": (425, 8, at), "userfaultfd": (323 if x86 else 282, 1),
    "keyctl": (250 if x86 else 219, 0, -3, 1), "add_key": (248 if x86 else 217, at, at, at, 0, -3),
    "bpf": (321 if x86 else 280, 0, at, 64), "perf_event_open": (298 if x86 else 241, at, 0, -1, -1, 0),
    "unshare user": (272 if x86 else 97, 0x10000000), "unshare mount": (272 if x86 else 97, 0x20000),
    "clone3": (435, at, 0), "open_tree": (428, -100, at, 1), "fsopen": (430, at, 0),
}
for name, (number, *arguments) in calls.items():
    if system_call(number, *arguments) >= 0:
        reached(name)
    elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        reached(f"{name}: {os.strerror(ctypes.get_errno())}")
""",
    ),
    Abuse(
        name="devices",
        source="""
for name in ("/dev/kmsg", "/dev/kvm", "/dev/mem", "/dev/fuse", "/proc/sysrq-trigger", "/proc/kcore", "/dev/vda"):
    for mode in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.open(name, mode)
            reached(name)
        except OSError:
            pass
""",
    ),
    Abuse(
        name="more privileges",
        source="""
import stat
status = open("/proc/self/status").read()
for line in status.splitlines():
    if line.startswith(("CapEff", "CapPrm", "CapBnd", "CapAmb")) and int(line.split()[1], 16):
        reached(line)
if "NoNewPrivs:\\t1" not in status:
    reached("new privileges by setuid programs")
try:
    os.setuid(0)
    reached("user 0")
except OSError:
    pass
""",
    ),
    Abuse(
        name="files of the host",
        source="""
for name in ("/root", "/home", "/var", "/sys/class", "/etc/shadow", "/etc/hostname", "/boot", "/opt/secret", "/run"):
    if os.path.exists(name) and not sys.prefix.startswith(name):
        reached(name)
for place in ("/usr", "/etc", "/"):
    try:
        open(os.path.join(place, "planted"), "w")
        reached("writing to " + place)
    except OSError:
        pass
""",
    ),
)


async def self_test(backend: SandboxBackend, *, main_only: bool = False) -> tuple[AbuseResult, ...]:
    """Try every abuse (or the main ones) against `backend` and return what came of each.

    Raises: SandboxError when an attempt could not be made.
    """
    results = []
    abstract = f"asyncrl-self-test-{secrets.token_hex(8)}"
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    try:
        with trio.socket.socket(trio.socket.AF_UNIX) as unix:
            await unix.bind("\0" + abstract)
            unix.listen()
            port = listeners[0].socket.getsockname()[1]
            for abuse in ABUSES:
                if abuse.main or not main_only:
                    results.append(await _attempt(backend, abuse, (str(port), abstract, str(os.getpid()))))
    finally:
        for listener in listeners:
            await listener.aclose()
    results.append(await _daemon(backend))
    if not main_only:
        results.append(await _traps_in_files(backend))
    return tuple(results)


def _python(backend: SandboxBackend, source: str, arguments: Sequence[str] = ()) -> list[str]:
    return [*backend.python, "-I", "-S", "-B", "-c", source, *arguments]


async def _attempt(backend: SandboxBackend, abuse: Abuse, arguments: tuple[str, ...]) -> AbuseResult:
    budget = (_LIMITS.memory_bytes, _LIMITS.disk_bytes, _LIMITS.max_pids, _LIMITS.max_files)
    argv = _python(backend, _HEAD + abuse.source, (*arguments, *map(str, budget)))
    async with await backend.open({}, limits=_LIMITS) as sandbox:
        result = await sandbox.exec(argv)
    if b"TRIED" not in result.stdout:
        said = result.stderr.decode(errors="replace").strip()
        raise SandboxError(
            f"the attempt {abuse.name!r} could not be made: {result.outcome} {result.detail} {said[-300:]}"
        )
    got_through = [line for line in result.stdout.decode(errors="replace").splitlines() if line.startswith("REACHED")]
    if abuse.evidence is not None and (evidence := abuse.evidence(result)):
        got_through.append(evidence)
    if result.outcome not in abuse.outcomes or (result.exit_code not in (0, None) and result.outcome is Outcome.OK):
        got_through.append(result.stderr.decode(errors="replace").strip()[-200:])
    detail = "; ".join([result.outcome.value, *got_through])
    return AbuseResult(name=abuse.name, stopped=not got_through, detail=detail[:500])


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
    """A process that has left its session and its parent, counting in a file."""
    async with await backend.open({}, limits=_LIMITS) as sandbox:
        started = await sandbox.exec(_python(backend, _DAEMON))
        if started.outcome is not Outcome.OK or started.exit_code != 0:
            raise SandboxError(f"the attempt 'daemon' could not be made: {started.outcome} {started.detail}")
        first = await sandbox.read("count")
        await sandbox.exec(_python(backend, "import time; time.sleep(0.1)"))
        second = await sandbox.read("count")
    return AbuseResult(name="daemon", stopped=first == second, detail=f"counted from {first!r} to {second!r}")


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
    async with await backend.open({}, limits=_LIMITS) as sandbox:
        made = await sandbox.exec(_python(backend, _TRAPS))
        if made.exit_code != 0:
            raise SandboxError(f"the attempt 'traps in files' could not be made: {made.outcome} {made.stderr!r}")
        for path in (
            "link",
            "directory/etc/passwd",
            "magic",
            "pipe",
            "hard",
            "large",
            "../../../etc/passwd",
            "/etc/passwd",
        ):
            if await _can_be_read(sandbox, path):
                passed.append(path)
    return AbuseResult(name="traps in files", stopped=not passed, detail=f"read through: {passed}")


async def _can_be_read(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.read(path)
    except (SandboxError, OSError):
        return False
    return True
