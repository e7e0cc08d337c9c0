"""The set of tasks in Harbor directories, and in the older ones of Terminal-Bench."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.coding.sets.harbor import read_harbor_task
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.terminal_bench import read_terminal_bench_task
from asyncrl.coding.tasks import CodingTask
from asyncrl.environments.rows import is_held_out
from asyncrl.errors import ConfigError

_READERS = {"task.toml": read_harbor_task, "task.yaml": read_terminal_bench_task}
_MAX_DEPTH = 4


class HarborTasks:
    """Task directories as Harbor has them, unmodified, or as Terminal-Bench had them (task.yaml).

    An id is "harbor/" and the directory's path below the one that was given. Fulfils `asyncrl.coding.tasks.TaskSet`.
    """

    settings_type = HarborSettings

    def __init__(self, settings: HarborSettings, *, seed: int = 0) -> None:
        """Read every task once. `seed` changes nothing: the split goes by the ids.

        Raises: ConfigError where there is none, where one cannot run here and is not to be skipped, or where all are
        held out.
        """
        del seed
        self._settings = settings
        self._directories = {f"harbor/{name}": path for name, path in find_tasks(settings.path).items()}
        self.refused: Mapping[str, str] = self._refusals()
        """Id -> why the task cannot run here; empty unless `skip_refused` is set."""
        self._ids = [task_id for task_id in self._directories if task_id not in self.refused]
        if not self._ids:
            raise ConfigError(
                f"none of the {len(self._directories)} tasks in {settings.path} can run here; the first: "
                f"{next(iter(self.refused.values()))}"
            )

    def _refusals(self) -> dict[str, str]:
        refused = {}
        for task_id in self._directories:
            try:
                self.task(task_id)
            except ConfigError as error:
                if not self._settings.skip_refused:
                    raise
                refused[task_id] = str(error)
        return refused

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return the ids that are trained on. Raises: ConfigError where there are none."""
        found = [task_id for task_id in self._ids if not self._is_held_out(task_id)]
        if not found:
            raise ConfigError(
                f"all {len(self._ids)} tasks in {self._settings.path} are held out: lower held_out_percent "
                f"({self._settings.held_out_percent})"
            )
        return found

    def held_out_ids(self) -> Sequence[str]:
        """Return the ids that are never trained on."""
        return [task_id for task_id in self._ids if self._is_held_out(task_id)]

    def all_ids(self) -> Sequence[str]:
        """Return the ids of both splits."""
        return self._ids

    def task(self, task_id: str) -> CodingTask:
        """Return a task, read anew. Raises: ConfigError."""
        root = self._directories.get(task_id)
        if root is None:
            raise ConfigError(f"there is no task {task_id!r} in {self._settings.path}")
        name = next(name for name in _READERS if (root / name).is_file())
        return _READERS[name](root, task_id, self._settings)

    def _is_held_out(self, task_id: str) -> bool:
        return is_held_out(task_id, self._settings.held_out_percent)


def find_tasks(top: Path) -> dict[str, Path]:
    """Return the task directories in `top` by their paths below it, or `top` itself by its name, where it is one.

    Raises: ConfigError where there are none.
    """
    if not top.is_dir():
        raise ConfigError(f"{top} is no directory ([environment.options.task_options] path)")
    if _is_task(top):
        return {top.resolve().name: top}
    found = {}
    for directory, names, _ in os.walk(top):
        here = Path(directory)
        depth = len(here.relative_to(top).parts)
        if _is_task(here):
            found[here.relative_to(top).as_posix()] = here
        if _is_task(here) or depth == _MAX_DEPTH:
            names.clear()
    if not found:
        raise ConfigError(f"{top} holds no task: none of its directories has a task.toml or a task.yaml")
    return dict(sorted(found.items()))


def _is_task(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _READERS)
