"""The bundled bug-fix templates as coding tasks: a file with the bug, a script of examples, hidden calls.

Besides the basic ones there are families of functions, and small packages: several hundred (`coding.sets.families`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from asyncrl.coding.sets.families import HELD_OUT_FAMILIES, families, family_of
from asyncrl.coding.sets.families_packages import PACKAGES, Package
from asyncrl.coding.tasks import CallChecks, CodingTask, PytestChecks, Reference, TaskStep
from asyncrl.environments.bugfix import held_out_tasks, shown_call, train_tasks
from asyncrl.environments.bugfix_tasks import TEMPLATES, build_task
from asyncrl.environments.templates import Template
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxLimits
from asyncrl.sandbox.judge import Call

_LIMITS = SandboxLimits(wall_s=4.0, cpu_s=2.0, memory_bytes=128 * 2**20, max_pids=16, disk_bytes=16 * 2**20)
_PACKAGE_LIMITS = replace(_LIMITS, wall_s=20.0, cpu_s=10.0)  # pytest alone takes a few tenths of a second
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
    """Whether the functions are asked too that a very small model hardly ever repairs: some of the basic ones, and the
    several hundred of the families, of which whole families are held out."""


class TemplateTasks:
    """Small functions of our own writing with a bug. Fulfils `asyncrl.coding.tasks.TaskSet`."""

    settings_type = TemplateSettings

    def __init__(self, settings: TemplateSettings, *, seed: int = 0) -> None:
        """`seed` gives bugs and inputs; which functions are held out does not depend on it."""
        self._settings = settings
        self._seed = seed

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return one task of each training function; bug and inputs differ from epoch to epoch."""
        basic = [_renamed(task.task_id) for task in train_tasks(self._seed, epoch, hard=self._settings.hard)]
        return basic + [self._of_epoch(name, epoch) for name in self._beyond(held_out=False)]

    def held_out_ids(self) -> Sequence[str]:
        """Return one task of each held-out function; they do not depend on the seed, so that runs compare."""
        basic = [_renamed(task.task_id) for task in held_out_tasks(self._seed)]
        return basic + [f"{_PREFIX}/{name}-0-0" for name in self._beyond(held_out=True)]

    def all_ids(self) -> Sequence[str]:
        """Return every function with every bug, of both splits, with the seed's inputs."""
        names = [*TEMPLATES, *self._beyond(held_out=False), *self._beyond(held_out=True)]
        return [f"{_PREFIX}/{name}-{bug}-{self._seed}" for name in names for bug in range(_num_bugs(name))]

    def _beyond(self, *, held_out: bool) -> list[str]:
        """Return the functions of the families, and the packages, of one split; none where they are not asked."""
        if not self._settings.hard:
            return []
        names = [name for name, family in family_of().items() if (family in HELD_OUT_FAMILIES) == held_out]
        return names + [name for name in PACKAGES if (name in HELD_OUT_FAMILIES) == held_out]

    def _of_epoch(self, name: str, epoch: int) -> str:
        bug = Random(f"{self._seed}/{epoch}/{name}").randrange(_num_bugs(name))
        return f"{_PREFIX}/{name}-{bug}-{self._seed * 1000 + epoch}"

    def task(self, task_id: str) -> CodingTask:
        """Return a function's task. Raises: ConfigError for an id that no template has."""
        found = _ID.fullmatch(task_id)
        template = _template(found["name"]) if found else None
        if found is None or template is None or int(found["bug"]) >= len(template.bugs):
            raise ConfigError(f'no task {task_id!r}: ids are "{_PREFIX}/FUNCTION-BUG-SEED", of the bundled templates')
        name, bug = found["name"], int(found["bug"])
        data = build_task(template, bug, seed=int(found["seed"])).data
        package = PACKAGES.get(name)
        told = f"package {name}" if package else f"template {template.name}"
        step, files = _of_function(data) if package is None else _of_package(package, name, bug, data)
        return CodingTask(
            task_id=task_id,
            steps=(step,),
            files=files,
            variables=_VARIABLES,
            limits=_LIMITS if package is None else _PACKAGE_LIMITS,
            allowed_paths=("solution.py",) if package is None else (f"{name}/*",),
            origin=f"{told}, bug {bug}, seed {found['seed']}",
        )


def _template(name: str) -> Template | None:
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name in PACKAGES:
        return PACKAGES[name].template
    return next((one for one in families().get(family_of().get(name, ""), ()) if one.name == name), None)


def _num_bugs(name: str) -> int:
    template = _template(name)
    assert template is not None, name
    return len(template.bugs)


def _of_function(data: Mapping[str, Any]) -> tuple[TaskStep, dict[str, bytes]]:
    step = TaskStep(
        instruction=_instruction(data),
        checks=CallChecks(
            path="solution.py",
            function=data["function"],
            hidden=_calls(data["hidden"]),
            visible=_calls(data["visible"]),
            call_timeout_s=_CALL_TIMEOUT_S,
        ),
        reference=Reference(files={"solution.py": data["reference"].encode()}),
    )
    return step, {"solution.py": data["source"].encode(), "examples.py": _examples(data, "solution").encode()}


def _of_package(package: Package, name: str, bug: int, data: Mapping[str, Any]) -> tuple[TaskStep, dict[str, bytes]]:
    """Return a package's step and files; its modules need each other, so pytest judges it and not calls of a file."""
    tests = [f"from {package.module} import {data['function']}", ""]
    for number, test in enumerate(data["hidden"]):
        tests += [
            "",
            f"def test_{number}():",
            f"    assert {shown_call(data['function'], test)} == {test['expected']!r}",
            "",
        ]
    step = TaskStep(
        instruction=(
            f"The package {name} is wrong: see {data['function']} in {package.module.replace('.', '/')}.py. "
            f"{data['instruction'].replace('`', '')} Correct the package; examples.py tries it."
        ),
        checks=PytestChecks(
            tests={"test_package.py": "\n".join(tests).encode()},
            expected=tuple(f"test_package.py::test_{number}" for number in range(len(data["hidden"]))),
            submitted=(f"{name}/*.py",),
        ),
        reference=Reference(files={path: text.encode() for path, text in package.files.items()}),
    )
    files = {path: text.encode() for path, text in package.buggy(bug).items()}
    return step, {**files, "examples.py": _examples(data, package.module).encode()}


def _renamed(task_id: str) -> str:
    return f"{_PREFIX}/{task_id.partition('/')[2]}"


def _calls(tests: Sequence[Mapping[str, Any]]) -> tuple[Call, ...]:
    return tuple(Call(arguments=t["arguments"], expected=t["expected"], tolerance=_TOLERANCE) for t in tests)


def _instruction(data: Mapping[str, Any]) -> str:
    says = data["instruction"].replace("`", "")
    return f"The function {data['function']} in solution.py is wrong. {says} Correct solution.py; examples.py tries it."


def _examples(data: Mapping[str, Any], module: str) -> str:
    """Return a script that ends at the first example which the function gets wrong, with what it answered."""
    lines = [f"from {module} import {data['function']}", ""]
    for test in data["visible"]:
        call = shown_call(data["function"], test)
        lines.append(f"assert {call} == {test['expected']!r}, repr({call})")
    return "\n".join([*lines, 'print("the examples pass")', ""])
