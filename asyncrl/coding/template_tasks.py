"""The bundled bug-fix templates as coding tasks: a file with the bug, a script of examples, hidden calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.coding.tasks import CallChecks, CodingTask, Reference, TaskStep
from asyncrl.environments.bugfix import held_out_tasks, shown_call, train_tasks
from asyncrl.environments.bugfix_tasks import TEMPLATES, build_task
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxLimits
from asyncrl.sandbox.judge import Call

_LIMITS = SandboxLimits(wall_s=4.0, cpu_s=2.0, memory_bytes=128 * 2**20, max_pids=16, disk_bytes=16 * 2**20)
# A fix of the same length in the same second has the old one's size and time, and Python would run the old bytecode.
_VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}
_CALL_TIMEOUT_S = 0.5  # the functions take microseconds; what takes longer does not end
_TOLERANCE = 1e-9  # of floats: another order of operations is no mistake
_PREFIX = "templates"
_ID = re.compile(_PREFIX + r"/(?P<name>\w+)-(?P<bug>\d{1,3})-(?P<seed>\d{1,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSettings:
    """Which of the templates are asked."""

    hard: bool = False
    """Whether the functions are trained on too that a very small model hardly ever repairs."""


class TemplateTasks:
    """Small functions of our own writing with a bug. Fulfils `asyncrl.coding.tasks.TaskSet`."""

    settings_type = TemplateSettings

    def __init__(self, settings: TemplateSettings, *, seed: int = 0) -> None:
        """`seed` gives bugs and inputs; which functions are held out does not depend on it."""
        self._settings = settings
        self._seed = seed

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return one task of each training function; bug and inputs differ from epoch to epoch."""
        return [_renamed(task.task_id) for task in train_tasks(self._seed, epoch, hard=self._settings.hard)]

    def held_out_ids(self) -> Sequence[str]:
        """Return one task of each held-out function; they do not depend on the seed, so that runs compare."""
        return [_renamed(task.task_id) for task in held_out_tasks(self._seed)]

    def all_ids(self) -> Sequence[str]:
        """Return every function with every bug, of both splits, with the seed's inputs."""
        return [f"{_PREFIX}/{t.name}-{bug}-{self._seed}" for t in TEMPLATES.values() for bug in range(len(t.bugs))]

    def task(self, task_id: str) -> CodingTask:
        """Return a function's task. Raises: ConfigError for an id that no template has."""
        found = _ID.fullmatch(task_id)
        template = TEMPLATES.get(found["name"]) if found else None
        if found is None or template is None or int(found["bug"]) >= len(template.bugs):
            raise ConfigError(f'no task {task_id!r}: ids are "{_PREFIX}/FUNCTION-BUG-SEED", of the bundled templates')
        data = build_task(template, int(found["bug"]), seed=int(found["seed"])).data
        return CodingTask(
            task_id=task_id,
            steps=(
                TaskStep(
                    instruction=_instruction(data),
                    checks=CallChecks(
                        path="solution.py",
                        function=data["function"],
                        hidden=_calls(data["hidden"]),
                        visible=_calls(data["visible"]),
                        call_timeout_s=_CALL_TIMEOUT_S,
                    ),
                    reference=Reference(files={"solution.py": data["reference"].encode()}),
                ),
            ),
            files={"solution.py": data["source"].encode(), "examples.py": _examples(data).encode()},
            variables=_VARIABLES,
            limits=_LIMITS,
            allowed_paths=("solution.py",),
            origin=f"template {template.name}, bug {found['bug']}, seed {found['seed']}",
        )


def _renamed(task_id: str) -> str:
    return f"{_PREFIX}/{task_id.partition('/')[2]}"


def _calls(tests: Sequence[Mapping[str, Any]]) -> tuple[Call, ...]:
    return tuple(Call(arguments=t["arguments"], expected=t["expected"], tolerance=_TOLERANCE) for t in tests)


def _instruction(data: Mapping[str, Any]) -> str:
    says = data["instruction"].replace("`", "")
    return f"The function {data['function']} in solution.py is wrong. {says} Correct solution.py; examples.py tries it."


def _examples(data: Mapping[str, Any]) -> str:
    """Return a script that ends at the first example which the function gets wrong, with what it answered."""
    lines = [f"from solution import {data['function']}", ""]
    for test in data["visible"]:
        call = shown_call(data["function"], test)
        lines.append(f"assert {call} == {test['expected']!r}, repr({call})")
    return "\n".join([*lines, 'print("the examples pass")', ""])
