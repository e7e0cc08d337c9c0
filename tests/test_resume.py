"""A run that is killed, anywhere and often, trains on every task that was drawn exactly once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_runs import BUFFERS, FAILING, NUM_TASKS, RATES, check_end, kill_after, opened, run_until_killed
from loop_simulation import Simulation, simulate

from asyncrl.buffers import LOST, BufferSettings, LostLine
from asyncrl.buffers.journal import list_files
from asyncrl.checkpoint import CheckpointStore
from asyncrl.curriculum import Curriculum, CurriculumSettings, TaskOrder
from asyncrl.resume_plan import LOST_LINE, plan_resumption
from asyncrl.run_history import RunHistory, Sampled, read_history
from asyncrl.testing import FakeEnvironment, Rates
from asyncrl.types import Completion, Group, Task, TokenIds, Trajectory

_SLOW = Rates(token_s=0.1, mean_tokens=80, sigma=1.0)
"""Episodes that see several versions."""


@pytest.mark.slow
@pytest.mark.parametrize("lost_line", list(LostLine))
@pytest.mark.parametrize("name", BUFFERS)
def test_every_task_is_trained_on_once_whenever_the_run_is_killed(
    tmp_path: Path, name: str, lost_line: LostLine
) -> None:
    rng, kills = random.Random(f"{name}/{lost_line}"), 0
    while run_until_killed(
        tmp_path,
        rng.choice([rng.uniform(0.1, 6), rng.uniform(6, 24)]),
        buffer=BUFFERS[name],
        lost_line=lost_line,
        seed=kills,
    ):
        kills += 1
        assert kills < 100
    assert kills >= 8
    with opened(tmp_path, buffer=BUFFERS[name], lost_line=lost_line, seed=99) as simulation:
        simulate(simulation)
        check_end(simulation)


_REUSE = BufferSettings(max_off_policyness=5, groups_per_step=2, group_size=3, max_uses=3)


@pytest.mark.slow
@pytest.mark.parametrize("lost_line", list(LostLine))
def test_groups_are_used_as_often_as_without_an_interruption(tmp_path: Path, lost_line: LostLine) -> None:
    """Kills: groups that wait for a further use are forgotten at a resume, or come back with too few or too many."""
    more: dict[str, Any] = {"buffer": _REUSE, "lost_line": lost_line}
    with opened(tmp_path / "whole", **more) as whole:
        simulate(whole)
    rng, kills, waited = random.Random(f"reuse/{lost_line}"), 0, 0
    while run_until_killed(tmp_path / "killed", rng.uniform(0.1, 24), seed=kills, **more):
        checkpoint = CheckpointStore(tmp_path / "killed" / "checkpoints", keep=2).newest()
        waited += bool(checkpoint and checkpoint.state["reusable"])
        kills += 1
        assert kills < 100
    assert waited >= 4
    with opened(tmp_path / "killed", seed=99, **more) as resumed:
        simulate(resumed)
    for simulation in (whole, resumed):
        uses, status = Counter(simulation.learner.weights), simulation.status
        assert {*uses} == {f"task-{i}" for i in range(NUM_TASKS) if f"task-{i}" not in FAILING}
        assert max(uses.values()) == 3
        assert sum(count < 3 for count in uses.values()) == status.expired_reuse
        assert status.lost_reuse == 0
        assert status.groups_reused == uses.total() - len(uses)
        assert status.max_staleness_trained <= 5
    assert whole.status.expired_reuse == 0


def test_a_further_use_that_would_break_the_bound_is_counted_as_expired(tmp_path: Path) -> None:
    """A checkpoint may be written while the engines have yet to pull; what leaves with that pull waits until then."""
    assert run_until_killed(tmp_path, 20.0, buffer=_REUSE)
    checkpoint = CheckpointStore(tmp_path / "checkpoints", keep=2).newest()
    assert checkpoint is not None
    waiting = len(checkpoint.state["reusable"])
    history = read_history(tmp_path / "journal", run_id="test", state=checkpoint.state)
    plans = [
        plan_resumption(checkpoint.state, checkpoint.version + later, history, settings=_REUSE) for later in (0, 6)
    ]
    assert [sum(kept.uses > 0 for kept in plan.kept) + plan.num_expired_uses for plan in plans] == [waiting] * 2
    assert plans[1].num_expired_uses == waiting > 0
    assert [plan.num_lost_uses for plan in plans] == [0, 0]
    tight = replace(_REUSE, max_off_policyness=1)
    expired = plan_resumption(checkpoint.state, checkpoint.version, history, settings=tight).num_expired_uses
    with opened(tmp_path, buffer=tight) as simulation:
        assert simulation.status.expired_reuse == checkpoint.state["counters"]["expired_reuse"] + expired > 0


def test_a_further_use_whose_record_is_gone_is_counted(tmp_path: Path) -> None:
    assert run_until_killed(tmp_path, 20.0, buffer=_REUSE)
    checkpoint = CheckpointStore(tmp_path / "checkpoints", keep=2).newest()
    assert checkpoint is not None
    waiting = len(checkpoint.state["reusable"])
    assert waiting
    for path in list_files(tmp_path / "journal"):
        path.unlink()
    with opened(tmp_path, seed=1, buffer=_REUSE) as simulation:
        assert simulation.status.lost_reuse == waiting
        assert f"0 groups wait for a further use, and {waiting} more did that are not left" in simulation.run.notes


_CHILD = """
import sys
from pathlib import Path
from loop_simulation import simulate
from killed_runs import opened
with opened(Path(sys.argv[1]), seed=int(sys.argv[2])) as simulation:
    put = simulation.run.buffer.put
    simulation.run.buffer.put = lambda group: (put(group), print("finished", group.group_id, flush=True))
    simulate(simulation)
"""


@pytest.mark.slow
def test_kill_9_loses_no_group_that_was_finished_and_no_task(tmp_path: Path) -> None:
    rng = random.Random(4)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for number in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, tmp_path, str(number)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randrange(4, 16))]
        child.kill()
        lines += child.stdout.readlines()
        child.wait()
        child.stdout.close()
        finished = {int(line.split()[1]) for line in lines if line.endswith("\n")}
        checkpoint = CheckpointStore(tmp_path / "checkpoints", keep=2).newest()
        state = checkpoint.state if checkpoint else {}
        history = read_history(tmp_path / "journal", run_id="test", state=state)
        known = {group_id for group_id, attempt in history.attempts.items() if attempt.finished is not None}
        assert {g for g in finished if g >= state.get("next_group_id", 0)} <= known
    with opened(tmp_path, seed=99) as simulation:
        simulate(simulation)
        check_end(simulation)


def _trained_by_group(simulation: Simulation) -> dict[int, Group]:
    return {group.group_id: group for group in simulation.learner.trained}


def _tokens(group: Group) -> list[bytes]:
    return [segment.token_ids.tobytes() for trajectory in group.trajectories for segment in trajectory.segments]


def test_finished_groups_are_put_back_as_they_were_and_running_ones_keep_their_episodes(tmp_path: Path) -> None:
    """Killed in the first step, before any checkpoint: nothing of what was finished is sampled again."""
    with opened(tmp_path, failing=frozenset()) as first:
        assert kill_after(first, 1.2)
    finished = {group.group_id: group for group in first.recorder.groups}
    history = read_history(tmp_path / "journal", run_id="test", state={})
    assert {i for i, attempt in history.attempts.items() if attempt.finished is not None} == set(finished)
    episodes = {t for attempt in history.attempts.values() for t in attempt.work.trajectories}
    assert len(episodes) > 3 * len(finished), "episodes of groups that were running are kept too"
    with opened(tmp_path, failing=frozenset(), seed=5) as second:
        assert f"{len(finished)} finished groups are put back" in second.run.notes[0]
        sampled = _log_requests(second)
        simulate(second)
    assert not episodes & set(sampled)
    trained = _trained_by_group(second)
    assert all(_tokens(trained[group_id]) == _tokens(group) for group_id, group in finished.items())
    kept = {t.trajectory_id for group in trained.values() for t in group.trajectories}
    assert episodes <= kept
    assert second.run.ledger.statement().dropped.keys() <= {LOST}
    assert second.status.tokens_generated == second.engine.tokens_sampled + _journalled_tokens(history)


def _log_requests(simulation: Simulation) -> list[str]:
    """Note the trajectory id of every request from now on."""
    requests: list[str] = []
    sample = simulation.engine.sample

    async def logged(token_ids: TokenIds, **more: Any) -> Completion:
        requests.append(more["trajectory_id"])
        return await sample(token_ids, **more)

    simulation.engine.sample = logged  # type: ignore[method-assign]
    return requests


def _journalled_tokens(history: RunHistory) -> int:
    return sum(event.num_tokens for event in history.events if isinstance(event, Sampled))


def _kill_past_a_checkpoint(directory: Path, **more: Any) -> Simulation:
    """Return a run that was killed two steps after its only checkpoint, at version 3."""
    with opened(directory, buffer=BUFFERS["n=3"], failing=frozenset(), rates=_SLOW, **more) as simulation:
        assert kill_after(simulation, 4.0, version=5)
    assert simulation.engine.version == 5
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.version == 3
    return simulation


def _versions(groups: Sequence[Group]) -> set[int]:
    return {span.version for g in groups for t in g.trajectories for s in t.segments for span in s.spans}


def test_a_lost_line_is_dropped_by_name_and_its_tasks_are_drawn_again(tmp_path: Path) -> None:
    first = _kill_past_a_checkpoint(tmp_path)
    lost = {group.group_id for group in first.recorder.groups if max(_versions([group])) > 3}
    assert lost
    with opened(tmp_path, buffer=BUFFERS["n=3"], failing=frozenset(), steps=8, seed=5) as second:
        assert second.status.groups_dropped[LOST_LINE] >= len(lost)
        simulate(second)
    assert not lost & set(_trained_by_group(second))
    assert second.run.ledger.statement().dropped[LOST_LINE].groups >= len(lost)
    old = {group.group_id: group for group in first.recorder.groups if group.group_id not in lost}
    back = [group for group in second.learner.trained if group.group_id in old]
    assert back, "what was sampled under weights that the run still has is trained on"
    assert all(_tokens(group) == _tokens(old[group.group_id]) for group in back)


def test_a_lost_line_is_kept_where_the_bound_allows_and_counts_from_where_the_lines_part(tmp_path: Path) -> None:
    first = _kill_past_a_checkpoint(tmp_path)
    old = {group.group_id: group for group in first.recorder.groups}
    with opened(
        tmp_path, buffer=BUFFERS["n=3"], lost_line=LostLine.KEEP, failing=frozenset(), steps=8, seed=5
    ) as second:
        simulate(second)
    kept = [g for g in second.learner.trained if g.group_id in old and max(_versions([old[g.group_id]])) > 3]
    assert kept
    for group in kept:
        assert _tokens(group) == _tokens(old[group.group_id])
        was = max(_versions([old[group.group_id]]))
        assert 2 * 3 - was in _versions([group]), f"version {was} is {was - 3} steps from 3, where the lines part"
        assert max(_versions([group])) <= 3
    assert second.status.max_staleness_trained <= 3


def test_other_weights_of_the_same_version_are_told_by_their_digest(tmp_path: Path) -> None:
    with opened(tmp_path, failing=frozenset(), steps=6, checkpoint_every_steps=1) as simulation:
        assert kill_after(simulation, 20.0)
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    history = read_history(tmp_path / "journal", run_id="test", state=checkpoint.state)
    plans = []
    for weights in (checkpoint.state["weights"], {v: "other" for v in checkpoint.state["weights"]}):
        state = {**checkpoint.state, "weights": weights}
        plans.append(plan_resumption(state, checkpoint.version, history, settings=BUFFERS["n=1"]))
    assert plans[0].kept
    assert LOST_LINE not in plans[0].dropped.values()
    assert not plans[1].kept
    assert {LOST_LINE} <= set(plans[1].dropped.values()) <= {LOST_LINE, LOST}


class _Learning(FakeEnvironment):
    """Asks the easiest tasks first, in two epochs."""

    def __init__(self) -> None:
        super().__init__(Rates(mean_tokens=10, sigma=1.0), random.Random(1))
        settings = CurriculumSettings(order=TaskOrder.EASY_TO_HARD)
        self.curriculum = Curriculum(self._tasks, settings, seed=0, group_size=3, epochs=2)

    def _tasks(self, epoch: int) -> list[Task]:
        return [Task(task_id=f"{epoch}/{i}", environment=self.name) for i in range(20)]

    def get_item(self) -> Task:
        return self.curriculum.next()

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        solved = sum(t.reward == 1.0 for t in trajectories)
        self.curriculum.observe(task, num_solved=solved, num_scored=len(trajectories))

    def state(self) -> Mapping[str, Any]:
        return self.curriculum.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.curriculum.restore(state)


@pytest.mark.slow
def test_a_curriculum_goes_on_with_the_draws_that_it_made(tmp_path: Path) -> None:
    rng, kills = random.Random(2), 0
    while True:
        with opened(tmp_path, environment=_Learning(), failing=frozenset(), seed=kills) as simulation:
            assert not any("otherwise than before" in note for note in simulation.run.notes)
            if not kill_after(simulation, rng.uniform(1, 20)):
                break
        kills += 1
    assert kills > 3
    assert Counter(simulation.learner.weights) == Counter(f"{epoch}/{i}" for epoch in range(2) for i in range(20))


class _Repeating(FakeEnvironment):
    """Gives five ids to all its tasks."""

    def get_item(self) -> Task:
        return replace(task := super().get_item(), task_id=f"task-{int(task.task_id[5:]) % 5}")


@pytest.mark.slow
def test_tasks_of_the_same_id_are_each_trained_on(tmp_path: Path) -> None:
    rng, kills, environment = random.Random(6), 0, _Repeating(RATES, random.Random(1), num_tasks=NUM_TASKS)
    while True:
        environment = _Repeating(RATES, random.Random(kills), num_tasks=NUM_TASKS)
        with opened(tmp_path, environment=environment, failing=frozenset(), seed=kills) as simulation:
            if not kill_after(simulation, rng.uniform(1, 20)):
                break
        kills += 1
    assert kills > 3
    assert Counter(simulation.learner.weights) == Counter(f"task-{i % 5}" for i in range(NUM_TASKS))
