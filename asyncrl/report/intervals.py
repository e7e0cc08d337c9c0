"""95 % intervals of what a run's episodes earned, over windows of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.solve_rates import wilson

_Z = 1.959963984540054  # two-sided 95 % of a normal distribution


def window_of(num_steps: int) -> int:
    """Return how many steps a window takes: single steps hold a few tasks each, and jump about."""
    return max(1, min(5, num_steps // 2), num_steps // 20)


def rates(rate: Sequence[float], number: Sequence[float], window: int) -> tuple[list[float], list[float], list[float]]:
    """Return (rate, low, high) over the trailing windows; NaN where a window has no episode."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for steps in _windows(len(rate), window):
        pairs = [(rate[i], number[i]) for i in steps if not math.isnan(rate[i] + number[i])]
        total, solved = sum(n for _, n in pairs), sum(r * n for r, n in pairs)
        ends = wilson(solved, total) if total else (math.nan, math.nan)
        for values, value in zip(found, (solved / total if total else math.nan, *ends), strict=True):
            values.append(value)
    return found


def means(
    mean: Sequence[float], deviation: Sequence[float], number: Sequence[float], window: int
) -> tuple[list[float], list[float], list[float]]:
    """Return (mean, low, high) over the trailing windows, pooled from each step's mean and deviation."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for steps in _windows(len(mean), window):
        known = [i for i in steps if not math.isnan(mean[i] + number[i])]
        total = sum(number[i] for i in known)
        if not total:
            for values in found:
                values.append(math.nan)
            continue
        pooled = sum(number[i] * mean[i] for i in known) / total
        spreads = [0.0 if math.isnan(deviation[i]) else deviation[i] for i in known]
        variance = (
            sum(number[i] * (s**2 + (mean[i] - pooled) ** 2) for i, s in zip(known, spreads, strict=True)) / total
        )
        half = _Z * math.sqrt(variance / total)
        for values, value in zip(found, (pooled, pooled - half, pooled + half), strict=True):
            values.append(value)
    return found


def _windows(length: int, window: int) -> list[range]:
    return [range(max(0, end - window), end) for end in range(1, length + 1)]
