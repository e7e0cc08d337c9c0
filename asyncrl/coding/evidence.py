"""What an episode's record says of how its verdicts came about, for an audit later: names and counts, no files.

A step's evidence is JSON-like: {"step", "solved", "reward", "checks" (how many), "failed" (their names), "flaky",
"tampered", "visible" ([passed, of]; only where the step failed and visible calls are there), "changed" and "outside"
(paths; those no pattern of `allowed_paths` names), "unread" (files that were not compared), "signs" (see `signs`),
"answer" (a digest of what was changed: equal for equal attempts)}. What is empty is left out.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping
from typing import Any

from asyncrl.coding.grading import Grader
from asyncrl.coding.places import is_history
from asyncrl.coding.signs import signs
from asyncrl.coding.tasks import CodingTask, TaskStep
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import UnsafeFilesError
from asyncrl.protocols import FileKind, Sandbox

KEY = "evidence"
"""Of a trajectory's extras: a list with an entry for every step that was judged."""

_MAX_ENTRIES = 20_000
_MAX_READ_FILES = 256  # of those that may have changed, read to be compared
_MAX_FILE_BYTES = 256 * 2**10
_MAX_NAMES = 50  # of paths or checks in a record
_MADE_BY_PROGRAMS = ("*.pyc", "*__pycache__*", ".pytest_cache/*", "*/.pytest_cache/*", ".mypy_cache/*", ".ruff_cache/*")


class Trail:
    """Follows one agent's files through the steps of a task."""

    def __init__(self, task: CodingTask) -> None:
        self._task = task
        self._before = {path: data for path, data in task.files.items() if not is_history(path)}

    async def begin(self, step: TaskStep, sandbox: Sandbox) -> None:
        """Note what a step begins with, after its set-up. Raises: SandboxError."""
        if step.setup:
            self._before, _ = await self._files(sandbox)
        else:
            self._before = {**self._before, **step.files}

    async def end(self, step: TaskStep, sandbox: Sandbox, verdict: Verdict, grader: Grader) -> dict[str, Any]:
        """Return the evidence of a step that was judged, in which nothing runs any more. Raises: SandboxError."""
        after, unread = await self._files(sandbox)
        changed = {path: data for path, data in after.items() if self._before.get(path) != data}
        gone = [path for path in self._before if path not in after and path not in unread]
        paths = sorted([*changed, *gone])
        failed = [check for check, passed in verdict.passed.items() if not passed]
        visible = None if verdict.solved else await grader.visible(self._task, step, sandbox)
        evidence = {
            "step": step.name,
            "solved": verdict.solved,
            "reward": verdict.reward,
            "checks": len(verdict.passed),
            "failed": failed[:_MAX_NAMES],
            "flaky": list(verdict.flaky)[:_MAX_NAMES],
            "tampered": verdict.tampered,
            "visible": visible and list(visible),
            "changed": [_printable(path) for path in paths[:_MAX_NAMES]],
            "outside": [_printable(path) for path in paths if not self._is_allowed(path)][:_MAX_NAMES],
            "unread": len(unread),
            "signs": signs(step, before=self._before, changed=changed),
            "answer": _digest(changed, gone),
        }
        self._before = after
        return {name: value for name, value in evidence.items() if value or name in ("solved", "reward")}

    def _is_allowed(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self._task.allowed_paths)

    async def _files(self, sandbox: Sandbox) -> tuple[dict[str, bytes], list[str]]:
        """Return what there is by path, and which files were not read; most of those are as they were."""
        try:
            entries = await sandbox.walk(max_entries=_MAX_ENTRIES)
        except UnsafeFilesError:
            return {}, list(self._before)
        files: dict[str, bytes] = {}
        sizes = {e.path: e.num_bytes for e in entries if e.kind is FileKind.FILE and not _is_by_the_way(e.path)}
        unread: list[str] = []
        # those of another size first: with many files, the others are most likely the same
        for path in sorted(sizes, key=lambda path: sizes[path] == len(self._before.get(path, b""))):
            if len(files) == _MAX_READ_FILES or sizes[path] > _MAX_FILE_BYTES:
                unread.append(path)
                continue
            try:
                files[path] = await sandbox.read(path, max_bytes=_MAX_FILE_BYTES)
            except (UnsafeFilesError, OSError):
                unread.append(path)
        return files, unread


def _is_by_the_way(path: str) -> bool:
    return is_history(path) or any(fnmatch.fnmatchcase(path, pattern) for pattern in _MADE_BY_PROGRAMS)


def _printable(path: str) -> str:
    return path.encode(errors="backslashreplace").decode()


def _digest(changed: Mapping[str, bytes], gone: list[str]) -> str:
    if not changed and not gone:
        return ""
    hashed = hashlib.blake2b(digest_size=8)
    for path, data in [*sorted(changed.items()), *((path, b"") for path in sorted(gone))]:
        for part in (path.encode(errors="surrogateescape"), data):
            hashed.update(b"%d:" % len(part) + part)
    return hashed.hexdigest()
