"""Coding tasks on the command line: which set is meant, what a task holds, and what comes of it without a model."""

from __future__ import annotations

import argparse
import difflib
import json
import tempfile
import textwrap
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from asyncrl.coding.bundled import TASK_SETS, load_task_set, resolve_task_options
from asyncrl.coding.grading import Grader
from asyncrl.coding.playing import Played, play
from asyncrl.coding.sets.mutation import read_functions
from asyncrl.coding.sets.mutation_checks import prove_all, proven_path, read_proven, write_proven
from asyncrl.coding.tasks import CallChecks, Checks, CodingTask, PytestChecks, TaskSet, TaskStep
from asyncrl.commands.arguments import sandbox_settings_of
from asyncrl.configs import load_config
from asyncrl.configs.loader import apply_overrides, read_toml
from asyncrl.environments.validate import task_set_of
from asyncrl.errors import ConfigError
from asyncrl.preflight import check_model
from asyncrl.processes import open_tasks
from asyncrl.protocols import SandboxBackend
from asyncrl.sandbox import SandboxSettings, open_backend

_SHOWN_NAMES = 20


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where tasks come from: a configuration, or a set that is named, and `--set`."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml", help="a configuration; or name --tasks")
    parser.add_argument(
        "--tasks",
        metavar="NAME[:PATH]",
        help=f"a set of coding tasks instead: {', '.join(TASK_SETS)}, or package.module:Class; PATH is its option path",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one setting of the file; with --tasks, tasks.KEY (an option of the set) or sandbox.KEY",
    )


def require_one_source(arguments: argparse.Namespace) -> None:
    """Put right what was read as the configuration and is the task. Raises: ConfigError unless there is one source.

    A task alone is a directory in Harbor's form, or an id that begins with the name of its set.
    """
    alone = arguments.task is None and arguments.config is not None and arguments.config.suffix != ".toml"
    if alone:
        arguments.config, arguments.task = None, str(arguments.config)
    if arguments.tasks is None and arguments.config is None and arguments.task is not None:
        arguments.tasks, arguments.task = _set_of(arguments.task)
    if (arguments.config is None) == (arguments.tasks is None):
        raise ConfigError("name either a configuration or --tasks NAME[:PATH], not both and not neither")


def _set_of(task: str) -> tuple[str, str]:
    """Return the set, as `--tasks` takes it, and the id of a task that is named alone. Raises: ConfigError."""
    if Path(task).is_dir():
        return f"harbor:{task}", f"harbor/{Path(task).resolve().name}"
    name = task.partition("/")[0]
    if name not in TASK_SETS:
        raise ConfigError(
            f"{task!r} alone is no task: give a task's directory, an id that begins with the name of its set "
            f"({', '.join(TASK_SETS)}), or a configuration or --tasks NAME[:PATH] before it"
        )
    return name, task


def named_set(spec: str, overrides: list[str]) -> tuple[TaskSet, SandboxSettings]:
    """Return the set that `--tasks` names, and the settings of its sandboxes. Raises: ConfigError."""
    name, separator, path = spec.partition(":")
    if name not in TASK_SETS and separator:
        name, path = spec, ""
    own = [override for override in overrides if override.startswith("tasks.")]
    options = {**({"path": path} if path else {}), **apply_overrides({}, own).get("tasks", {})}
    sandbox = sandbox_settings_of(None, [override for override in overrides if override not in own])
    return load_task_set(name, options, seed=0), sandbox


@asynccontextmanager
async def _opened(arguments: argparse.Namespace) -> AsyncIterator[tuple[TaskSet, SandboxBackend]]:
    if arguments.tasks is None:
        config = load_config(arguments.config, arguments.set)
        check_model(config.model.path)
        async with open_tasks(config) as (environment, _, backend):
            yield task_set_of(environment), backend
        return
    tasks, settings = named_set(arguments.tasks, arguments.set)
    with tempfile.TemporaryDirectory(prefix="asyncrl-tasks-") as scratch:
        async with open_backend(settings, directory=Path(scratch)) as backend:
            yield tasks, backend


async def run_task(arguments: argparse.Namespace) -> int:
    """Play one task as it stands or with its reference, print its verdict, and return 0 where it is solved, else 1."""
    async with _opened(arguments) as (tasks, backend), Grader(backend) as grader:
        task = find_task(tasks, arguments.task)
        played = await play(backend, grader, task, solution=arguments.solution)
    if arguments.json:
        print(json.dumps({**asdict(played), "solution": arguments.solution, "notes": task.notes}, indent=2))
    else:
        print(_told(task, played, solution=arguments.solution))
    return 0 if played.solved else 1


def add_mutate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which functions are mutated: a configuration's, or those that `--set` names."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml", help="whose task_options are taken")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="tasks.KEY=VALUE",
        help="an option of the set mutation (path, tests, per_function, checked), or sandbox.KEY",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


async def mutate(arguments: argparse.Namespace) -> int:
    """Find out which mutants are bugs that tests see, write it down for the set `mutation`, and return 0."""
    own = [override for override in arguments.set if override.startswith("tasks.")]
    options = _options_of(arguments.config) | apply_overrides({}, own).get("tasks", {})
    sandbox = sandbox_settings_of(arguments.config, [one for one in arguments.set if one not in own])
    settings = resolve_task_options("mutation", options)
    functions = read_functions(settings)
    path = proven_path(settings.checked, functions, most=settings.per_function)
    if path.exists():
        proven = read_proven(path)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="asyncrl-tasks-") as scratch,
            Progress(console=Console(stderr=True), transient=True) as progress,
        ):
            bar = progress.add_task("running the mutants", total=len(functions))
            async with open_backend(sandbox, directory=Path(scratch)) as backend:
                proven = await prove_all(
                    functions, backend, most=settings.per_function, report=lambda _: progress.advance(bar)
                )
        write_proven(path, proven)
    dropped: Counter[str] = Counter()
    for one in proven:
        dropped.update(one.dropped)
    told = {
        "file": str(path),
        "functions": len(functions),
        "with_mutants": sum(bool(one.mutants) for one in proven),
        "mutants": sum(len(one.mutants) for one in proven),
        "dropped": dict(dropped),
    }
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    left_out = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"
    print(f"{told['mutants']} mutants of {told['with_mutants']} of {told['functions']} functions; not kept: {left_out}")
    print(f"written to {path}")
    return 0


def _options_of(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    options = read_toml(config).get("environment", {}).get("options", {})
    if options.get("tasks") != "mutation":
        raise ConfigError(f"{config} does not ask for mutants: tasks must be 'mutation' ([environment.options])")
    return dict(options.get("task_options", {}))


def find_task(tasks: TaskSet, task_id: str) -> CodingTask:
    """Return a task by its id, also one that is not listed. Raises: ConfigError with the nearest one that is."""
    try:
        return tasks.task(task_id)
    except ConfigError as error:
        near = difflib.get_close_matches(task_id, ids, n=1) if task_id not in (ids := tasks.all_ids()) else []
        raise ConfigError(f"{error}; did you mean {near[0]!r}?" if near else str(error)) from None


def show_set(tasks: TaskSet, task_id: str | None) -> int:
    """Print the ids of a set and what was refused, or one task."""
    if task_id is not None:
        print(described(find_task(tasks, task_id)))
        return 0
    print("\n".join(tasks.all_ids()))
    for refused in getattr(tasks, "refused", {}).values():
        print(f"refused: {refused}")
    return 0


def described(task: CodingTask) -> str:
    """Return what a task holds, for a person: its checks and its reference too."""
    lines = [f"{task.task_id} ({task.origin})" if task.origin else task.task_id]
    lines += [f"note: {note}" for note in task.notes]
    if task.image:
        lines.append(f"image: {task.image}")
    if task.variables:
        lines.append("variables: " + ", ".join(task.variables))
    sizes = [f"{path} ({len(data)} bytes)" for path, data in sorted(task.files.items())]
    lines.append(f"files in {task.work}: {_first(sizes)}")
    for number, step in enumerate(task.steps, start=1):
        lines += ["", f"step {step.name or number}:", textwrap.indent(step.instruction.strip(), "    ")]
        lines += [f"checks: {_checks(step.checks)}", f"reference: {_reference(step)}"]
    return "\n".join(lines)


def _checks(checks: Checks) -> str:
    match checks:
        case CallChecks():
            shown = f"{len(checks.visible)} shown and {len(checks.hidden)} hidden calls"
            return f"{shown} of {checks.function} in {checks.path}, compared outside the sandbox"
        case PytestChecks():
            return f"{len(checks.expected)} tests in {_first(sorted(checks.tests))}, by pytest"
        case _:
            where = "a copy of the agent's sandbox" if checks.submitted is None else "a sandbox of its own"
            installs = f", with {', '.join(checks.provided)} said to be here" if checks.provided else ""
            return f"{checks.script} of {_first(sorted(checks.files))} in {where}{installs}; {checks.timeout_s:g} s"


def _reference(step: TaskStep) -> str:
    if step.reference is None:
        return "none"
    return step.reference.script or _first(sorted(step.reference.files))


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more or "none"


def _told(task: CodingTask, played: Played, *, solution: bool) -> str:
    what = "with its reference" if solution else "as it stands"
    result = "solved" if played.solved else "not solved"
    lines = [f"{task.task_id} {what} ({played.wall}): reward {played.reward:g}, {result}"]
    lines += [f"note: {note}" for note in task.notes]
    for name, verdict in played.verdicts.items():
        rewards = ", ".join(f"{key} {value:g}" for key, value in verdict.rewards.items())
        counted = f"{sum(verdict.passed.values())} of {len(verdict.passed)} checks" if verdict.passed else rewards
        lines.append(f"step {name}: {counted or f'reward {verdict.reward:g}'}")
        lines += [f"    {path} did not cross: {why}" for path, why in verdict.refused.items()]
        if verdict.detail:
            lines.append(textwrap.indent(verdict.detail, "    "))
    skipped = len(task.steps) - len(played.verdicts)
    return "\n".join([*lines, f"{skipped} further steps were not reached"] if skipped else lines)
