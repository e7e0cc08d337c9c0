"""What was found out about tasks, in a file: what need not be looked at again, and what is never asked.

A line is a verdict as JSON. Where a file says which tasks are left out, a line may also be a task's id alone, and lines
that begin with "#" say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from asyncrl.coding.hygiene import Fault, TaskVerdict
from asyncrl.coding.tasks import CodingTask, TaskSet
from asyncrl.errors import ConfigError


class VerdictFile:
    """Verdicts by task id, each written down as soon as it is known. The last line about a task counts."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a torn last line is dropped.

        Raises: ConfigError where the file cannot be written, or naming the line that is no verdict.
        """
        self._path = path
        self.verdicts: dict[str, TaskVerdict] = {}
        """By task id."""
        try:
            path.open("a").close()
        except OSError as error:
            raise ConfigError(f"verdicts cannot be written to {path}: {error.strerror}") from None
        text = _read(path)
        whole, _, torn = text.rpartition("\n")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                verdict = msgspec.json.decode(line, type=TaskVerdict)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigError(f"{path}, line {number} is no verdict on a task: {error}") from None
            self.verdicts[verdict.task_id] = verdict
        if torn:
            path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")

    def known(self, task_id: str, digest: str) -> TaskVerdict | None:
        """Return the verdict on a task with this content; None where there is none, or sandboxes failed then."""
        verdict = self.verdicts.get(task_id)
        if verdict is None or verdict.digest != digest:
            return None
        return None if any(one.fault is Fault.UNCHECKED for one in verdict.problems) else verdict

    def add(self, verdict: TaskVerdict) -> None:
        """Write a verdict down. Raises: OSError."""
        self.verdicts[verdict.task_id] = verdict
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def read_left_out(path: Path) -> frozenset[str]:
    """Return the ids of the tasks that a file says must not be asked: those with problems, and those named alone.

    Raises: ConfigError naming the file, and the line that is neither a verdict nor an id.
    """
    left_out: dict[str, bool] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        text = line.strip()
        if text.startswith("{"):
            try:
                verdict = msgspec.json.decode(text, type=TaskVerdict)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigError(f"{path}, line {number} is no verdict on a task: {error} (leave_out)") from None
            left_out[verdict.task_id] = not verdict.good
        elif text and not text.startswith("#"):
            left_out[text] = True
    return frozenset(task_id for task_id, is_out in left_out.items() if is_out)


def check_left_out(left_out: frozenset[str], *, all_ids: Sequence[str], training_ids: Sequence[str]) -> None:
    """Raise ConfigError where the ids are of other tasks, or leave nothing to train on."""
    where = "([environment.options] leave_out)"
    if left_out and left_out.isdisjoint(all_ids):
        raise ConfigError(
            f"leave_out must name tasks of this environment, found {min(left_out)!r} and {len(left_out) - 1} more "
            f"that are none, such as {all_ids[0]!r} is {where}"
        )
    if training_ids and left_out.issuperset(training_ids):
        raise ConfigError(f"leave_out must leave tasks to train on, and names all {len(training_ids)} {where}")


class LeavingOut:
    """A task set without some of its tasks: these are never asked, and still listed. A `TaskSet`."""

    def __init__(self, tasks: TaskSet, left_out: frozenset[str]) -> None:
        """Raises: ConfigError where no id is one of the set's, or nothing is left to train on."""
        self._tasks = tasks
        self._left_out = left_out
        check_left_out(left_out, all_ids=tasks.all_ids(), training_ids=tasks.training_ids(0))

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return the ids of an epoch that are not left out."""
        return self._kept(self._tasks.training_ids(epoch))

    def held_out_ids(self) -> Sequence[str]:
        """Return the held-out ids that are not left out."""
        return self._kept(self._tasks.held_out_ids())

    def all_ids(self) -> Sequence[str]:
        """Return every id, also of those left out: they are validated again."""
        return self._tasks.all_ids()

    def task(self, task_id: str) -> CodingTask:
        """Return the task with that id. Raises: ConfigError."""
        return self._tasks.task(task_id)

    def _kept(self, ids: Sequence[str]) -> list[str]:
        return [task_id for task_id in ids if task_id not in self._left_out]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of verdicts {path} cannot be read: {error}") from None
