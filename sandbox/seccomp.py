"""The system calls that no sandboxed program may make, as a BPF program for `bwrap --seccomp`."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import ConfigError

_DENIED = (
    # second ways into the kernel that other filters do not see
    "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf", "perf_event_open",
    # keys and other processes
    "add_key", "request_key", "keyctl", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "process_madvise",
    "pidfd_getfd", "move_pages", "migrate_pages",
    # file systems and namespaces
    "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "setns", "unshare", "open_by_handle_at", "name_to_handle_at", "quotactl", "quotactl_fd",
    "fanotify_init",
    # the machine
    "personality", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon",
    "swapoff", "acct", "syslog", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "iopl", "ioperm",
    "lookup_dcookie", "vhangup", "nfsservctl", "modify_ldt",
)  # fmt: skip
_NEW_NAMESPACES = 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_ALLOWED_FAMILIES = 1, 2, 10, 16  # UNIX, INET, INET6, NETLINK; a network namespace does not stop AF_VSOCK
_LAST_FAMILY = 64
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C


def seccomp_program() -> bytes:
    """Return the filter: everything is allowed but what no task needs.

    Loads libseccomp, which starts a process to find it: call it once, in a thread.
    Raises: ConfigError where libseccomp is missing.
    """
    try:
        import pyseccomp as libseccomp
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the sandbox needs libseccomp ({error}): install the system's package libseccomp2 (libseccomp on Fedora)"
        ) from None
    masked, equal, greater = libseccomp.MASKED_EQ, libseccomp.EQ, libseccomp.GT
    denied = libseccomp.ERRNO(errno.EPERM)
    program = libseccomp.SyscallFilter(libseccomp.ALLOW)
    for name in _DENIED:
        try:
            program.add_rule(denied, name)
        except OSError:  # this libseccomp is older than the call, or this architecture lacks it
            continue
    for flag in _NEW_NAMESPACES:
        program.add_rule(denied, "clone", libseccomp.Arg(0, masked, flag, flag))
    program.add_rule(libseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory; libc falls back to clone
    for request in (_TIOCSTI, _TIOCLINUX):
        program.add_rule(denied, "ioctl", libseccomp.Arg(1, masked, 0xFFFFFFFF, request))
    refused = libseccomp.ERRNO(errno.EAFNOSUPPORT)
    for call in ("socket", "socketpair"):
        for family in range(_LAST_FAMILY + 1):
            if family not in _ALLOWED_FAMILIES:
                program.add_rule(refused, call, libseccomp.Arg(0, equal, family))
        program.add_rule(refused, call, libseccomp.Arg(0, greater, _LAST_FAMILY))
    descriptor = os.memfd_create("seccomp")
    with os.fdopen(descriptor, "r+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()


def container_profile() -> dict[str, Any]:
    """Return the same filter in the form that container engines read."""

    def rule(names: Sequence[str], code: int, *arguments: dict[str, Any]) -> dict[str, Any]:
        return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": list(arguments)}

    def masked(index: int, mask: int, value: int) -> dict[str, Any]:
        return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}

    rules = [rule(_DENIED, errno.EPERM), rule(["clone3"], errno.ENOSYS)]
    rules += [rule(["clone"], errno.EPERM, masked(0, flag, flag)) for flag in _NEW_NAMESPACES]
    rules += [rule(["ioctl"], errno.EPERM, masked(1, 0xFFFFFFFF, request)) for request in (_TIOCSTI, _TIOCLINUX)]
    families = [family for family in range(_LAST_FAMILY + 1) if family not in _ALLOWED_FAMILIES]
    refused = [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"} for family in families]
    refused.append({"index": 0, "value": _LAST_FAMILY, "op": "SCMP_CMP_GT"})
    rules += [rule([call], errno.EAFNOSUPPORT, one) for call in ("socket", "socketpair") for one in refused]
    return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}
