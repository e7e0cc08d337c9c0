"""`asyncrl bench gpu`: what a GPU makes of the learner."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.bench.gpu_settings import SHAPES, GpuBench
from asyncrl.errors import ConfigError

_DEFAULTS = GpuBench()


def add_benchmark(benches: Any, say: Callable[[], Callable[[str], None]]) -> None:
    """Declare the benchmark; `say` makes what its progress is told to."""
    parser: argparse.ArgumentParser = benches.add_parser(
        "gpu",
        help="the learner on a GPU: speed, memory, attention, packing, loss, copies; needs no model",
        description="The keys of the JSON file are listed in asyncrl/bench/gpu.py. Takes less than five minutes.",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=[*_DEFAULTS.shapes],
        metavar="NAME",
        help=f"of the random weights: {', '.join(SHAPES)} (default: {' '.join(_DEFAULTS.shapes)})",
    )
    parser.add_argument(
        "--device", default=_DEFAULTS.device, help="cuda, or cpu to try the benchmark itself (default: cuda)"
    )
    parser.add_argument("--rounds", type=int, default=_DEFAULTS.rounds, metavar="N", help=f"default {_DEFAULTS.rounds}")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=_DEFAULTS.limit_s,
        metavar="S",
        help=f"begin nothing new after that (default: {_DEFAULTS.limit_s:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.set_defaults(command=lambda arguments: run(arguments, say()))


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Measure; return the exit code."""
    bench = GpuBench(
        shapes=tuple(arguments.shape), device=arguments.device, rounds=arguments.rounds, limit_s=arguments.limit_s
    )
    if arguments.json and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json: there is no directory {arguments.json.parent}")
    from asyncrl.bench.gpu import bench_gpu, table  # they need torch, and the command line must start without

    report = bench_gpu(bench, say=say)
    Console().print(table(report))
    for piece in report["left_out"]:
        print(f"not begun within {bench.limit_s:g} s: {piece}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"figures in {arguments.json}")
    return 0
