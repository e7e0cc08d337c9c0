"""Write when things happened in a run as a trace: learner, weight syncs, groups, episodes and turns, sandbox calls.

  asyncrl trace runs/demo-1
  asyncrl trace runs/demo-1 --last 600 --out trace.json
  asyncrl trace runs/demo-1 --format otlp --out spans.json

https://ui.perfetto.dev and chrome://tracing open the first two; an OpenTelemetry collector reads the third. The run has
kept the newest events, as many as fit into `events_mib` ([metrics]). Reads the run directory only, while the run goes
on too.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.run_directory import RunDirectory
from asyncrl.timeline import read_events
from asyncrl.trace import chrome, otlp, slices

HELP = "write a run's timeline as a trace for Perfetto or OpenTelemetry"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/demo-1")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the trace (default: trace.json in the run)")
    parser.add_argument("--format", choices=("chrome", "otlp"), default="chrome", help="(default: chrome)")
    parser.add_argument(
        "--last", type=float, default=math.inf, metavar="SECONDS", help="only what ended in the run's last seconds"
    )


def main(arguments: argparse.Namespace) -> int:
    """Write; return the exit code."""
    directory = RunDirectory(arguments.run)
    if not directory.config.is_file():
        raise ConfigError(f"{directory.path} is no run directory: it holds no config.toml")
    if not arguments.last > 0:
        raise ConfigError(f"--last must be > 0 seconds, got {arguments.last:g}")
    found = slices(read_events(directory.events))
    if not found:
        raise ConfigError(f"{directory.events} holds no events: the run has not begun, or events_mib was 0 ([metrics])")
    end = max(one.ended for one in found)
    found = [one for one in found if one.ended >= end - arguments.last]
    trace = chrome(found) if arguments.format == "chrome" else otlp(found, run=directory.run_id)
    out: Path = arguments.out or directory.path / "trace.json"
    try:
        out.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    print(f"trace in {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0
