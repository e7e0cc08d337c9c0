"""The buffer between rollouts and learner: finished groups wait here, and leave in an order that keeps the bound.

It knows the engines' version, so that every group has a deadline from its admission on; `ordering.choose` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import trio

from asyncrl.buffers.ordering import Candidate, Choice, Order, choose
from asyncrl.types import Group, PolicyVersion


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


@dataclass(slots=True)
class _Entry:
    deadline: PolicyVersion
    group: Group | None = None  # None while it runs


class GroupBuffer:
    """Bounded by the gate: it holds only groups that hold a slot.

    Example:
        >>> from asyncrl.types import Group, Task
        >>> task = Task(task_id="t", environment="e")
        >>> async def main():
        ...     buffer = GroupBuffer(groups_per_step=1, max_off_policyness=2, window=2)
        ...     for group_id in range(3):
        ...         buffer.admit(group_id)
        ...     buffer.put(Group(group_id=2, task=task, trajectories=()))  # beyond the window: must wait
        ...     buffer.put(Group(group_id=1, task=task, trajectories=()))  # may overtake group 0
        ...     return [group.group_id for group in await buffer.take()]
        >>> trio.run(main)
        [1]
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_off_policyness: int,
        order: Order = Order.WINDOWED_FIFO,
        window: int | None = None,
        version: PolicyVersion = 0,
        rng: Random | None = None,
    ) -> None:
        """`version` is what the engines hold at the start; `rng` draws for the uniform order."""
        assert window is None or window >= 1
        self._groups_per_step = groups_per_step
        self._max_off_policyness = max_off_policyness
        self._order = order
        self._window = window
        self._rng = rng
        self._version = version
        self._outstanding: dict[int, _Entry] = {}  # admitted and not taken, in order of admission
        self._changed = trio.Event()
        self._ended = False
        self._num_taken = 0
        self._num_dropped: dict[str, int] = {}

    @property
    def version(self) -> PolicyVersion:
        """The engines' version: what a group that is admitted now is sampled under, or a later one."""
        return self._version

    def admit(self, group_id: int) -> None:
        """Note that a group has started. Ids must grow."""
        assert not self._outstanding or group_id > next(reversed(self._outstanding))
        self._outstanding[group_id] = _Entry(self._version + self._max_off_policyness)

    def put(self, group: Group) -> None:
        """Hand in a finished group. Never blocks: the group's slot at the gate is its place here."""
        entry = self._outstanding[group.group_id]
        assert entry.group is None, f"group {group.group_id} was handed in twice"
        entry.group = group
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

    async def take(self) -> Sequence[Group]:
        """Wait until a whole step's groups may be taken, and return them in the preferred order.

        After `end_admission` it may return fewer, and none when all are taken. Nothing is taken before the step is
        complete, so that a later, preferred group is not missed, and a cancelled call takes none.
        """
        while not self._ended or self._outstanding:
            choice = self._choose()
            needed = min(self._groups_per_step, len(self._outstanding)) if self._ended else self._groups_per_step
            if len(choice.group_ids) == needed:
                return [self._remove(group_id) for group_id in choice.group_ids]
            await self._changed.wait()
        return []

    def pulled(self, version: PolicyVersion) -> None:
        """Note that all engines hold `version`."""
        assert version >= self._version
        self._version = version

    def _choose(self) -> Choice:
        candidates = [
            Candidate(group_id=group_id, deadline=entry.deadline, finished=entry.group is not None)
            for group_id, entry in self._outstanding.items()
        ]
        return choose(
            candidates,
            version=self._version,
            groups_per_step=self._groups_per_step,
            order=self._order,
            window=self._window,
            rng=self._rng,
        )

    def _remove(self, group_id: int) -> Group:
        group = self._outstanding.pop(group_id).group
        assert group is not None
        self._num_taken += 1
        return group

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def statistics(self) -> BufferStatistics:
        """Return what is ready, what is awaited and what was dropped."""
        ready = sum(entry.group is not None for entry in self._outstanding.values())
        oldest = next(iter(self._outstanding), None)
        return BufferStatistics(
            num_ready=ready,
            num_running=len(self._outstanding) - ready,
            straggler=oldest if oldest is not None and self._outstanding[oldest].group is None else None,
            num_taken=self._num_taken,
            num_dropped=dict(self._num_dropped),
        )
