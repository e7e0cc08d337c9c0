"""How full the engines' caches of keys and values are, looked at while requests come.

An engine whose cache is full pushes running requests out and computes them again later: more sessions at once then mean
fewer tokens a second.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

import trio

from asyncrl.engines import EnginePool

_USE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_LOOK_S = 2.0  # for engines to say how full they are; one that does not is not counted
_INTERVAL_S = 1.0  # caches fill over seconds; each look costs every engine a page of text


class CacheUse:
    """The least full cache of the engines in service, no older than a second while anyone asks."""

    def __init__(self, look: Callable[[], Awaitable[Sequence[float]]], *, limit: float) -> None:
        """`look` returns each engine's share from 0 to 1, as far as it can be had; with a `limit` of 1 nobody looks."""
        self._look = look
        self._limit = limit
        self._asked = trio.Event()
        self.least = 0.0

    @property
    def has_room(self) -> bool:
        """Whether any engine's cache is below the limit."""
        self._asked.set()
        return self.least < self._limit or self._limit >= 1.0

    async def watch(self) -> None:
        """Look while anyone asks, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            if self._limit < 1.0:
                self.least = min(await self._look(), default=0.0)
            await trio.sleep(_INTERVAL_S)


def cache_use_of(pool: EnginePool, *, limit: float) -> CacheUse:
    """Return how full the caches of a pool's engines are, by their own metrics; of several ranks the fullest counts."""

    async def look() -> list[float]:
        texts = await pool.read_metrics(_LOOK_S)
        found = ([float(use) for use in _USE.findall(text)] for text in texts.values())
        return [max(uses) for uses in found if uses]

    return CacheUse(look, limit=limit)
