"""Results that are fetched later, by their id and as often as one likes, while there is room for them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import trio

from asyncrl import wire
from asyncrl.tinker.orders import Result

_OVERHEAD_BYTES = 512  # of a result that is kept, beside its numbers


class Future:
    """A result that is there or will be."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.settled = trio.Event()
        self.result: Result | None = None
        """None until it is settled, and once it is no longer kept."""

    async def wait(self, timeout_s: float) -> bool:
        """Return whether it is settled, after at most `timeout_s`."""
        with trio.move_on_after(timeout_s):
            await self.settled.wait()
        return self.settled.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureStatistics:
    """Counts since the start, but for the first two."""

    open: int
    kept_bytes: int
    settled: dict[str, int]
    """By kind of result."""
    dropped_read: int
    """Results that were fetched at least once before they were dropped for want of room."""
    dropped_unread: int


class Futures:
    """All futures of a service; settled ones take at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[str, Future] = {}
        self._unread: OrderedDict[str, tuple[Future, int]] = OrderedDict()
        self._read: OrderedDict[str, tuple[Future, int]] = OrderedDict()
        self._bytes = 0
        self._settled: Counter[str] = Counter()
        self._dropped_read = self._dropped_unread = 0

    def open(self, request_id: str) -> Future:
        """Return a new future."""
        assert self.get(request_id) is None
        future = self._open[request_id] = Future(request_id)
        return future

    def get(self, request_id: str) -> Future | None:
        """Return a future that is open or whose result is kept."""
        if request_id in self._open:
            return self._open[request_id]
        kept = self._unread.get(request_id) or self._read.get(request_id)
        return None if kept is None else kept[0]

    def settle(self, future: Future, result: Result) -> None:
        """Give a future its result, for good. What has been kept longest goes where there is no room for it."""
        del self._open[future.request_id]
        future.result = result
        future.settled.set()
        self._settled[type(result).__name__] += 1
        size = len(wire.encode(result)) + _OVERHEAD_BYTES
        self._unread[future.request_id] = (future, size)
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._read) + len(self._unread) > 1:
            if self._read:
                _, (dropped, size) = self._read.popitem(last=False)
                self._dropped_read += 1
            else:
                _, (dropped, size) = self._unread.popitem(last=False)
                self._dropped_unread += 1
            dropped.result = None
            self._bytes -= size

    def note_read(self, future: Future) -> None:
        """Say that a result has been fetched: it goes before those that have not."""
        kept = self._unread.pop(future.request_id, None)
        if kept is not None:
            self._read[future.request_id] = kept

    def statistics(self) -> FutureStatistics:
        """Return the present counts."""
        return FutureStatistics(
            open=len(self._open),
            kept_bytes=self._bytes,
            settled=dict(self._settled),
            dropped_read=self._dropped_read,
            dropped_unread=self._dropped_unread,
        )
