"""An engine's sleep: it gives its GPU memory up, keeps its requests, and wakes with new weights.

What vLLM 0.32 does, read in its source: `/sleep?level=1` pauses the scheduler, throws keys and values away, and copies
the weights to host memory. With `mode=keep` running requests stay in its queue, and are computed again from their first
token when it wakes; with `mode=wait` they end first. `/wake_up?tags=weights` brings the weights back and leaves the
scheduler paused; with the last tag (`kv_cache`) it goes on by itself. New requests are queued all the while.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import trio

from asyncrl.engines.control import ControlRoutes
from asyncrl.engines.requests import Request
from asyncrl.engines.settings import EngineSettings, KVOnSync
from asyncrl.errors import EngineError, WeightSyncError


class Nap:
    """One sleep of one engine. Requests that it finds running are not timed while it lasts."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.since = trio.current_time()
        self._left_s = {request: request.scope.deadline - self.since for request in requests}
        for request in self._left_s:
            request.scope.deadline = math.inf

    def end(self) -> None:
        """Go on timing the requests."""
        now = trio.current_time()
        for request, left_s in self._left_s.items():
            request.scope.deadline = now + left_s


class Napping(ABC):
    """What a client of a server that can sleep has besides: `sleep`, and the nap that its next pull ends."""

    name: str
    control: ControlRoutes
    nap: Nap | None = None
    """While its server sleeps."""
    _pulling: trio.Lock
    _sent: set[Request]

    async def sleep(self) -> None:
        """See `Engine`. Requests wait with it, and new ones for the pull that wakes it."""
        async with self._pulling:
            self.hold_requests()
            mode = "wait" if self.settings.kv_on_sync is KVOnSync.FINISH else "keep"
            try:
                with trio.fail_after(self.settings.sync_timeout_s):
                    await self.control.post("/sleep", None, {"level": "1", "mode": mode})
            except trio.TooSlowError:
                why = f"no answer in {self.settings.sync_timeout_s:g} s ([engine] sync_timeout_s)"
                raise EngineError(f"{self.name} does not go to sleep: {why}") from None
            except WeightSyncError as error:
                raise EngineError(f"{self.name} does not go to sleep: {error} (colocated, [engine])") from error
            self.nap = Nap(self._sent)

    def end_nap(self) -> None:
        """Note that the server is awake."""
        if self.nap is not None:
            self.nap.end()
        self.nap = None

    @abstractmethod
    def hold_requests(self) -> None:
        """Send no new request until the next pull is over."""

    @property
    @abstractmethod
    def settings(self) -> EngineSettings:
        """What is set of it."""
