"""Measure a model on an environment's held-out tasks.

  asyncrl eval configs/demo.toml
  asyncrl eval configs/demo.toml --model runs/demo-1/checkpoints/step-40/model --samples 8 --json

Starts an engine and sandboxes, and no learner. Rates are from 0 to 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.evaluation import evaluate
from asyncrl.preflight import preflight
from asyncrl.processes import open_evaluation
from asyncrl.progress import Progress
from asyncrl.run_directory import RunDirectory
from asyncrl.status import EvaluationResult
from asyncrl.tokens import ChatRenderer

HELP = "measure a model on held-out tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model than the configuration's")
    parser.add_argument("--samples", type=int, metavar="N", help="episodes of each task; default as configured")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Measure; return the exit code."""
    config = load_config(arguments.config, arguments.set)
    if arguments.model:
        config = replace(config, model=replace(config.model, path=arguments.model))
        if config.engine.urls:
            raise ConfigError("--model cannot be served by servers that run elsewhere: leave urls empty ([engine])")
    samples = config.evaluation.samples if arguments.samples is None else arguments.samples
    if samples < 1:
        raise ConfigError(f"samples must be >= 1, got {samples} ([evaluation], --samples)")
    with tempfile.TemporaryDirectory(prefix="asyncrl-eval-") as scratch:
        directory = RunDirectory(Path(scratch))
        preflight(config)
        result = trio.run(_evaluate, config, directory, samples, arguments.json)
    if arguments.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        _print(result)
    return 0


async def _evaluate(config: Config, directory: RunDirectory, samples: int, quiet: bool) -> EvaluationResult:
    progress = Progress(Console(stderr=True, quiet=quiet), title="evaluation", max_steps=0)
    renderer = ChatRenderer.load(config.model.path)
    opening = open_evaluation(config, directory, renderer, config.model.path, progress.say)
    async with progress.shown(), opening as (tasks, sampler):
        held_out = tasks.held_out()
        if not held_out:
            raise ConfigError(f"environment {config.environment.name!r} has no held-out tasks ([environment])")
        progress.say(f"{len(held_out)} tasks, {samples} episodes each")
        return await evaluate(
            tasks,
            sampler,
            held_out,
            samples=samples,
            version=0,
            concurrent_tasks=max(1, config.engine.max_num_seqs // samples),
            deadline_s=config.buffer.group_deadline_s,
        )


def _print(result: EvaluationResult) -> None:
    table = Table(title="held-out tasks")
    table.add_column("task")
    table.add_column("solved", justify="right")
    for task_id, rate in sorted(result.by_task.items(), key=lambda item: -item[1]):
        table.add_row(task_id, f"{rate:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"solve rate {result.solve_rate:.3f}, mean reward {result.mean_reward:.3f} over {result.num_tasks} tasks, "
        f"{result.num_samples} episodes ({result.num_failed} failed and left out), {result.seconds:.0f} s"
    )
