"""Show what a run does now, or what it did.

  asyncrl status runs/demo-1
  asyncrl status runs/demo-1 --json

Reads the run directory only: it works while the run goes on, after it, and after a crash.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.recording import WARM_START, read_metrics, read_spikes, read_warm_start
from asyncrl.run_directory import RunDirectory, is_running
from asyncrl.spikes import WORDS, Cause

_PACE_STEPS = 10  # that the rest of the run is told by
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
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())  # what is not finite becomes null
        return 0
    print(f"{report['run']}: {report['state']}")
    if report["moment"]:
        print(f"  {report['moment']} (written {report['age_seconds']:.0f} s ago)")
    if report["phase"] == "paused" and report["pid"]:
        print(f"  kill -USR1 {report['pid']} goes on, kill -INT {report['pid']} ends it")
    for line in report["waiting"]:
        print(f"  {line}")
    for line in _now(report):
        print(f"  {line}")
    for key, value in (report["summary"] or report["counters"]).items():
        if not isinstance(value, list):
            print(f"  {key}: {value}")
    for unit in ("groups", "trajectories", "tokens") if report["accounting"] else ():
        print(f"  {unit}: {_accounting_line(report['accounting'], unit)}")
    for environment, quantities in report["selection"].items():
        print(f"  trained on against generated in {environment}: {_selection_line(quantities)}")
    return 0


_SHOWN = (
    ("solved", "solve_rate", "{:.2f}"),
    ("reward", "reward_mean", "{:.2f}"),
    ("largest ratio", "importance_ratio_max", "{:.2f}"),
    ("ESS", "ess_token", "{:.2f}"),
    ("staleness", "staleness_max", "{:.0f}"),
    ("gradient norm", "grad_norm", "{:.2f}"),
    ("entropy", "entropy", "{:.2f}"),
)
"""Of the last step: title, key, form."""


def _now(report: Mapping[str, Any]) -> list[str]:
    """Return the last step, how long the run will take, and what was measured, each in a line."""
    lines, step = [], report["last_step"]
    if step and step.get("phase") != WARM_START:
        of = f" of {report['max_steps']}" if report["max_steps"] else ""
        figures = (f"{title} {form.format(step[key])}" for title, key, form in _SHOWN if step.get(key) is not None)
        lines.append(f"step {step['step']}{of}: {', '.join(figures)}")
    if report["eta_seconds"] is not None:
        lines.append(f"about {report['eta_seconds'] / 60:.0f} minutes more, at the pace of the last steps")
    if report["last_spike"]:
        spike = report["last_spike"]
        lines.append(
            f"its largest ratio: {WORDS[Cause(spike['cause'])]} ({spike['task_id']}, {spike['trajectory_id']})"
        )
    if report["evaluations"]:
        rates = (f"{result['solve_rate']:.3f} at version {result['version']}" for result in report["evaluations"])
        lines.append(f"held-out tasks solved: {', '.join(rates)}")
    return lines


def _eta_seconds(steps: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> float | None:
    """Return how long the run will go on at the pace of its last steps, None where that cannot be told."""
    last = [step["seconds"] for step in steps[-_PACE_STEPS:]]
    if len(last) < 2 or not run.get("steps"):
        return None
    left: float = (run["steps"] - steps[-1]["step"]) * (last[-1] - last[0]) / (len(last) - 1)
    if run.get("max_minutes"):
        left = min(left, 60 * run["max_minutes"] - last[-1])
    return max(0.0, left)


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
    on_rollouts = read_metrics(directory)
    steps = on_rollouts or read_warm_start(directory)
    spikes = read_spikes(directory)
    settings = _settings(directory.config)
    return {
        "run": str(directory.path),
        "state": "running" if running else "finished" if summary else "stopped without a summary",
        "phase": moment.get("phase", "starting"),
        "pid": moment.get("pid") if running else None,
        "moment": moment.get("moment", ""),
        "straggler_group": moment.get("straggler_group"),
        "waiting": moment.get("waiting", []) if running else [],
        "age_seconds": max(0.0, time.time() - moment["time"]) if moment else None,  # clocks are set back, too
        "counters": moment.get("counters", {}),
        "accounting": moment.get("accounting", {}),
        "selection": moment.get("selection", {}),
        "max_steps": settings.get("steps"),
        "eta_seconds": _eta_seconds(on_rollouts, settings) if running else None,
        "last_step": steps[-1] if steps else None,
        "last_spike": spikes[-1]["tokens"][0] if spikes and spikes[-1].get("tokens") else None,
        "evaluations": moment.get("counters", {}).get("evaluations", []),
        "summary": summary,
    }


def _settings(path: Path) -> dict[str, Any]:
    """Return [run] of a configuration, as far as it can be read: a run of an older version is still shown."""
    try:
        run = tomllib.loads(path.read_text(encoding="utf-8")).get("run", {})
    except ValueError:
        return {}
    return run if isinstance(run, dict) else {}


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
