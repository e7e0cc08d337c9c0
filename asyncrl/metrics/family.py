"""One metric: what it is called, what it says, when to worry, and where its value comes from.

The families of a process are rows of tables (`loop`, `learning`, `episodes`, `engines`, `machine`). A scrape reads them
all from one `Source`; configs/METRICS.md is written from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.engines import PoolStatistics
from asyncrl.gateway import Gateway
from asyncrl.metering import MeteredBackend
from asyncrl.metrics.sampling import Sampled
from asyncrl.run import Run
from asyncrl.tallies import Buckets


class Kind(StrEnum):
    """As Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a scrape reads. None stands for a part that this process does not have."""

    run: Run
    engines: Callable[[], PoolStatistics] | None = None
    sandboxes: MeteredBackend | None = None
    gateway: Gateway | None = None
    sampled: Sampled | None = None


Value = float | Buckets | None
Values = Value | Mapping[Any, Value]
"""One value, or values by label; by a tuple where there are several labels. None is left out."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row of a table."""

    name: str
    """Without the `_total` that Prometheus appends to a counter's samples."""
    kind: Kind
    unit: str
    meaning: str
    worry: str
    """When a person should look into it; empty where it only explains others."""
    read: Callable[[Source], Values]
    labels: tuple[str, ...] = ()

    def metric(self, source: Source) -> Metric | None:
        """Return its samples as of now, or None where there are none."""
        found = self.read(source)
        if found is None:
            return None
        values = found if isinstance(found, Mapping) else {(): found}
        family = _FAMILIES[self.kind](self.name, self.meaning, labels=self.labels or None)
        for key, value in values.items():
            if value is not None:
                _add(family, [str(part) for part in (key if isinstance(key, tuple) else (key,))], value)
        return family if family.samples else None


_FAMILIES: Mapping[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _add(family: Any, labels: list[str], value: float | Buckets) -> None:
    if not isinstance(value, Buckets):
        family.add_metric(labels, value)
        return
    seen, cumulative = 0.0, []
    for edge, count in zip((*map(_edge, value.edges), "+Inf"), value.counts, strict=True):
        seen += count
        cumulative.append((edge, seen))
    family.add_metric(labels, cumulative, value.total)


def _edge(edge: float) -> str:
    return repr(float(f"{edge:.4g}"))


def counter(name: str, unit: str, meaning: str, worry: str, read: Callable[[Source], Values], *labels: str) -> Family:
    """Return a family that only grows, but for a new start of the process."""
    return Family(name, Kind.COUNTER, unit, meaning, worry, read, labels)


def gauge(name: str, unit: str, meaning: str, worry: str, read: Callable[[Source], Values], *labels: str) -> Family:
    """Return a family that goes up and down."""
    return Family(name, Kind.GAUGE, unit, meaning, worry, read, labels)


def histogram(name: str, unit: str, meaning: str, worry: str, read: Callable[[Source], Values], *labels: str) -> Family:
    """Return a family of `Buckets`."""
    return Family(name, Kind.HISTOGRAM, unit, meaning, worry, read, labels)


class TableCollector(Collector):
    """Turns tables into samples at the moment of the scrape."""

    def __init__(self, tables: Iterable[Iterable[Family]], source: Source) -> None:
        self._families = [family for table in tables for family in table]
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield every family that has a sample."""
        for family in self._families:
            metric = family.metric(self._source)
            if metric is not None:
                yield metric
