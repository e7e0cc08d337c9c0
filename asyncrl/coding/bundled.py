"""Finds a set of coding tasks by name, and builds it with its own options."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.coding.tasks import TaskSet
from asyncrl.environments.loading import convert_options
from asyncrl.errors import ConfigError

TASK_SETS: Mapping[str, str] = {
    "templates": "asyncrl.coding.template_tasks:TemplateTasks",
    "mutation": "asyncrl.coding.sets.mutation:MutationTasks",
    "humanevalfix": "asyncrl.coding.sets.humanevalfix:HumanEvalFixTasks",
    "harbor": "asyncrl.coding.sets.harbor_tasks:HarborTasks",
}
"""Name -> "module:Class". Any other class is named by "module:Class" itself.

A class is called with its settings, which are of its `settings_type`, and with `seed` by keyword.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The settings of a set that has none."""


def task_set_class(name: str) -> Any:
    """Return the class that `name` stands for. Raises ConfigError where there is none."""
    where = "([environment.options] tasks)"
    module_name, separator, attribute = TASK_SETS.get(name, name).partition(":")
    if not separator:
        nearest = difflib.get_close_matches(name, TASK_SETS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(TASK_SETS)}"
        raise ConfigError(f'unknown task set {name!r}; {hint} (or "package.module:Class") {where}')
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the last two for names such as ":X" and ".a:X"
        raise ConfigError(f"task set {name!r}: {error} {where}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        raise ConfigError(f"task set {name!r}: {module_name} has no class {attribute!r} {where}")
    return found


def resolve_task_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return the set's own settings, its defaults filled in. Raises: ConfigError naming the option."""
    kind = getattr(task_set_class(name), "settings_type", NoOptions)
    return convert_options(kind, options, owner=f"task set {name!r}", where="[environment.options.task_options]")


def load_task_set(name: str, options: Mapping[str, Any], *, seed: int) -> TaskSet:
    """Return the set of tasks that is named. Raises: ConfigError."""
    found: TaskSet = task_set_class(name)(resolve_task_options(name, options), seed=seed)
    return found
