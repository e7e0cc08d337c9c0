"""How fast an engine samples, seen from the events of its streams."""

from __future__ import annotations

import math

_HALF_LIFE_S = 20.0  # shorter, and the noise of few requests steers; longer, and a slow engine is found out late


class Pace:
    """Tokens and the time that requests waited for them; what is older counts less.

    Example:
        >>> pace = Pace()
        >>> pace.note(16, 0.8, now=10.0)
        >>> round(pace.seconds_per_token, 3)
        0.05
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._timed_tokens = 0.0
        self._seconds = 0.0
        self._last = -math.inf

    def note(self, num_tokens: int, seconds: float | None, *, now: float) -> None:
        """Count an event: `num_tokens` came, `seconds` after the event before it; None where there was none."""
        decay = self._decay(now)
        self._tokens = self._tokens * decay + num_tokens
        self._timed_tokens *= decay
        self._seconds *= decay
        if seconds is not None:
            self._timed_tokens += num_tokens
            self._seconds += seconds
        self._last = now

    @property
    def seconds_per_token(self) -> float | None:
        """What one request waits for one token; None before anything is known."""
        return self._seconds / self._timed_tokens if self._timed_tokens else None

    def tokens_per_second(self, now: float) -> float:
        """Return the recent rate of all requests together."""
        return self._tokens * self._decay(now) * math.log(2) / _HALF_LIFE_S

    def quiet_seconds(self, now: float) -> float:
        """Return how long there has been no event."""
        return now - self._last

    def _decay(self, now: float) -> float:
        return 0.5 ** ((now - self._last) / _HALF_LIFE_S) if math.isfinite(self._last) else 0.0
