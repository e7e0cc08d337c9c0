"""Solve rates, what they may really be, and how often one of k tries would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

_Z = 1.959963984540054  # two-sided 95 % of a normal distribution

Counts = Sequence[tuple[int, int]]
"""(solved, episodes) of each task."""


def wilson(solved: float, number: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a rate, (0, 1) of nothing.

    Source: Wilson 1927. Example:
        >>> [round(end, 3) for end in wilson(5, 10)]
        [0.237, 0.763]
    """
    if number <= 0:
        return 0.0, 1.0
    rate, spread = min(1.0, max(0.0, solved / number)), _Z**2 / number
    centre = (rate + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(rate * (1 - rate) / number + spread / (4 * number)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def interval(counts: Counts) -> tuple[float, float]:
    """Return the 95 % interval of the solve rate over tasks like these, (0, 1) of nothing.

    Episodes of one task are alike, so they count for fewer: Wilson's interval with the episodes divided by the design
    effect, the variance over tasks relative to that of independent episodes, and never for fewer than there are tasks.
    Source: Kish 1965; arXiv:2411.00640, section 2.2.

    Example:
        >>> [round(end, 2) for end in interval([(4, 4), (0, 4), (4, 4), (0, 4)])]
        [0.15, 0.85]
    """
    known = [(solved, number) for solved, number in counts if number]
    total = sum(number for _, number in known)
    if not total:
        return 0.0, 1.0
    rate, effective = sum(solved for solved, _ in known) / total, float(len(known))
    if len(known) > 1 and 0.0 < rate < 1.0:
        correction = len(known) / (len(known) - 1)
        clustered = correction * sum((solved - rate * number) ** 2 for solved, number in known) / total**2
        effect = clustered / (rate * (1 - rate) / total)
        effective = max(float(len(known)), total / max(1.0, effect))
    return wilson(rate * effective, effective)


def pass_at(counts: Counts, k: int) -> float | None:
    """Return the chance that one of k episodes solves a task, a mean over tasks with at least k; None without any.

    The unbiased estimate of arXiv:2107.03374, equation 1. Example:
        >>> pass_at([(1, 4)], 2)
        0.5
    """
    found = [1.0 - math.comb(n - solved, k) / math.comb(n, k) for solved, n in counts if n >= k]
    return fmean(found) if found else None


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return how much larger our rates are than theirs of the same tasks, in the mean, and its 95 % interval.

    A paired comparison: what makes a task hard makes it hard for both. (-1, 1) of fewer than two tasks.
    Source: arXiv:2411.00640, section 4.2. Example:
        >>> [round(value, 2) for value in difference([1.0, 0.5, 0.5], [0.5, 0.25, 0.0])]
        [0.42, 0.25, 0.58]
    """
    gaps = [our - their for our, their in zip(ours, theirs, strict=True)]
    mean = fmean(gaps) if gaps else 0.0
    half = _Z * stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 1.0
    return mean, max(-1.0, mean - half), min(1.0, mean + half)
