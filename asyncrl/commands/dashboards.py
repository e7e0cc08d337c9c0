"""Draw what the dashboards of configs/grafana show, without Grafana.

  asyncrl dashboards render --prometheus http://127.0.0.1:9090 --out pictures
  asyncrl dashboards render --prometheus http://127.0.0.1:9090 --out pictures --run 127.0.0.1:9400 --hours 24

One PNG a dashboard, of the part of the last hours in which there is something about the runs: the queries of every
panel, answered by the Prometheus that scrapes them. Needs matplotlib (asyncrl[plot]).
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from asyncrl.commands.arguments import need_matplotlib
from asyncrl.errors import ConfigError

HELP = "draw what the Grafana dashboards show of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    render = verbs.add_parser("render", help="draw every dashboard, from a Prometheus that scrapes the run")
    render.add_argument("--prometheus", required=True, metavar="URL", help="the server's, http://127.0.0.1:9090 here")
    render.add_argument("--out", type=Path, required=True, metavar="DIRECTORY", help="for the pictures; it is made")
    render.add_argument("--run", default=".+", metavar="HOST:PORT", help="of its metrics, as a regular expression")
    render.add_argument("--hours", type=float, default=3.0, metavar="H", help="back from now (default: 3)")
    render.set_defaults(command=_render)


def main(arguments: argparse.Namespace) -> int:
    """Never called: each command has its own."""
    raise AssertionError(arguments)


def _render(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.hours < float("inf"):
        raise ConfigError(f"--hours must be > 0, got {arguments.hours}")
    need_matplotlib()
    from asyncrl.dashboards import BOARDS
    from asyncrl.dashboards.pictures import draw
    from asyncrl.dashboards.readings import Readings

    with closing(Readings(arguments.prometheus, run=arguments.run)) as readings:
        window = readings.window(arguments.hours)
        arguments.out.mkdir(parents=True, exist_ok=True)
        for board in BOARDS:
            picture = arguments.out / f"{board.name}.png"
            empty = draw(board, readings, window, picture)
            panels = f"{len(list(board.charts))} panels"
            print(f"{picture}: {panels}" + f", no data: {', '.join(empty)}" * bool(empty), flush=True)
    return 0
