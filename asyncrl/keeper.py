"""A small parent between the orchestrator and one child, so that nothing outlives the run. Standard library only.

    python -I -S keeper.py --pipe FD --grace SECONDS [--pass-fd FD]... [--scratch DIR] [--remove GLOB]... -- COMMAND...

It holds the read end of a pipe whose only write end is the orchestrator's. When the pipe closes, because the
orchestrator asked or because it was killed, the command gets SIGTERM, then after the grace SIGKILL, and so does every
process that came from it, sessions of their own or not: the keeper is their subreaper. Files and directories that
match `--remove` are removed last, and with them the directory `--scratch`, after whose entries such files may be named.
If the keeper itself is killed, the kernel kills the command (parent-death signal; it follows the thread that spawned,
here the only one).
"""

from __future__ import annotations

import ctypes
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REMOVALS, _REMOVE_AGAIN_S = 40, 0.5  # of a directory that processes which are not ours still write to
_TRACKER_S = 2.0  # it has a handful of names to unlink


def main(arguments: Sequence[str]) -> int:
    """Keep one command; return its exit code, or 128 + N where signal N ended it."""
    options, command = _parse(arguments)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to handle
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"x"))

    def die_with_keeper() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    pipe = int(options["--pipe"][0])
    os.set_inheritable(pipe, False)
    passed = [int(fd) for fd in options["--pass-fd"]]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_keeper, pass_fds=passed)
    for fd in passed:
        os.close(fd)
    child_fd = os.pidfd_open(child.pid)
    ready, _, _ = select.select([pipe, stop_read, child_fd], [], [])
    if child_fd not in ready:
        child.terminate()
        select.select([child_fd], [], [], float(options["--grace"][0]))
    code = _end(child)
    for scratch in options["--scratch"] or [""]:
        remove(options["--remove"], scratch)
    return code if code >= 0 else 128 - code


def remove(patterns: Iterable[str], scratch: str = "") -> None:
    """Remove the files that match the glob patterns, then the directory `scratch`, where it is there.

    `{scratch}` in a pattern stands for the name of each of the directory's entries.
    """
    entries = os.listdir(scratch) if os.path.isdir(scratch) else []
    for pattern in patterns:
        for entry in entries if "{scratch}" in pattern else [""]:
            for name in glob.glob(pattern.replace("{scratch}", glob.escape(entry))):
                _remove(Path(name))
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)  # who holds its files is gone; another's are not in it


def _parse(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    split = list(arguments).index("--")
    options: dict[str, list[str]] = {"--pipe": [], "--grace": [], "--remove": [], "--pass-fd": [], "--scratch": []}
    for name, value in zip(arguments[:split:2], arguments[1:split:2], strict=True):
        options[name].append(value)
    return options, list(arguments[split + 1 :])


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill the child and all that came from it, reap them, and return the child's own code."""
    child.kill()
    code = child.wait()
    trackers = [pid for pid in _descendants(os.getpid()) if _is_resource_tracker(pid)]
    _kill(pid for pid in _descendants(os.getpid()) if pid not in trackers)
    for pid in trackers:  # each ends by itself once nobody holds its pipe, and unlinks the family's semaphores first
        _wait(pid, _TRACKER_S)
    while True:
        _kill(_descendants(os.getpid()))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code


def _remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it, though others may still write there while they end."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for _ in range(_REMOVALS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        select.select([], [], [], _REMOVE_AGAIN_S)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended between the listing and the signal


def _wait(pid: int, seconds: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [], seconds)
    os.close(descriptor)


def _is_resource_tracker(pid: int) -> bool:
    """Tell whether a process is multiprocessing's, which removes named semaphores whose makers were killed."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _descendants(root: int) -> list[int]:
    """Return the pids below `root`, parents before children."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rsplit(b")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the listing and the reading
        children[parent].append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children[queue.pop(0)]
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
