"""The buffer between rollouts and learner: finished groups leave in order of admission, give or take a window.

A group may be taken while its id is less than the oldest untaken id plus the window. So at most `window - 1` groups
overtake a straggler, whatever it does: the other half of the bound in `STALENESS.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from asyncrl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatistics:
    """A moment's view of the buffer."""

    num_ready: int
    """Finished groups that wait for the learner."""
    num_running: int
    """Admitted groups that are not finished."""
    straggler: int | None
    """The oldest admitted group if it is not finished, else None: what a strict order would wait for."""
    num_taken: int
    num_dropped: Mapping[str, int]
    """reason -> groups."""


class WindowedFifo:
    """Bounded by the gate: it holds only groups that hold a slot.

    Example:
        >>> from asyncrl.types import Group, Task
        >>> task = Task(task_id="t", environment="e")
        >>> async def main():
        ...     buffer = WindowedFifo(window=2)
        ...     for group_id in range(3):
        ...         buffer.admit(group_id)
        ...     buffer.put(Group(group_id=2, task=task, trajectories=()))  # beyond the window: must wait
        ...     buffer.put(Group(group_id=1, task=task, trajectories=()))  # may overtake group 0
        ...     return [group.group_id for group in await buffer.take(1)]
        >>> trio.run(main)
        [1]
    """

    def __init__(self, *, window: int) -> None:
        assert window >= 1
        self._window = window
        self._outstanding: dict[int, Group | None] = {}  # admitted and not taken, in order; None while it runs
        self._changed = trio.Event()
        self._ended = False
        self._num_taken = 0
        self._num_dropped: dict[str, int] = {}

    def admit(self, group_id: int) -> None:
        """Note that a group has started. Ids must grow."""
        assert not self._outstanding or group_id > max(self._outstanding)
        self._outstanding[group_id] = None

    def put(self, group: Group) -> None:
        """Hand in a finished group. Never blocks: the group's slot at the gate is its place here."""
        assert self._outstanding[group.group_id] is None, f"group {group.group_id} was handed in twice"
        self._outstanding[group.group_id] = group
        self._wake()

    def drop(self, group_id: int, reason: str) -> None:
        """Forget a group that will not be trained on; counted under `reason`."""
        del self._outstanding[group_id]
        self._num_dropped[reason] = self._num_dropped.get(reason, 0) + 1
        self._wake()

    def end_admission(self) -> None:
        """Note that no group will be admitted any more: `take` then returns what is left."""
        self._ended = True
        self._wake()

    async def take(self, count: int) -> Sequence[Group]:
        """Wait until `count` groups have come within the window, one after the other, and return them.

        After `end_admission` it may return fewer, and none when all are taken. Cancelled in the middle it takes none.
        """
        taken: list[Group] = []
        try:
            while len(taken) < count:
                group = await self._take_one()
                if group is None:
                    break
                taken.append(group)
        except BaseException:
            self._outstanding = dict(sorted({**self._outstanding, **{g.group_id: g for g in taken}}.items()))
            self._num_taken -= len(taken)
            raise
        return taken

    async def _take_one(self) -> Group | None:
        while self._outstanding or not self._ended:
            oldest = next(iter(self._outstanding), 0)
            for group_id, group in self._outstanding.items():
                if group_id >= oldest + self._window:
                    break
                if group is not None:
                    del self._outstanding[group_id]
                    self._num_taken += 1
                    return group
            await self._changed.wait()
        return None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def statistics(self) -> BufferStatistics:
        """Return what is ready, what is awaited and what was dropped."""
        ready = sum(group is not None for group in self._outstanding.values())
        oldest = next(iter(self._outstanding), None)
        return BufferStatistics(
            num_ready=ready,
            num_running=len(self._outstanding) - ready,
            straggler=oldest if oldest is not None and self._outstanding[oldest] is None else None,
            num_taken=self._num_taken,
            num_dropped=dict(self._num_dropped),
        )
