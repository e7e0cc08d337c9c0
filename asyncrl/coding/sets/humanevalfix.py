"""The set of a HumanEvalFix file's tasks, as the environment of that name reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.environments.as_coding_tasks import AsCodingTasks
from asyncrl.environments.humanevalfix import coding_task, read_tasks
from asyncrl.environments.rows import check_percent, is_held_out
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanEvalFixTaskSettings:
    """Which file is read, and how it is split."""

    path: Path
    """JSONL with the fields task_id, declaration, canonical_solution, buggy_solution, entry_point, test."""
    held_out_percent: int = 20
    """Share of the tasks that is never trained on; chosen by the tasks' ids alone."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        check_percent(self.held_out_percent)


class HumanEvalFixTasks(AsCodingTasks):
    """Functions with a bug from a file in HumanEvalFix's form, judged by the file's own asserts."""

    settings_type = HumanEvalFixTaskSettings

    def __init__(self, settings: HumanEvalFixTaskSettings, *, seed: int = 0) -> None:
        """`seed` changes nothing.

        Raises: ConfigError naming the line that cannot be read, or where all tasks are held out.
        """
        del seed
        tasks = read_tasks(settings.path)
        held_out = {task.task_id for task in tasks if is_held_out(task.task_id, settings.held_out_percent)}
        if len(held_out) == len(tasks):
            raise ConfigError(
                f"all {len(tasks)} tasks in {settings.path} are held out: lower held_out_percent "
                f"({settings.held_out_percent})"
            )
        super().__init__(tasks, held_out, coding_task)
