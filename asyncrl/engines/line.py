"""Who runs which request: places in engines, and the line of requests that wait for one.

A trajectory has a home among the engines in service: its turns go there, where its prefix is cached. The home follows
from the names alone (the engine whose name hashes highest with the trajectory's), so nothing is kept, an engine that
goes moves only its own trajectories, and one that comes takes its share at once. A request goes to its home unless that
is full or loaded by more than `_LOYALTY` beyond the least loaded engine, which then takes it.

The load of an engine is its requests over its capacity, times how much slower than the fastest engine it samples (by
the time that a request waits for a token). So an engine that slows down to a tenth counts as full when it is a tenth
full, and one that hangs is loaded beyond all others.

When all are full, requests wait in one line. A place that frees goes to the first in line that is at home there, else
to the first of all: nobody waits while there is a place.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from asyncrl.engines.draft import Draft
from asyncrl.engines.roster import Member, Roster

_LOYALTY = 0.25  # of a capacity; at 0 the prefix cache is of little use, at 1 one engine fills while another idles


class _Waiter:
    """One request in line."""

    def __init__(self, draft: Draft, home: Member | None) -> None:
        self.draft = draft
        self.home = home
        self.called = trio.Event()
        self.member: Member | None = None
        """Whose place it got and has not gone to; None where it must look again."""


class Line:
    """Gives out the places of a roster's engines."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._waiters: list[_Waiter] = []
        roster.on_change = self._look_again

    @property
    def length(self) -> int:
        """Requests that wait for a place, or for an engine."""
        return len(self._waiters)

    @asynccontextmanager
    async def place(self, draft: Draft) -> AsyncIterator[Member]:
        """Hold a place in an engine for `draft`. Raises: EngineError when none has been in service for too long."""
        member = self._choose(draft) or await self._wait_for_place(draft)
        try:
            yield member
        finally:
            member.places_taken -= 1
            self._call()

    async def _wait_for_place(self, draft: Draft) -> Member:
        waiter = _Waiter(draft, self._home(draft))
        self._waiters.append(waiter)
        try:
            while True:
                await self._roster.wait_serving()
                if waiter.member is None:
                    await waiter.called.wait()
                if waiter.member is not None:
                    member, waiter.member = waiter.member, None
                    return member
                waiter.called = trio.Event()
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if waiter.member is not None:  # it was called, and given up before it could go
                waiter.member.places_taken -= 1
                self._call()

    def _look_again(self) -> None:
        """An engine has come or gone: homes change, and where none is left, all in line see how long it takes."""
        for waiter in self._waiters:
            waiter.home = self._home(waiter.draft)
            if waiter.home is None:
                waiter.called.set()
        self._call()

    def _call(self) -> None:
        """Give free places to those in line."""
        for member in sorted((m for m in self._roster.members if m.has_place), key=self.load):
            while self._waiters and member.has_place:
                first = next((w for w in self._waiters if w.home is member), self._waiters[0])
                self._waiters.remove(first)
                member.places_taken += 1
                first.member = member
                first.called.set()

    def _choose(self, draft: Draft) -> Member | None:
        free = [member for member in self._roster.members if member.has_place]
        if not free or self._waiters:
            return None
        home, idlest = self._home(draft), min(free, key=self.load)
        chosen = home if home in free and self.load(home) <= self.load(idlest) + _LOYALTY else idlest
        chosen.places_taken += 1
        return chosen

    def _home(self, draft: Draft) -> Member | None:
        """Return the trajectory's engine among those that serve."""
        return max(self._roster.serving, key=lambda member: _score(draft.trajectory_id, member.name), default=None)

    def load(self, member: Member) -> float:
        """Return the share of its capacity that an engine would use with one more request, more where it is slow."""
        paces = [pace for m in self._roster.serving if (pace := m.engine.seconds_per_token)]
        own = member.engine.seconds_per_token
        slowness = own / min(paces) if own and paces else 1.0
        return (member.places_taken + 1) / member.engine.capacity * max(1.0, slowness)


def _score(trajectory_id: str, engine: str) -> bytes:
    # not a CRC: those of names that differ in one digit differ by a constant, which shares unevenly
    return hashlib.blake2b(f"{trajectory_id} {engine}".encode(), digest_size=8).digest()
