"""Draw a run: what it solved, how old and how far off its tokens were, and where the time went.

  asyncrl plot runs/demo-1 demo.svg
  asyncrl plot runs/demo-1 runs/demo-2 both.png

One line a run. The file's ending chooses the format. Needs matplotlib (asyncrl[plot]).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.commands.arguments import check_picture
from asyncrl.errors import ConfigError
from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory

HELP = "draw one run or several"

_SMOOTH = 5  # steps of the moving mean: single steps hold a few tasks each, and jump about
_PANELS = (
    ("solve_rate", "solved in training (mean of 5 steps)"),
    ("importance_ratio_max", "largest importance ratio"),
    ("staleness_max", "largest staleness (optimizer steps)"),
    ("step_seconds", "seconds of an optimizer step"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("picture", type=Path, metavar="FILE", help="the picture: .svg, .png or .pdf")


def main(arguments: argparse.Namespace) -> int:
    """Draw; return the exit code."""
    check_picture(arguments.picture)
    runs = [RunDirectory(path) for path in arguments.runs]
    for run in runs:
        if not read_metrics(run):
            raise ConfigError(f"{run.path} holds no steps to draw")
    _draw(runs, arguments.picture)
    print(f"picture in {arguments.picture}")
    return 0


def _draw(runs: Sequence[RunDirectory], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for run in runs:
        steps = read_metrics(run)
        for axis, (key, title) in zip(axes, _PANELS, strict=True):
            values = [step.get(key, float("nan")) for step in steps]
            if key == "solve_rate":
                values = _smooth(values)
            (line,) = axis.plot([step["version"] for step in steps], values, label=run.path.name)
            axis.set_title(title, fontsize=10)
            if key == "solve_rate":
                _mark_evaluations(axis, run, line.get_color())
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.set_xlabel("optimizer step", fontsize=9)
        axis.grid(alpha=0.3)
    figure.savefig(picture)


def _mark_evaluations(axis: Any, run: RunDirectory, colour: str) -> None:
    """Mark what was measured on the held-out tasks, at its version."""
    if not run.status.exists():
        return
    measured = json.loads(run.status.read_text(encoding="utf-8"))["counters"]["evaluations"]
    for result in measured:
        label = "held-out tasks" if result is measured[0] else None
        axis.plot(result["version"], result["solve_rate"], "o", color=colour, label=label)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the trailing mean of at most _SMOOTH values."""
    windows = [values[max(0, i - _SMOOTH + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
