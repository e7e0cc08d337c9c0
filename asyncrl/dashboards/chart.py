"""One panel of a dashboard, and the queries that fill it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.metrics import TABLES, Family

WINDOW = "[$__rate_interval]"
"""For what happens all the time: Grafana makes it four scrapes at least."""
STEPS = "[15m]"
"""For what happens once a step."""

_NAME = re.compile(r"\b(asyncrl_[a-z0-9_]+)(\{)?")
_FAMILIES = {family.name: family for table in TABLES.values() for family in table}


class Look(StrEnum):
    """How a panel shows its series."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel. Queries are (expression, legend); the run's own series are chosen when it is built."""

    title: str
    unit: str
    """As Grafana names it: "short", "s", "bytes", "percentunit", ..."""
    queries: tuple[tuple[str, str], ...]
    look: Look = Look.LINES
    logarithmic: bool = False
    limits: tuple[float, ...] = ()
    """Where it turns yellow, and red."""

    @property
    def description(self) -> str:
        """What its metrics mean and when to worry, as configs/METRICS.md says it."""
        found: dict[str, None] = {}
        for expression, _ in self.queries:
            for family in families_of(expression):
                worry = f" Worry: {family.worry}." if family.worry else ""
                found[f"{family.name}: {family.meaning}{worry}"] = None
        return "\n\n".join(found)


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: rows of panels, by title."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Chart, ...]], ...]

    @property
    def name(self) -> str:
        """Of its files, without their endings."""
        return self.uid.removeprefix("asyncrl-")

    @property
    def charts(self) -> Iterator[Chart]:
        """Every panel."""
        for _, charts in self.rows:
            yield from charts


def lines(title: str, unit: str, *queries: tuple[str, str], logarithmic: bool = False) -> Chart:
    """Return a panel of curves."""
    return Chart(title, unit, queries, logarithmic=logarithmic)


def stacked(title: str, unit: str, *queries: tuple[str, str]) -> Chart:
    """Return a panel of areas that add up."""
    return Chart(title, unit, queries, Look.STACKED)


def number(title: str, unit: str, expression: str, *limits: float) -> Chart:
    """Return a panel of one number, yellow and red from `limits` on."""
    return Chart(title, unit, ((expression, title),), Look.NUMBER, limits=limits)


def heatmap(title: str, unit: str, histogram: str, labels: str = "") -> Chart:
    """Return a panel of a histogram over time."""
    expression = f"sum by (le) (increase({histogram}_bucket{labels}{STEPS}))"
    return Chart(title, unit, ((expression, "{{le}}"),), Look.HEATMAP)


def quantiles(title: str, unit: str, histogram: str, by: str, *shares: float, window: str = WINDOW) -> Chart:
    """Return a panel of a histogram's quantiles, by a label; an empty one is none."""
    label = f"{{{{{by}}}}}, " if by else ""
    added = f"sum by (le{', ' + by if by else ''}) (rate({histogram}_bucket{window}))"
    return Chart(title, unit, tuple((f"histogram_quantile({share}, {added})", f"{label}{share:g}") for share in shares))


def families_of(expression: str) -> list[Family]:
    """Return the metrics that an expression names. Raises: KeyError for one that no run has."""
    found = []
    for name, _ in _NAME.findall(expression):
        bare = re.sub("_(total|bucket|sum|count)$", "", name)
        found.append(_FAMILIES[name] if name in _FAMILIES else _FAMILIES[bare])
    return found


def of_run(expression: str) -> str:
    """Return the expression about the runs that are chosen in the dashboard."""
    chosen = 'instance=~"$run"'
    return _NAME.sub(lambda m: f"{m[1]}{{{chosen}" + (", " if m[2] else "}"), expression)
