"""Engines as one processor that all requests share: whoever samples is given as much as every other.

Since all are given equally many tokens at any time, one number says how many a request that samples from the beginning
was given; another ends when that number has grown by what it asked for. Between two beginnings or ends it grows
steadily, so that one task with one alarm is enough for any number of requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection

import trio

_NEARLY = 1e-6  # tokens: what a float is off by after millions of them


class SharedEngines:
    """What samples, and until when."""

    def __init__(self, rate_of: Callable[[int], float]) -> None:
        """`rate_of` returns the tokens a second of each of so many requests."""
        self._rate_of = rate_of
        self._given = 0.0
        self._seen_at = 0.0
        self._order = itertools.count()
        self._sampling: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = trio.Event()

    def sample_nowait(self, num_tokens: int, on_end: Callable[[], None]) -> int:
        """Begin a request and return its number; `on_end` is called once its tokens are sampled."""
        self._go_on()
        number = next(self._order)
        heapq.heappush(self._sampling, (self._given + num_tokens, number, on_end))
        self._changed.set()
        return number

    def abort_nowait(self, numbers: Collection[int]) -> None:
        """End those of the requests that still sample; nobody is told."""
        self._go_on()
        self._sampling = [each for each in self._sampling if each[1] not in numbers]
        heapq.heapify(self._sampling)
        self._changed.set()

    async def serve(self) -> None:
        """Sample, until cancelled."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(self._next_end()):
                await self._changed.wait()
            self._go_on()
            while self._sampling and self._sampling[0][0] <= self._given + _NEARLY:
                heapq.heappop(self._sampling)[2]()

    def _next_end(self) -> float:
        if not self._sampling:
            return float("inf")
        return self._seen_at + max(0.0, self._sampling[0][0] - self._given) / self._rate_of(len(self._sampling))

    def _go_on(self) -> None:
        now = trio.current_time()
        if self._sampling:
            self._given += (now - self._seen_at) * self._rate_of(len(self._sampling))
        self._seen_at = now
