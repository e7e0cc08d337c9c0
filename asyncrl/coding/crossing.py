"""What crosses from an agent's sandbox to a judging script's: its working directory, or files of any place."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.coding.tasks import CodingTask, ScriptChecks
from asyncrl.errors import UnsafeFilesError
from asyncrl.protocols import FileKind, Sandbox, SandboxBackend, SandboxLimits, Snapshot

_MAX_ENTRIES = 20_000  # looked at in one place; a sandbox with more was filled on purpose
_MAX_FILE_BYTES = 32 * 2**20
_MAX_TOTAL_BYTES = 64 * 2**20  # they are held in memory here, for every episode that is being graded
_MAX_FILES = 4096
_FILE_OVERHEAD_BYTES = 8192  # of a file and a directory of its own, which take whole pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What a judge's sandbox is opened over, and what is written into its places."""

    work: Snapshot
    places: Mapping[str, bytes]
    """Absolute path -> content."""
    refused: Mapping[str, str]
    """Path -> why; all of it is the agent's doing."""

    def beside(self, limits: SandboxLimits) -> SandboxLimits:
        """Return the limits of a judge that finds its own room beside all this, however much an agent left."""
        num_bytes = self.work.num_bytes + sum(len(data) + _FILE_OVERHEAD_BYTES for data in self.places.values())
        return replace(
            limits,
            disk_bytes=limits.disk_bytes + num_bytes,
            max_files=limits.max_files + self.work.num_files + 2 * len(self.places),
        )


async def cross(backend: SandboxBackend, task: CodingTask, checks: ScriptChecks, sandbox: Sandbox) -> Crossing:
    """Return what the agent's files come to, whose processes have ended. The caller closes `work`.

    Links, sockets, pipes and what is too large or too much are refused by path. Raises: SandboxError.
    """
    patterns = ["*"] if checks.submitted is None else [posixpath.join(task.work, path) for path in checks.submitted]
    places = list(task.places) if checks.submitted is None else [task.work, *task.places]
    files: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for place in places:
        await _take(sandbox, place, patterns, checks.excluded, files, refused)
    if checks.submitted is None:
        return Crossing(work=await sandbox.snapshot(), places=files, refused=refused)
    for pattern in patterns:
        if not _has_wildcard(pattern) and not any(_is_meant(path, [pattern]) for path in (*files, *refused)):
            refused[pattern] = "it is not there"
    below = {path: data for path, data in files.items() if path.startswith(task.work + "/")}
    work = {**checks.beside, **{path[len(task.work) + 1 :]: data for path, data in below.items()}}
    others = {path: data for path, data in files.items() if path not in below}
    return Crossing(work=await backend.prepare(work), places=others, refused=refused)


async def _take(
    sandbox: Sandbox,
    place: str,
    patterns: Sequence[str],
    excluded: Sequence[str],
    files: dict[str, bytes],
    refused: dict[str, str],
) -> None:
    try:
        entries = await sandbox.walk(place, max_entries=_MAX_ENTRIES)
    except UnsafeFilesError as error:
        refused[place] = str(error)
        return
    for entry in entries:
        path = f"{place}/{entry.path}"
        if entry.kind is FileKind.DIRECTORY or not _is_meant(path, patterns):
            continue
        if any(fnmatch.fnmatchcase(path, one) for one in excluded):
            continue
        left = _MAX_TOTAL_BYTES - sum(map(len, files.values()))
        if entry.kind is not FileKind.FILE:
            refused[path] = "a symbolic link" if entry.kind is FileKind.LINK else "no regular file"
        elif len(files) == _MAX_FILES:
            refused[path] = f"more than {_MAX_FILES} files"
        else:
            try:
                files[path] = await sandbox.read(path, max_bytes=min(left, _MAX_FILE_BYTES))
            except (UnsafeFilesError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                refused[path] = str(error)


def _is_meant(path: str, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        if path == pattern or path.startswith(pattern.rstrip("/") + "/"):
            return True
        if _has_wildcard(pattern) and fnmatch.fnmatchcase(path, pattern):
            return True
    return False


def _has_wildcard(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")
