"""The page of all metrics: `python -m asyncrl.metrics.page > configs/METRICS.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from asyncrl.metrics import TABLES
from asyncrl.metrics.family import Family, Kind
from asyncrl.tallies import MAX_ENVIRONMENTS, MAX_PARTS

_HEAD = f"""\
# Metrics

A run serves these at the address that it prints (`[metrics] host`, `port`), for Prometheus and for whoever reads text.
This page is written from the code: `python -m asyncrl.metrics.page > configs/METRICS.md`.

A name ends in its unit where it has one. Counters end in `_total`, and begin at 0 with every process but for those that
a checkpoint keeps; `rate()` and `increase()` see through both. Histograms have `_bucket`, `_sum` and `_count`. What
speaks of "the last step" is the state of that step, and of nothing in between. A value that cannot be measured is
absent, never 0.

The number of series is bounded: labels have the values of the program's own lists, and of what comes from outside
there are at most {MAX_ENVIRONMENTS} environments, {MAX_PARTS} parts of rewards and {MAX_PARTS} kinds of behaviour;
later ones are counted as `other`. An engine that is added takes the first name that is free, so that there are as many
as a run ever had at a time; the series of one that has left end.
"""


def lines() -> Iterator[str]:
    """Yield the page."""
    yield _HEAD
    for title, table in TABLES.items():
        yield f"## {title}\n"
        yield "| metric | type | unit | labels | meaning | when to worry |"
        yield "|---|---|---|---|---|---|"
        yield from map(_row, table)
        yield ""


def _row(family: Family) -> str:
    name = family.name + "_total" * (family.kind is Kind.COUNTER)
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{name}` | {family.kind} | {family.unit} | {labels} | {family.meaning} | {family.worry} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()))
