"""The promise `max_off_policyness`: reached, never passed, and broken by the two mutants that look harmless."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from asyncrl.buffers import BufferSettings, Gate, WindowedFifo
from asyncrl.errors import ConfigError
from asyncrl.types import Group, Task

_TASK = Task(task_id="task", environment="simulated")
_STEPS = 60


@dataclass
class Outcome:
    """Staleness of what was trained on, in optimizer steps."""

    max_staleness: int = 0
    engine_version: int = 0


def simulate(
    settings: BufferSettings, seed: int, *, free_at_take: bool = False, ignore_window: bool = False
) -> Outcome:
    """Run the real gate and buffer under a mock clock with heavy-tailed rollouts and slow syncs."""
    rng = random.Random(seed)
    sigma, sync_s = rng.choice([0.1, 1.0, 2.5]), rng.choice([0.01, 0.5, 5.0])
    outcome = Outcome()
    started: dict[int, int] = {}

    async def rollout(buffer: WindowedFifo, group_id: int, seconds: float) -> None:
        started[group_id] = outcome.engine_version
        await trio.sleep(seconds)
        buffer.put(Group(group_id=group_id, task=_TASK, trajectories=()))

    async def produce(gate: Gate, buffer: WindowedFifo, nursery: trio.Nursery) -> None:
        while True:
            group_id = await gate.admit()
            buffer.admit(group_id)
            nursery.start_soon(rollout, buffer, group_id, rng.lognormvariate(0, sigma))

    async def main() -> None:
        gate = Gate(settings.num_slots)
        buffer = WindowedFifo(window=10**9 if ignore_window else settings.effective_window)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce, gate, buffer, nursery)
            for version in range(_STEPS):
                groups = [group.group_id for group in await buffer.take(settings.groups_per_step)]
                outcome.max_staleness = max([outcome.max_staleness, *(version - started[g] for g in groups)])
                if free_at_take:
                    gate.release(groups)
                await trio.sleep(rng.uniform(0.1, 2.0))
                await trio.sleep(sync_s)
                outcome.engine_version = version + 1
                if not free_at_take:
                    gate.release(groups)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return outcome


def _random_settings(seed: int) -> BufferSettings:
    rng = random.Random(seed)
    groups_per_step, bound = rng.randint(1, 6), rng.randint(0, 4)
    window = rng.randint(1, bound * groups_per_step + 1)
    return BufferSettings(max_off_policyness=bound, groups_per_step=groups_per_step, window=window)


@pytest.mark.slow
def test_no_schedule_passes_the_bound_and_most_reach_it() -> None:
    reached = 0
    for seed in range(100):
        settings = _random_settings(seed)
        staleness = simulate(settings, seed).max_staleness
        assert staleness <= settings.max_off_policyness, f"seed {seed}: {settings}"
        reached += staleness == settings.max_off_policyness
    assert reached > 60


def test_bound_zero_is_on_policy() -> None:
    assert simulate(BufferSettings(max_off_policyness=0, groups_per_step=3), 0).max_staleness == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["free_at_take", "ignore_window"])
def test_mutants_break_the_bound(mutant: str) -> None:
    """Kills: slots freed when a group is taken; a buffer without its window."""
    broken = 0
    for seed in range(100):
        settings = _random_settings(seed)
        staleness = simulate(settings, seed, **{mutant: True}).max_staleness
        broken += staleness > settings.max_off_policyness
    assert broken > 20


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
        buffer = WindowedFifo(window=3)
        for group_id in range(3):
            buffer.admit(group_id)
        buffer.put(Group(group_id=1, task=_TASK, trajectories=()))
        with trio.move_on_after(1) as patience:
            await buffer.take(2)
        assert patience.cancelled_caught
        assert buffer.statistics().num_ready == 1
        assert buffer.statistics().num_taken == 0
        buffer.drop(0, "all_failed")
        assert buffer.statistics().num_dropped == {"all_failed": 1}
        assert [group.group_id for group in await buffer.take(1)] == [1]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_after_the_last_admission_what_is_left_is_taken_and_then_nothing() -> None:
    async def main() -> None:
        buffer = WindowedFifo(window=1)
        buffer.admit(0)
        buffer.put(Group(group_id=0, task=_TASK, trajectories=()))
        buffer.end_admission()
        with trio.fail_after(1):
            assert len(await buffer.take(2)) == 1
            assert await buffer.take(2) == []

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
    ],
)
def test_settings_that_cannot_run_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BufferSettings(**settings)
