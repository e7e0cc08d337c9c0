"""What crosses from an agent's sandbox to a judge's: regular files that were asked for, and nothing else."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.errors import UnsafeFilesError
from asyncrl.protocols import FileEntry, FileKind, Sandbox

_MAX_ENTRIES = 20_000  # looked at; a sandbox with more was filled on purpose
_WILD = "*?["


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectLimits:
    """How much may cross."""

    file_bytes: int = 1 * 2**20
    total_bytes: int = 8 * 2**20
    max_files: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What crossed, and what did not."""

    files: Mapping[str, bytes]
    refused: Mapping[str, str]
    """Path, or pattern -> why; all of it is the agent's doing."""


async def collect(sandbox: Sandbox, patterns: Sequence[str], *, limits: CollectLimits | None = None) -> Collected:
    """End the agent's processes, then return its files whose paths match one of `patterns`.

    A pattern is a path, or has `*`, `?`, `[...]`, of which `*` matches "/" too. Links, sockets, pipes, files with
    several names and what is too large are refused by path; where there are too many to look at, all are.

    Raises: SandboxError where the sandbox failed, which is not the agent's doing.
    """
    limits = limits or CollectLimits()
    await sandbox.kill()
    files: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for path in await _matching(sandbox, patterns, refused):
        left = limits.total_bytes - sum(map(len, files.values()))
        if len(files) == limits.max_files:
            refused[path] = f"more than {limits.max_files} files"
        else:
            await _take(sandbox, path, min(left, limits.file_bytes), files, refused)
    return Collected(files=files, refused=refused)


async def _matching(sandbox: Sandbox, patterns: Sequence[str], refused: dict[str, str]) -> list[str]:
    """Return the paths to be read, in the order of the patterns; notes others that match in `refused`."""
    wanted = dict.fromkeys(pattern for pattern in patterns if not set(pattern) & set(_WILD))
    wild = [pattern for pattern in patterns if set(pattern) & set(_WILD)]
    entries: Sequence[FileEntry] = ()
    if wild:
        try:
            entries = await sandbox.walk(max_entries=_MAX_ENTRIES)
        except UnsafeFilesError as error:
            refused.update(dict.fromkeys(wild, str(error)))
    for entry in entries:
        if entry.kind is FileKind.DIRECTORY or not any(fnmatch.fnmatchcase(entry.path, one) for one in wild):
            continue
        if entry.kind is FileKind.FILE:
            wanted[entry.path] = None
        else:
            refused[entry.path] = "a symbolic link" if entry.kind is FileKind.LINK else "no regular file"
    return list(wanted)


async def _take(sandbox: Sandbox, path: str, max_bytes: int, files: dict[str, bytes], refused: dict[str, str]) -> None:
    try:
        files[path] = await sandbox.read(path, max_bytes=max_bytes)
    except FileNotFoundError:
        refused[path] = "it is not there"
    except (UnsafeFilesError, NotADirectoryError, IsADirectoryError) as error:
        refused[path] = str(error)
