"""The wall clocks of two hosts, compared: for people who read the dates of their logs. Nothing is ordered by them."""

from __future__ import annotations

import time

_WORTH_SAYING_S = 2.0  # less may be the way of the message


def now_s() -> float:
    """Return this host's wall clock, in seconds since the epoch."""
    return time.time()


def compare(theirs_s: float) -> str:
    """Return how far another host's clock, read a moment ago, is off this one's, in words; "" where it agrees."""
    ahead_s = theirs_s - now_s()
    if abs(ahead_s) < _WORTH_SAYING_S:
        return ""
    return f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}, as the dates in its logs are"
