"""What is asked of one model: each thing once, in the order of its numbers, however the requests arrive.

number   waits for all below it, and is carried out once: a repetition gets the future that there is
gap      what waits longer than `gap_timeout_s` for a number below it fails, by name; that number may still come
failure  of one is its future's result; the next one is carried out
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from asyncrl import wire
from asyncrl.gateway.http import Refused
from asyncrl.tinker.futures import Future, Futures
from asyncrl.tinker.orders import Refusal, Result

Carry = Callable[[], Awaitable[Result]]
_REMEMBERED = 4096  # numbers whose repetition is compared with what came first; older ones are only known to be done


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    future: Future
    carry: Carry
    since: float


class Line:
    """Requests of one model."""

    def __init__(self, model_id: str, futures: Futures, *, max_waiting: int, gap_timeout_s: float) -> None:
        self.model_id = model_id
        self._futures = futures
        self._max_waiting = max_waiting
        self._gap_timeout_s = gap_timeout_s
        self._next = 0
        self._waiting: dict[int, _Waiting] = {}
        self._failed_ahead: set[int] = set()
        """Numbers above `_next` that are settled."""
        self._digests: dict[int, int] = {}
        self._arrival = trio.Event()
        self._ended: str = ""
        self._last: Callable[[], Awaitable[object]] | None = None

    def submit(self, number: int, digest: int, carry: Carry) -> str:
        """Return the id of the future of a request; one that is known already is not carried out again.

        Raises: Refused where the number was another request's, or too much waits.
        """
        if number < 0:
            raise Refused(400, f"seq_id must be >= 0, got {number}")
        request_id = f"{self.model_id}:{number}"
        known = self._digests.get(number)
        if known is not None and known != digest:
            raise Refused(400, f"seq_id {number} of {self.model_id} was another request", code="sequence_conflict")
        if known is not None or number < self._next:
            return request_id
        if self._ended:
            raise Refused(410, f"{self.model_id}: {self._ended}", code="model_ended")
        if len(self._waiting) >= self._max_waiting and number != self._next:  # which all the others wait for
            raise Refused(429, f"{len(self._waiting)} requests of {self.model_id} wait (max_waiting)", retry_after_s=1)
        self._digests[number] = digest
        self._digests.pop(number - _REMEMBERED, None)
        future = self._futures.open(request_id)
        self._waiting[number] = _Waiting(future=future, carry=carry, since=trio.current_time())
        self._arrival.set()
        return request_id

    async def serve(self) -> None:
        """Carry requests out until the line is ended."""
        while (waiting := await self._wait_next()) is not None:
            self._futures.settle(waiting.future, await waiting.carry())
            self._next += 1
        assert self._last is not None
        await self._last()

    async def _wait_next(self) -> _Waiting | None:
        """Return the next request, None once the line is ended; those that wait for one that does not come fail."""
        while not self._ended:
            while self._next in self._failed_ahead:
                self._failed_ahead.remove(self._next)
                self._next += 1
            if self._next in self._waiting:
                return self._waiting.pop(self._next)
            self._arrival = trio.Event()
            since = min((waiting.since for waiting in self._waiting.values()), default=float("inf"))
            with trio.move_on_at(since + self._gap_timeout_s) as patience:
                await self._arrival.wait()
            if patience.cancelled_caught:
                self._fail_those_that_wait(
                    f"SequenceGap: seq_id {self._next} of {self.model_id} has not come in {self._gap_timeout_s:g} s "
                    "(gap_timeout_s), and requests after it wait for it"
                )
        return None

    def _fail_those_that_wait(self, why: str) -> None:
        for number, waiting in sorted(self._waiting.items()):
            self._futures.settle(waiting.future, Refusal(message=why, by_user=True))
            self._failed_ahead.add(number)
        self._waiting.clear()

    def end(self, why: str, last: Callable[[], Awaitable[object]]) -> None:
        """Fail all that waits; what is under way is carried out, and after it `last`. May be called twice."""
        if not self._ended:
            self._ended, self._last = why, last
            self._fail_those_that_wait(f"{self.model_id}: {why}")
            self._arrival.set()


def digest_of(order: wire.Message) -> int:
    """Return a number that two requests share when they ask for the same thing."""
    return hash(wire.encode(order))
