"""How long episodes take, and the longest of many: what a step waits for.

An episode is one stretch of sampling (lognormal tokens) and one outside of the engines (lognormal seconds, with a share
of stragglers); the two are independent. Engines share their rate among all that sample: those that began together are
equally far at any time, so that an episode of l tokens has them after

    t(l) = integral from 0 to l of max(1 / r, N(u) / C) du,    N(u) = N sum over k of S(g(t(u) - k T))

seconds, where r is what one request gets at most, C what the engines give together, N how many begin every T seconds,
S(u) the share of them that is longer than u tokens, and g(a) how many tokens such an episode has after a seconds:
processor sharing with a cap, in the steady state, solved by repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_Z = np.linspace(-8.0, 8.0, 8001)  # beyond, a share of 1e-15 is left out
_CDF = np.array([0.5 * math.erfc(-z / math.sqrt(2.0)) for z in _Z])
_NODES = np.linspace(-6.0, 6.0, 121)  # of the tokens; what is longer is one episode in 10^9
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()
_SETTLING = 8  # rounds in which who samples beside whom settles to a thousandth
_GRID = 800  # seconds at which the distribution is looked at; twice as many change no figure by a thousandth


def _area(x: Array, y: Array) -> float:
    return float((np.diff(x) * (y[1:] + y[:-1])).sum() / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """exp(log(median) + sigma z) of a standard normal z; sigma 0 is the median alone."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        """Its mean."""
        return self.median * math.exp(self.sigma**2 / 2)

    def below(self, x: Array) -> Array:
        """Return the share that is at most `x`, element by element."""
        if not self.sigma or not self.median:
            return (x >= self.median).astype(np.float64)
        with np.errstate(divide="ignore", over="ignore"):
            z = np.log(np.maximum(x, 0.0) / self.median) / self.sigma
        shares: Array = np.interp(z, _Z, _CDF, left=0.0, right=1.0)
        return shares

    def nodes(self) -> Array:
        """Return the values at the nodes over which is averaged."""
        return self.median * np.exp(self.sigma * _NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTimes:
    """Durations of the episodes that begin together. Seconds."""

    sampling: Array
    """At the nodes of the tokens."""
    outside: Callable[[Array], Array]
    """Seconds -> share of episodes that are outside of the engines for at most so long."""
    outside_longest: float
    """That only one in 10^9 exceeds."""

    limit_s: float = math.inf
    """At which an episode is cut short."""

    @property
    def mean(self) -> float:
        """Of an episode: the integral of the share that takes longer."""
        x, shares = self._distribution()
        return _area(x, 1.0 - shares)

    def longest(self, count: float) -> float:
        """Return the expected longest of `count` episodes: the integral over x >= 0 of 1 - F(x)^count.

        Source: E[X] of a non-negative X is the integral of its survival function; F^k is the distribution of the
        largest of k independent ones.
        """
        x, shares = self._distribution()
        return _area(x, 1.0 - shares**count)

    def draw_longest(self, count: int, chances: Array) -> Array:
        """Return the longest of `count` episodes for each of `chances`, which are uniform from 0 to 1."""
        x, shares = self._distribution()
        return np.interp(chances ** (1.0 / count), shares, x)

    def _distribution(self) -> tuple[Array, Array]:
        """Return seconds, and the share of episodes that take at most so long."""
        top = float(self.sampling[-1]) + self.outside_longest
        x = np.concatenate([[0.0], np.geomspace(top * 1e-4, top, _GRID)])
        x = x[x < self.limit_s]
        shares = np.minimum(self.outside(x[:, None] - self.sampling[None, :]) @ _WEIGHTS, 1.0)
        if self.limit_s <= top:
            x, shares = np.append(x, self.limit_s), np.append(shares, 1.0)
        return x, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRate:
    """What engines give to those that sample."""

    request_rate: float
    """Tokens a second that one request gets at most."""
    capacity: float
    """Tokens a second of all together."""
    together: float
    """Episodes that begin at once."""
    every_s: float
    """Seconds from then until as many more begin."""
    most: float
    """Episodes under way at most."""


def episode_times(
    tokens: Lognormal,
    outside: Lognormal,
    rate: SharedRate,
    *,
    straggler_share: float,
    straggler_factor: float,
    limit_s: float = math.inf,
) -> EpisodeTimes:
    """Return the durations of episodes that begin together; stragglers take `straggler_factor` times the median."""
    straggling = outside.median * straggler_factor

    def below(x: Array) -> Array:
        return (1.0 - straggler_share) * outside.below(x) + straggler_share * (x >= straggling)

    return EpisodeTimes(
        sampling=_sampling_times(tokens, rate),
        outside=below,
        outside_longest=max(outside.median * math.exp(6.0 * outside.sigma), straggling),
        limit_s=limit_s,
    )


def _sampling_times(tokens: Lognormal, rate: SharedRate) -> Array:
    """Return t(l) at the nodes, in the steady state in which others begin every so many seconds."""
    lengths = np.concatenate([[0.0], tokens.nodes()])
    longer = 1.0 - tokens.below(np.nextafter(lengths, 0.0))  # an episode samples to its last token
    begun = int(rate.most / rate.together + 1.0)  # lots that may be under way at once
    times = lengths / rate.request_rate
    for _ in range(_SETTLING):
        sampling = np.zeros_like(times)
        for lot in range(-begun + 1, begun):
            ages = times - lot * rate.every_s
            sampling += np.where(ages >= 0.0, np.interp(ages, times, longer, right=0.0), 0.0)
        pace = np.maximum(1.0 / rate.request_rate, np.minimum(sampling * rate.together, rate.most) / rate.capacity)
        after = np.concatenate([[0.0], np.cumsum(np.diff(lengths) * (pace[1:] + pace[:-1]) / 2)])
        times = (times + after) / 2
    return times[1:]
