"""The promise `max_off_policyness`: reached, never passed, and broken by the mutants that look harmless."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import trio
import trio.testing

from asyncrl.buffers import BufferSettings, Gate, GroupBuffer, Order
from asyncrl.types import Group, Logprobs, Segment, Task, TokenIds, TokenSpan, Trajectory, TrajectoryStatus

_TASK = Task(task_id="task", environment="simulated")
_STEPS = 30
_NO_RULE = 10**9  # a buffer that believes in this bound finds every choice schedulable


@dataclass
class Outcome:
    """Staleness of what was trained on, in optimizer steps."""

    max_staleness: int = 0
    max_ahead: int = 0
    """Versions that the slowest engine was behind when a step began."""
    num_reused: int = 0
    num_out_of_turn: int = 0
    """Groups that were trained on while one of an earlier version was left behind."""


def simulate(
    settings: BufferSettings,
    seed: int,
    *,
    num_engines: int = 0,
    free_at_take: bool = False,
    first_engine_counts: bool = False,
    ignore_window: bool = False,
    ignore_deadlines: bool = False,
) -> Outcome:
    """Run the real gate and buffer under a mock clock with heavy-tailed rollouts and pulls, and dropped groups.

    Each engine goes from what it holds to the newest version, while the learner goes on. 0 engines are one to three.
    """
    rng = random.Random(seed)
    sigma, sync_s = rng.choice([0.1, 1.0, 2.5]), rng.choice([0.01, 0.5, 5.0])
    drop_share = rng.choice([0.0, 0.0, 0.3])
    outcome = Outcome()
    engines = [0] * (num_engines or rng.randint(1, 3))
    published = [trio.Event()]
    started: dict[int, int] = {}
    waiting: set[int] = set()
    finished: set[int] = set()
    uses: Counter[int] = Counter()
    gate = Gate(settings.num_slots)
    buffer = GroupBuffer(
        groups_per_step=settings.groups_per_step,
        max_off_policyness=_NO_RULE if ignore_deadlines else settings.max_off_policyness,
        order=settings.order,
        window=None if ignore_window else settings.effective_window,
        max_uses=settings.max_uses,
        rng=random.Random(seed),
    )

    async def rollout(group_id: int, seconds: float, dropped: bool) -> None:
        started[group_id] = rng.choice(engines)
        waiting.add(group_id)
        await trio.sleep(seconds)
        if dropped:
            waiting.remove(group_id)
            buffer.drop(group_id, "dropped")
            gate.release([group_id])
        else:
            finished.add(group_id)
            buffer.put(Group(group_id=group_id, task=_TASK, trajectories=_sampled_at(started[group_id])))

    async def produce(nursery: trio.Nursery) -> None:
        while True:
            group_id = await gate.admit()
            buffer.admit(group_id)
            nursery.start_soon(rollout, group_id, rng.lognormvariate(0, sigma), rng.random() < drop_share)

    async def pull(engine: int) -> None:
        while True:
            if engines[engine] == (newest := len(published) - 1):
                await published[-1].wait()
                continue
            await trio.sleep(sync_s * rng.lognormvariate(0, 0.5))
            engines[engine] = newest
            held = max(engines) if first_engine_counts else min(engines)
            if held > buffer.version:
                used_up = buffer.pulled(held)
                if not free_at_take:
                    gate.release(used_up.group_ids)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce, nursery)
            for engine in range(len(engines)):
                nursery.start_soon(pull, engine)
            for version in range(_STEPS):
                groups = [group.group_id for group in await buffer.take()]
                outcome.max_ahead = max(outcome.max_ahead, version - min(engines))
                assert len(set(groups)) == settings.groups_per_step
                outcome.max_staleness = max([outcome.max_staleness, *(version - started[g] for g in groups)])
                reused = {group_id for group_id in groups if uses[group_id]}
                assert {g for g in groups if not buffer.is_first_use(g)} == reused
                outcome.num_reused += len(reused)
                uses.update(groups)
                waiting.difference_update(groups)
                finished.difference_update(groups)
                assert not (reused and finished and settings.effective_window is None), (
                    "a reuse took a first use's place"
                )
                oldest = min((started[g] for g in waiting), default=version)
                outcome.num_out_of_turn += sum(started[g] > oldest for g in groups)
                if free_at_take:
                    gate.release(groups)
                await trio.sleep(rng.uniform(0.1, 2.0))
                published.append(trio.Event())
                published[version].set()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert max(uses.values()) <= settings.max_uses
    return outcome


def _sampled_at(version: int) -> tuple[Trajectory, ...]:
    segment = Segment(
        token_ids=TokenIds([1]),
        loss_mask=b"\1",
        behaviour_logprobs=Logprobs([-1.0]),
        spans=(TokenSpan(start=0, end=1, version=version),),
    )
    trajectory = Trajectory(
        trajectory_id="0",
        task_id=_TASK.task_id,
        environment=_TASK.environment,
        segments=(segment,),
        reward=1.0,
        status=TrajectoryStatus.COMPLETED,
    )
    return (trajectory,)


def _random_settings(seed: int, order: Order, *, own_slots: bool) -> BufferSettings:
    rng = random.Random(seed)
    groups_per_step, bound = rng.randint(1, 6), rng.randint(0, 4)
    window = rng.randint(1, bound * groups_per_step + 1)
    slots = rng.randint(groups_per_step, (bound + 1) * groups_per_step)
    return BufferSettings(
        max_off_policyness=bound,
        groups_per_step=groups_per_step,
        order=order,
        slots=slots if own_slots else 0,
        window=window if order is Order.WINDOWED_FIFO and not (own_slots and seed % 2) else 0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("own_slots", [False, True])
@pytest.mark.parametrize("order", Order)
def test_no_schedule_passes_the_bound_and_most_reach_it(order: Order, own_slots: bool) -> None:
    reached = 0
    for seed in range(30):
        settings = _random_settings(seed, order, own_slots=own_slots)
        staleness = simulate(settings, seed).max_staleness
        assert staleness <= settings.max_off_policyness, f"seed {seed}: {settings}"
        reached += staleness == settings.max_off_policyness
    assert reached > 15


@pytest.mark.slow
def test_the_bound_holds_however_far_the_engines_are_behind() -> None:
    """They are as far behind as slots allow: those of the steps in between are all held."""
    ahead = set()
    for seed in range(40):
        bound = 1 + seed % 4
        settings = BufferSettings(max_off_policyness=bound, groups_per_step=3, slots=(bound + 1) * 3)
        outcome = simulate(settings, seed)
        assert outcome.max_staleness <= bound
        assert outcome.max_ahead <= bound
        ahead.add((bound, outcome.max_ahead))
    assert ahead >= {(bound, bound) for bound in (1, 2, 3, 4)}


@pytest.mark.slow
def test_slots_that_the_first_of_several_engines_frees_break_the_bound() -> None:
    """Kills: an engines' version that is not the least of those that serve."""
    broken = 0
    for seed in range(30):
        settings = _random_settings(seed, Order.WINDOWED_FIFO, own_slots=True)
        outcome = simulate(settings, seed, num_engines=3, first_engine_counts=True)
        broken += outcome.max_staleness > settings.max_off_policyness
    assert broken > 10


@pytest.mark.slow
@pytest.mark.parametrize("order", Order)
def test_the_bound_is_reached_with_the_most_slots(order: Order) -> None:
    for seed in range(10):
        bound = seed % 5
        settings = BufferSettings(max_off_policyness=bound, groups_per_step=3, order=order, slots=(bound + 1) * 3)
        assert simulate(settings, seed).max_staleness == bound, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("order", Order)
def test_groups_that_are_used_again_keep_the_bound_at_every_use_and_take_no_place_of_others(order: Order) -> None:
    reused, reached = 0, 0
    for seed in range(30):
        plain = _random_settings(seed, order, own_slots=bool(seed % 2))
        if plain.max_off_policyness:
            settings = replace(plain, max_uses=2 + seed % 3)
            outcome = simulate(settings, seed)
            assert outcome.max_staleness <= settings.max_off_policyness, f"seed {seed}: {settings}"
            reached += outcome.max_staleness == settings.max_off_policyness
            reused += outcome.num_reused
    assert reused > 400
    assert reached > 15


@pytest.mark.slow
def test_reuse_past_the_bound_breaks_it() -> None:
    """Kills: a use that is not checked against the bound again."""
    settings = BufferSettings(max_off_policyness=1, groups_per_step=2, order=Order.FRESHEST, slots=4, max_uses=3)
    assert simulate(settings, 0, ignore_deadlines=True).max_staleness > 1


@pytest.mark.slow
def test_the_window_alone_holds_the_bound_with_the_slots_that_it_leaves() -> None:
    for seed in range(30):
        settings = _random_settings(seed, Order.WINDOWED_FIFO, own_slots=False)
        assert simulate(settings, seed, ignore_deadlines=True).max_staleness <= settings.max_off_policyness


def test_bound_zero_is_on_policy() -> None:
    for order in Order:
        assert simulate(BufferSettings(max_off_policyness=0, groups_per_step=3, order=order), 0).max_staleness == 0


def _num_broken(order: Order, *, own_slots: bool, **mutant: bool) -> int:
    broken = 0
    for seed in range(30):
        settings = _random_settings(seed, order, own_slots=own_slots)
        broken += simulate(settings, seed, **mutant).max_staleness > settings.max_off_policyness
    return broken


@pytest.mark.slow
def test_a_slot_freed_at_consumption_breaks_the_bound() -> None:
    """Kills: slots freed when a group is taken. With the rule in place the buffer says so itself."""
    assert _num_broken(Order.WINDOWED_FIFO, own_slots=False, free_at_take=True, ignore_deadlines=True) > 10
    settings = BufferSettings(max_off_policyness=1, groups_per_step=4, order=Order.FRESHEST, slots=8)
    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(settings, 0, free_at_take=True)
    assert "groups are due by version" in str(caught.value.exceptions[0])


@pytest.mark.slow
def test_an_ignored_window_breaks_the_bound() -> None:
    """Kills: a window that is not kept, where nothing else is."""
    assert _num_broken(Order.WINDOWED_FIFO, own_slots=False, ignore_window=True, ignore_deadlines=True) > 5


@pytest.mark.slow
@pytest.mark.parametrize("order", [Order.FRESHEST, Order.UNIFORM])
def test_a_preference_without_the_rule_breaks_the_bound(order: Order) -> None:
    """Kills: a step that takes what it prefers and leaves more behind than the next steps can eat in time."""
    assert _num_broken(order, own_slots=True, ignore_deadlines=True) > 10


def test_all_slots_are_first_come_first_served_and_fewer_leave_a_choice() -> None:
    def out_of_turn(slots: int) -> int:
        settings = BufferSettings(max_off_policyness=2, groups_per_step=4, order=Order.FRESHEST, slots=slots)
        return simulate(settings, 0).num_out_of_turn

    assert out_of_turn(12) == 0 < out_of_turn(11) < out_of_turn(9)


def test_of_more_groups_than_a_step_needs_it_takes_the_first_and_the_others_go_on() -> None:
    settings = BufferSettings(max_off_policyness=1, groups_per_step=2, oversample=2)

    async def main() -> None:
        gate = Gate(settings.num_slots)
        buffer = GroupBuffer(groups_per_step=2, max_off_policyness=1, window=settings.effective_window)

        async def start(count: int) -> list[int]:
            ids = [await gate.admit() for _ in range(count)]
            for group_id in ids:
                buffer.admit(group_id)
            return ids

        def finish(*group_ids: int) -> None:
            for group_id in group_ids:
                buffer.put(Group(group_id=group_id, task=_TASK, trajectories=()))

        assert await start(4) == [0, 1, 2, 3]
        finish(3, 1)
        assert [group.group_id for group in await buffer.take()] == [1, 3]
        gate.release(buffer.pulled(1).group_ids)
        assert await start(2) == [4, 5]
        finish(4, 5, 2)
        with trio.move_on_after(100) as waited:
            await buffer.take()
        assert waited.cancelled_caught, "group 0 is due"
        finish(0)
        assert [group.group_id for group in await buffer.take()] == [0, 2]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_group_is_used_until_the_bound_or_the_limit_and_keeps_its_slot_until_then() -> None:
    async def main() -> None:
        buffer = GroupBuffer(groups_per_step=1, max_off_policyness=2, max_uses=4)
        for group_id in (0, 1):
            buffer.admit(group_id)
        buffer.put(Group(group_id=0, task=_TASK, trajectories=_sampled_at(0)))
        for version in range(3):
            assert [group.group_id for group in await buffer.take()] == [0]
            assert buffer.is_first_use(0) == (version == 0)
            used_up = buffer.pulled(version + 1)
            assert (list(used_up.group_ids), used_up.num_expired) == (([], 0) if version < 2 else ([0], 1))
            if version == 1:  # the last step in which group 1 may be trained on is the next one
                with trio.move_on_after(1) as waited:
                    await buffer.take()
                assert waited.cancelled_caught
                buffer.drop(1, "dropped")
        statistics = buffer.statistics()
        assert (statistics.num_taken, statistics.num_reused, statistics.num_reusable) == (1, 2, 0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
