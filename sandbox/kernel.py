"""System calls that Python 3.11 has no name for. Standard library only: the launcher loads this without any package.

Source: unshare(2), mount(2), umount(2), openat2(2), clone3(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_SYS_CLONE3 = 435  # the same numbers on every architecture
_SYS_OPENAT2 = 437
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_INTO_CGROUP = 0x200000000
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_ALL = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
_OPENAT2_TRIES = 64  # BENEATH answers EAGAIN when something is renamed meanwhile; an agent may do that in a loop


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC_LOCKED = ctypes.PyDLL(None, use_errno=True)
for _library in (_LIBC, _LIBC_LOCKED):
    _library.syscall.restype = ctypes.c_long


def _raise(path: str | None = None) -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


class _CloneArguments(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls", "set_tid",
            "set_tid_size", "cgroup",
        )
    )  # fmt: skip


def fork_into(group: int) -> int:
    """Fork with the child in the version 2 control group whose directory is open as `group`; returns as os.fork does.

    Moving a process there later, by `cgroup.procs`, waits for all processors to pass a quiet state: 10 ms, not 0.5.
    The child must do nothing but become another program, since Python has not been told of the fork.

    Source: clone3(2). Raises: OSError where the kernel, or a filter around this process, does not know the call.
    """
    arguments = _CloneArguments(flags=_CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=group)
    size = ctypes.c_size_t(ctypes.sizeof(arguments))
    # by the library that keeps the interpreter's lock: the child goes on as the only thread, and holds it
    pid = int(_LIBC_LOCKED.syscall(ctypes.c_long(_SYS_CLONE3), ctypes.byref(arguments), size))
    if pid < 0:
        _raise()
    return pid


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind, so that it can be waited for. Raises OSError."""
    if _LIBC.prctl(ctypes.c_int(_PR_SET_CHILD_SUBREAPER), ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3) != 0:
        _raise()


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    if _LIBC.unshare(ctypes.c_int(flags)) != 0:
        _raise()


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount `source` on `target`. Raises OSError naming the target."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    if _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]) != 0:
        _raise(target)


def unmount(target: str) -> None:
    """Detach the mount at `target`, even while something still uses it. Raises OSError."""
    if _LIBC.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)) != 0:
        _raise(target)


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Return a file descriptor for `path`, which cannot leave `directory` by any link or mount, not even in a race.

    Source: openat2(2); checks by islink() or realpath() before open() lose the race.
    Raises: OSError; ELOOP for a symbolic link on the way, EXDEV for a way out.
    """
    how = _OpenHow(flags=flags | os.O_CLOEXEC, mode=mode, resolve=_RESOLVE_ALL)
    for _ in range(_OPENAT2_TRIES):
        descriptor = _LIBC.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(directory),
            os.fsencode(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return int(descriptor)
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    _raise(path)
    raise AssertionError("unreachable")


def start_time(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None when there is none (or a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def mapped_users() -> list[tuple[int, int]]:
    """Return the ranges of user ids that exist in this process's user namespace: (first, how many)."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return [(int(first), int(count)) for first, _, count in rows]


def is_root_of_the_machine() -> bool:
    """Return whether this process is root, and not only within a user namespace, as in a rootless container."""
    return os.geteuid() == 0 and (0, 2**32 - 1) in mapped_users()
