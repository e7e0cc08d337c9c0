"""What training selects: distributions of what was generated, trained on and dropped, and how far they lie apart.

Long, slow or failing episodes that are dropped more often than others bias what is learned. The measure is the
two-sample Kolmogorov-Smirnov distance D = sup_x |F_a(x) - F_b(x)| of the empirical distribution functions (Smirnov
1939; Conover, Practical Nonparametric Statistics, ch. 6), from 0 to 1.

Values are counted in fixed bins of 1% relative width, which need no random numbers, go on exactly after a resume, and
hold a stream of any length in bounded memory. F is known exactly at the edges of bins, and inside a bin it can only
rise by the bin's own share: so D lies between `distance` and `at_most`, which are computed, not estimated. They are
equal where every bin holds one value only: integers up to 100, rewards that are a few numbers, staleness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_LOG_WIDTH = math.log(1.01)  # wider bins cost accuracy, narrower ones memory: 1% is 232 bins a decade
_LEAST, _MOST = 1e-6, 1e9  # what is nearer to 0 counts as 0, what is larger as the largest: at most 6,943 bins
_OFFSET = 1 - math.floor(math.log(_LEAST) / _LOG_WIDTH)  # so that bins of positive values have positive numbers


class Stage(StrEnum):
    """What became of an episode."""

    GENERATED = "generated"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class _Bin:
    count: int
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KSDistance:
    """How far two distributions lie apart, from 0 to 1."""

    distance: float
    """The largest difference at an edge of a bin."""
    at_most: float
    """What it can be at most, inside a bin."""


class Distribution:
    """A stream of numbers, by count.

    Example:
        >>> short, long = Distribution(), Distribution()
        >>> for value in (1, 2, 3, 4):
        ...     short.add(value)
        ...     long.add(value + 2)
        >>> ks_distance(short, long).distance
        0.5
    """

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a finite value."""
        assert math.isfinite(value), value
        self.count += 1
        self.total += value
        known = self._bins.get(key := _bin_of(value))
        if known is None:
            self._bins[key] = _Bin(1, value, value)
            return
        known.count += 1
        known.least, known.most = min(known.least, value), max(known.most, value)

    @property
    def mean(self) -> float | None:
        """The mean of the values; None where there are none."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return a value that `share` of the values do not exceed, within 1%; None where there are none."""
        seen = 0
        for key in sorted(self._bins):
            seen += self._bins[key].count
            if seen >= share * self.count:
                return self._bins[key].most
        return None

    def state(self) -> list[list[float]]:
        """Return what `restore` needs (JSON-like)."""
        return [[self.total, 0, 0, 0], *([key, b.count, b.least, b.most] for key, b in self._bins.items())]

    @classmethod
    def restore(cls, state: list[list[float]]) -> Distribution:
        """Return the distribution that `state` was taken of."""
        restored = cls()
        restored.total = state[0][0]
        restored._bins = {int(key): _Bin(int(count), least, most) for key, count, least, most in state[1:]}
        restored.count = sum(b.count for b in restored._bins.values())
        return restored


def _bin_of(value: float) -> int:
    size = abs(value)
    if size < _LEAST:
        return 0
    key = math.floor(math.log(min(size, _MOST)) / _LOG_WIDTH) + _OFFSET
    return key if value > 0 else -key


def ks_distance(a: Distribution, b: Distribution) -> KSDistance | None:
    """Return the two-sample Kolmogorov-Smirnov distance; None where one of them is empty."""
    if not (a.count and b.count):
        return None
    distance = at_most = difference = 0.0
    for key in sorted({*a._bins, *b._bins}):
        ours, theirs = a._bins.get(key), b._bins.get(key)
        rise_a = ours.count / a.count if ours else 0.0
        rise_b = theirs.count / b.count if theirs else 0.0
        if ours and theirs and not ours.least == ours.most == theirs.least == theirs.most:
            # all of one may come before all of the other, in a bin that both are in
            at_most = max(at_most, abs(difference + rise_a), abs(difference - rise_b))
        difference += rise_a - rise_b
        distance = max(distance, abs(difference))
    return KSDistance(distance=distance, at_most=max(distance, at_most))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFigures:
    """What is compared of one episode. None is not counted: a failed episode has no reward."""

    tokens: float | None
    """Sampled tokens."""
    reward: float | None
    staleness: float | None
    """Optimizer steps between the weights that sampled its oldest token and the learner's."""
    seconds: float | None
    """From its start to its end."""


_QUANTITIES = ("tokens", "reward", "staleness", "seconds")


class SelectionStatistics:
    """Distributions by environment, stage and quantity.

    Example:
        >>> statistics = SelectionStatistics()
        >>> short, long = (EpisodeFigures(tokens=tokens, reward=1, staleness=0, seconds=1) for tokens in (10, 20))
        >>> statistics.count("demo", Stage.GENERATED, short)
        >>> statistics.count("demo", Stage.GENERATED, long)
        >>> statistics.count("demo", Stage.TRAINED, short)
        >>> statistics.distances()["demo", "tokens", Stage.TRAINED].distance
        0.5
    """

    def __init__(self) -> None:
        self._distributions: dict[tuple[str, Stage, str], Distribution] = {}

    def count(self, environment: str, stage: Stage, figures: EpisodeFigures) -> None:
        """Count one episode."""
        for quantity in _QUANTITIES:
            value = getattr(figures, quantity)
            if value is not None:
                self._distributions.setdefault((environment, stage, quantity), Distribution()).add(value)

    def distances(self) -> Mapping[tuple[str, str, Stage], KSDistance]:
        """Return (environment, quantity, trained or dropped) -> its distance from what was generated."""
        found: dict[tuple[str, str, Stage], KSDistance] = {}
        for (environment, stage, quantity), distribution in sorted(self._distributions.items()):
            generated = self._distributions.get((environment, Stage.GENERATED, quantity))
            if stage is Stage.GENERATED or generated is None:
                continue
            distance = ks_distance(distribution, generated)
            assert distance is not None, "a distribution is made with its first value"
            found[environment, quantity, stage] = distance
        return found

    def report(self) -> dict[str, Any]:
        """Return environment -> quantity -> stage -> count, mean, median and distance (JSON-like)."""
        report: dict[str, Any] = {}
        distances = self.distances()
        for (environment, stage, quantity), distribution in sorted(self._distributions.items()):
            figures = {"count": distribution.count, "mean": distribution.mean, "median": distribution.quantile(0.5)}
            if distance := distances.get((environment, quantity, stage)):
                figures |= {"ks_distance": distance.distance, "ks_distance_at_most": distance.at_most}
            report.setdefault(environment, {}).setdefault(quantity, {})[stage.value] = figures
        return report

    def state(self) -> list[Any]:
        """Return what `restore` needs (JSON-like)."""
        return [[*key, distribution.state()] for key, distribution in self._distributions.items()]

    def restore(self, state: list[Any]) -> None:
        """Go on from what `state` returned."""
        self._distributions = {
            (environment, Stage(stage), quantity): Distribution.restore(distribution)
            for environment, stage, quantity, distribution in state
        }
