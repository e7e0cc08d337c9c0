"""Gate and buffer one call at a time: what a step takes, whom it waits for, and the settings that cannot run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing

from asyncrl.buffers import BufferSettings, Candidate, Gate, GroupBuffer, Order, choose
from asyncrl.errors import ConfigError
from asyncrl.types import Group, Task

_TASK = Task(task_id="task", environment="simulated")


def _candidates(*specs: tuple[int, bool]) -> list[Candidate]:
    return [Candidate(group_id=i, deadline=due, finished=done) for i, (due, done) in enumerate(specs)]


@pytest.mark.parametrize("order", Order)
def test_what_is_taken_leaves_the_rest_schedulable_and_is_as_much_as_can_be(order: Order) -> None:
    """Against a brute force over all subsets."""
    rng = random.Random(0)
    for _ in range(300):
        groups_per_step, version = rng.randint(1, 3), 5
        specs: list[tuple[int, bool]] = []
        for due in range(version, version + rng.randint(1, 3)):
            most = (due - version + 1) * groups_per_step - len(specs)
            specs += [(due, rng.random() < 0.6) for _ in range(rng.randint(0, most))]
        candidates = _candidates(*specs)
        choice = choose(candidates, version=version, groups_per_step=groups_per_step, order=order, rng=rng)
        assert len(choice.group_ids) == _most(candidates, version, groups_per_step)
        assert _fits(candidates, choice.group_ids, version, groups_per_step)


def _most(candidates: list[Candidate], version: int, groups_per_step: int) -> int:
    finished = [c.group_id for c in candidates if c.finished]
    subsets = [[g for k, g in enumerate(finished) if mask >> k & 1] for mask in range(2 ** len(finished))]
    fitting = (s for s in subsets if len(s) <= groups_per_step and _fits(candidates, s, version, groups_per_step))
    return max(len(subset) for subset in fitting)


def _fits(candidates: list[Candidate], taken: object, version: int, groups_per_step: int) -> bool:
    """Tell whether the rest can still be eaten in time, if this step's free places go to what is due first."""
    assert isinstance(taken, (list, tuple))
    left = sorted(c.deadline for c in candidates if c.group_id not in taken)[groups_per_step - len(taken) :]
    places = Counter({version + 1 + k: groups_per_step for k in range(len(candidates))})
    for due in left:
        step = next((v for v in sorted(places) if places[v] and v <= due), None)
        if step is None:
            return False
        places[step] -= 1
    return True


def test_each_order_prefers_what_it_says() -> None:
    waiting = _candidates((9, True), (9, False), (9, True), (9, True), (9, True))
    taken = {
        order: choose(waiting, version=1, groups_per_step=2, order=order, rng=random.Random(3)).group_ids
        for order in Order
    }
    assert taken[Order.WINDOWED_FIFO] == (0, 2)
    assert taken[Order.FRESHEST] == (4, 3)
    drawn = Counter(
        group_id
        for seed in range(400)
        for group_id in choose(
            waiting, version=1, groups_per_step=2, order=Order.UNIFORM, rng=random.Random(seed)
        ).group_ids
    )
    assert set(drawn) == {0, 2, 3, 4}
    assert min(drawn.values()) > 150


def test_the_straggler_is_named_only_where_nobody_else_can_help() -> None:
    def straggler(specs: list[tuple[int, bool]], version: int) -> int | None:
        return choose(_candidates(*specs), version=version, groups_per_step=2, order=Order.FRESHEST).straggler

    assert straggler([(4, False), (4, True), (5, True)], 4) == 0  # two are ready, and group 0 must be of this step
    assert straggler([(4, True), (4, False)], 4) == 1  # nothing else is under way
    assert straggler([(4, False), (4, False), (5, True)], 4) == 0  # no place of this step is for the one that is ready
    assert straggler([(9, True), (9, False), (9, False)], 4) is None  # either of two would do
    assert straggler([(4, False), (4, False)], 4) is None  # nothing is ready: no single group is late


def test_slot_is_held_until_released() -> None:
    async def main() -> None:
        gate = Gate(2)
        assert [await gate.admit(), await gate.admit()] == [0, 1]
        with trio.move_on_after(100) as waited:
            await gate.admit()
        assert waited.cancelled_caught
        gate.release([0])
        with trio.fail_after(1):
            assert await gate.admit() > 1
        assert gate.statistics().held == 2

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_cancelled_take_takes_nothing() -> None:
    async def main() -> None:
        buffer = GroupBuffer(groups_per_step=2, max_off_policyness=2, window=3)
        for group_id in range(3):
            buffer.admit(group_id)
        buffer.put(Group(group_id=1, task=_TASK, trajectories=()))
        with trio.move_on_after(1) as patience:
            await buffer.take()
        assert patience.cancelled_caught
        assert buffer.statistics().num_ready == 1
        assert buffer.statistics().num_taken == 0
        buffer.drop(0, "all_failed")
        assert buffer.statistics().num_dropped == {"all_failed": 1}
        buffer.put(Group(group_id=2, task=_TASK, trajectories=()))
        assert [group.group_id for group in await buffer.take()] == [1, 2]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_after_the_last_admission_what_is_left_is_taken_and_then_nothing() -> None:
    async def main() -> None:
        buffer = GroupBuffer(groups_per_step=2, max_off_policyness=1, window=1)
        buffer.admit(0)
        buffer.put(Group(group_id=0, task=_TASK, trajectories=()))
        buffer.end_admission()
        with trio.fail_after(1):
            assert len(await buffer.take()) == 1
            buffer.pulled(1)
            assert await buffer.take() == []

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_off_policyness": -1}, "max_off_policyness must be >= 0 optimizer steps, got -1"),
        ({"groups_per_step": 0}, "groups_per_step must be >= 1"),
        ({"group_size": 0}, "group_size must be >= 1"),
        (
            {"max_off_policyness": 0, "groups_per_step": 4, "window": 2},
            "the gate has .* = 3 slots, but one step needs 4",
        ),
        ({"slots": 9}, "slots must be 0, or between groups_per_step = 4 and .* = 8 groups, got 9"),
        ({"slots": 3}, "slots must be 0, or between groups_per_step = 4 and .* = 8 groups, got 3"),
        ({"oversample": 5}, "oversample must be at most max_off_policyness . groups_per_step = 4 groups.* got 5"),
        ({"oversample": 1, "max_off_policyness": 0}, "oversample must be at most .* = 0 groups"),
        ({"oversample": 1, "slots": 6}, "slots = 6 and oversample = 1: give one of them"),
        ({"oversample": -1}, "oversample must be >= 0 groups"),
        ({"max_uses": 0}, "max_uses must be >= 1"),
        ({"max_uses": 2, "max_off_policyness": 0}, "max_uses = 2 needs max_off_policyness >= 1"),
        ({"order": Order.FRESHEST, "window": 2}, 'window = 2 is for order = "windowed_fifo"'),
    ],
)
def test_settings_that_cannot_run_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BufferSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "num_slots", "window"),
    [
        ({}, 7, 2),
        ({"max_off_policyness": 0}, 4, 1),
        ({"window": 3}, 6, 3),
        ({"slots": 6}, 6, None),
        ({"slots": 6, "window": 5}, 6, 5),
        ({"order": Order.FRESHEST}, 6, None),
        ({"oversample": 2}, 6, None),
        ({"max_uses": 2}, 4, None),
        ({"max_uses": 2, "max_off_policyness": 3}, 8, None),
        ({"max_uses": 3, "max_off_policyness": 4, "window": 15}, 6, 15),
        ({"oversample": 4, "order": Order.UNIFORM}, 8, None),
        ({"order": Order.UNIFORM, "max_off_policyness": 0}, 4, None),
    ],
)
def test_what_slots_and_window_are_where_they_are_not_given(
    settings: dict[str, Any], num_slots: int, window: int | None
) -> None:
    resolved = BufferSettings(**settings)
    assert (resolved.num_slots, resolved.effective_window) == (num_slots, window)
