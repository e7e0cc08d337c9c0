"""`asyncrl bench scale`: what grows with a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.bench.scale import bench_scale, table
from asyncrl.bench.scale_settings import GOALS, ScaleBench
from asyncrl.errors import ConfigError


def add_benchmark(benches: Any, say: Callable[[], Callable[[str], None]]) -> None:
    """Declare the benchmark; `say` makes what its progress is told to."""
    parser: argparse.ArgumentParser = benches.add_parser(
        "scale",
        help="the wire, a batch to two ranks, FSDP2, checkpoints, rollouts under way, requests to engines",
        description="The keys of the JSON file are listed in asyncrl/bench/scale.py. Takes about four minutes.",
    )
    for option in fields(ScaleBench):
        flag = f"--{option.name}"
        if option.name == "directory":
            parser.add_argument(flag, type=Path, default=Path(), help="on the disk to measure (default: here)")
        else:
            parser.add_argument(flag, type=int, default=option.default, metavar="N", help=f"default {option.default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.set_defaults(command=lambda arguments: run(arguments, say()))


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Measure; return the exit code."""
    bench = ScaleBench(**{option.name: getattr(arguments, option.name) for option in fields(ScaleBench)})
    if arguments.json and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json: there is no directory {arguments.json.parent}")
    report = bench_scale(bench, say=say)
    console = Console()
    console.print(table(report))
    for goal in GOALS:
        value = report["ratios"][goal.name]
        promise = f"promised: {'at least' if goal.is_least else 'at most'} {goal.limit:g}"
        print(f"{goal.words}: {value:.2f} ({promise}, {'kept' if goal.met(value) else 'missed'})")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"figures in {arguments.json}")
    return 0
