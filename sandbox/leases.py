"""The ledger: one small file for every group and sandbox, written before it is made. Standard library only.

A file's name carries the owner (process id and start time), so a reader can tell a dead owner's files from those of a
program that still runs, also after the process id has been given to another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.sandbox import cgroups, kernel

_REMOVE_TRIES = 200
_REMOVE_PAUSE_S = 0.01  # a killed process holds its group for some ms; two seconds in all
_ENGINE_S = 120.0  # for many containers at once
DIRECTORY = "leases"
"""Name of the folder that a ledger is."""

_NAME = re.compile(r"(?P<pid>\d+)-(?P<start>\d+)\.(?P<name>[A-Za-z0-9_-]+)\.json")


class Ledger:
    """The files of one owner in an open directory, which stays reachable whatever is mounted over its path."""

    def __init__(self, directory: int, owner: str) -> None:
        self._directory = directory
        self.owner = owner
        self._where = {"boot": _boot(), "pid_namespace": _pid_namespace()}

    @classmethod
    def open(cls, path: str, owner_pid: int) -> Ledger:
        """Return the ledger of the running process `owner_pid`. Raises OSError."""
        return cls.of_owner(path, owner_name(owner_pid))

    @classmethod
    def of_owner(cls, path: str, owner: str) -> Ledger:
        """Return the ledger of the process that `owner_name` named so, which may be gone. Raises OSError."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), owner)

    def _file(self, name: str) -> str:
        return f"{self.owner}.{name}.json"

    def write(self, name: str, lease: Mapping[str, Any]) -> None:
        """Record `lease`. A crash of the machine may lose it, but takes what it names along."""
        temporary = f"{self.owner}.{name}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=self._directory)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({**lease, **self._where}, file)
        os.rename(temporary, self._file(name), src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def files(self) -> list[str]:
        """Return the names of this owner's files."""
        return [
            file for file in os.listdir(self._directory) if file.startswith(f"{self.owner}.") and file.endswith(".json")
        ]

    def clear(self) -> None:
        """Strike everything off that is this owner's."""
        for file in self.files():
            os.unlink(file, dir_fd=self._directory)

    def remove(self, name: str) -> None:
        """Strike `name` off. A missing one counts as removed."""
        try:
            os.unlink(self._file(name), dir_fd=self._directory)
        except FileNotFoundError:
            return


def owner_name(pid: int) -> str:
    """Return what names a running process for good: its id and its start."""
    return f"{pid}-{kernel.start_time(pid)}"


def open_owner(owner: str) -> int | None:
    """Return a descriptor that becomes readable when the process that `owner_name` named so ends; None if it has."""
    pid = int(owner.partition("-")[0])
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if owner_name(pid) == owner:
        return descriptor
    os.close(descriptor)
    return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def reap_below(directory: str | os.PathLike[str]) -> list[str]:
    """Reap every ledger below a directory, such as that of a run, and return the leases that were settled.

    Raises: OSError.
    """
    settled: list[str] = []
    for path, names, _ in os.walk(directory):
        if DIRECTORY in names:
            names.remove(DIRECTORY)
            settled += (os.path.join(path, DIRECTORY, name) for name in reap(os.path.join(path, DIRECTORY)))
    return settled


def reap(directory: str) -> list[str]:
    """Remove what dead owners left and return the names of the leases that were settled.

    A launcher's mounts need no hand: they lie in its own namespace and ended with it. Those of containers do. Leases of
    a living owner, and those written in another container, are left alone. Raises OSError.
    """
    settled: list[str] = []
    by_owner: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in sorted(os.listdir(directory)):
        match = _NAME.fullmatch(file)
        if match is None or kernel.start_time(int(match["pid"])) == int(match["start"]):
            continue
        path = os.path.join(directory, file)
        if not stat.S_ISREG(os.lstat(path).st_mode):
            continue
        try:
            with open(path, encoding="utf-8") as stream:
                lease = json.load(stream)
        except ValueError:
            lease = {}  # half a file: its owner died while writing, before making anything
        by_owner.setdefault(f"{match['pid']}-{match['start']}", []).append((path, lease))
    for owner, owned in by_owner.items():
        here = all(lease.get("pid_namespace", _pid_namespace()) == _pid_namespace() for _, lease in owned)
        if not here:
            continue
        current = [lease for _, lease in owned if lease.get("boot") == _boot()]
        if not (_containers_removed([lease for _, lease in owned]) and _groups_removed(owner, current)):
            continue
        _unmount(current)
        for path, _ in owned:
            os.unlink(path)
            settled.append(os.path.basename(path))
    return settled


def _groups_removed(owner: str, current: list[dict[str, Any]]) -> bool:
    """Kill and remove the groups of a dead owner; False while something still runs in one."""
    gone = True
    for lease in current:
        for parent in lease.get("groups", ()):
            if os.path.basename(parent) != cgroups.PREFIX + owner or not os.path.isdir(parent):
                continue
            for entry in os.scandir(parent):
                if entry.is_dir(follow_symlinks=False):
                    single = cgroups.Group(version=2, memory=entry.path, pids=entry.path, unified=_killable(entry.path))
                    single.kill()
                    gone &= _emptied(single)
            gone &= cgroups.remove_directories([parent])
    return gone


def _emptied(group: cgroups.Group) -> bool:
    """Remove a group that was killed, waiting for its last process to be gone; False where one is not."""
    for _ in range(_REMOVE_TRIES):
        if group.remove():
            return True
        time.sleep(_REMOVE_PAUSE_S)  # version 1 tells nobody when a group becomes empty
    return False


def _killable(path: str) -> str | None:
    return path if os.path.exists(os.path.join(path, "cgroup.kill")) else None


def _containers_removed(owned: list[dict[str, Any]]) -> bool:
    """Remove the containers of a dead owner, all of an engine at once; False where the engine did not do so."""
    by_engine: dict[str, list[str]] = {}
    for lease in owned:
        for name in lease.get("containers", ()):
            by_engine.setdefault(lease["engine"], []).append(name)
    done = True
    for engine, names in by_engine.items():
        try:
            subprocess.run(
                [engine, "rm", "--force", "--volumes", *names], capture_output=True, timeout=_ENGINE_S, check=False
            )
            listed = subprocess.run(
                [engine, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, timeout=_ENGINE_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return False
        done &= not set(names) & set(listed.stdout.decode().split())
    return done


def _unmount(current: list[dict[str, Any]]) -> None:
    for lease in current:
        for path in lease.get("host_mounts", ()):
            unmount_below(path)


def unmount_below(path: str) -> None:
    """Remove the mounts at and below `path`, those within others first, and the directory. Raises OSError."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounted = [line.split()[4] for line in file]
    for below in reversed([one for one in mounted if one == path or one.startswith(path + "/")]):
        kernel.unmount(below)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)
