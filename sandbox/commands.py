"""What the launcher knows of a sandbox and of a command in it, and how a command ended. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.sandbox import cgroups
from asyncrl.sandbox.layers import Layer

NOT_EXECUTABLE = 126  # as a shell says it
NOT_FOUND = 127
NEW_SHELL = "a new shell: the one before it has ended, and its variables and directory with it"
_FREE_PAGES = 4  # a write that filled the disk leaves a few pages that no further write would fit in


@dataclass(slots=True)
class Stream:
    """What is kept of one output stream: its beginning and its end."""

    keep: int
    total: int = 0
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self.total += len(data)
        half = self.keep // 2
        room = half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.keep:
            del self.tail[: len(self.tail) - (self.keep - half)]

    def result(self) -> tuple[bytes, bool]:
        """Return the text with its cut marked, and whether there is one."""
        if len(self.head) + len(self.tail) <= self.keep and self.total <= self.keep:
            return bytes(self.head + self.tail), False
        tail = self.tail[len(self.tail) - (self.keep - self.keep // 2) :]
        cut = self.total - len(self.head) - len(tail)
        return bytes(self.head) + b"\n[... %d bytes cut ...]\n" % cut + bytes(tail), True


@dataclass(slots=True, kw_only=True)
class Box:
    """One open sandbox."""

    name: str
    path: str
    uid: int | None
    limits: dict[str, Any]
    work: str
    """Where the working directory appears inside."""
    layer: Layer | None
    """What the working directory lies over."""
    deadline: float
    """When it is closed, whoever holds it."""
    group: cgroups.Group | None = None
    directory: int = -1
    """Open file descriptor of its working directory."""
    mounts: list[str] = field(default_factory=list)
    """In the order in which they were made."""
    held: list[Layer] = field(default_factory=list)
    places: dict[str, Layer | None] = field(default_factory=dict)
    binds: list[tuple[str, str, bool]] = field(default_factory=list)
    """Where each place appears inside, where it lies, and whether it is written to."""
    containers: list[str] = field(default_factory=list)
    """Names of the containers that show it, if any do."""
    image: str = ""
    """Of these containers; empty is the backend's own."""
    command: Command | None = None
    shell: Command | None = None
    num_shells: int = 0
    was_killed: bool = False
    """Whether the group was ever killed as a whole. Linux kills at once what is later born into such a group."""
    when_idle: list[Callable[[], None]] = field(default_factory=list)
    """To be done once nothing runs any more."""

    @property
    def changed(self) -> str:
        """Return the directory that holds what differs from the layer below, or all where there is none."""
        return os.path.join(self.path, "task" if self.layer is None else "changed")


@dataclass(slots=True, kw_only=True)
class Command:
    """One running command, or the shell, which is one command after the other in the same process."""

    request: int | None
    """None while a shell has nothing to do."""
    box: Box
    pid: int
    pidfd: int
    started: float
    deadline: float
    before: cgroups.Counters
    outputs: tuple[Stream, Stream]
    max_output_bytes: int
    streams: dict[int, int]
    """Descriptor -> index in `outputs`; removed at its end."""
    status: int
    init: int | None = None
    """Descriptor of the first process inside, readable when that and all others inside are gone."""
    init_gone: bool = False
    stdin: int | None = None
    pending: bytes = b""
    status_text: bytes = b""
    ended_by: str | None = None
    """The limit that made the launcher end it: "wall", "output" or "closed"."""
    exit_status: int | None = None
    report: int = -1
    """Where a shell reports the end of each command."""
    report_text: bytes = b""
    number: int = 0
    """Of the shell's present command."""
    is_new: bool = False
    """Whether this is the shell's first command, and not the sandbox's."""

    @property
    def is_shell(self) -> bool:
        return self.report >= 0

    @property
    def num_bytes(self) -> int:
        return sum(stream.total for stream in self.outputs)


def let_in(box: Box) -> None:
    """Give the sandbox's user its working directory back, which an agent may have closed to itself.

    No command could start there, and what an agent does must not look like a sandbox that failed.
    """
    mode = stat.S_IMODE(os.fstat(box.directory).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(box.directory, mode | stat.S_IRWXU)


def exit_code(command: Command, stderr: bytes) -> int | None:
    """Return the command's exit code, -N for signal N; None where it never started.

    bubblewrap reports signal N as 128 + N, so a program that exits with such a code reads as ended by that signal.
    """
    code = reported(command.status_text, "exit-code")
    if code is not None:
        return as_signal(code)
    if stderr.startswith(b"bwrap: execvp "):
        return NOT_FOUND  # nothing has run, so nobody else has written this
    if stderr.startswith(b"bwrap: Can't chdir to "):
        return NOT_EXECUTABLE  # what runs on in the background has closed the directory again, after `let_in`
    return NOT_EXECUTABLE if command.exit_status == NOT_EXECUTABLE << 8 else None


def as_signal(code: int) -> int:
    """Return -N for the code with which a shell, and bubblewrap, report signal N; else the code."""
    return 128 - code if 128 < code <= 128 + signal.NSIG else code


def reported(status: bytes, name: str) -> int | None:
    """Return the number `name` from the whole lines of bubblewrap's report."""
    for line in status.splitlines(keepends=True):
        if line.endswith(b"\n") and (number := json.loads(line).get(name)) is not None:
            return int(number)
    return None


def outcome(
    *,
    ended_by: str | None,
    before: cgroups.Counters,
    after: cgroups.Counters,
    code: int | None,
    limits: Mapping[str, Any],
    disk: str,
    unstarted: str,
) -> tuple[str, str]:
    """Return how a command ended, told from what was counted, and what failed where the sandbox did.

    Args: `code` is None where it did not start, and `unstarted` then says why; `disk` is where its file system is.
    """
    if ended_by == "closed":
        return "infrastructure", "the sandbox's owner ended it while the command ran"
    if ended_by == "output":
        return "output", ""
    if after.memory_kills > before.memory_kills:
        return "memory", ""
    if after.refused_forks > before.refused_forks:
        return "pids", ""
    if ended_by == "wall":
        return "wall", ""
    if code is None:
        return "infrastructure", f"the command was not started: {unstarted[-500:]}"
    if code == -signal.SIGXFSZ or _is_full(disk):
        return "disk", ""
    burned = after.cpu_s - before.cpu_s >= 0.9 * limits["cpu_s"]
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and burned):
        return "cpu", ""
    return "ok", ""


def _is_full(path: str) -> bool:
    usage = os.statvfs(path)
    return usage.f_bavail < _FREE_PAGES or usage.f_ffree == 0
