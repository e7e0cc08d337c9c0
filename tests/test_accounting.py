"""The books: what was generated is somewhere, at every moment of a run, and each figure agrees with who else counts."""

from __future__ import annotations

import io
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import trio
import trio.testing
from loop_simulation import Scrape, Simulation, audited, simulate
from rich.console import Console

from asyncrl import cli
from asyncrl.buffers import DISCARDED, LOST, Amount, BufferSettings, Ledger, Order
from asyncrl.progress import Progress
from asyncrl.recording import RunRecorder, read_metrics
from asyncrl.run import Limits
from asyncrl.run_directory import RunDirectory
from asyncrl.testing import Rates
from asyncrl.types import Group, Logprobs, Segment, Task, TokenIds, TokenSpan, Trajectory, TrajectoryStatus

_TASK = Task(task_id="task", environment="simulated")
_RATES = Rates(mean_tokens=8, token_s=0.2, sigma=1.0)


@pytest.mark.slow
def test_the_books_balance_at_every_moment_of_a_run_with_failures(tmp_path: Path) -> None:
    for order in Order:
        buffer = BufferSettings(max_off_policyness=2, groups_per_step=3, group_size=3, order=order)
        simulation = Simulation(tmp_path / order, buffer=buffer, rates=_RATES, limits=Limits(steps=10))
        simulation.environment.failing = {"task-1", "task-2", "task-9"}.__contains__
        statement = audited(simulation).run.ledger.statement()
        assert statement.trained.groups == simulation.status.groups_trained == 30
        trained = [t for group in simulation.learner.trained for t in group.trajectories]
        assert statement.trained.trajectories == len(trained) == 90
        assert statement.trained.tokens == sum(t.num_sampled_tokens for t in trained) > 90
        assert statement.dropped["all_failed"] == Amount(groups=3)
        assert statement.dropped["failed_sandbox"].trajectories == 9
        assert statement.dropped["failed_sandbox"].tokens > 9
        assert set(statement.dropped) == {"all_failed", "failed_sandbox"}
        assert statement.in_flight.groups + statement.in_buffer.groups == simulation.run.num_unfinished


@pytest.mark.slow
def test_groups_that_are_used_again_are_in_the_books_once_and_shorten_the_wait(tmp_path: Path) -> None:
    rates = Rates(mean_tokens=40, token_s=0.5, step_s=1.0)  # generation is what takes the time
    seconds = []
    for max_uses in (1, 2):
        buffer = BufferSettings(max_off_policyness=2, groups_per_step=3, group_size=3, max_uses=max_uses)
        simulation = Simulation(tmp_path / str(max_uses), buffer=buffer, rates=rates, limits=Limits(steps=12))
        audited(simulation)
        status, statement = simulation.status, simulation.run.ledger.statement()
        assert statement.trained.groups == status.groups_trained == 36 - status.groups_reused
        assert status.max_staleness_trained <= 2
        uses = Counter(group.group_id for group in simulation.learner.trained)
        assert max(uses.values()) == max_uses
        assert sum(uses.values()) - len(uses) == status.groups_reused
        assert sum(step["groups_reused"] for step in simulation.recorder.steps) == status.groups_reused
        assert (status.groups_reused > 6) == (max_uses == 2)
        seconds.append(simulation.run.seconds)
    assert seconds[1] < 0.9 * seconds[0]


@pytest.mark.slow
def test_what_a_resumed_run_begins_with_is_in_its_books(tmp_path: Path) -> None:
    limits = Limits(steps=4, checkpoint_every_steps=3)
    first = audited(Simulation(tmp_path, num_tasks=40, rates=_RATES, limits=limits)).run.ledger.statement()
    second = simulate(Simulation(tmp_path, num_tasks=40, rates=_RATES, limits=Limits(steps=100), resume=True))
    statement = second.run.ledger.statement()
    assert statement.difference == Amount()
    assert statement.trained.groups == 40
    assert statement.dropped == {LOST: first.in_flight + first.in_buffer}


def test_metrics_and_status_show_the_books(tmp_path: Path) -> None:
    simulation = simulate(Simulation(tmp_path, rates=_RATES, limits=Limits(steps=3)))
    scraped = Scrape(simulation.run)

    def value(state: str, unit: str) -> float | None:
        return scraped(f"asyncrl_accounted_{unit}", {"state": state})

    assert value("trained", "groups") == 12
    assert value("generated", "tokens") == simulation.engine.tokens_sampled
    assert value("missing", "trajectories") == 0


def test_status_shows_where_everything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulation = Simulation(tmp_path / "checkpoints", rates=_RATES, limits=Limits(steps=3))
    simulation.environment.failing = {"task-1"}.__contains__
    directory = RunDirectory(tmp_path)
    directory.config.touch()
    progress = Progress(Console(file=io.StringIO()), title="run", max_steps=3)

    async def main() -> None:
        await simulation.run.train()
        RunRecorder(directory, progress, lambda token_ids: "", version=0).watch(simulation.run)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    accounting = json.loads(capsys.readouterr().out)["accounting"]
    assert accounting == json.loads(json.dumps(simulation.run.ledger.statement().as_dict()))
    assert cli.main(["status", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  groups: "))
    assert "generated = 12 trained + " in line
    assert line.endswith("+ 1 dropped (all_failed 1)")


def test_a_wall_clock_that_jumps_dates_records_and_changes_nothing_else(tmp_path: Path) -> None:
    """It is set forward and back, by years, whenever it is read."""
    rng, directory = random.Random(5), RunDirectory(tmp_path)
    directory.trajectories.mkdir(parents=True)
    recorder = RunRecorder(
        directory,
        Progress(Console(file=io.StringIO()), title="run", max_steps=4),
        lambda token_ids: "",
        version=0,
        wall_clock=lambda: 1e9 + rng.uniform(-1e8, 1e8),
    )
    limits = Limits(steps=4, checkpoint_every_steps=2)
    simulation = Simulation(directory.checkpoints, rates=_RATES, limits=limits, recorder=recorder)

    async def main() -> None:
        recorder.watch(simulation.run)
        await simulation.run.train()
        summary = recorder.finish(simulation.run, wall_seconds=0.0)
        assert summary["training_seconds"] == pytest.approx(trio.current_time())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    steps = read_metrics(directory)
    dates, seconds = [step["time"] for step in steps], [step["seconds"] for step in steps]
    assert dates != sorted(dates)
    assert seconds == sorted(seconds)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["sync_seconds"] for step in steps if step["syncs"]] == pytest.approx([_RATES.sync_s] * 3)
    for step in steps:
        assert step["step_seconds"] == pytest.approx(_RATES.step_s)
        assert all(value >= 0 for name, value in step.items() if name.endswith("_seconds"))
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["step-2", "step-4"]


def test_the_status_is_a_second_old_at_most_and_not_written_for_every_group(tmp_path: Path) -> None:
    dates = iter(range(10))
    directory = RunDirectory(tmp_path)
    directory.trajectories.mkdir(parents=True)
    progress = Progress(Console(file=io.StringIO()), title="run", max_steps=4)
    recorder = RunRecorder(directory, progress, lambda _: "", version=0, wall_clock=lambda: float(next(dates)))
    simulation = Simulation(directory.checkpoints, recorder=recorder)
    group = Group(group_id=0, task=_TASK, trajectories=())

    def written() -> float:
        return float(json.loads(directory.status.read_text())["time"])

    async def main() -> None:
        recorder.watch(simulation.run)
        for _ in range(3):
            recorder.group(group)
        assert written() == 0
        await trio.sleep(1.0)
        recorder.group(group)
        assert written() == 1
        recorder.phase()
        assert written() == 2, "what the run does now is written at once"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_status_from_the_future_is_not_of_negative_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path)
    directory.config.touch()
    directory.write_json(directory.status, {"time": time.time() + 1e6, "moment": "stepping"})
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["age_seconds"] == 0


def _trajectory(name: str, num_tokens: int, *, failed: bool = False) -> Trajectory:
    segment = Segment(
        token_ids=TokenIds([1] * (num_tokens + 2)),
        loss_mask=bytes(2) + b"\1" * num_tokens,
        behaviour_logprobs=Logprobs([0.0] * (num_tokens + 2)),
        spans=(TokenSpan(start=2, end=num_tokens + 2, version=0),),
    )
    return Trajectory(
        trajectory_id=name,
        task_id="task",
        environment="simulated",
        segments=() if failed else (segment,),
        reward=None if failed else 1.0,
        status=TrajectoryStatus.FAILED_ENGINE if failed else TrajectoryStatus.COMPLETED,
    )


def test_tokens_that_are_in_no_segment_are_dropped_with_a_reason_and_brought_ones_are_generated() -> None:
    ledger = Ledger()
    ledger.admit(0, num_trajectories=3)
    ledger.sample(0, "a", 10)  # a first attempt
    ledger.sample(0, "a", 5)
    ledger.sample(0, "b", 4)
    trajectories = (_trajectory("a", 5), _trajectory("b", 0, failed=True), _trajectory("c", 7))
    ledger.finish(Group(group_id=0, task=_TASK, trajectories=trajectories))
    ledger.sample(0, "a", 1)  # too late
    statement = ledger.statement()
    assert statement.in_buffer == Amount(groups=1, trajectories=2, tokens=12)
    assert statement.dropped == {
        DISCARDED: Amount(tokens=11),
        "failed_engine": Amount(trajectories=1, tokens=4),
    }
    assert statement.generated == Amount(groups=1, trajectories=3, tokens=20 + 7)
    ledger.train([0])
    assert ledger.statement().trained == statement.in_buffer
    assert ledger.statement().difference == Amount()


def test_what_is_forgotten_shows() -> None:
    """Kills: a side of the books that is computed from the others."""
    ledger = Ledger()
    ledger.admit(0, num_trajectories=2)
    ledger.sample(0, "a", 3)
    del ledger._open[0]
    assert ledger.statement().difference == Amount(groups=1, trajectories=2, tokens=3)


def test_tokens_that_were_sampled_for_a_group_before_it_had_episodes_are_counted_once() -> None:
    ledger = Ledger()
    task = Task(task_id="task", environment="elsewhere", group_size=0)
    ledger.admit(7, num_trajectories=0)
    ledger.sample(7, "7-sampled", 10)
    ledger.finish(Group(group_id=7, task=task, trajectories=(_trajectory("7-0", 4), _trajectory("7-1", 3))))
    statement = ledger.statement()
    assert statement.generated == Amount(groups=1, trajectories=2, tokens=10)
    assert statement.in_buffer == Amount(groups=1, trajectories=2, tokens=7)
    assert statement.dropped == {DISCARDED: Amount(tokens=3)}
    assert statement.difference == Amount()
