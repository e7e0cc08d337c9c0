"""The run as Prometheus sees it: tables of metrics, read at the moment of the scrape.

Counters live in the run's own objects and nothing is kept twice. The registry is the caller's; importing this registers
nothing. configs/METRICS.md shows the tables to people.

Example:
    >>> registry = CollectorRegistry()                     # doctest: +SKIP
    >>> registry.register(collector(Source(run=run)))      # doctest: +SKIP
"""

from collections.abc import Mapping

from asyncrl.metrics.episodes import COST, EPISODES
from asyncrl.metrics.family import Family as Family
from asyncrl.metrics.family import Kind as Kind
from asyncrl.metrics.family import Source as Source
from asyncrl.metrics.family import TableCollector
from asyncrl.metrics.gateway import GATEWAY
from asyncrl.metrics.learning import LEARNER, OFF_POLICY
from asyncrl.metrics.loop import PHASES as PHASES
from asyncrl.metrics.loop import PIPELINE, PROGRESS, SYNC
from asyncrl.metrics.sampling import Sampled as Sampled
from asyncrl.metrics.services import ENGINES, MACHINE, SANDBOXES

TABLES: Mapping[str, tuple[Family, ...]] = {
    "Progress": PROGRESS,
    "Off-policyness": OFF_POLICY,
    "Learner": LEARNER,
    "Episodes and rewards": EPISODES,
    "Pipeline and waits": PIPELINE,
    "Weight sync": SYNC,
    "Engines": ENGINES,
    "Gateway": GATEWAY,
    "Sandboxes": SANDBOXES,
    "Machine": MACHINE,
    "Cost": COST,
}
"""title -> the metrics of a part."""


def collector(source: Source) -> TableCollector:
    """Return what a registry asks for all of them."""
    return TableCollector(TABLES.values(), source)
