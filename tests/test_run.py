"""The real loop, gate and buffer under a mock clock, with simulated engine, learner and environment."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from loop_simulation import Simulation, simulate

from asyncrl.buffers import BufferSettings
from asyncrl.dynamic_sampling import FILTERED
from asyncrl.errors import CheckpointError, EnvironmentFault, LearnerError, StalenessError, WeightSyncError
from asyncrl.protocols import Sampler
from asyncrl.run import Limits
from asyncrl.testing import FakeEnvironment, Rates
from asyncrl.types import Task, TokenIds, Trajectory


def _causes(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in _causes(inner)]
    return [error]


def _fails(simulation: Simulation, kind: type[Exception], beside: Any = None) -> str:
    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(simulation, beside)
    causes = [cause for cause in _causes(caught.value) if isinstance(cause, kind)]
    assert causes, caught.value
    return str(causes[0])


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_holds_through_the_whole_loop_and_is_reached(tmp_path: Path, bound: int) -> None:
    buffer = BufferSettings(max_off_policyness=bound, groups_per_step=4, group_size=2)
    simulation = simulate(Simulation(tmp_path, buffer=buffer, limits=Limits(steps=20)))
    assert simulation.status.max_staleness_trained == bound
    assert simulation.status.steps == simulation.status.version == 20


def test_tokens_of_one_completion_carry_several_versions_when_weights_change_under_it(tmp_path: Path) -> None:
    rates = Rates(token_s=0.2, step_s=2.0)
    simulation = simulate(Simulation(tmp_path, rates=rates, buffer=BufferSettings(max_off_policyness=3)))
    versions = {len(s.spans) for g in simulation.learner.trained for t in g.trajectories for s in t.segments}
    assert max(versions) >= 2


def test_rollouts_go_on_while_the_learner_steps(tmp_path: Path) -> None:
    rates = Rates(step_s=20.0, mean_tokens=50)
    buffer = BufferSettings(max_off_policyness=1, groups_per_step=4, group_size=2, window=1)
    simulation = simulate(Simulation(tmp_path, rates=rates, buffer=buffer, limits=Limits(steps=10)))
    seconds = simulation.status.last_step["seconds"]
    assert seconds < 10 * 20.5 + 10, "only the first step waits for its groups"


def test_every_drawn_task_is_trained_once_or_still_open(tmp_path: Path) -> None:
    simulation = simulate(Simulation(tmp_path))
    trained = [group.task.task_id for group in simulation.learner.trained]
    assert len(set(trained)) == len(trained) == 12 * 4
    drawn = simulation.environment.state()["next"]
    assert drawn == len(trained) + simulation.run.num_unfinished


def test_a_task_source_that_ends_ends_the_run_after_its_last_group(tmp_path: Path) -> None:
    limits = Limits(steps=100, evaluation_samples=2)
    simulation = simulate(Simulation(tmp_path, num_tasks=10, limits=limits))
    assert Counter(g.task.task_id for g in simulation.learner.trained) == Counter(f"task-{i}" for i in range(10))
    assert simulation.status.steps == 3
    assert [e.version for e in simulation.recorder.evaluations] == [0, 3]
    assert simulation.recorder.evaluations[0].num_samples == 6
    pulled = simulation.status.last_step["seconds"] + Rates().sync_s
    assert simulation.run.seconds == pytest.approx(pulled), "measuring at the end is not training"


def test_every_task_is_trained_on_as_often_as_it_may_be_when_the_tasks_end(tmp_path: Path) -> None:
    buffer = BufferSettings(max_off_policyness=3, groups_per_step=4, group_size=2, max_uses=2)
    simulation = simulate(Simulation(tmp_path, num_tasks=10, buffer=buffer, limits=Limits(steps=100)))
    uses = Counter(group.task.task_id for group in simulation.learner.trained)
    assert set(uses) == {f"task-{i}" for i in range(10)}
    assert sum(uses.values()) + simulation.status.expired_reuse == 2 * 10
    assert simulation.run.num_unfinished == 0


def test_resume_trains_every_task_exactly_once(tmp_path: Path) -> None:
    first = simulate(Simulation(tmp_path, num_tasks=40, limits=Limits(steps=4, checkpoint_every_steps=3)))
    second = simulate(Simulation(tmp_path, num_tasks=40, limits=Limits(steps=100), resume=True))
    trained = Counter(g.task.task_id for g in [*first.learner.trained, *second.learner.trained])
    assert trained == Counter(f"task-{i}" for i in range(40))
    assert second.status.steps == second.status.version == 10
    assert second.status.max_staleness_trained <= 1
    ids = [g.group_id for g in second.learner.trained]
    assert min(ids) > max(g.group_id for g in first.learner.trained)


def test_stop_finishes_the_step_under_way_and_saves(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(steps=1000, evaluation_samples=2, evaluate_before=False))

    async def stop_later() -> None:
        await trio.sleep(33.0)
        simulation.stop.set()

    simulate(simulation, stop_later)
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.version == simulation.status.version == simulation.learner.version > 0
    assert simulation.recorder.evaluations == []


def test_stop_in_an_evaluation_ends_it(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(steps=1000, evaluation_samples=2))

    async def stop_soon() -> None:
        await trio.sleep(0.1)
        simulation.stop.set()

    simulate(simulation, stop_soon)
    assert simulation.status.steps == 0
    assert simulation.recorder.evaluations == []


def test_no_step_starts_after_the_time_limit(tmp_path: Path) -> None:
    simulation = simulate(Simulation(tmp_path, limits=Limits(steps=1000, max_seconds=60.0)))
    assert 0 < simulation.status.steps < 12
    assert simulation.status.last_step["seconds"] < 60 + 6


def test_a_broken_environment_ends_the_run_and_is_named(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path)
    simulation.environment.failing = lambda task_id: True
    message = _fails(simulation, EnvironmentFault)
    assert "3 groups in a row" in message
    assert "no sandbox" in message


def test_a_group_without_a_usable_episode_frees_its_slot_and_is_counted(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(steps=8))
    simulation.environment.failing = {"task-1", "task-2", "task-9"}.__contains__
    simulate(simulation)
    assert simulation.status.groups_dropped["all_failed"] == 3
    assert simulation.status.steps == 8
    assert simulation.status.trajectories["failed_sandbox"] == 3 * 4
    trained = {group.task.task_id for group in simulation.learner.trained}
    assert not trained & {"task-1", "task-2", "task-9"}


def test_a_reward_that_is_no_number_is_a_failed_episode_whatever_the_environment(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(steps=3))
    collect = simulation.environment.collect_trajectories

    async def spoiled(task: Task, sampler: Sampler, *, group_id: str, group_size: int) -> list[Trajectory]:
        first, *others = await collect(task, sampler, group_id=group_id, group_size=group_size)
        return [replace(first, reward=float("nan")), *others]

    simulation.environment.collect_trajectories = spoiled  # type: ignore[method-assign]
    simulate(simulation)
    assert simulation.status.steps == 3
    assert simulation.status.trajectories["failed_environment"] == len(simulation.recorder.groups)
    failed = simulation.recorder.groups[0].trajectories[0]
    assert (failed.reward, failed.segments) == (None, ())
    assert failed.detail == "EnvironmentFault: the reward must be a finite number, got nan"


class _Observing(FakeEnvironment):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(Rates(), random.Random(1))
        self.observed: list[tuple[Task, int]] = []

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        self.observed.append((task, len(trajectories)))


def test_an_environment_hears_of_every_finished_group_those_that_are_dropped_too(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(steps=3), environment=_Observing())
    simulation.environment.failing = {"task-1"}.__contains__
    simulate(simulation)
    assert isinstance(simulation.environment, _Observing)
    assert simulation.environment.observed == [(group.task, 4) for group in simulation.recorder.groups]
    assert "task-1" in {task.task_id for task, _ in simulation.environment.observed}


def test_a_dead_learner_ends_the_run(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path)
    simulation.learner.dead = True
    assert "signal 9" in _fails(simulation, LearnerError)


def test_a_token_older_than_the_bound_raises(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path)
    simulation.engine.keeps_weights = True
    assert "max_off_policyness is 1" in _fails(simulation, StalenessError)


def test_an_unverified_sync_ends_the_run(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path)
    simulation.engine.verifies = False
    assert "verified: False" in _fails(simulation, WeightSyncError)


def test_an_environment_without_held_out_tasks_trains_unmeasured(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, limits=Limits(steps=2, evaluation_samples=4))
    simulation.environment.num_held_out = 0
    simulate(simulation)
    assert simulation.status.steps == 2
    assert simulation.recorder.evaluations == []


def test_old_checkpoints_are_removed_and_a_broken_one_is_named(tmp_path: Path) -> None:
    simulation = simulate(Simulation(tmp_path, limits=Limits(steps=9, checkpoint_every_steps=2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-8", "step-9"]
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    (checkpoint.model_directory / "version").unlink()
    with pytest.raises(CheckpointError, match="model/version is missing"):
        simulation.checkpoints.newest()


def test_who_waits_for_whom_is_said_when_it_lasts(tmp_path: Path) -> None:
    """One episode's environment never answers: the chain names its group, itself and where it is."""
    simulation = Simulation(tmp_path, limits=Limits(steps=12, stall_seconds=600, max_seconds=3000))
    silent: list[str] = []
    environment = simulation.environment
    collect = environment.collect_trajectories

    async def collect_one_never(task: Task, sampler: Any, *, group_id: str, group_size: int) -> Any:
        if group_id == "6":
            await sampler.sample(TokenIds([0]), max_tokens=8, trajectory_id="6-0")
            silent.append(task.task_id)
            await trio.sleep_forever()
        return await collect(task, sampler, group_id=group_id, group_size=group_size)

    environment.collect_trajectories = collect_one_never  # type: ignore[method-assign]
    simulate(simulation)
    assert simulation.status.stalls == len(simulation.recorder.stalls) == 1
    chain = simulation.recorder.stalls[0]
    assert chain[0].startswith("learner: waiting for groups for 600 s (")
    assert chain[1].startswith(f"group 6 (task {silent[0]}): running for ")
    assert "6-0 in its environment for" in chain[1]
    assert "(turn 1)" in chain[1]
    gate = next(line for line in chain if line.startswith("gate: "))
    assert re.search(r"slots held by groups .*\b6\b", gate), gate
    assert chain[-1] == "tasks: there are more"


def test_an_episode_in_an_engine_is_told_from_one_in_its_environment(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, rates=Rates(token_s=100.0), limits=Limits(steps=1, max_seconds=50))
    seen: list[list[str]] = []

    async def look() -> None:
        await trio.sleep(40)
        seen.append(simulation.run.explain())

    simulate(simulation, look)
    assert "0-0 in an engine for 40 s (turn 1)" in seen[0][1]
    assert seen[0][4].endswith("more groups are running, begun later")


class Hoarding(FakeEnvironment):
    """Brings for task 30 what it sampled for task 2, many versions before."""

    hoard: Sequence[Trajectory] = ()

    def get_item(self) -> Task:
        return replace(super().get_item(), group_size=0)

    async def collect_trajectories(self, task: Task, sampler: Sampler, **more: Any) -> Sequence[Trajectory]:
        if task.task_id != "task-30":
            found = await super().collect_trajectories(task, sampler, **more)
            self.hoard = found if task.task_id == "task-2" else self.hoard
            return found
        return [replace(t, trajectory_id=f"{more['group_id']}-{place}") for place, t in enumerate(self.hoard)]


def test_what_was_sampled_before_its_group_was_admitted_is_dropped_and_counted(tmp_path: Path) -> None:
    rates = Rates()
    simulation = Simulation(tmp_path, limits=Limits(steps=10), environment=Hoarding(rates, random.Random(1)))
    simulate(simulation)
    assert simulation.status.groups_dropped == {"sampled_before_admission": 1}
    assert simulation.status.steps == 10
    assert simulation.status.max_staleness_trained <= 1
    assert "task-30" not in {group.task.task_id for group in simulation.learner.trained}


class Filtering(FakeEnvironment):
    """Wants two of its groups to be trained on by nobody."""

    async def collect_trajectories(self, task: Task, sampler: Sampler, **more: Any) -> Sequence[Trajectory]:
        found = await super().collect_trajectories(task, sampler, **more)
        if task.task_id not in {"task-2", "task-3"}:
            return found
        return [replace(trajectory, extras={FILTERED: "too easy"}) for trajectory in found]


def test_groups_that_their_environment_lets_go_are_dropped_and_counted(tmp_path: Path) -> None:
    environment = Filtering(Rates(), random.Random(1))
    simulation = simulate(Simulation(tmp_path, limits=Limits(steps=5), environment=environment))
    assert simulation.status.groups_dropped == {"filtered": 2}
    assert simulation.status.steps == 5
    assert {"task-2", "task-3"}.isdisjoint(group.task.task_id for group in simulation.learner.trained)
