"""Metrics that merge exactly over microbatches and ranks. Imports no torch.

A mean is kept as its total and its count, a quantile as a histogram, an effective sample size as two sums; only
`finalise` divides. Floating sums are added with `math.fsum`, so the order of microbatches does not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

_STEPS = tuple(1e-3 * 2.0 ** (k / 2) for k in range(29))
LOG_EDGES = (*(-step for step in reversed(_STEPS)), *_STEPS)
RATIO_EDGES = tuple(math.exp(edge) for edge in LOG_EDGES)
"""[58] edges of the ratio histograms: log ratios from 0.001 to 16.4 nats in steps of sqrt(2), on both sides of 1."""

STALENESS_BUCKETS: Mapping[str, int] = {"0": 0, "1": 1, "2": 2, "3-4": 3, "5-8": 5, "9+": 9}
"""name -> the least staleness in it, in optimizer steps, of the ratio histograms by staleness; in order."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    total: float

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        return cls(math.fsum(p.total for p in parts))

    def finalise(self, name: str) -> dict[str, float]:
        """Return the total."""
        return {name: self.total}


@dataclass(frozen=True, slots=True)
class Mean:
    """A total over a count; NaN when nothing was counted."""

    total: float
    count: float

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        return cls(math.fsum(p.total for p in parts), math.fsum(p.count for p in parts))

    def finalise(self, name: str) -> dict[str, float]:
        """Return the mean, NaN of nothing."""
        return {name: self.total / self.count if self.count else math.nan}


@dataclass(frozen=True, slots=True)
class Max:
    """A largest value; -inf when there was none."""

    value: float

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        return cls(max(p.value for p in parts))

    def finalise(self, name: str) -> dict[str, float]:
        """Return the largest value, NaN of nothing."""
        return {name: self.value if self.value > -math.inf else math.nan}


@dataclass(frozen=True, slots=True)
class Min:
    """A smallest value; inf when there was none."""

    value: float

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        return cls(min(p.value for p in parts))

    def finalise(self, name: str) -> dict[str, float]:
        """Return the smallest value, NaN of nothing."""
        return {name: self.value if self.value < math.inf else math.nan}


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """(sum w)^2 / sum w^2, and its share of the count."""

    total: float
    squares: float
    count: float

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        return cls(
            math.fsum(p.total for p in parts),
            math.fsum(p.squares for p in parts),
            math.fsum(p.count for p in parts),
        )

    def finalise(self, name: str) -> dict[str, float]:
        """Return the size, and its share of the count as `_frac`; NaN of nothing."""
        size = self.total**2 / self.squares if self.squares else math.nan
        return {name: size, f"{name}_frac": size / self.count if self.count else math.nan}


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - Var(target - prediction) / Var(target), from moments: their count, totals and totals of squares.

    1 is a perfect prediction, 0 one as good as the mean, below 0 a worse one; NaN where the targets do not differ. An
    error that is the same everywhere does not show.
    """

    count: float
    targets: float
    target_squares: float
    errors: float
    error_squares: float

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        return cls(
            math.fsum(p.count for p in parts),
            math.fsum(p.targets for p in parts),
            math.fsum(p.target_squares for p in parts),
            math.fsum(p.errors for p in parts),
            math.fsum(p.error_squares for p in parts),
        )

    def finalise(self, name: str) -> dict[str, float]:
        """Return 1 - Var(error) / Var(target); NaN where the target does not vary."""
        if not self.count:
            return {name: math.nan}
        spread = self.target_squares - self.targets**2 / self.count
        if not spread > 1e-12 * max(1.0, self.target_squares):  # below this it is rounding of equal numbers
            return {name: math.nan}
        return {name: 1.0 - (self.error_squares - self.errors**2 / self.count) / spread}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between `edges` [k]: counts [k+1], the first below edges[0], the last at or above edges[-1]."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        assert all(p.edges == parts[0].edges for p in parts), "histograms with different edges"
        return cls(parts[0].edges, tuple(math.fsum(column) for column in zip(*(p.counts for p in parts), strict=True)))

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bin that holds the quantile; NaN when empty, inf past the last edge."""
        wanted, seen = share * math.fsum(self.counts), 0.0
        if wanted == 0:
            return math.nan if not any(self.counts) else self.edges[0]
        for edge, count in zip((*self.edges, math.inf), self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return edge
        return math.inf

    def finalise(self, name: str) -> dict[str, float]:
        """Return upper bounds of the 50th, 95th and 99th percentile."""
        return {f"{name}_p{round(100 * share)}_bound": self.quantile(share) for share in (0.5, 0.95, 0.99)}


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each integer was seen, e.g. tokens by staleness in optimizer steps."""

    counts: tuple[tuple[int, float], ...]

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        total: dict[int, list[float]] = {}
        for part in parts:
            for key, count in part.counts:
                total.setdefault(key, []).append(count)
        return cls(tuple((key, math.fsum(total[key])) for key in sorted(total)))

    def finalise(self, name: str) -> dict[str, float]:
        """Return how often each integer was seen, by name and integer."""
        return {f"{name}_{key}": count for key, count in self.counts}


@dataclass(frozen=True, slots=True)
class Growth:
    """Spread of a cumulative quantity over sequences at t = 1, 2, 4, ...: counts, totals and squares per t."""

    counts: tuple[float, ...]
    totals: tuple[float, ...]
    squares: tuple[float, ...]
    length: float
    """Tokens of all sequences together; counts[0] is the number of sequences."""

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        longest = max(len(p.counts) for p in parts)

        def column(values: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
            rows = list(values)
            return tuple(math.fsum(row[k] for row in rows if k < len(row)) for k in range(longest))

        return cls(
            column(p.counts for p in parts),
            column(p.totals for p in parts),
            column(p.squares for p in parts),
            math.fsum(p.length for p in parts),
        )

    def spreads(self) -> list[tuple[float, float]]:
        """Return (t, unbiased standard deviation) where at least two sequences reach t and they differ."""
        points = []
        for k, (count, total, square) in enumerate(zip(self.counts, self.totals, self.squares, strict=True)):
            if count < 2:
                continue
            variance = (square - total * total / count) / (count - 1)
            if variance > 1e-12 * max(1.0, square / count):  # below this it is rounding of two equal numbers
                points.append((float(2**k), math.sqrt(variance)))
        return points

    def finalise(self, name: str) -> dict[str, float]:
        """Return the least-squares exponent of log spread on log t; sigma_1, the spread at t = 1; and the share of
        sequences' effective sample size that sigma_1 predicts at the mean length T, exp(-sigma_1^2 T).

        Independent token errors grow as sqrt(t), exponent 0.5; above 0.75 something drifts the same way at every token
        (temperature, template, precision).
        """
        points = self.spreads()
        exponent = math.nan
        if len(points) >= 2:
            xs, ys = [math.log(t) for t, _ in points], [math.log(s) for _, s in points]
            x0, y0 = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
            exponent = math.fsum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / math.fsum(
                (x - x0) ** 2 for x in xs
            )
        sigma = next((spread for t, spread in points if t == 1.0), math.nan)
        mean_length = self.length / self.counts[0] if self.counts and self.counts[0] else math.nan
        return {
            f"{name}_exponent": exponent,
            f"{name}_sigma_1": sigma,
            f"{name}_predicted_ess_frac": math.exp(-sigma * sigma * mean_length),
        }


@dataclass(frozen=True, slots=True)
class Groups:
    """Rewards by group: (index, number, smallest, largest, successes). Microbatches may cut a group."""

    groups: tuple[tuple[int, float, float, float, float], ...]
    max_reward: float = 1.0

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the record of all `parts` together."""
        total: dict[int, tuple[float, float, float, float]] = {}
        for part in parts:
            for key, number, low, high, successes in part.groups:
                n, lo, hi, s = total.get(key, (0.0, math.inf, -math.inf, 0.0))
                total[key] = (n + number, min(lo, low), max(hi, high), s + successes)
        return cls(tuple((key, *total[key]) for key in sorted(total)), parts[0].max_reward)

    def finalise(self, name: str) -> dict[str, float]:
        """Return shares of groups whose rewards do not differ, by kind, and the share expected by chance.

        Expected: mean over groups of p^G + (1-p)^G with p the batch's success rate: a lower bound in reality, since
        the trajectories of one task are correlated. Singleton groups are counted as zero-variance.
        """
        if not self.groups:
            return {}
        num = len(self.groups)
        equal = [(lo, hi) for _, _, lo, hi, _ in self.groups if hi - lo <= ZERO_VARIANCE]
        fail = sum(hi <= ZERO_VARIANCE for _, hi in equal)
        win = sum(lo >= self.max_reward - ZERO_VARIANCE for lo, _ in equal)
        rate = math.fsum(g[4] for g in self.groups) / math.fsum(g[1] for g in self.groups)
        return {
            f"{name}_frac": len(equal) / num,
            f"{name}_all_fail_frac": fail / num,
            f"{name}_all_pass_frac": win / num,
            f"{name}_other_frac": (len(equal) - fail - win) / num,
            f"{name}_expected_frac": math.fsum(rate ** g[1] + (1 - rate) ** g[1] for g in self.groups) / num,
            "success_rate": rate,
            "groups_kept": float(num - len(equal)),
        }


ZERO_VARIANCE = 1e-6
"""Largest difference of rewards in a group that counts as none: below it the difference is rounding of equal scores."""

Record = Sum | Mean | Max | Min | EffectiveSampleSize | ExplainedVariance | Histogram | Counts | Growth | Groups


def reduce(parts: Iterable[Mapping[str, Record]]) -> dict[str, Record]:
    """Return the metrics of all `parts` (microbatches, or ranks) as if they had been one batch.

    Example:
        >>> finalise(reduce([{"kl": Mean(1.0, 4.0)}, {"kl": Mean(2.0, 2.0)}]))
        {'kl': 0.5}


    A name that some parts lack is merged over those that have it.
    Raises: TypeError when one name stands for different kinds of record.
    """
    by_name: dict[str, list[Record]] = {}
    for part in parts:
        for name, record in part.items():
            by_name.setdefault(name, []).append(record)
    merged: dict[str, Record] = {}
    for name, records in by_name.items():
        kind = type(records[0])
        if any(type(record) is not kind for record in records):
            raise TypeError(f"metric {name!r} is a {kind.__name__} in one part and something else in another")
        merged[name] = kind.merge(records)  # type: ignore[arg-type]
    return merged


def finalise(records: Mapping[str, Record]) -> dict[str, float]:
    """Return name -> float for every record; NaN where nothing was counted."""
    return {key: value for name, record in records.items() for key, value in record.finalise(name).items()}
