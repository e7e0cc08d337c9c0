"""What the gateway has done since the start, by labels of which there are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from asyncrl.gateway.http import Refused
from asyncrl.tallies import Buckets

_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OK, LEFT = "200", "left"


class Note:
    """One request that is being counted."""

    def __init__(self) -> None:
        self.is_handed_on = False
        """Whether somebody else counts it."""


class GatewayFigures:
    """Counts of requests and sessions.

    Example:
        >>> async def main(figures):
        ...     with figures.answering("chat"):
        ...         await trio.lowlevel.checkpoint()
        >>> figures = GatewayFigures()
        >>> trio.run(main, figures)
        >>> dict(figures.requests)
        {('chat', '200'): 1}
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By face and HTTP status; LEFT where the client has gone, or the program ended, before the answer."""
        self.seconds: dict[str, Buckets] = {}
        """face -> from a request to the end of its answer, of those that were answered."""
        self.admission_seconds = Buckets(_SECONDS)
        """From a session's first request, which was turned away, to the one that was admitted."""
        self.turned_away = 0
        """Requests of new sessions that came while every engine's cache was full."""
        self.streams_left = 0

    @contextmanager
    def answering(self, face: str) -> Iterator[Note]:
        """Count a request of a face, by what the body raises."""
        note, began, status = Note(), trio.current_time(), LEFT
        try:
            yield note
            status = OK
        except Refused as refused:
            status = str(refused.status)
            raise
        finally:
            if not note.is_handed_on:
                self.requests[face, status] += 1
                if status == OK:
                    self.seconds.setdefault(face, Buckets(_SECONDS)).add(trio.current_time() - began)
