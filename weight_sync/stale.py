"""Finding and removing what dead publishers left behind. Standard library only."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

PREFIX = "asyncrl-"
LOCK_SUFFIX = ".lock"
WEIGHTS_SUFFIX = ".weights"
DELTA_SUFFIX = ".delta"
"""Behind the name of the version's own file."""

SHARED_MEMORY_DIRECTORY = "/dev/shm"

_FILE = re.compile(rf"{PREFIX}(?P<run>.+)-\d+{re.escape(WEIGHTS_SUFFIX)}(\..*)?")


def remove_stale(directory: str | os.PathLike[str] = SHARED_MEMORY_DIRECTORY) -> tuple[Path, ...]:
    """Remove the weight files of publishers that are dead, and return what was removed.

    A file whose run has a living publisher is left alone, whoever asks; so is one of another user that may not be
    opened. Safe to call at any time, from any process.
    """
    root = Path(directory)
    if not root.is_dir():
        return ()
    runs: dict[str, list[Path]] = {}
    for path in sorted(root.glob(f"{PREFIX}*")):
        if path.name.endswith(LOCK_SUFFIX):
            runs.setdefault(path.name[len(PREFIX) : -len(LOCK_SUFFIX)], [])
        elif match := _FILE.fullmatch(path.name):
            runs.setdefault(match["run"], []).append(path)
    removed: list[Path] = []
    for run, paths in runs.items():
        removed += _remove_run(root / f"{PREFIX}{run}{LOCK_SUFFIX}", paths)
    return tuple(removed)


def _remove_run(lock_path: Path, paths: list[Path]) -> list[Path]:
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:
        return []
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in paths:
            path.unlink(missing_ok=True)
        lock_path.unlink(missing_ok=True)
    except BlockingIOError:
        return []
    finally:
        os.close(descriptor)
    return paths
