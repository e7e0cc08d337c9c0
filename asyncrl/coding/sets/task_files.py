"""Files of a task's directory, which somebody else has written: read whole, and nothing outside of it.

Links are followed as long as they stay in the task's directory; what is no regular file, too large or too much is an
error that names the path. Nothing of it is executed here.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.errors import ConfigError

MAX_FILE_BYTES = 64 * 2**20  # a task's files are kept in memory, and sent to every machine that opens it
MAX_TOTAL_BYTES = 256 * 2**20
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """Files below one folder of a task."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path below the folder -> content."""
    executable: Collection[str] = ()

    def __bool__(self) -> bool:
        return bool(self.files)


def read_text(root: Path, path: str, *, task_id: str) -> str:
    """Return the text of a file of the task. Raises: ConfigError where it is missing, no UTF-8 or leads out."""
    data = _read(root, root / path, task_id)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{task_id}: {root / path} is not UTF-8: {error.reason}") from None


def read_tree(root: Path, folder: str, *, task_id: str, ignore: Sequence[str] = ()) -> TaskFiles:
    """Return all files below `folder` of the task's directory `root`; empty where the folder is not there.

    Args: `ignore` are patterns as of a .gitignore file without "!": of a name, or of a path that holds "/".
    Raises: ConfigError naming the path.
    """
    top = root / folder
    if not os.path.lexists(top):
        return TaskFiles()
    _require_inside(root, top, task_id)
    if not top.is_dir():
        raise ConfigError(f"{task_id}: {top} must be a directory")
    files: dict[str, bytes] = {}
    executable: set[str] = set()
    left: list[tuple[Path, str, tuple[Path, ...]]] = [(top, "", (top.resolve(),))]
    total = 0
    while left:
        directory, prefix, above = left.pop()
        for name in sorted(os.listdir(directory)):
            path, inside = directory / name, prefix + name
            _require_name(path, task_id)
            if _is_ignored(inside, ignore):
                continue
            _require_inside(root, path, task_id)
            if path.is_dir():
                real = path.resolve()
                if real in above:
                    raise ConfigError(f"{task_id}: {path} is a link to a directory that it lies in: remove it")
                left.append((path, inside + "/", (*above, real)))
                continue
            files[inside] = _read(root, path, task_id)
            total += len(files[inside])
            if os.access(path, os.X_OK):
                executable.add(inside)
            if total > MAX_TOTAL_BYTES or len(files) > MAX_FILES:
                raise ConfigError(
                    f"{task_id}: {top} holds more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes: put such data "
                    "into an image (docker_image in task.toml)"
                )
    return TaskFiles(files=files, executable=executable)


def _read(root: Path, path: Path, task_id: str) -> bytes:
    _require_inside(root, path, task_id)
    try:
        # without waiting, for a pipe that nobody writes to
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{task_id}: {path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{task_id}: {path} is neither a file nor a directory: remove it")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{task_id}: {path} has {status.st_size} bytes, allowed are {MAX_FILE_BYTES}: put such data into an "
                "image (docker_image in task.toml)"
            )
        return file.read()


def _require_inside(root: Path, path: Path, task_id: str) -> None:
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"{task_id}: {path} leads out of the task's directory, to {path.resolve()}: copy what it needs into it"
        )


def _require_name(path: Path, task_id: str) -> None:
    if not path.name.isprintable():
        raise ConfigError(f"{task_id}: {str(path)!r} has a name that cannot be shown: rename it")


def _is_ignored(path: str, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        wanted = pattern.strip("/")
        against = path if "/" in wanted else path.rpartition("/")[2]
        if fnmatch.fnmatchcase(against, wanted):
            return True
    return False
