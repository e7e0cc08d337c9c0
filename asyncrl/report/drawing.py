"""Axes of a report's pictures: SVG by matplotlib, in the colours of the page around it, dark or light.

matplotlib was chosen because it needs nothing in the reader's browser; plotly was rejected, whose script is 4.6 MB in
every page, and an own drawing of axes, which a well-kept library does better.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#ec4899", "#84cc16")
"""Of runs, and of parts of a whole: of middling lightness, so that they are seen on white and on black."""

_TEXT, _RULE = "#010203", "#040506"  # stand for the page's own colours, which take their place in the SVG
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, sharp, and in the page's font
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _RULE,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.4,
    "lines.solid_joinstyle": "round",
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
}
_SMALLEST_SHOWN = 1e-6  # on a log axis; a float32 engine on the same CPU differs by 1e-13, which would flatten the rest
_WIDTH, _HEIGHT = 5.6, 2.7  # inches; the page scales it


def axes(rows: int = 1, *, height: float = _HEIGHT, grid: str = "both") -> tuple[Figure, list[Axes]]:
    """Return a figure of panels one above the other, over one x axis."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        panels = list(figure.subplots(rows, 1, sharex=True, squeeze=False).flatten())
        for panel in panels:
            panel.grid(False)
            panel.grid(True, axis=grid)
        return figure, panels


def steps_axis(panel: Axes, steps: Sequence[int]) -> None:
    """Label the x axis with optimizer steps, whole ones, also where there is one step alone."""
    from matplotlib.ticker import MaxNLocator

    panel.set_xlabel("optimizer step")
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if steps and min(steps) == max(steps):
        panel.set_xlim(steps[0] - 1, steps[0] + 1)


def line(panel: Axes, x: Sequence[float], y: Sequence[float], colour: str, label: str = "", **how: Any) -> None:
    """Draw values by step; a single one, which no line would show, as a dot. Not-a-numbers are gaps."""
    known = sum(not math.isnan(value) for value in y)
    alone = {"marker": "o", "markersize": 3.5} if known == 1 else {}
    panel.plot(x, y, color=colour, label=label or None, **{**alone, **how})


def log_axis(panel: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers at its ticks; linear where all is within 3 x."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = panel.dataLim.minposy, panel.dataLim.y1
    if not math.isfinite(low) or high < 3 * low:
        panel.yaxis.set_major_locator(MaxNLocator(nbins=5))
        return
    panel.set_yscale("log")
    panel.set_ylim(bottom=max(panel.get_ylim()[0], _SMALLEST_SHOWN))
    subs = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    panel.yaxis.set_major_locator(LogLocator(subs=subs, numticks=7))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def legend(panel: Axes, *, columns: int = 4) -> None:
    """Put the names above the panel, where no line can be below them."""
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        with matplotlib.rc_context(_STYLE):
            panel.legend(
                handles,
                labels,
                loc="lower left",
                bbox_to_anchor=(0.0, 1.0),
                ncols=min(columns, len(handles)),
                handlelength=1.2,
                columnspacing=1.2,
                borderaxespad=0.2,
                labelcolor=_TEXT,
            )


def svg(figure: Figure, name: str) -> str:
    """Return the picture to be put into a page; ids in it begin with what `name` makes of them."""
    out = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', text, count=1)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", text)
    return text.replace(_TEXT, "currentColor").replace(_RULE, "var(--rule)")
