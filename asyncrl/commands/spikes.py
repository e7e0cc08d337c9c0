"""Show which tokens made a run's largest importance ratios, or weighed most in a gradient, and the likely cause.

  asyncrl spikes runs/demo-1
  asyncrl spikes runs/demo-1 --step 12
  asyncrl spikes runs/demo-1 --by influence --json

A token's influence is |d loss / d log-prob|, as the backward pass found it: |ratio x advantage| over the loss's
denominator where the clip lets the token pass, and 0 where it does not; it is shown as its share of the step's sum.
Without --step: the largest of the whole run. Reads the run directory only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.recording import read_spikes
from asyncrl.run_directory import RunDirectory
from asyncrl.spikes import WORDS, Cause

HELP = "show which tokens made the largest importance ratios, and why"

_SHOWN = 10  # tokens of a whole run, unless told otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/demo-1")
    parser.add_argument("--step", type=int, help="only this optimizer step, and all that was kept of it")
    parser.add_argument(
        "--by", choices=("ratio", "influence"), default="ratio", help="what to order by (default: ratio)"
    )
    parser.add_argument(
        "--number", type=int, default=_SHOWN, metavar="N", help=f"tokens of a whole run (default: {_SHOWN})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def main(arguments: argparse.Namespace) -> int:
    """Show; return the exit code."""
    if arguments.number < 1:
        raise ConfigError(f"--number must be >= 1, got {arguments.number}")
    directory = RunDirectory(arguments.run)
    if not directory.config.is_file():
        raise ConfigError(f"{directory.path} is no run directory: it holds no config.toml")
    lines = read_spikes(directory)
    tokens = select(lines, step=arguments.step, by=arguments.by, number=arguments.number)
    if arguments.step is not None and not any(line["step"] == arguments.step for line in lines):
        there = f"steps {lines[0]['step']} to {lines[-1]['step']}" if lines else "no step yet"
        raise ConfigError(f"--step {arguments.step} is not in {directory.spikes}: it holds {there}")
    if arguments.json:
        print(json.dumps({"run": str(directory.path), "by": arguments.by, "tokens": tokens}, indent=2))
        return 0
    if not tokens:
        print(f"{directory.path}: no tokens were trained on yet")
    for token in tokens:
        print("\n".join(describe(token)))
    return 0


def select(lines: Sequence[Mapping[str, Any]], *, step: int | None, by: str, number: int) -> list[dict[str, Any]]:
    """Return the tokens of one step, or the `number` that stand out most of all, largest first."""
    rows = [
        {"step": line["step"], "sampling": line.get("sampling", {}), **token}
        for line in lines
        if step is None or line["step"] == step
        for token in line.get("tokens", [])
        if step is not None or by in token["by"]
    ]
    measure = "ratio" if by == "ratio" else "influence_share"
    rows.sort(key=lambda row: (row[measure] is not None, -(row[measure] or 0.0)))
    return rows if step is not None else rows[:number]


def describe(token: Mapping[str, Any]) -> list[str]:
    """Return a token in lines, for people."""
    turn = "" if token["turn"] is None else f", turn {token['turn'] + 1}"
    engine = f", {token['engine']}" if token["engine"] else ""
    ended = f", ended by {token['finish_reason']}" if token["finish_reason"] else ""
    temperature = token["sampling"].get("temperature")
    sampled = f", temperature {temperature:g}" if temperature is not None else ""
    share = token["influence_share"]
    weight = "not finite" if share is None else f"{100 * share:.2g} % of the step's"
    return [
        f"step {token['step']}: ratio {_figure(token['ratio'])}, influence {weight}: {WORDS[Cause(token['cause'])]}",
        f"  ...{_one_line(token['before'])} >>>{_one_line(token['text'])}<<< {_one_line(token['after'])}...",
        f"  log-prob {_figure(token['behaviour_logprob'])} when sampled, {_figure(token['policy_logprob'])} when "
        f"trained on; advantage {_figure(token['advantage'])}",
        f"  version {token['version']}, {token['staleness']} steps old{sampled}; token {token['position_in_turn']} of "
        f"its reply, {token['position']} of its segment{turn}{ended}{engine}",
        f"  {token['environment']}, task {token['task_id']}, trajectory {token['trajectory_id']}, {token['status']}",
    ]


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _one_line(text: str) -> str:
    """Return text that cannot move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
