"""Measure a model on an environment's tasks.

  asyncrl eval configs/demo.toml
  asyncrl eval configs/demo.toml --run runs/demo-1 --baseline models/smollm2-135m-instruct
  asyncrl eval configs/demo.toml --model runs/demo-1/checkpoints/step-40/model --samples 8 --json

Starts an engine and sandboxes of its own, and no learner, so that a run may train on beside it while one of its
versions is measured. Held-out tasks unless --split says otherwise. Rates are from 0 to 1, with 95 % intervals over
tasks like these; pass@k is the chance that one of k episodes solves a task. With a baseline both are asked the same
tasks, and the difference is a paired one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from asyncrl.checkpoint import CheckpointStore
from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, at_home, load_config
from asyncrl.errors import ConfigError
from asyncrl.evaluation import evaluate
from asyncrl.learner.merged import is_adapter, write_whole
from asyncrl.preflight import preflight
from asyncrl.processes import open_evaluation
from asyncrl.progress import Progress
from asyncrl.protocols import Environment
from asyncrl.run_directory import RunDirectory
from asyncrl.solve_rates import difference
from asyncrl.status import EvaluationResult
from asyncrl.tokens import ChatRenderer
from asyncrl.types import PolicyVersion, Task

HELP = "measure a model on held-out tasks, alone or against another"

_SHOWN_K = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model on the tasks."""

    model: Path
    result: EvaluationResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--model", type=Path, metavar="DIR", help="another model than the configuration's")
    whose.add_argument("--run", type=Path, metavar="RUN", help="the model of a run's newest checkpoint")
    parser.add_argument("--version", type=int, metavar="N", help="of --run: the checkpoint of this policy version")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="a model to compare with, on the same tasks")
    parser.add_argument("--split", choices=("held-out", "training"), default="held-out", help="default: held-out")
    parser.add_argument("--tasks", type=int, metavar="N", help="the first N tasks alone")
    parser.add_argument("--samples", type=int, metavar="N", help="episodes of each task; default as configured")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object here too")


def main(arguments: argparse.Namespace) -> int:
    """Measure; return the exit code."""
    config = at_home(load_config(arguments.config, arguments.set))
    samples = config.evaluation.samples if arguments.samples is None else arguments.samples
    for name, number in (("samples ([evaluation], --samples)", samples), ("--tasks", arguments.tasks)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be >= 1, got {number}")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise ConfigError(f"--out: there is no directory {arguments.out.parent}")
    model, version = _model(arguments, config)
    if config.engine.urls and (model != config.model.path or arguments.baseline):
        raise ConfigError("servers that run elsewhere serve a model of their own: leave urls empty ([engine])")
    models = [path for path in (model, arguments.baseline) if path]
    with tempfile.TemporaryDirectory(prefix="asyncrl-eval-models-") as scratch:
        wholes = [_whole(path, Path(scratch) / str(place)) for place, path in enumerate(models)]
        configs = [replace(config, model=replace(config.model, path=path)) for path in wholes]
        for one in configs:
            preflight(one)
        measured = [
            replace(_measure(one, arguments, samples, version if one is configs[0] else 0), model=path)
            for one, path in zip(configs, models, strict=True)
        ]
    found = _as_json(measured)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print(measured, found)
    return 0


def _model(arguments: argparse.Namespace, config: Config) -> tuple[Path, PolicyVersion]:
    """Return the model to measure, and its policy version where it is a run's."""
    if arguments.version is not None and arguments.run is None:
        raise ConfigError(f"--version {arguments.version} is of a run: give --run too")
    if arguments.run is None:
        return arguments.model or config.model.path, 0
    checkpoints = CheckpointStore(RunDirectory(arguments.run).checkpoints, keep=1)
    checkpoint = checkpoints.newest() if arguments.version is None else checkpoints.of_version(arguments.version)
    if checkpoint is None:
        kept = ", ".join(map(str, checkpoints.versions())) or "none"
        raise ConfigError(f"there is no such checkpoint in {arguments.run}: kept are {kept} (--run, --version)")
    return checkpoint.model_directory, checkpoint.version


def _whole(model: Path, scratch: Path) -> Path:
    """Return a directory that an engine can serve: `model`, or what the adapter in it makes of the model it names."""
    if not is_adapter(model):
        return model
    write_whole(model, scratch)
    return scratch


def _measure(config: Config, arguments: argparse.Namespace, samples: int, version: PolicyVersion) -> Measured:
    with tempfile.TemporaryDirectory(prefix="asyncrl-eval-") as scratch:
        return trio.run(_evaluate, config, RunDirectory(Path(scratch)), arguments, samples, version)


async def _evaluate(
    config: Config, directory: RunDirectory, arguments: argparse.Namespace, samples: int, version: PolicyVersion
) -> Measured:
    progress = Progress(Console(stderr=True, quiet=arguments.json), title="evaluation", max_steps=0)
    renderer = ChatRenderer.load(config.model.path)
    opening = open_evaluation(config, directory, renderer, config.model.path, progress.say)
    async with progress.shown(), opening as (environment, sampler):
        tasks = _tasks(environment, config, arguments.split)[: arguments.tasks]
        progress.say(f"{config.model.path}: {len(tasks)} tasks, {samples} episodes each")
        result = await evaluate(
            environment,
            sampler,
            tasks,
            samples=samples,
            version=version,
            concurrent_tasks=max(1, config.engine.max_num_seqs // samples),
            deadline_s=config.buffer.group_deadline_s,
        )
        return Measured(model=config.model.path, result=result)


def _tasks(environment: Environment, config: Config, split: str) -> Sequence[Task]:
    if split == "training":
        if not hasattr(environment, "training_tasks"):
            raise ConfigError(
                f"environment {config.environment.name!r} has no training_tasks(epoch) that lists them ([environment])"
            )
        return environment.training_tasks(0)  # type: ignore[no-any-return]
    if not environment.held_out():
        raise ConfigError(f"environment {config.environment.name!r} has no held-out tasks ([environment])")
    return environment.held_out()


def _as_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the first model's result, and what it is compared with."""
    first, *others = measured
    found = {"model": str(first.model), **asdict(first.result)}
    for other in others:
        names = [name for name in first.result.by_task if name in other.result.by_task]
        ours, theirs = ([one.result.by_task[name] for name in names] for one in (first, other))
        gain, low, high = difference(ours, theirs)
        found["baseline"] = {"model": str(other.model), **asdict(other.result)}
        found["difference"] = {"solve_rate": gain, "interval": [low, high], "num_tasks": len(names)}
    return found


def _print(measured: Sequence[Measured], found: dict[str, Any]) -> None:
    console = Console()
    table = Table("task", title="share of the episodes that solved it")
    for one in measured:
        table.add_column(one.model.name, justify="right")
    for name in sorted(measured[0].result.by_task, key=lambda name: -measured[0].result.by_task[name]):
        rates = [one.result.by_task.get(name) for one in measured]
        table.add_row(name, *("failed" if rate is None else f"{rate:.2f}" for rate in rates))
    console.print(table)
    for one in measured:
        result = one.result
        low, high = result.interval
        console.print(
            f"{one.model}: solve rate {result.solve_rate:.3f} ({low:.3f} to {high:.3f}), mean reward "
            f"{result.mean_reward:.3f} over {result.num_tasks} tasks, {result.num_samples} episodes "
            f"({result.num_failed} failed and left out), {result.seconds:.0f} s",
            soft_wrap=True,
        )
        shown = {k: result.pass_at[k - 1] for k in _SHOWN_K if k <= len(result.pass_at)}
        console.print("  " + ", ".join(f"pass@{k} {chance:.3f}" for k, chance in shown.items()))
    if "difference" in found:
        gain, (low, high) = found["difference"]["solve_rate"], found["difference"]["interval"]
        console.print(f"difference {gain:+.3f} ({low:+.3f} to {high:+.3f})")
