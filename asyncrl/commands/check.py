"""Resolve a configuration, refuse what cannot run, and print what would run.

  asyncrl check configs/demo.toml
  asyncrl check configs/demo.toml --set buffer.max_off_policyness=2 --json

Nothing is started. Exit code 2 and one message when a run of it would be refused.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from asyncrl import run_directory
from asyncrl.commands.arguments import add_config_arguments
from asyncrl.configs import Config, dump_config, load_config, to_table
from asyncrl.preflight import preflight
from asyncrl.serving import listen

HELP = "resolve a configuration and refuse what cannot run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print configuration and plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Check; return the exit code."""
    config = load_config(arguments.config, arguments.set)
    directory = run_directory.choose(config, resume=False)
    preflight(config)
    run_directory.check_space(directory, config)
    listen(config.metrics.host, config.metrics.port, setting="[metrics] port").close()
    plan = process_plan(config) | {"run directory": str(directory.path)}
    if arguments.json:
        print(json.dumps({"config": to_table(config), "plan": plan}, indent=2))
        return 0
    print(dump_config(config))
    print("# what would run")
    for name, what in plan.items():
        print(f"# {name}: {what}")
    return 0


def process_plan(config: Config) -> dict[str, Any]:
    """Return who would run where, and how much would be under way."""
    buffer = config.buffer
    engines = ", ".join(config.engine.urls) or "one vLLM server, started here"
    return {
        "orchestrator": "this process",
        "learner": f"one process, loss {config.learner.loss}, {config.learner.dtype}",
        "engines": engines,
        "sandboxes": config.sandbox.backend,
        "environment": config.environment.name,
        "one step": f"{buffer.groups_per_step} groups of {buffer.group_size} trajectories",
        "under way": f"at most {buffer.num_slots} groups, {buffer.num_slots * buffer.group_size} trajectories",
        "staleness": f"at most {buffer.max_off_policyness} optimizer steps, window {buffer.effective_window}",
    }
