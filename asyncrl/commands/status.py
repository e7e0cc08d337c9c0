"""Show what a run does now, or what it did.

  asyncrl status runs/demo-1
  asyncrl status runs/demo-1 --json

Reads the run directory only: it works while the run goes on, after it, and after a crash.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.recording import read_metrics, read_warm_start
from asyncrl.run_directory import RunDirectory, is_running

_STATES = {"trained": "trained", "in_buffer": "in the buffer", "in_flight": "in flight"}

HELP = "show what a run does now, or did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/demo-1")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Show; return the exit code."""
    report = read_status(RunDirectory(arguments.run))
    if arguments.json:
        print(json.dumps(report, indent=2))
        return 0
    print(f"{report['run']}: {report['state']}")
    if report["moment"]:
        print(f"  {report['moment']} (written {report['age_seconds']:.0f} s ago)")
    for line in report["waiting"]:
        print(f"  {line}")
    for key, value in (report["summary"] or report["counters"]).items():
        if not isinstance(value, list):
            print(f"  {key}: {value}")
    for unit in ("groups", "trajectories", "tokens") if report["accounting"] else ():
        print(f"  {unit}: {_accounting_line(report['accounting'], unit)}")
    for environment, quantities in report["selection"].items():
        print(f"  trained on against generated in {environment}: {_selection_line(quantities)}")
    return 0


def _selection_line(quantities: dict[str, Any]) -> str:
    """Return how far the trained episodes lie from the generated ones, by quantity."""
    distances = ((name, stages.get("trained", {}).get("ks_distance")) for name, stages in quantities.items())
    return ", ".join(f"{name} {distance:.2f}" for name, distance in distances if distance is not None) or "nothing yet"


def _accounting_line(accounting: dict[str, Any], unit: str) -> str:
    """Return where what was generated is, in one line."""
    dropped = {reason: amount[unit] for reason, amount in accounting["dropped"].items() if amount[unit]}
    reasons = f" ({', '.join(f'{reason} {number}' for reason, number in sorted(dropped.items()))})" if dropped else ""
    there = " + ".join(f"{accounting[state][unit]} {words}" for state, words in _STATES.items())
    return f"{accounting['generated'][unit]} generated = {there} + {sum(dropped.values())} dropped{reasons}"


def read_status(directory: RunDirectory) -> dict[str, Any]:
    """Return the run's state (running, finished, stopped), moment, counters, accounting, last step and summary.

    Raises: ConfigError where there is no run.
    """
    if not directory.config.is_file():
        raise ConfigError(f"{directory.path} is no run directory: it holds no config.toml")
    running = is_running(directory)
    moment = _read(directory.status) or {}
    summary = None if running else _read(directory.summary)
    steps = read_metrics(directory) or read_warm_start(directory)
    return {
        "run": str(directory.path),
        "state": "running" if running else "finished" if summary else "stopped without a summary",
        "phase": moment.get("phase", "starting"),
        "moment": moment.get("moment", ""),
        "straggler_group": moment.get("straggler_group"),
        "waiting": moment.get("waiting", []) if running else [],
        "age_seconds": max(0.0, time.time() - moment["time"]) if moment else None,  # clocks are set back, too
        "counters": moment.get("counters", {}),
        "accounting": moment.get("accounting", {}),
        "selection": moment.get("selection", {}),
        "last_step": steps[-1] if steps else None,
        "summary": summary,
    }


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
