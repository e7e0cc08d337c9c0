"""How often the gate and the order let a step begin: the rules of buffers/STALENESS.md over drawn durations of groups.

Learner and pulls take the same time at each step; groups differ, and a step waits for the ones that it needs. The
longest of a step's groups, over what the slots allow, is only the least of what that costs: steps whose groups began
one after the other wait for each other, so that one long group delays all that come after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What `BufferSettings` say, and what a step takes."""

    groups_per_step: int
    slots: int
    max_off_policyness: int
    window: int | None
    """Of windowed FIFO; None where only the bound limits."""
    step_s: float
    """From a step's beginning until its weights are published."""
    interval_s: float
    """At least from one step's beginning to the next one's; 0 leaves it to the slots alone."""
    sync_s: float
    """Of one pull; one after the other, and the newest version is what is pulled."""


def step_interval(gate: Gate, durations: Array, *, warm_up: int) -> float:
    """Return the mean seconds from one step's beginning to the next, after `warm_up` of them.

    `durations` [N] float64, seconds: of the groups in order of admission; as many steps are taken as they are enough
    for.
    """
    running = _Admitted(gate, durations)
    starts: list[float] = []
    free = 0.0
    published: list[float] = []  # of steps whose weights are not pulled yet
    engines_free, pulled = 0.0, 0
    while True:
        start = max(free, running.earliest())
        begin = max(published[0], engines_free) if published else math.inf
        if start > begin + gate.sync_s or math.isinf(start):
            done = sum(when <= begin for when in published)
            del published[:done]
            engines_free, pulled = begin + gate.sync_s, pulled + done
            if not running.admit(done * gate.groups_per_step, engines_free, pulled):
                break
            continue
        running.take(start, len(starts))
        starts.append(start)
        published.append(start + gate.step_s)
        free = start + gate.interval_s
    return (starts[-1] - starts[warm_up]) / (len(starts) - 1 - warm_up)


class _Admitted:
    """Groups that are admitted and not taken, in order of admission."""

    def __init__(self, gate: Gate, durations: Array) -> None:
        self._gate, self._durations, self._next = gate, durations, 0
        self._version = 0
        self._ids = np.empty(0, dtype=np.int64)
        self._ends = np.empty(0)
        self._due = np.empty(0, dtype=np.int64)
        self.admit(gate.slots, 0.0, 0)

    def admit(self, count: int, now: float, version: int) -> bool:
        """Admit the next groups, under the engines' `version`; return False where no more are drawn."""
        last = self._next + count
        if last > len(self._durations):
            return False
        self._ids = np.concatenate([self._ids, np.arange(self._next, last)])
        self._ends = np.concatenate([self._ends, now + self._durations[self._next : last]])
        self._due = np.concatenate([self._due, np.full(count, version + self._gate.max_off_policyness)])
        self._next = last
        return True

    def earliest(self) -> float:
        """Return when a step may begin; infinite where there are too few groups."""
        if len(self._ids) < self._gate.groups_per_step:
            return math.inf
        times = np.sort(self._ends)[self._gate.groups_per_step - 1 :]
        low, high = 0, len(times) - 1
        while low < high:
            middle = (low + high) // 2
            if self._allowed(self._ends <= times[middle]).sum() >= self._gate.groups_per_step:
                high = middle
            else:
                low = middle + 1
        return float(times[low])

    def take(self, now: float, version: int) -> None:
        """Take a step's groups at `now`, the oldest that the rules allow."""
        taken = np.flatnonzero(self._allowed(self._ends <= now))[: self._gate.groups_per_step]
        self._version = version + 1
        left = np.ones(len(self._ids), dtype=bool)
        left[taken] = False
        self._ids, self._ends, self._due = self._ids[left], self._ends[left], self._due[left]

    def _allowed(self, finished: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of the finished groups a step may take together."""
        if self._gate.window is not None:
            oldest = self._ids[~finished][:1]
            return finished if not len(oldest) else finished & (self._ids < oldest[0] + self._gate.window)
        return finished & self._schedulable(finished)

    def _schedulable(self, finished: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which groups leave the others their places, the oldest preferred: at most P - m(t) are due after t."""
        per_step = self._gate.groups_per_step
        allowed = finished.copy()
        for due in sorted(set(self._due.tolist()))[:-1]:
            here = int((self._due <= due).sum())
            most_later = per_step - max(0, here - (due - self._version) * per_step)
            later = np.flatnonzero(allowed & (self._due > due))
            allowed[later[max(0, most_later) :]] = False
        return allowed
