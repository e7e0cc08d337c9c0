"""Seconds added to episodes: of the shape that was asked for, once an episode, counted as the environment's own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import trio
import trio.testing
from loop_simulation import Simulation, simulate

from asyncrl.buffers import BufferSettings
from asyncrl.environments.latency import LatencySettings, with_latency
from asyncrl.errors import ConfigError
from asyncrl.protocols import KeepsTrajectories, LearnsFromGroups, Sampler, reports_trajectories
from asyncrl.run import Limits
from asyncrl.testing import FakeEngine, FakeEnvironment, Rates
from asyncrl.types import Task, TokenIds, Trajectory

_RATES = Rates(mean_tokens=5, token_s=0.0, environment_s=0.0)
_TASK = Task(task_id="t", environment="fake")


class TwoTurns(FakeEnvironment):
    """Asks twice, and keeps what it was told and when."""

    def __init__(self) -> None:
        super().__init__(_RATES, random.Random(0))
        self.observed: list[Task] = []
        self.answered: dict[str, list[float]] = {}

    async def _episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        for _ in range(2):
            await sampler.sample(TokenIds([1]), max_tokens=5, trajectory_id=trajectory_id)
            self.answered.setdefault(trajectory_id, []).append(trio.current_time())
        return await super()._episode(task, sampler, trajectory_id)

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        self.observed.append(task)


def _collect(settings: LatencySettings, *, seed: int = 0) -> Mapping[str, Sequence[float]]:
    environment = TwoTurns()
    delayed = with_latency(environment, settings, seed=seed)

    async def main() -> None:
        engine = FakeEngine(_RATES, random.Random(1))
        found = await delayed.collect_trajectories(_TASK, engine, group_id="7", group_size=400)
        assert [t.trajectory_id for t in found] == [f"7-{index}" for index in range(400)]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return environment.answered


def test_each_episode_waits_once_as_long_as_the_shape_says() -> None:
    answered = _collect(LatencySettings(median_s=10.0, sigma=0.8, straggler_share=0.1, straggler_factor=4.0))
    waits = [first for first, _ in answered.values()]
    assert all(second == first for first, second in answered.values())
    assert 20 < waits.count(40.0) < 60
    others = [wait for wait in waits if wait != 40.0]
    assert 8 < median(others) < 12
    assert 10 * 2.718**0.8 * 0.8 < sorted(others)[round(0.84 * len(others))] < 10 * 2.718**0.8 * 1.25


def test_an_episode_waits_as_long_in_every_run_of_a_seed() -> None:
    settings = LatencySettings(median_s=10.0)
    assert _collect(settings) == _collect(settings) != _collect(settings, seed=1)


def test_without_a_median_nothing_is_wrapped() -> None:
    environment = TwoTurns()
    assert with_latency(environment, LatencySettings(), seed=0) is environment


def test_the_wait_is_the_environments_and_all_else_is_passed_on(tmp_path: Path) -> None:
    inner = TwoTurns()
    environment: Any = with_latency(inner, LatencySettings(median_s=50.0), seed=0)
    assert reports_trajectories(environment)
    assert isinstance(environment, LearnsFromGroups)
    buffer = BufferSettings(max_off_policyness=1, groups_per_step=2, group_size=2)
    simulation = Simulation(tmp_path, buffer=buffer, limits=Limits(steps=3), rates=_RATES, environment=environment)
    simulate(simulation)
    assert len(inner.observed) >= 6
    assert environment.state() == inner.state()
    idle = simulation.status.engine_idle_seconds
    assert idle["no_requests"] + idle["no_slot"] > 50, "no engine has a request meanwhile"


def test_an_episode_that_was_kept_is_not_run_again() -> None:
    kept = Trajectory(trajectory_id="7-0", task_id="t", environment="fake", segments=(), reward=1.0, status="completed")  # type: ignore[arg-type]

    class Keeping(FakeEngine):
        def kept_trajectory(self, trajectory_id: str) -> Trajectory | None:
            return kept if trajectory_id == "7-0" else None

    engine = Keeping(_RATES, random.Random(1))
    assert isinstance(engine, KeepsTrajectories)
    environment = with_latency(TwoTurns(), LatencySettings(median_s=1.0), seed=0)

    async def main() -> Sequence[Trajectory]:
        return await environment.collect_trajectories(_TASK, engine, group_id="7", group_size=2)

    found = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert [trajectory is kept for trajectory in found] == [True, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"median_s": -1.0}, r"median_s must be >= 0 and finite, got -1.0 \(\[environment.latency\]\)"),
        ({"sigma": float("nan")}, "sigma must be >= 0 and finite, got nan"),
        ({"straggler_share": 1.5}, "straggler_share must be from 0 to 1, got 1.5"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LatencySettings(**settings)
