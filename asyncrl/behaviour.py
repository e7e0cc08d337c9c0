"""What episodes were seen trying besides their tasks, as shares of a step, and whether a share is rising.

An environment that watches notes {behaviour: number of attempts} in a trajectory's extras, under `KEY`, also where it
saw none. The share of a step is that of its watched episodes with at least one attempt. A share rises where the recent
one stands out from the long-term one by more than chance makes it: both are means with weights that fall by half every
few steps, over episodes, so that small steps say less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.tallies import MAX_PARTS, Names
from asyncrl.types import Trajectory

KEY = "behaviour"
"""Of a trajectory's extras."""

_LONG_TERM_STEPS = 40.0  # after which a step counts half in what is usual
_RECENT_STEPS = 3.0  # ... and in what is recent; fewer would follow single steps, more would tell late
_QUIET_STEPS = 10  # first of a behaviour's watch: what is usual is not known before
_BEGINS = 4.0  # standard deviations; by chance once in 30,000 steps
_ENDS = 2.0
_LEAST_RISE = 0.02  # of all episodes; with many of them, less stands out and means nothing


def counts_of(trajectories: Iterable[Trajectory]) -> tuple[int, dict[str, int]]:
    """Return how many of the episodes were watched, and of those, behaviour -> how many showed it."""
    watched = [t.extras[KEY] for t in trajectories if isinstance(t.extras.get(KEY), Mapping)]
    names = {str(name) for counts in watched for name in counts}
    return len(watched), {name: sum(bool(counts.get(name)) for counts in watched) for name in sorted(names)}


@dataclass(slots=True)
class _Share:
    long_term: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Weighted episodes that showed it, and all."""
    recent: list[float] = field(default_factory=lambda: [0.0, 0.0])
    is_rising: bool = False
    num_rises: int = 0
    last: float = 0.0
    """Of the last step."""

    def add(self, shown: int, watched: int) -> None:
        for sums, steps in ((self.long_term, _LONG_TERM_STEPS), (self.recent, _RECENT_STEPS)):
            kept = 0.5 ** (1 / steps)
            sums[:] = sums[0] * kept + shown, sums[1] * kept + watched
        self.last = shown / watched

    def deviations(self) -> float:
        """Return how far the recent share lies above the usual one, in standard deviations of the recent one."""
        usual = self.long_term[0] / self.long_term[1]  # it takes in the recent ones, so that no rise is from nothing
        rise = self.recent[0] / self.recent[1] - usual
        return rise / math.sqrt(usual * (1 - usual) / self.recent[1]) if rise > _LEAST_RISE else 0.0


class BehaviourWatch:
    """The shares of a run's steps so far.

    Example:
        >>> watch = BehaviourWatch()
        >>> for step in range(30):
        ...     _ = watch.add_step(32, {"network": 0 if step < 25 else 8})
        >>> watch.rising
        {'network': True}
    """

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._history = _Share()
        self._num_steps = 0
        self._name = Names(MAX_PARTS)

    def add_step(self, watched: int, shown: Mapping[str, int]) -> dict[str, float]:
        """Note a step and return its figures: share and rise of every behaviour ever seen; none where nobody watched.

        Args: as `counts_of` returns them.
        """
        if not watched:
            return {}
        counted: Counter[str] = Counter()
        for kind, number in shown.items():
            name = self._name(kind)
            counted[name] = min(watched, counted[name] + number)
            if name not in self._shares:  # nobody showed it in the steps before
                self._shares[name] = _Share([0.0, self._history.long_term[1]], [0.0, self._history.recent[1]])
        self._history.add(0, watched)
        self._num_steps += 1
        figures: dict[str, float] = {}
        for name, share in self._shares.items():
            share.add(counted[name], watched)
            above = share.deviations()
            began = above > _BEGINS and self._num_steps > _QUIET_STEPS and not share.is_rising
            share.num_rises += began
            share.is_rising = began or (share.is_rising and above > _ENDS)
            figures[f"behaviour_{name}_share"] = share.last
            figures[f"behaviour_{name}_rising"] = float(share.is_rising)
        return figures

    @property
    def shares(self) -> dict[str, float]:
        """Behaviour -> its share of the last step's watched episodes."""
        return {name: share.last for name, share in self._shares.items()}

    @property
    def rising(self) -> dict[str, bool]:
        """Behaviour -> whether its share is rising now."""
        return {name: share.is_rising for name, share in self._shares.items()}

    @property
    def num_rises(self) -> dict[str, int]:
        """Behaviour -> times that its share began to rise."""
        return {name: share.num_rises for name, share in self._shares.items()}

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs (JSON-like)."""
        return {
            "steps": self._num_steps,
            "watched": [self._history.long_term[1], self._history.recent[1]],
            "shares": {
                name: [*share.long_term, *share.recent, share.is_rising, share.num_rises]
                for name, share in self._shares.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; from the beginning where it is empty."""
        self._num_steps = state.get("steps", 0)
        long_term, recent = state.get("watched", (0.0, 0.0))
        self._history = _Share([0.0, long_term], [0.0, recent])
        self._shares = {
            name: _Share(list(kept[:2]), list(kept[2:4]), bool(kept[4]), int(kept[5]))
            for name, kept in state.get("shares", {}).items()
        }
        self._name = Names(MAX_PARTS)
        for name in self._shares:
            self._name(name)
