"""Write one HTML file about a run, or about several beside each other: pictures, spikes, trajectories, configuration.

  asyncrl report runs/demo-1
  asyncrl report runs/demo-1 runs/demo-2 --out compared.html

The file needs nothing besides itself: no network, no script. Reads the run directories only, whether the runs go on,
have ended or have crashed. Needs matplotlib (asyncrl[plot]).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from asyncrl.commands.arguments import need_matplotlib
from asyncrl.errors import ConfigError

HELP = "write a run, or several, as one HTML page"

_MAX_RUNS = 8  # there are no more colours that are told apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, such as runs/demo-1")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the first run)")


def main(arguments: argparse.Namespace) -> int:
    """Write; return the exit code."""
    need_matplotlib()
    from asyncrl.report import read_run, render

    if len(arguments.runs) > _MAX_RUNS:
        raise ConfigError(f"at most {_MAX_RUNS} runs are told apart on one page, got {len(arguments.runs)}")
    out: Path = arguments.out or arguments.runs[0] / "report.html"
    runs = [read_run(path, name=name) for path, name in zip(arguments.runs, _names(arguments.runs), strict=True)]
    page = render(runs).encode("utf-8", errors="replace")
    partial = out.with_name(f".{out.name}.tmp")
    try:
        partial.write_bytes(page)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    print(f"report in {out} ({len(page) / 1e6:.1f} MB)")
    return 0


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the directories' own names, with those above them where two are equal."""
    names = [path.resolve().name for path in paths]
    twice = {name for name, number in Counter(names).items() if number > 1}
    return [str(path) if name in twice else name for path, name in zip(paths, names, strict=True)]
