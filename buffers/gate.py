"""The gate: a group may start only while few enough others are between admission and the engines' pull.

`STALENESS.md` proves what that bounds. A slot is held on behalf of a group, from its admission until the engines have
pulled the weights that it was trained into, and not merely until it is taken for training: between those two moments
the engines still sample from weights that are older than the learner's, by as many steps as they are behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import trio


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatistics:
    """A moment's view of the gate."""

    num_slots: int
    held: int
    num_waiting: int
    """Callers that wait for a slot."""
    holders: Mapping[int, float]
    """group id -> seconds since its admission."""


class Gate:
    """Slots for groups, in order of admission.

    Example:
        >>> async def main():
        ...     gate = Gate(2)
        ...     first, second = await gate.admit(), await gate.admit()
        ...     gate.release([first])
        ...     return first, second, await gate.admit()
        >>> trio.run(main)
        (0, 1, 2)
    """

    def __init__(self, num_slots: int, *, first_group_id: int = 0) -> None:
        self._slots = trio.CapacityLimiter(num_slots)
        self._next_group_id = first_group_id
        self._admitted_at: dict[int, float] = {}

    @property
    def next_group_id(self) -> int:
        """The id that the next admitted group gets."""
        return self._next_group_id

    async def admit(self) -> int:
        """Wait for a slot and return the id of the group that now holds it. Ids follow the order of admission."""
        group_id = self._next_group_id  # given before the wait: the limiter serves its callers in order
        self._next_group_id += 1
        await self._slots.acquire_on_behalf_of(group_id)
        self._admitted_at[group_id] = trio.current_time()
        return group_id

    def resize(self, num_slots: int) -> None:
        """Have so many slots from now on; where more are held, none is given before enough are released."""
        self._slots.total_tokens = num_slots

    def readmit(self, group_id: int) -> None:
        """Give a slot to a group that was admitted before the run was interrupted. Raises: trio.WouldBlock."""
        assert group_id < self._next_group_id, f"group {group_id} was never admitted"
        self._slots.acquire_on_behalf_of_nowait(group_id)
        self._admitted_at[group_id] = trio.current_time()

    def release(self, group_ids: Iterable[int]) -> None:
        """Free the slots of groups whose weights the engines have pulled, or that were dropped untrained."""
        for group_id in group_ids:
            self._slots.release_on_behalf_of(group_id)
            del self._admitted_at[group_id]

    def statistics(self) -> GateStatistics:
        """Return who holds a slot, and how many wait."""
        slots = self._slots.statistics()
        now = trio.current_time()
        return GateStatistics(
            num_slots=int(slots.total_tokens),
            held=slots.borrowed_tokens,
            num_waiting=slots.tasks_waiting,
            holders={group_id: now - since for group_id, since in self._admitted_at.items()},
        )
