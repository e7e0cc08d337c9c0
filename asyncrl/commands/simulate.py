"""Simulate what a configuration would do: the real loop, gate and buffer over simulated engines, learner and tasks.

  asyncrl simulate configs/demo.toml --steps 1000
  asyncrl simulate configs/demo.toml --steps 1000 --from runs/demo-1
  asyncrl simulate configs/gpu.toml --steps 1000 --rate environment_s=30 --rate sync_s=2
  asyncrl simulate configs/gpu.toml --steps 1000 --against buffer.max_off_policyness=0
  asyncrl simulate configs/gpu.toml --steps 50 --fault engine_death@20
  asyncrl simulate --cluster configs/clusters/gpus-8.toml configs/clusters/gpus-256.toml
  asyncrl simulate --cluster configs/clusters/gpus-8.toml --replay 200 --set buffer.max_off_policyness=3

Only [buffer] and the number and slots of the engines are read from the configuration; how long things take comes from
--from (a run that has been) and --rate. Time is simulated: hours pass in seconds, and nothing is started.

With --cluster nothing is simulated: what the GPUs, sandboxes, bandwidths and failure rates of each file come to is
computed, and printed side by side. asyncrl/simulation/CLUSTERS.md explains it; --replay N runs N steps of the real loop
over simulated engines of the same rates beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.commands.arguments import add_config_arguments, add_rate_arguments, forecast_of, rates_of
from asyncrl.commands.simulate_cluster import settings_help, show_clusters
from asyncrl.configs import load_config
from asyncrl.errors import ConfigError
from asyncrl.simulation import FAULTS
from asyncrl.simulation.faults import parse
from asyncrl.simulation.forecast import as_table

HELP = "simulate a configuration, or predict a cluster: throughput, staleness, idle shares"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_config_arguments(parser, optional=True)
    parser.epilog = settings_help()
    parser.add_argument(
        "--cluster", type=Path, nargs="+", default=[], metavar="FILE", help="predict these clusters, side by side"
    )
    parser.add_argument("--replay", type=int, default=0, metavar="N", help="with --cluster: N steps of the real loop")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, durations and rewards (default: 0)")
    add_rate_arguments(parser)
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND@VERSION",
        help="inject: " + "; ".join(f"{kind} ({what})" for kind, what in FAULTS.items()),
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="simulate a second configuration with these settings, and print the ratio of steps per hour",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Simulate; return the exit code."""
    if arguments.cluster:
        return _clusters(arguments)
    if arguments.config is None:
        raise ConfigError("give a configuration, or clusters (--cluster FILE)")
    if arguments.replay:
        raise ConfigError("--replay is for --cluster; --steps says how many steps of a configuration are simulated")
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be >= 1, got {arguments.steps}")
    config = load_config(arguments.config, arguments.set)
    rates = rates_of(arguments, config)
    how: Any = {"steps": arguments.steps, "seed": arguments.seed, "faults": parse(arguments.fault)}
    forecasts = {"simulated": forecast_of(config, rates, **how)}
    if arguments.against:
        other = load_config(arguments.config, [*arguments.set, *arguments.against])
        forecasts["against"] = forecast_of(other, rates, **how)
    if arguments.json:
        print(json.dumps({"rates": asdict(rates), **{name: asdict(f) for name, f in forecasts.items()}}, indent=2))
        return 0
    for name, forecast in forecasts.items():
        words = ", ".join(arguments.against) if name == "against" else str(arguments.config)
        _show(words, as_table(forecast))
    if arguments.against:
        ratio = forecasts["simulated"].steps_per_hour / forecasts["against"].steps_per_hour
        print(f"{arguments.config} takes {ratio:.2f} times the steps per hour of {', '.join(arguments.against)}")
    return 0


def _clusters(arguments: argparse.Namespace) -> int:
    for name in ("config", "run", "rate", "fault", "against"):
        if getattr(arguments, name):
            raise ConfigError(f"--cluster takes files of its own: leave out {_WORDS.get(name, '--' + name)}")
    if arguments.replay < 0:
        raise ConfigError(f"--replay must be >= 0 steps, got {arguments.replay}")
    return show_clusters(arguments.cluster, arguments.set, replay=arguments.replay, as_json=arguments.json)


_WORDS = {"config": "the configuration", "run": "--from"}


def _show(title: str, table: Mapping[str, Any]) -> None:
    print(title)
    for name, text in table.items():
        print(f"  {name:10} {text}")
