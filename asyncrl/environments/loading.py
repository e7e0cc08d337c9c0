"""Finds an environment by name and builds it with its own options."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.environments.chat import ChatSettings
from asyncrl.environments.latency import LatencySettings
from asyncrl.errors import ConfigError
from asyncrl.protocols import Environment, SandboxBackend
from asyncrl.rollout import RolloutSettings
from asyncrl.tokens import ChatRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Which environment asks the tasks.

    Example:
        >>> EnvironmentSettings(name="bugfix", options={"max_turns": 1}).options["max_turns"]
        1
    """

    name: str = "bugfix"
    """A name of the ENVIRONMENTS table, or "package.module:Class"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own settings: the fields of its `settings_type`."""
    chat: ChatSettings = field(default_factory=ChatSettings)
    """How its messages become tokens."""
    latency: LatencySettings = field(default_factory=LatencySettings)
    """Seconds added to every episode of a run, for experiments."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a name or an option that the environment does not have."""
        resolve_options(self)


def spell_out(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an [environment] that names one of verifiers' in short as any other is named.

    Example:
        >>> spell_out({"verifiers": "my_taskset", "options": {"num_tasks": 8}})
        {'options': {'num_tasks': 8, 'taskset': 'my_taskset'}, 'name': 'verifiers'}

    Raises: ConfigError where it names another one besides.
    """
    if "verifiers" not in table:
        return table
    rest = {key: value for key, value in table.items() if key != "verifiers"}
    options, taskset = rest.get("options", {}), table["verifiers"]
    if "name" in rest or "taskset" in options:
        raise ConfigError(f"verifiers = {taskset!r} names the environment: leave out name and taskset ([environment])")
    return {**rest, "options": {**options, "taskset": taskset}, "name": "verifiers"}


def environment_class(name: str) -> Any:
    """Return the class that `name` stands for. Raises ConfigError where there is none."""
    # imported late: the table stands in the package that this module belongs to
    from asyncrl.environments import ENVIRONMENTS

    path = ENVIRONMENTS.get(name, name)
    module_name, separator, attribute = path.partition(":")
    if not separator:
        nearest = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(ENVIRONMENTS)}"
        raise ConfigError(f'unknown environment {name!r}; {hint} (or "package.module:Class") ([environment] name)')
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the last two for names such as ":X" and ".a:X"
        raise ConfigError(f"environment {name!r}: {error} ([environment] name)") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        raise ConfigError(f"environment {name!r}: {module_name} has no class {attribute!r} ([environment] name)")
    return found


def resolve_options(settings: EnvironmentSettings) -> Any:
    """Return the environment's own settings, its defaults filled in.

    Raises: ConfigError naming the option, what was found and what is allowed.
    """
    kind = getattr(environment_class(settings.name), "settings_type", RolloutSettings)
    return convert_options(
        kind, settings.options, owner=f"environment {settings.name!r}", where="[environment.options]"
    )


def convert_options(kind: Any, options: Mapping[str, Any], *, owner: str, where: str) -> Any:
    """Return a settings dataclass of `kind` from what was typed, its defaults filled in.

    Raises: ConfigError naming the option and its `owner`, what was found and what is allowed, and `where`.
    """
    hints, known = typing.get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"allowed: {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"unknown option {key!r} of {owner}; {hint} ({where})")
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):  # msgspec passes over unknown names
            values[key] = convert_options(hints[key], value, owner=owner, where=f"{where.removesuffix(']')}.{key}]")
            continue
        try:
            values[key] = msgspec.convert(value, hints[key], dec_hook=_to_path)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{key} = {value!r}: {error} ({where})") from error
    missing = [
        name
        for name, f in known.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{owner} needs {', '.join(missing)} ({where})")
    return kind(**values)


def load_environment(
    settings: EnvironmentSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int
) -> Environment:
    """Return the environment that `settings` name.

    Its class is called with its settings, and `renderer`, `sandboxes` and `seed` by keyword. Raises: ConfigError.
    """
    options = resolve_options(settings)
    renderer = settings.chat.rendering(renderer)
    environment = environment_class(settings.name)(options, renderer=renderer, sandboxes=sandboxes, seed=seed)
    if not isinstance(environment, Environment):
        wanted = "get_item, held_out, collect_trajectories, state, restore, aclose and name"
        raise ConfigError(f"environment {settings.name!r} must have {wanted} ([environment] name)")
    _check_task_ids(environment, settings.name)
    return environment


def _check_task_ids(environment: Environment, name: str) -> None:
    """Raise ConfigError where two tasks that are known beforehand have the same id: figures go by it."""
    lists = {"held-out tasks": environment.held_out()}
    if hasattr(environment, "training_tasks"):
        lists["training tasks"] = environment.training_tasks(0)
    for words, tasks in lists.items():
        counts = Counter((task.environment, task.task_id) for task in tasks)
        twice = [task_id for (_, task_id), count in counts.items() if count > 1]
        if twice:
            raise ConfigError(
                f"environment {name!r}: {len(twice)} of the {words} have an id that another one has, "
                f"{', '.join(map(repr, twice[:3]))}: give each its own task_id ([environment] name)"
            )


def _to_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"cannot read {kind.__name__}")
