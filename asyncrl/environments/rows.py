"""Tasks in a file of JSON lines, and the share of them that is never trained on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The tasks of a file, and which of them are never trained on."""

    all_tasks: Sequence[Task]
    """Of both, in the file's order."""
    train: Sequence[Task]
    """At least one."""
    held_out: Sequence[Task]


def read_split(path: Path, task_of: Callable[[Mapping[str, Any], str], Task], *, held_out_percent: int) -> Split:
    """Return the tasks of a file; see `read_rows` and `is_held_out`.

    Raises: ConfigError naming the file and line that cannot be read, or where nothing is left to train on.
    """
    tasks = read_rows(path, task_of)
    train = [task for task in tasks if not is_held_out(task.task_id, held_out_percent)]
    if not train:
        raise ConfigError(
            f"held_out_percent = {held_out_percent} leaves nothing of the {len(tasks)} lines of {path} to train on "
            "([environment.options])"
        )
    held_out = [task for task in tasks if is_held_out(task.task_id, held_out_percent)]
    return Split(all_tasks=tasks, train=train, held_out=held_out)


def task_id_of(row: Mapping[str, Any], where: str) -> str:
    """Return a line's `id`, or its number where it has none; `where` is as `read_rows` gives it."""
    return str(row.get("id", where.rpartition(" ")[2]))


def read_rows(path: Path, task_of: Callable[[Mapping[str, Any], str], Task]) -> list[Task]:
    """Return the tasks of a file; `task_of` is given a line's object, and the file and line for its complaints.

    Raises: ConfigError naming the file and the line that is broken, or has an id that was there before.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error} ([environment.options] path)") from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            task = task_of(_row(line, where), where)
            if task.task_id in tasks:
                raise ConfigError(f"{where}: {task.task_id} was there before")
            tasks[task.task_id] = task
    if not tasks:
        raise ConfigError(f"{path} holds no tasks ([environment.options] path)")
    return list(tasks.values())


def is_held_out(task_id: str, percent: int) -> bool:
    """Tell whether a task is never trained on, by its id alone: runs and files of other order agree."""
    return zlib.crc32(task_id.encode()) % 100 < percent


def check_percent(percent: int) -> None:
    """Raises: ConfigError for a share of tasks that is none."""
    if not 0 <= percent <= 100:
        raise ConfigError(f"held_out_percent must be from 0 to 100, got {percent} ([environment.options])")


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a JSON object, found {type(row).__name__}")
    return row
