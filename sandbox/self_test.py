"""Tries to break out of a backend's sandboxes, so that a wall with a hole is found before an agent finds it.

Each attempt runs in a sandbox of its own and is judged by what it reached, not by what it says: an attempt that did not
run at all raises.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from asyncrl.errors import SandboxError
from asyncrl.protocols import ExecResult, Outcome, SandboxBackend
from asyncrl.sandbox.self_test_deeds import DEEDS, LIMITS, AbuseResult, python_command

_INHERITED = ("PATH", "HOME", "LANG", "PWD", "SHLVL", "OLDPWD", "_", "HOSTNAME", "LC_ALL", "TERM")
"""Variables whose value inside may be the same as outside without having come from there."""

# Every attempt is given, as arguments: port, name of the abstract socket, process id to signal, what it may use up, and
# the path of a socket.
_HEAD = """
import errno, os, socket, sys, time
port, abstract, owner = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
memory, disk, pids, files = map(int, sys.argv[4:8])
path = sys.argv[8]
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


def _same_files(result: ExecResult) -> str:
    """Return the names that stand for the same file or directory inside as out here."""
    same = []
    for line in result.stdout.decode(errors="replace").splitlines():
        match line.split():
            case ["STAT", name, device, inode] if os.path.exists(name):
                status = os.stat(name)
                if (str(status.st_dev), str(status.st_ino)) == (device, inode):
                    same.append(name)
    return " ".join(same)


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
        name="socket file of the host",
        source="""
try:
    socket.socket(socket.AF_UNIX).connect(path)
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
        name="setuid program",
        source="""
import shutil, subprocess
for place in ("/task", "/tmp", "/dev/shm"):
    own = os.path.join(place, "own")
    shutil.copy(shutil.which("id"), own)
    os.chmod(own, 0o6755)
    if subprocess.run([own, "-u"], capture_output=True).stdout.strip() not in (b"", b"%d" % os.getuid()):
        reached("another user by " + own)
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
for name in ("/", "/root", "/home", "/var", "/etc", "/etc/shadow", "/etc/hostname", "/boot", "/opt", "/run", "/tmp"):
    if os.path.exists(name):
        status = os.stat(name)
        print("STAT", name, status.st_dev, status.st_ino)
for place in ("/usr", "/etc", "/"):
    try:
        open(os.path.join(place, "planted"), "w")
        reached("writing to " + place)
    except OSError:
        pass
""",
        evidence=_same_files,
    ),
)


def names(*, main_only: bool = False) -> tuple[str, ...]:
    """Return the names of all attempts, or of the main ones."""
    return tuple(attempt.name for attempt in (*ABUSES, *DEEDS) if attempt.main or not main_only)


async def self_test(backend: SandboxBackend, *, only: Collection[str] | None = None) -> tuple[AbuseResult, ...]:
    """Try every abuse (or those named) against `backend` and return what came of each.

    Raises: SandboxError when an attempt could not be made.
    """
    results = []
    abstract = f"asyncrl-self-test-{secrets.token_hex(8)}"
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="asyncrl-self-test-", dir="/tmp") as directory,
            trio.socket.socket(trio.socket.AF_UNIX) as unix,
            trio.socket.socket(trio.socket.AF_UNIX) as named,
        ):
            await unix.bind("\0" + abstract)
            unix.listen()
            path = os.path.join(directory, "socket")
            await named.bind(path)
            named.listen()
            os.chmod(directory, 0o755)
            os.chmod(path, 0o777)
            port = listeners[0].socket.getsockname()[1]
            for abuse in ABUSES:
                if only is None or abuse.name in only:
                    results.append(await _attempt(backend, abuse, (str(port), abstract, str(os.getpid())), path))
    finally:
        for listener in listeners:
            await listener.aclose()
    for attempt in DEEDS:
        if only is None or attempt.name in only:
            results.append(await attempt.run(backend))
    return tuple(results)


async def _attempt(backend: SandboxBackend, abuse: Abuse, arguments: tuple[str, ...], path: str) -> AbuseResult:
    budget = (LIMITS.memory_bytes, LIMITS.disk_bytes, LIMITS.max_pids, LIMITS.max_files)
    argv = python_command(backend, _HEAD + abuse.source, (*arguments, *map(str, budget), path))
    async with await backend.open({}, limits=LIMITS) as sandbox:
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
