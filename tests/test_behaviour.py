"""A behaviour's share is told of every step, and a rise of it is told from chance, from the first steps on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from loop_simulation import Simulation, simulate
from prometheus_client import CollectorRegistry

from asyncrl.behaviour import KEY, BehaviourWatch, counts_of
from asyncrl.metrics import Source, collector
from asyncrl.protocols import Sampler
from asyncrl.run import Limits
from asyncrl.tallies import MAX_PARTS, OTHER
from asyncrl.testing import FakeEnvironment, Rates
from asyncrl.types import Task, Trajectory, TrajectoryStatus


def steps(watch: BehaviourWatch, *shown: int, watched: int = 32) -> list[bool]:
    """Add steps in which so many episodes showed it, and return after which of them its share is rising."""
    rising = []
    for number in shown:
        watch.add_step(watched, {"network": number})
        rising.append(watch.rising["network"])
    return rising


def test_a_share_that_stays_as_it_is_raises_nothing() -> None:
    for share in (0.0, 0.01, 0.1, 0.5, 1.0):
        rng, watch = random.Random(7), BehaviourWatch()
        steps(watch, *(sum(rng.random() < share for _ in range(32)) for _ in range(1000)))
        assert watch.num_rises == {"network": 0}


def test_a_rise_is_told_within_a_few_steps_once_and_ends_when_it_has_become_usual() -> None:
    watch = BehaviourWatch()
    rising = steps(watch, *[0] * 30, *[8] * 300)
    assert True in rising[30:33]
    assert rising[-1] is False
    assert watch.num_rises == {"network": 1}
    assert True in steps(watch, *[24] * 5)
    assert watch.num_rises == {"network": 2}


@pytest.mark.parametrize("shown", [(*(0,) * 9, 32), (16,) * 10, (0,) * 40 + (1,)])
def test_neither_the_first_steps_nor_a_single_episode_are_a_rise(shown: tuple[int, ...]) -> None:
    assert True not in steps(BehaviourWatch(), *shown)


def test_a_small_step_says_less_than_a_large_one() -> None:
    small, large = BehaviourWatch(), BehaviourWatch()
    assert True not in steps(small, *[0] * 20, 1, watched=4)
    assert True in steps(large, *[0] * 20, 100, watched=400)


def test_a_rise_that_only_many_episodes_can_tell_is_none() -> None:
    assert True not in steps(BehaviourWatch(), *[10_000] * 30, *[11_500] * 10, watched=100_000)


def test_a_behaviour_that_is_first_seen_late_was_absent_before() -> None:
    late, early = BehaviourWatch(), BehaviourWatch()
    for _ in range(30):
        late.add_step(32, {})
        early.add_step(32, {"network": 0})
    assert steps(late, 8, 8) == steps(early, 8, 8)
    assert late.state() == early.state()


def test_a_watch_goes_on_from_its_state_and_steps_that_nobody_watched_count_nothing() -> None:
    one, other = BehaviourWatch(), BehaviourWatch()
    steps(one, *[0] * 20, 8)
    other.restore(json.loads(json.dumps(one.state())))
    assert one.add_step(0, {}) == {}
    assert one.add_step(32, {"network": 4}) == other.add_step(32, {"network": 4})
    assert one.state() == other.state()
    other.restore({})
    assert (other.rising, other.num_rises) == ({}, {})


def test_episodes_are_counted_once_however_often_they_tried() -> None:
    def trajectory(behaviour: Mapping[str, int] | None) -> Trajectory:
        extras = {} if behaviour is None else {KEY: behaviour}
        return Trajectory(
            trajectory_id="t",
            task_id="t",
            environment="e",
            segments=(),
            reward=0.0,
            status=TrajectoryStatus.COMPLETED,
            extras=extras,
        )

    seen = [trajectory(None), trajectory({}), trajectory({"network": 9, "judge": 0}), trajectory({"network": 1})]
    assert counts_of(seen) == (3, {"judge": 0, "network": 2})


class Watched(FakeEnvironment):
    """From some task on, every second episode tries the network."""

    async def _episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        trajectory = await super()._episode(task, sampler, trajectory_id)
        tries = int(task.task_id.rpartition("-")[2]) >= 80 and int(trajectory_id.rpartition("-")[2]) % 2
        return replace(trajectory, extras={KEY: {"network": 2} if tries else {}})


def test_a_run_tells_shares_and_rises_in_its_steps_and_metrics_also_after_it_was_resumed(tmp_path: Path) -> None:
    def run(number: int, *, resume: bool = False) -> Simulation:
        environment = Watched(Rates(), random.Random(1))
        limits = Limits(steps=number, checkpoint_every_steps=number)
        return simulate(Simulation(tmp_path, limits=limits, environment=environment, resume=resume))

    first = run(15)
    assert not any("behaviour_network_share" in record for record in first.recorder.steps)
    second = run(26, resume=True)
    records = second.recorder.steps
    assert [record["behaviour_network_share"] for record in records[-3:]] == [0.5] * 3
    assert 1.0 in [record.get("behaviour_network_rising") for record in records]
    registry = CollectorRegistry()
    registry.register(collector(Source(run=second.run)))
    labels = {"kind": "network"}
    assert registry.get_sample_value("asyncrl_behaviour_ratio", labels) == 0.5
    assert registry.get_sample_value("asyncrl_behaviour_rises_total", labels) == 1.0
    assert registry.get_sample_value("asyncrl_behaviour_rising", labels) == records[-1]["behaviour_network_rising"]


def test_kinds_that_come_from_outside_are_bounded_also_after_a_resume() -> None:
    one, other = BehaviourWatch(), BehaviourWatch()
    one.add_step(8, {f"kind-{number}": 2 for number in range(30)})
    assert len(one.shares) == MAX_PARTS + 1
    assert one.shares[OTHER] == 1.0
    other.restore(one.state())
    other.add_step(8, {"more": 3})
    assert set(other.shares) == set(one.shares)
