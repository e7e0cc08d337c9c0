"""Measure speed. Every figure is compared with something measured in the same call, since machines differ.

asyncrl bench step --json step.json       seconds per optimizer step against TRL's GRPOTrainer
asyncrl bench step --without-trl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from asyncrl.bench.step import bench_step
from asyncrl.errors import ConfigError

HELP = "measure speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    step = benches.add_parser("step", help="one optimizer step, generation included, against TRL")
    step.add_argument("--config", type=Path, default=Path("configs/demo.toml"), help="default configs/demo.toml")
    step.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="replace one setting")
    step.add_argument("--steps", type=int, default=3, help="timed steps of each trainer, after one for warm-up")
    step.add_argument("--without-trl", action="store_true", help="time asyncrl alone")
    step.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    step.set_defaults(command=_step)


def main(arguments: argparse.Namespace) -> int:
    """Never called: each benchmark has its own."""
    raise AssertionError(arguments)


def _step(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be >= 1, got {arguments.steps}")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json: there is no directory {arguments.json.parent}")
    report = bench_step(arguments.config, arguments.set, steps=arguments.steps, with_trl=not arguments.without_trl)
    for name in ("asyncrl", "trl"):
        if name in report:
            times = report[name]
            print(
                f"{name}: {times['mean_seconds']:.1f} s a step over {len(times['seconds'])} steps, completions of "
                f"{times['mean_completion_tokens']:.0f} tokens on average"
            )
    if "ratio" in report:
        print(f"asyncrl is {report['ratio']:.1f} times faster a step, {report['ratio_per_token']:.1f} times a token")
    _write(arguments.json, report)
    return 0


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"figures in {path}")
