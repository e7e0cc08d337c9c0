"""Pictures of dashboards: what a Prometheus answers becomes panels, and what it does not have is said.

That every panel has data on a real run, tests/test_dashboards.py shows.
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from prometheus_server import needs_prometheus, serving
from tree import ROOT

from asyncrl import cli
from asyncrl.dashboards import Board
from asyncrl.dashboards.chart import heatmap, lines, number, stacked
from asyncrl.dashboards.pictures import _heatmap, draw, with_gaps
from asyncrl.dashboards.readings import Readings, Series, Window
from asyncrl.engines import free_port

_WINDOW = Window(1000.0, 1300.0)
_TIMES = [1000.0, 1001.0, 1002.0]


class Told(Readings):
    """Answers from a table: metric -> series."""

    def __init__(self, table: dict[str, list[Series]]) -> None:
        self._table = table

    def series(self, expression: str, window: Window) -> list[Series]:
        """See `Readings`."""
        return next((found for name, found in self._table.items() if name in expression), [])


def test_panels_without_data_are_named_and_the_others_drawn(tmp_path: Path) -> None:
    board = Board(
        "asyncrl-board",
        "a board",
        (
            ("Now", (number("version", "short", "asyncrl_policy_version", 5, 50), number("x", "s", "asyncrl_loss"))),
            (
                "Later",
                (
                    lines("curve", "percentunit", ("asyncrl_policy_version", "{{engine}}"), logarithmic=True),
                    stacked("area", "bytes", ("asyncrl_memory_bytes", "{{role}}")),
                    heatmap("buckets", "short", "asyncrl_importance_ratio"),
                    lines("not a number", "short", ("asyncrl_entropy_nats", "now")),
                ),
            ),
        ),
    )
    told = Told(
        {
            "asyncrl_policy_version": [Series({"engine": "engine 0"}, _TIMES, [1.0, 2.0, 70.0])],
            "asyncrl_memory_bytes": [Series({"role": role}, _TIMES[:2], [1e9, math.nan]) for role in ("a", "b")],
            "asyncrl_importance_ratio": [Series({"le": le}, _TIMES, [2.0, 2.0, 2.0]) for le in ("1.0", "+Inf")],
            "asyncrl_entropy_nats": [Series({}, _TIMES, [math.nan] * 3)],
        }
    )
    picture = tmp_path / "board.png"
    assert draw(board, told, _WINDOW, picture) == ["x", "not a number"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_histogram_is_drawn_by_what_lies_between_its_edges() -> None:
    panel = Figure().add_subplot()
    series = [Series({"le": le}, _TIMES[:2], values) for le, values in
              (("+Inf", [9.0, 4.0]), ("0.5", [1.0, 0.0]), ("2.0", [7.0, 4.0]))]  # fmt: skip
    _heatmap(panel, series, _WINDOW)
    (mesh,) = panel.collections
    assert mesh.get_array().tolist() == [[1.0, 0.0], [6.0, 4.0], [2.0, 0.0]]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0.5", "2", "inf"]


def test_no_curve_is_drawn_over_a_time_without_values() -> None:
    times, values = with_gaps(Series({}, [1000.0, 1001.0, 1009.0], [1.0, math.inf, 3.0]), _WINDOW)
    assert times == [1000.0, 1001.0, 1008.0, 1009.0]
    assert [value for value in values if not math.isnan(value)] == [1.0, 3.0]


class Short(Told):
    """Knows of a run of half a minute, at the end of the last hours."""

    def series(self, expression: str, window: Window) -> list[Series]:
        """See `Readings`: a value wherever a point of the window's grid falls into the run."""
        grid = [window.start + number * window.step for number in range(302)]
        times = [time for time in grid if 970.0 <= time <= 1000.0]
        return [Series({}, times, [1.0] * len(times))]

    def _ask(self, route: str, **parameters: object) -> object:
        return {"result": [0, "1000.0"]}


def test_a_short_run_is_shown_whole() -> None:
    """Points of three hours lie 36 s apart, and a run may lie between two of them for the most part."""
    window = Short({}).window(3.0)
    assert 967.0 <= window.start <= 970.0
    assert window.end == 1000.0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prometheus", "127.0.0.1:9090"], 2, "--prometheus must begin with http:// or https://"),
        (["--prometheus", "http://127.0.0.1:9090", "--hours", "nan"], 2, "--hours must be > 0, got nan"),
        (["--prometheus", f"http://127.0.0.1:{free_port()}"], 1, "no Prometheus answers at http://127.0.0.1:"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["dashboards", "render", "--out", str(out), *arguments]) == code
    assert words in capsys.readouterr().err
    assert not out.exists()


@needs_prometheus
@pytest.mark.slow
def test_a_prometheus_that_knows_no_run_and_a_query_that_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{free_port()}"
    with serving(tmp_path, target, ROOT / "configs" / "prometheus" / "alerts.yml") as prometheus:
        out = tmp_path / "out"
        arguments = ["dashboards", "render", "--prometheus", prometheus.url, "--out", str(out)]
        assert cli.main([*arguments, "--run", "127.0.0.1:9400"]) == 2
        assert "holds nothing about a run '127.0.0.1:9400' in the last 3 hours" in capsys.readouterr().err
        assert cli.main([*arguments, "--run", "("]) == 1
        assert "refuses asyncrl_policy_version" in capsys.readouterr().err
        assert not out.exists()
        prometheus.wait("up >= 0", timeout_s=30.0)
        now = float(prometheus.ask("query", query="time()")["result"][1])
        with closing(Readings(prometheus.url)) as readings:
            (up,) = readings.series("up", Window(now, now))
        assert up.legend("{{job}} at {{instance}}") == f"asyncrl at {target}"
