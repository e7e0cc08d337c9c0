"""A dashboard's panels as one picture, by matplotlib, from what a Prometheus answers to their queries.

For who has no Grafana at hand, and for documents: the same queries, legends, units and limits, not the same look.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from asyncrl.dashboards.chart import Board, Chart, Look
from asyncrl.dashboards.readings import Readings, Series, Window
from asyncrl.report.drawing import COLOURS, line, log_axis

_WIDTH, _DPI = 15.0, 80  # inches; 1200 pixels, which a page shows as they are
_IN_LINE = {"numbers": 8, "charts": 3}
_HEIGHTS = {"title": 0.45, "numbers": 0.75, "charts": 2.4}  # inches of a line
_MARGINS = {"numbers": (0.2, 0.3, 0.0, 0.05), "charts": (0.6, 0.3, 0.1, 0.4)}
"""Inches left of a panel, above it (its title), right of it, below it (its minutes)."""
_LIMIT_COLOURS = ("#10b981", "#f59e0b", "#ef4444")  # below, at, and above a number's limits
_PALETTE = 128  # colours of the picture; all of them would make it three times as large
_MOST_NAMES = 8  # in a legend; it would cover the curves
_Line = tuple[str, str, Sequence[Chart]]
"""Kind, a title's text, the panels."""


def draw(board: Board, readings: Readings, window: Window, picture: Path) -> list[str]:
    """Write the picture, and return the titles of the panels that have no data."""
    lines = list(_lines(board))
    height = sum(_HEIGHTS[kind] for kind, _, _ in lines)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
    empty, bottom = [], height
    for kind, title, charts in lines:
        bottom -= _HEIGHTS[kind]
        if kind == "title":
            figure.text(0.2 / _WIDTH, (bottom + 0.1) / height, title, fontsize=13, fontweight="bold")
            continue
        left, above, right, below = _MARGINS[kind]
        wide, high = _WIDTH / _IN_LINE[kind], _HEIGHTS[kind]
        for column, chart in enumerate(charts):
            panel = figure.add_axes(
                (
                    (wide * column + left) / _WIDTH,
                    (bottom + below) / height,
                    (wide - left - right) / _WIDTH,
                    (high - above - below) / height,
                )
            )
            panel.set_title(chart.title, loc="left", fontsize=9)
            if not _panel(panel, chart, readings, window):
                empty.append(chart.title)
                panel.set_axis_off()
                panel.text(0, 0.5, "no data", va="center", transform=panel.transAxes, color="0.5")
    whole = io.BytesIO()
    figure.savefig(whole, format="png")
    Image.open(whole).convert("RGB").quantize(_PALETTE).save(picture, format="png", optimize=True)
    return empty


def _lines(board: Board) -> Iterator[_Line]:
    yield "title", board.title, ()
    for title, charts in board.rows:
        yield "title", title, ()
        for kind, width in _IN_LINE.items():
            those = [chart for chart in charts if (chart.look is Look.NUMBER) == (kind == "numbers")]
            for first in range(0, len(those), width):
                yield kind, "", those[first : first + width]


def _panel(panel: Axes, chart: Chart, readings: Readings, window: Window) -> bool:
    """Draw a panel; tell whether there was anything to draw."""
    found = [
        (series, series.legend(legend))
        for expression, legend in chart.queries
        for series in readings.series(expression, window)
        if any(math.isfinite(value) for value in series.values)
    ]
    if not found:
        return False
    if chart.look is Look.NUMBER:
        _number(panel, chart, found[0][0])
        return True
    panel.tick_params(labelsize=7)
    panel.set_xlim(0, max(1e-3, (window.end - window.start) / 60))
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6))
    panel.set_xlabel("minutes", fontsize=7, labelpad=1)
    if chart.look is Look.HEATMAP:
        _heatmap(panel, [series for series, _ in found], window)
        return True
    panel.grid(alpha=0.3)
    if chart.look is Look.STACKED:
        _stacked(panel, found, window)
    else:
        _curves(panel, found, window)
    if chart.logarithmic:
        log_axis(panel)
    elif (unit := _UNITS.get(chart.unit)) is not None:
        panel.yaxis.set_major_formatter(lambda value, _: unit(value))
    _legend(panel)
    return True


def with_gaps(series: Series, window: Window) -> tuple[list[float], list[float]]:
    """Return times and values with a not-a-number wherever there was none, so that no curve is drawn over it."""
    times: list[float] = []
    values: list[float] = []
    for time, value in zip(series.times, series.values, strict=True):
        if times and time - times[-1] > 1.5 * window.step:
            times.append(time - window.step)
            values.append(math.nan)
        times.append(time)
        values.append(value if math.isfinite(value) else math.nan)
    return times, values


def _curves(panel: Axes, found: Sequence[tuple[Series, str]], window: Window) -> None:
    for place, (series, name) in enumerate(found):
        times, values = with_gaps(series, window)
        line(panel, [(time - window.start) / 60 for time in times], values, COLOURS[place % len(COLOURS)], name)


def _stacked(panel: Axes, found: Sequence[tuple[Series, str]], window: Window) -> None:
    times = sorted({time for series, _ in found for time in series.times})
    by_time = [dict(zip(series.times, series.values, strict=True)) for series, _ in found]
    heights = [[value if math.isfinite(value := at.get(time, 0.0)) else 0.0 for time in times] for at in by_time]
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(found))]
    minutes = [(time - window.start) / 60 for time in times]
    panel.stackplot(minutes, heights, labels=[name for _, name in found], colors=colours, alpha=0.6)


def _heatmap(panel: Axes, found: Sequence[Series], window: Window) -> None:
    """Draw a histogram over time: a row a bucket, whose upper edge is at its top."""
    found = sorted(found, key=lambda series: float(series.labels["le"]))
    times = sorted({time for series in found for time in series.times})
    below = [0.0] * len(times)
    rows = []
    for series in found:
        at = dict(zip(series.times, series.values, strict=True))
        until = [at.get(time, 0.0) for time in times]
        rows.append([max(0.0, upper - lower) for upper, lower in zip(until, below, strict=True)])
        below = until
    step = window.step / 60
    edges = [(time - window.start) / 60 - step for time in times] + [(times[-1] - window.start) / 60]
    most = max(max(row) for row in rows) or 1.0
    panel.pcolormesh(edges, range(len(rows) + 1), rows, cmap="Blues", norm=PowerNorm(0.4, vmin=0.0, vmax=most))
    shown = range(0, len(found), max(1, len(found) // 8))
    panel.set_yticks([place + 1 for place in shown], [f"{float(found[place].labels['le']):.3g}" for place in shown])


def _number(panel: Axes, chart: Chart, series: Series) -> None:
    value = next(value for value in reversed(series.values) if math.isfinite(value))
    passed = sum(value >= limit for limit in chart.limits)
    colour = _LIMIT_COLOURS[passed] if chart.limits else "black"
    panel.set_axis_off()
    panel.text(0.0, 0.35, _UNITS.get(chart.unit, _short)(value), fontsize=17, color=colour, va="center")


def _legend(panel: Axes) -> None:
    handles, names = panel.get_legend_handles_labels()
    more = len(names) - _MOST_NAMES
    title = f"and {more} more" if more > 0 else None
    panel.legend(
        handles[:_MOST_NAMES], names[:_MOST_NAMES], fontsize=6.5, frameon=False, title=title, title_fontsize=6.5
    )


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "short": _short,
    "s": lambda value: f"{_short(value)} s",
    "bytes": _bytes,
    "Bps": lambda value: f"{_bytes(value)}/s",
    "percentunit": lambda value: f"{100 * value:.3g} %",
    "sci": lambda value: f"{value:.1e}",
}
"""Grafana's name of a unit -> a value in words."""
