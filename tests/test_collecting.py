"""A group's deadline, and attempts that follow a failed one: what is late or failed costs itself and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from loop_simulation import Simulation, audited, simulate

from asyncrl.buffers import RETRIED, BufferSettings
from asyncrl.collecting import GroupCollector
from asyncrl.errors import ConfigError, EnvironmentFault, leaves
from asyncrl.evaluation import evaluate
from asyncrl.protocols import Sampler, reports_trajectories
from asyncrl.rollout import MultiTurnEnvironment
from asyncrl.run import Limits
from asyncrl.status import EvaluationResult
from asyncrl.testing import FakeEngine, FakeEnvironment, Rates
from asyncrl.types import Task, Trajectory, TrajectoryStatus

_RATES = Rates(mean_tokens=6, token_s=0.2, sigma=0.5)


class Silent(FakeEnvironment):
    """Tells nothing before the whole group has ended, as environments did before there was a deadline."""

    async def collect_trajectories(  # type: ignore[override]
        self, task: Task, sampler: Sampler, *, group_id: str, group_size: int
    ) -> Sequence[Trajectory]:
        """See `protocols.Environment`."""
        return await super().collect_trajectories(task, sampler, group_id=group_id, group_size=group_size)


class Flaky(FakeEnvironment):
    """Fails the first attempt at every second episode."""

    def __init__(self) -> None:
        super().__init__(_RATES, random.Random(0))
        self.num_failed = 0

    async def _episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        trajectory = await super()._episode(task, sampler, trajectory_id)
        if "." in trajectory_id or not trajectory_id.endswith(("1", "3")):
            return trajectory
        self.num_failed += 1
        return replace(trajectory, segments=(), reward=None, status=TrajectoryStatus.FAILED_SANDBOX)


def collect(environment: FakeEnvironment, *, seconds: float | None = None, retries: int = 0) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        collector = GroupCollector(environment, deadline_s=60.0, retries=retries)
        engine = FakeEngine(_RATES, random.Random(0))
        started, told = trio.current_time(), list[Trajectory]()
        found = await collector.collect(
            environment.get_item(), engine, group_id="7", group_size=4, on_trajectory=told.append
        )
        assert seconds is None or trio.current_time() - started == seconds
        ended = [t for t in found if t.status is not TrajectoryStatus.FAILED_DEADLINE]
        assert all(t in told for t in ended), "those of later attempts too"
        return found

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_episodes_that_run_at_the_deadline_have_failed_and_the_others_are_kept() -> None:
    environment = FakeEnvironment(_RATES, random.Random(0))
    environment.hanging = {"7-1", "7-3"}.__contains__
    found = {trajectory.trajectory_id: trajectory for trajectory in collect(environment, seconds=60.0)}
    assert set(found) == {"7-0", "7-1", "7-2", "7-3"}
    for name, trajectory in found.items():
        late = name in {"7-1", "7-3"}
        assert trajectory.status.failed == late == (trajectory.reward is None)
        assert bool(trajectory.segments) != late
    assert found["7-1"].status is TrajectoryStatus.FAILED_DEADLINE
    assert "60 s old (group_deadline_s)" in found["7-1"].detail


def test_an_environment_that_tells_nothing_loses_the_whole_group() -> None:
    environment = Silent(_RATES, random.Random(0))
    assert not reports_trajectories(environment)
    assert reports_trajectories(FakeEnvironment(_RATES, random.Random(0)))
    assert "on_trajectory" in MultiTurnEnvironment.collect_trajectories.__annotations__
    environment.hanging = {"7-1"}.__contains__
    assert [t.status for t in collect(environment)] == [TrajectoryStatus.FAILED_DEADLINE] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("num_hanging", "dropped"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_step_completes_though_a_worker_never_returns(tmp_path: Path, num_hanging: int, dropped: bool) -> None:
    buffer = BufferSettings(max_off_policyness=1, groups_per_step=3, group_size=4, group_deadline_s=60.0)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=Limits(steps=6, max_seconds=3000))
    hanging = {f"{group_id}-{index}" for group_id in (2, 9) for index in range(num_hanging)}
    simulation.environment.hanging = hanging.__contains__
    audited(simulation)
    assert simulation.status.steps == 6
    assert simulation.status.max_staleness_trained <= 1
    assert simulation.status.groups_dropped["group_deadline"] == 2 * dropped
    assert simulation.status.trajectories["failed_deadline"] == 2 * num_hanging
    statement = simulation.run.ledger.statement()
    assert statement.dropped["failed_deadline"].trajectories == 2 * num_hanging
    assert {group.group_id for group in simulation.learner.trained}.isdisjoint({2, 9}) == dropped


def test_groups_that_are_always_late_end_the_run(tmp_path: Path) -> None:
    buffer = BufferSettings(groups_per_step=2, group_size=4, group_deadline_s=60.0)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=Limits(steps=6, max_seconds=3000))
    simulation.environment.hanging = lambda trajectory_id: not trajectory_id.endswith("-0")
    with pytest.raises(BaseExceptionGroup) as caught:
        audited(simulation)
    (error,) = leaves(caught.value)
    assert isinstance(error, EnvironmentFault)
    assert "3 groups in a row had too few episodes that ended in time" in str(error)
    assert "failed_deadline" in str(error)


def test_an_evaluation_ends_though_a_worker_never_returns(tmp_path: Path) -> None:
    buffer = BufferSettings(groups_per_step=2, group_size=4, group_deadline_s=60.0)
    limits = Limits(steps=1, evaluation_samples=2, evaluate_before=False)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=limits)
    simulation.environment.hanging = {"evaluation-1-held-out-0-1"}.__contains__
    simulate(simulation)
    (result,) = simulation.recorder.evaluations
    assert (result.num_samples, result.num_failed) == (5, 1)


def test_held_out_tasks_of_a_mixture_may_have_the_same_id_in_two_parts() -> None:
    tasks = [Task(task_id="same", environment=label) for label in ("left", "right")]

    async def main() -> EvaluationResult:
        fakes = FakeEnvironment(_RATES, random.Random(0)), FakeEngine(_RATES, random.Random(1))
        return await evaluate(*fakes, tasks, samples=3, version=0, concurrent_tasks=2)

    result = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert {*result.by_task} == {"left/same", "right/same"}
    assert result.num_samples == 6


def test_failed_episodes_are_started_again_as_often_as_was_asked() -> None:
    found = collect(Flaky(), retries=1)
    assert [t.trajectory_id for t in found] == ["7-0", "7.1-0", "7-2", "7.1-1"]
    assert not any(t.status.failed for t in found)
    assert [t.status.failed for t in collect(Flaky(), retries=0)] == [False, True, False, True]
    broken = FakeEnvironment(_RATES, random.Random(0))
    broken.failing = lambda task_id: True
    assert [t.status.failed for t in collect(broken, retries=2)] == [True] * 4
    assert [t.trajectory_id for t in collect(broken, retries=2)] == ["7.2-0", "7.2-1", "7.2-2", "7.2-3"]


class AnySize(FakeEnvironment):
    """Brings as many trajectories as it likes: of every task a pair, of every third as many as come."""

    def get_item(self) -> Task:
        """Return the next task, with its group's size."""
        return replace(super().get_item(), group_size=0 if self._next % 3 == 0 else 2)

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Play what was asked for, or one to five where nobody says."""
        size = group_size if task.group_size else 1 + int(group_id) % 5
        return await super().collect_trajectories(
            task, sampler, group_id=group_id, group_size=size, on_trajectory=on_trajectory
        )


def test_a_task_may_say_how_many_trajectories_its_group_has_and_the_books_hold(tmp_path: Path) -> None:
    simulation = audited(Simulation(tmp_path, environment=AnySize(_RATES, random.Random(3)), rates=_RATES))
    groups = simulation.recorder.groups
    assert {len(group.trajectories) for group in groups if group.task.group_size} == {2}
    assert len({len(group.trajectories) for group in groups if group.task.group_size == 0}) == 5
    statement = simulation.run.ledger.statement()
    finished = sum(len(group.trajectories) for group in groups)
    assert statement.generated.trajectories - statement.in_flight.trajectories == finished


def test_a_task_of_any_size_that_is_late_keeps_what_has_ended_and_fails_for_the_rest() -> None:
    environment = AnySize(_RATES, random.Random(0))
    environment.hanging = lambda trajectory_id: trajectory_id.endswith("-1")
    environment._next = 2  # the third task is of any size
    trajectories = collect(environment)
    assert [t.reward is not None for t in trajectories] == [True, True, False]
    assert trajectories[-1].status is TrajectoryStatus.FAILED_DEADLINE


def test_a_group_of_any_size_is_not_empty() -> None:
    class Empty(FakeEnvironment):
        def get_item(self) -> Task:
            return replace(super().get_item(), group_size=0)

        async def collect_trajectories(  # type: ignore[override]
            self, task: Task, sampler: Sampler, *, group_id: str, group_size: int
        ) -> Sequence[Trajectory]:
            return ()

    with pytest.raises(EnvironmentFault, match="0 trajectories of 0 different ids, at least one was asked for"):
        collect(Empty(_RATES, random.Random(0)))
    with pytest.raises(ValueError, match="group_size must be >= 0, got -1"):
        Task(task_id="a", environment="fake", group_size=-1)


@pytest.mark.slow
def test_attempts_are_counted_and_their_tokens_dropped_with_a_reason(tmp_path: Path) -> None:
    flaky = Flaky()
    buffer = BufferSettings(groups_per_step=3, group_size=4, retries=1)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=Limits(steps=5), environment=flaky)
    audited(simulation)
    assert simulation.status.steps == 5
    assert not simulation.status.groups_dropped
    statement = simulation.run.ledger.statement()
    assert statement.dropped[RETRIED].trajectories == simulation.status.episodes_retried >= 2 * 15
    assert statement.dropped[RETRIED].tokens > 2 * 15
    assert statement.trained.trajectories == 4 * 15
    assert 0 <= flaky.num_failed - simulation.status.episodes_retried <= 2 * buffer.num_slots


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_deadline_s": -1.0}, "group_deadline_s must be >= 0 seconds, got -1.0"),
        ({"group_deadline_s": float("nan")}, "group_deadline_s must be >= 0 seconds, got nan"),
        ({"retries": -1}, "retries must be >= 0 attempts, got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BufferSettings(**settings)
