"""The forked child that becomes bubblewrap. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.sandbox import kernel, profile
from asyncrl.sandbox.commands import NOT_EXECUTABLE, Box, let_in

_FAILED = 125
REPORT = 9
"""Descriptor on which a shell reports; one digit, since not every shell can redirect others."""
_LOWEST = 10  # inherited descriptors are above those that a command begins with
_OPEN_FILES = 256
_UID_BASE = 1_900_000_000  # unused by any distribution or container tool; each sandbox gets a user of its own
_NUM_UIDS = 60_000
_FEW_UIDS = 1000  # fewer are a single user's, or a handful set aside for something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A process that was just started, and our ends of its pipes."""

    pid: int
    stdin: int | None
    """None where it has no input, and sees its end at once."""
    stdout: int
    stderr: int
    status: int
    """Where bubblewrap reports on the command."""
    report: int
    """Where a shell reports on its commands; -1 for other programs."""


def user(number: int) -> int | None:
    """Return an unprivileged user for sandbox `number`; None where this process has no privilege to drop.

    In a rootless container only some users exist: then it is one of the upper half of those.
    """
    if os.geteuid() != 0:
        return None
    ranges = kernel.mapped_users()
    if any(first <= _UID_BASE and first + count >= _UID_BASE + _NUM_UIDS for first, count in ranges):
        return _UID_BASE + number % _NUM_UIDS
    first, count = max(ranges, key=lambda one: one[1])
    return None if count < _FEW_UIDS else first + count // 2 + number % (count // 2)


def spawn(
    stage: profile.Stage, box: Box, argv: Sequence[str], *, has_input: bool, seccomp: bytes, reports: bool = False
) -> Spawned:
    """Start a command in a sandbox. Raises OSError where no process can be had."""
    let_in(box)
    status, status_write = _pipe()
    filter_file = _sealed("seccomp", seccomp)  # bubblewrap uses one up at each start
    options = profile.arguments(stage, box.path, box.work, box.binds, filter_file, status_write)
    arguments = _sealed("arguments", options)
    stdout, stdout_write = os.pipe2(os.O_CLOEXEC)
    stderr, stderr_write = os.pipe2(os.O_CLOEXEC)
    stdin_read, stdin = os.pipe2(os.O_CLOEXEC) if has_input else (os.open(os.devnull, os.O_RDONLY), None)
    report, report_write = _pipe() if reports else (-1, -1)
    placed = {0: stdin_read, 1: stdout_write, 2: stderr_write, **({REPORT: report_write} if reports else {})}
    inherited = filter_file, arguments, status_write
    command_line = [stage.bubblewrap, "--args", str(arguments), "--", *_limited(box, argv)]
    pid, in_group = _fork(box)
    if pid == 0:
        entrances = () if box.group is None else box.group.entrances(forked_into=in_group)
        _become(box, command_line, placed, inherited, entrances)
    for descriptor in (*placed.values(), *inherited):
        os.close(descriptor)
    return Spawned(pid=pid, stdin=stdin, stdout=stdout, stderr=stderr, status=status, report=report)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose writing end is a descriptor that no other will be placed on."""
    read, write = os.pipe2(os.O_CLOEXEC)
    return read, _raised(write)


def _raised(descriptor: int) -> int:
    raised = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
    os.close(descriptor)
    return raised


def _fork(box: Box) -> tuple[int, bool]:
    """Return as os.fork does, and whether the child was born in the sandbox's control group."""
    if box.group is not None and box.group.unified is not None and not box.was_killed:
        group = os.open(box.group.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return kernel.fork_into(group), True
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.E2BIG):
                raise
        finally:
            os.close(group)
    return os.fork(), False


def _sealed(name: str, content: bytes) -> int:
    """Return a new memory file, at its start."""
    descriptor = _raised(os.memfd_create(name))
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _limited(box: Box, argv: Sequence[str]) -> list[str]:
    """Return the command, under a limit on processes where no group counts them."""
    if box.group is not None:
        return list(argv)
    limit = f'ulimit -u {box.limits["max_pids"]} 2>/dev/null || ulimit -p {box.limits["max_pids"]}; exec "$@"'
    return ["/bin/sh", "-c", limit, "sh", *argv]


def _become(
    box: Box, argv: Sequence[str], placed: Mapping[int, int], inherited: Sequence[int], entrances: Sequence[str]
) -> None:
    """Turn this forked child into bubblewrap. Never returns."""
    try:
        for target, descriptor in placed.items():
            os.dup2(descriptor, target)
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for entrance in entrances:
            _write(entrance, "0")
        _write("/proc/self/oom_score_adj", "500")  # when the whole machine runs out, the sandboxes go first
        _limit_resources(box)
        if box.uid is not None:
            os.setgroups([])
            os.setresgid(box.uid, box.uid, box.uid)
            os.setresuid(box.uid, box.uid, box.uid)
        os.execve(argv[0], list(argv), {})
    except BaseException as error:  # noqa: BLE001 - nothing may leave a forked child but its exit
        os.write(2, f"{error}\n".encode(errors="replace"))
        if isinstance(error, OSError) and error.errno == errno.E2BIG:
            os._exit(NOT_EXECUTABLE)
    finally:
        os._exit(_FAILED)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _limit_resources(box: Box) -> None:
    limits = box.limits
    cpu_s = max(1, round(limits["cpu_s"]))
    wanted = [
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"], limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 65536, 65536),
    ]
    if box.group is None:
        wanted.append((resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]))
    for kind, soft, hard in wanted:
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))
