"""Control groups of the sandboxes, on version 1, version 2 and the mix of both. Standard library only.

Groups are made only below the group that this process is in already, one parent for a launcher and in it one group
for a sandbox. Limits come from the controllers `memory` and `pids`; killing all at once from `cgroup.kill`, which on
a mixed machine lives in the version 2 tree although that has no controllers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTROLLERS = ("memory", "pids")
PREFIX = "asyncrl-"
"""Every group that is ever made or removed here has a parent whose name begins with this."""


class CgroupsUnavailableError(Exception):
    """No group can be limited here; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the kernel has counted in a group since it was made."""

    memory_kills: int = 0
    refused_forks: int = 0
    peak_memory_bytes: int | None = None
    peak_pids: int | None = None
    cpu_s: float = 0.0


def _read(*parts: str) -> str | None:
    try:
        with open(os.path.join(*parts), encoding="ascii") as file:
            return file.read()
    except OSError:
        return None


def _write(text: str, *parts: str) -> None:
    with open(os.path.join(*parts), "w", encoding="ascii") as file:
        file.write(text)


def _number(text: str | None, key: str | None = None) -> int | None:
    """Return the number in `text`, or the one after `key` on a line of its own."""
    for line in (text or "").splitlines():
        name, _, value = line.rpartition(" ")
        if name == (key or "") and value.isdigit():
            return int(value)
    return None


def own_groups(mountinfo: str, membership: str) -> Mapping[str, str]:
    """Return directory by controller name of the groups a process is in; version 2 is under the name "unified".

    Args are the texts of /proc/self/mountinfo and /proc/self/cgroup.
    """
    paths: dict[str, str] = {}
    for line in membership.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        for controller in ["unified"] if hierarchy == "0" else controllers.split(","):
            paths[controller] = path
    found: dict[str, str] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _source, options = right.split(" ", 2)
        root, mountpoint = left.split(" ")[3:5]
        names = ["unified"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            if name in paths and name not in found:
                below = os.path.relpath(paths[name], root)
                if below.startswith(".."):
                    continue  # the mount shows another part of the tree than the one this process is in
                found[name] = os.path.normpath(os.path.join(mountpoint, below))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The control group of one sandbox: one directory per tree that it lies in."""

    version: int
    memory: str
    pids: str
    unified: str | None
    """Where `cgroup.kill` is, if anywhere."""

    def directories(self) -> tuple[str, ...]:
        """Return every directory, each once."""
        return tuple(dict.fromkeys(path for path in (self.memory, self.pids, self.unified) if path is not None))

    def entrances(self, *, forked_into: bool) -> tuple[str, ...]:
        """Return the files that take in the process which writes "0" to them, where it was not born in the group.

        Version 1 has `tasks`, which moves the one thread that asks without the lock that costs a grace period.
        """
        files = [os.path.join(path, "tasks") for path in (self.memory, self.pids) if self.version == 1]
        if self.unified is not None and not forked_into:
            files.append(os.path.join(self.unified, "cgroup.procs"))
        return tuple(files)

    def limit(self, *, memory_bytes: int, max_pids: int) -> None:
        """Set the hard limits. Raises OSError."""
        _write(str(max_pids), self.pids, "pids.max")
        if self.version == 1:
            _write(str(memory_bytes), self.memory, "memory.limit_in_bytes")
            if os.path.exists(os.path.join(self.memory, "memory.memsw.limit_in_bytes")):
                _write(str(memory_bytes), self.memory, "memory.memsw.limit_in_bytes")
            return
        _write(str(memory_bytes), self.memory, "memory.max")
        if os.path.exists(os.path.join(self.memory, "memory.swap.max")):
            _write("0", self.memory, "memory.swap.max")
        if os.path.exists(os.path.join(self.memory, "memory.oom.group")):
            _write("1", self.memory, "memory.oom.group")

    def counters(self) -> Counters:
        """Return what was counted so far."""
        if self.version == 1:
            kills = _number(_read(self.memory, "memory.oom_control"), "oom_kill")
            peak = _number(_read(self.memory, "memory.max_usage_in_bytes"))
        else:
            kills = _number(_read(self.memory, "memory.events"), "oom_kill")
            peak = _number(_read(self.memory, "memory.peak"))
        return Counters(
            memory_kills=kills or 0,
            refused_forks=_number(_read(self.pids, "pids.events"), "max") or 0,
            peak_memory_bytes=peak,
            peak_pids=_number(_read(self.pids, "pids.peak")),
            cpu_s=self._cpu_s(),
        )

    def _cpu_s(self) -> float:
        """Version 2 counts CPU time in every group, with and without controllers."""
        return (_number(None if self.unified is None else _read(self.unified, "cpu.stat"), "usage_usec") or 0) / 1e6

    def kill(self) -> None:
        """Kill every process in the group; the whole of it at once where the kernel can."""
        if self.unified is not None:
            try:
                _write("1", self.unified, "cgroup.kill")
                return
            except OSError:
                pass  # before Linux 5.14; one by one below
        for line in (_read(self.pids, "cgroup.procs") or "").split():
            try:
                os.kill(int(line), 9)
            except ProcessLookupError:
                continue

    def remove(self) -> bool:
        """Remove the group's directories; False while a process is still in it."""
        return remove_directories(self.directories())


def remove_directories(paths: Iterable[str]) -> bool:
    """Remove empty groups; False when one still holds a process. A missing one counts as removed."""
    gone = True
    for path in paths:
        try:
            os.rmdir(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
            gone = False
    return gone


class Hierarchy:
    """The groups of one launcher: a parent in each tree, and in it a group per sandbox."""

    def __init__(self, own: Mapping[str, str], owner: str, owner_pid: int) -> None:
        """Find where groups can be limited; makes nothing yet.

        Args: `own` as `own_groups` returns it; `owner` names the parent; processes below `owner_pid` may be moved.
        Raises: CgroupsUnavailableError.
        """
        self._leaf: str | None = None
        self._owner_pid = owner_pid
        unified = own.get("unified")
        if all(name in own for name in CONTROLLERS):
            self.version = 1
            self._parents = {name: os.path.join(own[name], PREFIX + owner) for name in CONTROLLERS}
        elif unified is not None:
            available = (_read(unified, "cgroup.controllers") or "").split()
            if missing := [name for name in CONTROLLERS if name not in available]:
                raise CgroupsUnavailableError(
                    f"the control group {unified} was not given the controllers {', '.join(missing)}: "
                    "start the program by `systemd-run --user --scope -p Delegate=yes ...`"
                )
            self.version = 2
            self._parents = {name: os.path.join(unified, PREFIX + owner) for name in CONTROLLERS}
        else:
            raise CgroupsUnavailableError("no control group file system is mounted at /sys/fs/cgroup")
        if unified is not None:
            self._parents["unified"] = os.path.join(unified, PREFIX + owner)

    def directories(self) -> tuple[str, ...]:
        """Return the parents' directories, each once."""
        return tuple(dict.fromkeys(self._parents.values()))

    def make(self) -> None:
        """Make the parents, and see that limits can be set. Raises CgroupsUnavailableError."""
        try:
            if self.version == 2:
                self._enable_controllers(os.path.dirname(self._parents["unified"]))
            for path in self.directories():
                os.makedirs(path, exist_ok=True)
            if self.version == 2:
                _write("+memory +pids", self._parents["unified"], "cgroup.subtree_control")
            trial = self.create("trial", memory_bytes=2**26, max_pids=8)
            trial.remove()
        except OSError as error:
            self.remove()
            raise CgroupsUnavailableError(
                f"control groups cannot be made here ({error.strerror}: {error.filename}): run as root, or by "
                "`systemd-run --user --scope -p Delegate=yes ...`"
            ) from None

    def planned(self, name: str) -> Group:
        """Return the group that `create` will make under this name."""
        unified = self._parents.get("unified")
        return Group(
            version=self.version,
            memory=os.path.join(self._parents["memory"], name),
            pids=os.path.join(self._parents["pids"], name),
            unified=None if unified is None else os.path.join(unified, name),
        )

    def create(self, name: str, *, memory_bytes: int, max_pids: int) -> Group:
        """Return a new group with its limits set. Raises OSError."""
        group = self.planned(name)
        for path in group.directories():
            os.mkdir(path)
        group.limit(memory_bytes=memory_bytes, max_pids=max_pids)
        return group

    def remove(self) -> bool:
        """Remove the parents and undo what enabling the controllers took; False while a group is left in one."""
        gone = remove_directories(self.directories())
        if gone and self._leaf is not None:
            own = os.path.dirname(self._leaf)
            _write("-memory -pids", own, "cgroup.subtree_control")
            for pid in (_read(self._leaf, "cgroup.procs") or "").split():
                _write(pid, own, "cgroup.procs")
            gone = remove_directories([self._leaf])
        return gone

    def _enable_controllers(self, own: str) -> None:
        """Give the group `own` controllers for its children, which version 2 allows only when it holds no process."""
        if set(CONTROLLERS) <= set((_read(own, "cgroup.subtree_control") or "").split()):
            return
        try:
            _write("+memory +pids", own, "cgroup.subtree_control")
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        pids = [int(pid) for pid in (_read(own, "cgroup.procs") or "").split()]
        strangers = [pid for pid in pids if not _is_related(pid, self._owner_pid)]
        if strangers:
            raise CgroupsUnavailableError(
                f"the control group {own} also holds other programs (process {strangers[0]}), which may not be moved: "
                "start the program by `systemd-run --scope -p Delegate=yes ...` (with --user unless root)"
            )
        self._leaf = os.path.join(own, PREFIX + "main")
        os.makedirs(self._leaf, exist_ok=True)
        for pid in pids:
            _write(str(pid), self._leaf, "cgroup.procs")
        _write("+memory +pids", own, "cgroup.subtree_control")


def _parent(pid: int) -> int:
    text = _read("/proc", str(pid), "stat")
    return 0 if text is None else int(text.rpartition(")")[2].split()[1])


def _ancestry(pid: int) -> list[int]:
    chain = [pid]
    while (pid := _parent(pid)) > 0:
        chain.append(pid)
    return chain


def _is_related(pid: int, owner_pid: int) -> bool:
    """True where `pid` started the owner or was started by it."""
    return owner_pid in _ancestry(pid) or pid in _ancestry(owner_pid)
