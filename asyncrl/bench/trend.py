"""A straight line through figures of which some are far off: the Theil-Sen slope and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How fast something grows."""

    slope: float
    """Median of the slopes between all pairs."""
    low: float
    high: float
    """Between them lies the slope with 95% confidence; neighbours that depend on each other make it too narrow."""

    @property
    def is_flat(self) -> bool:
        """Whether no growth and no shrinking is within the interval."""
        return self.low <= 0.0 <= self.high


def trend(xs: Sequence[float], ys: Sequence[float]) -> Trend:
    """Return the trend of `ys` over `xs`, which grow.

    Source: Sen 1968, "Estimates of the regression coefficient based on Kendall's tau"; the interval is the one of its
    section 6, by the normal approximation and without its correction for ties.

    Example:
        >>> trend([0, 1, 2, 3, 4], [5.0, 7.0, 9.0, 100.0, 13.0]).slope
        2.0
    """
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(zip(xs, ys, strict=True), 2))
    count, pairs = len(xs), len(slopes)
    spread = _NORMAL_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    first = max(0, math.floor((pairs - spread) / 2))
    last = min(pairs - 1, math.ceil((pairs + spread) / 2))
    return Trend(slope=median(slopes), low=slopes[first], high=slopes[last])
