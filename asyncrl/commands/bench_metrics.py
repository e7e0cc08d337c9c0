"""`asyncrl bench metrics`: what watching a run costs."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.bench.metrics_settings import GOALS, MetricsBench
from asyncrl.configs import load_config
from asyncrl.errors import ConfigError


def add_benchmark(benches: Any, model: Path) -> None:
    """Declare the benchmark; `model` is the one that is usual."""
    parser: argparse.ArgumentParser = benches.add_parser(
        "metrics",
        help="what watching costs: in a step, in the loop, at a scrape, on disk, in the report, in a whole run",
        description="The keys of the JSON file are listed in asyncrl/bench/metrics.py. Takes about five minutes, and "
        "fifteen more for the pairs of runs, which are of --config.",
    )
    for option in fields(MetricsBench):
        flag = f"--{option.name.replace('_', '-')}"
        if option.name == "model":
            parser.add_argument(flag, type=Path, default=model, help=f"a model directory (default: {model})")
        else:
            parser.add_argument(flag, type=int, default=option.default, metavar="N", help=f"default {option.default}")
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"), help="default configs/demo.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="replace one setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure; return the exit code."""
    from asyncrl.bench.metrics import bench_metrics  # it needs torch, and the command line must start without

    if arguments.json and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json {arguments.json} cannot be written: {arguments.json.parent} is no directory")
    bench = MetricsBench(**{f.name: getattr(arguments, f.name) for f in fields(MetricsBench)})
    config = load_config(arguments.config, arguments.set) if bench.pairs else None
    report = bench_metrics(bench, config)
    table = Table("what", "measured", "at most", "kept")
    for goal in (goal for goal in GOALS if goal.name in report["ratios"]):
        value = report["ratios"][goal.name]
        table.add_row(goal.words, f"{value:.3g}", f"{goal.limit:g}", "yes" if goal.met(value) else "no")
    Console().print(table)
    if runs := report["runs"]:
        print(
            f"everything on against off over {runs['steps']} steps: {runs['cpu_share']:+.1%} of processor time "
            f"({runs['cpu_share_low']:+.1%} to {runs['cpu_share_high']:+.1%})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
