"""What the project promises of its speed, and whether a measurement keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that the project promises."""

    name: str
    """Its key in the report's `ratios`."""
    words: str
    limit: float
    is_least: bool
    """True: the figure must be at least the limit; False: at most."""

    def met(self, value: float) -> bool:
        """Whether `value` keeps the promise."""
        return value >= self.limit if self.is_least else value <= self.limit

    def report(self, value: float) -> dict[str, float | str | bool]:
        """Return the figure, the promise and whether it is kept, for a benchmark's report."""
        return {
            "name": self.name,
            "value": value,
            "limit": self.limit,
            "is_least": self.is_least,
            "met": self.met(value),
        }
