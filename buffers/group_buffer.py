"""The buffer between rollouts and learner: finished groups wait here, and leave in an order that keeps the bound.

It knows the engines' version, so that every group has a deadline from its admission on, and the learner's, which may be
several steps ahead; `ordering.choose` decides. A group may be used for more than one step; it stays here, and keeps its
slot, until it is used up and the engines have pulled what it was trained into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    num_unpulled: int
    """Groups that were trained on, or are being, and keep their slots until the engines' pull."""
    num_taken: int
    """First uses."""
    num_reusable: int
    """Groups that were trained on and may be once more; they hold their slots."""
    num_reused: int
    """Uses after a group's first."""
    num_dropped: Mapping[str, int]
    """reason -> groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedUp:
    """Groups that no step will train on any more, after a pull."""

    group_ids: Sequence[int]
    num_expired: int
    """Those of them that were used less often than they might, because once more would break the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What the next step is waited for."""

    straggler: int | None
    """The running group that the step cannot do without; None while any would help."""
    for_pull: bool
    """No step can come before the engines' pull: too few groups hold the slots that those under way leave."""


@dataclass(slots=True)
class _Entry:
    deadline: PolicyVersion  # the largest version at which a step that uses it may begin
    group: Group | None = None  # None while it runs
    uses: int = 0  # steps that it was taken for
    trained_into: PolicyVersion = 0  # what the last of them makes


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
        max_uses: int = 1,
        version: PolicyVersion = 0,
        rng: Random | None = None,
    ) -> None:
        """`max_uses`: steps that may train on a group, as far as the bound allows. `version`: what learner and engines
        hold at the start. `rng` draws for the uniform order.
        """
        assert window is None or window >= 1
        self._groups_per_step = groups_per_step
        self._max_off_policyness = max_off_policyness
        self._order = order
        self._window = window
        self._max_uses = max_uses
        self._rng = rng
        self._version = self._next_step = version
        self._outstanding: dict[int, _Entry] = {}  # admitted and not taken, in order of admission
        self._unpulled: dict[int, _Entry] = {}  # taken, for steps whose weights the engines do not hold yet
        self._reusable: dict[int, _Entry] = {}
        self._changed = trio.Event()
        self._ended = False
        self._num_taken = self._num_reused = 0
        self._num_dropped: dict[str, int] = {}

    @property
    def version(self) -> PolicyVersion:
        """The engines' version: what a group that is admitted now is sampled under, or a later one."""
        return self._version

    @property
    def next_step(self) -> PolicyVersion:
        """The version at which the next step begins; that of a step under way is one less."""
        return self._next_step

    def admit(self, group_id: int, *, sampled_since: PolicyVersion | None = None) -> None:
        """Note that a group has started. Ids must grow.

        `sampled_since` is the oldest version of a group that has tokens already, from before the run was interrupted.
        """
        assert not self._outstanding or group_id > next(reversed(self._outstanding))
        oldest = self._version if sampled_since is None else sampled_since
        self._outstanding[group_id] = _Entry(oldest + self._max_off_policyness)

    def sampled_since(self, group_id: int) -> PolicyVersion:
        """Return the oldest version that a running group may hold a token of: the bound is kept for no older one."""
        return self._outstanding[group_id].deadline - self._max_off_policyness

    def put(self, group: Group) -> None:
        """Hand in a finished group. Never blocks: the group's slot at the gate is its place here."""
        entry = self._outstanding[group.group_id]
        assert entry.group is None, f"group {group.group_id} was handed in twice"
        entry.group = group
        self._wake()

    def put_back(self, group: Group, *, uses: int) -> None:
        """Hand in a group that so many steps trained on before the run was interrupted, and that one more may use."""
        assert 0 < uses < self._max_uses
        entry = _Entry(self._version + self._max_off_policyness, group, uses)
        assert self._last_use(entry) >= self._version
        self._reusable[group.group_id] = entry
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

    async def take(self, *, on_wait: Callable[[Wait], None] | None = None) -> Sequence[Group]:
        """Wait until a whole step's groups may be taken, and return them in the preferred order, reused ones last.

        After `end_admission` it may return fewer, and none when all are used up. Nothing is taken before the step is
        complete, so that a later, preferred group is not missed, and a cancelled call takes none. `on_wait` is told
        before each wait what is waited for.
        """
        while (left := self._num_left()) or not self._ended:
            choice = self._choose()
            needed = min(self._groups_per_step, left) if self._ended else self._groups_per_step
            if len(choice.group_ids) == needed:
                self._next_step += 1
                return [self._take(group_id) for group_id in choice.group_ids]
            if on_wait:
                present = len(self._outstanding) + len(self._reusable_now())
                on_wait(Wait(straggler=choice.straggler, for_pull=bool(self._unpulled) and present < needed))
            await self._changed.wait()
        return []

    @property
    def reusable(self) -> Mapping[int, int]:
        """group id -> steps that trained on it, of groups that hold a slot and were used less often than they may be.

        Among them are those that leave with the next pull, because once more would break the bound.
        """
        trained = {**self._reusable, **self._unpulled}
        return {group_id: entry.uses for group_id, entry in trained.items() if entry.uses < self._max_uses}

    def is_first_use(self, group_id: int) -> bool:
        """Tell whether the step under way is the first to train on one of its groups."""
        return self._unpulled[group_id].uses == 1

    def pulled(self, version: PolicyVersion) -> UsedUp:
        """Note that all engines hold `version` or a later one; return the groups whose slots are free now."""
        assert version >= self._version
        self._version = version
        self._next_step = max(self._next_step, version)  # a warm start has taken steps on no group
        used_up, num_expired = list[int](), 0
        there = {i: entry for i, entry in self._unpulled.items() if entry.trained_into <= version}
        for group_id, entry in sorted({**self._reusable, **there}.items()):
            self._unpulled.pop(group_id, None)
            if self._may_be_reused(entry):
                self._reusable[group_id] = entry
                continue
            self._reusable.pop(group_id, None)
            num_expired += entry.uses < self._max_uses
            used_up.append(group_id)
        self._wake()
        return UsedUp(group_ids=used_up, num_expired=num_expired)

    def _num_left(self) -> int:
        """Return how many groups this step or a later one may train on, those that come back with a pull included."""
        coming_back = sum(self._may_be_reused(entry) for entry in self._unpulled.values())
        return len(self._outstanding) + len(self._reusable_now()) + coming_back

    def _may_be_reused(self, entry: _Entry) -> bool:
        return entry.uses < self._max_uses and self._last_use(entry) >= self._next_step

    def _reusable_now(self) -> dict[int, _Entry]:
        """Return those that a step which begins now may use again; the others leave with the next pull."""
        return {group_id: entry for group_id, entry in self._reusable.items() if self._may_be_reused(entry)}

    def _last_use(self, entry: _Entry) -> PolicyVersion:
        """Return the largest version at which a step that trains on a finished group once more may begin."""
        assert entry.group is not None
        oldest = entry.group.oldest_version
        return entry.deadline if oldest is None else oldest + self._max_off_policyness

    def _choose(self) -> Choice:
        candidates = [
            Candidate(
                group_id=group_id, deadline=entry.deadline, finished=entry.group is not None, reuse=entry.uses > 0
            )
            for entries in (self._outstanding, self._reusable_now())
            for group_id, entry in entries.items()
        ]
        return choose(
            candidates,
            version=self._next_step,
            groups_per_step=self._groups_per_step,
            order=self._order,
            window=self._window,
            rng=self._rng,
        )

    def _take(self, group_id: int) -> Group:
        entry = self._outstanding.pop(group_id, None) or self._reusable.pop(group_id)
        assert entry.group is not None
        self._num_taken += entry.uses == 0
        self._num_reused += entry.uses > 0
        entry.uses += 1
        entry.trained_into = self._next_step
        self._unpulled[group_id] = entry
        return entry.group

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
            num_unpulled=len(self._unpulled),
            num_taken=self._num_taken,
            num_reusable=len(self._reusable),
            num_reused=self._num_reused,
            num_dropped=dict(self._num_dropped),
        )
