"""Groups whose rewards are all equal are replaced, up to a limit; no step waits for rewards that never come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_simulation import Simulation, audited

from asyncrl import dynamic_sampling
from asyncrl.buffers import BufferSettings, Order
from asyncrl.dynamic_sampling import Replacements, zero_advantage_reason
from asyncrl.errors import ConfigError
from asyncrl.losses.reduction import ZERO_VARIANCE
from asyncrl.run import Limits
from asyncrl.testing import Rates
from asyncrl.types import Group, Logprobs, Segment, Task, TokenIds, TokenSpan, Trajectory, TrajectoryStatus, TurnSpan

_RATES = Rates(mean_tokens=6, token_s=0.2, sigma=1.0)


def _buffer(**settings: Any) -> BufferSettings:
    return BufferSettings(groups_per_step=3, group_size=3, replace_zero_advantage=True, **settings)


def _rewards_of(task_id: str) -> float | None:
    """Give every third task of the fake environment rewards that are all equal."""
    number = int(task_id.removeprefix("task-"))
    return {0: 1.0, 3: 0.0, 6: 0.25}.get(number % 9)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_groups_without_an_advantage_are_replaced_and_counted_by_reason(tmp_path: Path, bound: int) -> None:
    buffer = _buffer(max_off_policyness=bound, max_replacements=100)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=Limits(steps=12))
    simulation.environment.rewards = _rewards_of
    audited(simulation)
    assert simulation.status.steps == 12
    assert simulation.status.max_staleness_trained == bound
    assert {*simulation.status.groups_dropped} == {"all_pass", "all_fail", "all_equal"}
    assert min(simulation.status.groups_dropped.values()) >= 2
    for group in simulation.learner.trained:
        assert zero_advantage_reason(group) is None


@pytest.mark.slow
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("bound", [0, 1])
def test_an_environment_of_constant_rewards_starves_no_step(tmp_path: Path, bound: int, order: Order) -> None:
    """Kills: a replacement without a limit, and one that is not counted anew for every step."""
    buffer = _buffer(max_off_policyness=bound, max_replacements=4, order=order)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=Limits(steps=6, max_seconds=1000))
    simulation.environment.rewards = lambda task_id: 0.0
    audited(simulation)
    assert simulation.status.steps == 6
    dropped = simulation.status.groups_dropped["all_fail"]
    assert 3 * 4 <= dropped <= 7 * 4


@pytest.mark.slow
def test_the_last_tasks_are_kept_since_nothing_can_replace_them(tmp_path: Path) -> None:
    buffer = _buffer(max_off_policyness=1)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_RATES, limits=Limits(steps=50), num_tasks=10)
    simulation.environment.rewards = lambda task_id: 1.0
    audited(simulation)
    assert simulation.status.groups_trained + simulation.status.groups_dropped["all_pass"] == 10
    assert simulation.status.groups_trained > 0


def test_replacements_are_counted_anew_after_every_pull() -> None:
    replacements = Replacements(2)
    assert [replacements.allow(0) for _ in range(3)] == [True, True, False]
    assert [replacements.allow(1) for _ in range(3)] == [True, True, False]


def _group(*rewards: float | None, turns: tuple[float, ...] = (), own_credit: bool = False, **parts: float) -> Group:
    trajectories = []
    for index, reward in enumerate(rewards):
        segment = Segment(
            token_ids=TokenIds([1, 2]),
            loss_mask=b"\0\1",
            behaviour_logprobs=Logprobs([0.0, -1.0]),
            spans=(TokenSpan(start=1, end=2, version=0),),
            advantages=Logprobs([0.0, 0.5]) if own_credit else None,
            turns=(TurnSpan(start=1, end=2, reward=turns[index]),) if turns else (),
        )
        trajectory = Trajectory(
            trajectory_id=str(index),
            task_id="task",
            environment="simulated",
            segments=() if reward is None else (segment,),
            reward=reward,
            status=TrajectoryStatus.FAILED_ENGINE if reward is None else TrajectoryStatus.COMPLETED,
            reward_parts=parts,
        )
        trajectories.append(trajectory)
    return Group(group_id=0, task=Task(task_id="task", environment="simulated"), trajectories=tuple(trajectories))


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (_group(1.0, 0.0), None),
        (_group(1.0, 1.0), "all_pass"),
        (_group(0.0, 0.0), "all_fail"),
        (_group(-0.2, -0.2), "all_fail"),
        (_group(0.5, 0.5), "all_equal"),
        (_group(0.5, 0.5, solved=1.0), "all_pass"),
        (_group(0.7, 0.7 + 1e-7), "all_equal"),
        (_group(0.7, 0.7 + 1e-5), None),
        (_group(1.0, None), "all_pass"),
        (_group(None, None), None),
        (_group(0.5, 0.5, own_credit=True), None),
        (_group(0.5, 0.5, turns=(0.1, 0.2)), None),
        (_group(0.5, 0.5, turns=(0.1, 0.1)), "all_equal"),
    ],
)
def test_which_groups_can_have_no_advantage(group: Group, reason: str | None) -> None:
    assert zero_advantage_reason(group) == reason


def test_equal_means_the_same_here_as_in_the_learner() -> None:
    assert dynamic_sampling._EQUAL == ZERO_VARIANCE


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_replacements": 0}, "max_replacements must be >= 1"),
        ({"replace_zero_advantage": True, "group_size": 1}, "needs group_size >= 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BufferSettings(**settings)
