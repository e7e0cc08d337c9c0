"""An environment's tasks as coding tasks, so that all are validated, audited and shown by the same code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from asyncrl.coding.tasks import CodingTask
from asyncrl.errors import ConfigError
from asyncrl.types import Task


class AsCodingTasks:
    """The tasks of an environment that asks them in its own way. Fulfils `asyncrl.coding.tasks.TaskSet`."""

    def __init__(self, tasks: Sequence[Task], held_out: Collection[str], build: Callable[[Task], CodingTask]) -> None:
        """`held_out` are ids of `tasks`; `build` returns one as a coding task."""
        self._tasks = {task.task_id: task for task in tasks}
        self._held_out = held_out
        self._build = build

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return the ids that may be trained on."""
        return [task_id for task_id in self._tasks if task_id not in self._held_out]

    def held_out_ids(self) -> Sequence[str]:
        """Return the ids that are never trained on."""
        return [task_id for task_id in self._tasks if task_id in self._held_out]

    def all_ids(self) -> Sequence[str]:
        """Return every id, in the environment's order."""
        return list(self._tasks)

    def task(self, task_id: str) -> CodingTask:
        """Return the task with that id. Raises: ConfigError where there is none."""
        if task_id not in self._tasks:
            raise ConfigError(f"there is no task {task_id!r} among {len(self._tasks)}")
        return self._build(self._tasks[task_id])
