"""Which token is credited with what, from groups as rollouts make them, against plain loops over their turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups

from asyncrl.errors import ConfigError, EnvironmentFault, ShapeError
from asyncrl.learner.credit import Selection, select
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.settings import LearnerSettings
from asyncrl.packing import Batch
from asyncrl.types import Group, Logprobs, Segment, TrajectoryStatus, TurnSpan


def settings(*, baseline: str = "mean", scale: str = "none", **credit: object) -> LearnerSettings:
    return LearnerSettings(baseline=baseline, scale=scale, credit=CreditSettings(**credit))  # type: ignore[arg-type]


def by_segment(selection: Selection) -> list[list[float]]:
    """Return the advantages of each segment's trained tokens."""
    batch = selection.batch
    bounds = batch.cu_seqlens.tolist()
    rows = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]  # noqa: RUF007
    return [batch.advantages[row][batch.loss_mask[row]].tolist() for row in rows]


def segment_of(*turns: tuple[int, float | None]) -> Segment:
    """Return a segment of turns, each of so many sampled tokens and a reward, with one token of answer between."""
    segment = make_segment([1, 2], [([7] * n, [3]) for n, _ in turns])
    spans, at = [], 2
    for n, reward in turns:
        spans.append(TurnSpan(start=at, end=at + n, reward=reward))
        at += n + 1
    return replace(segment, turns=tuple(spans))


def group_of(rewards: Sequence[float | None], *segments: Segment, group_id: int = 0) -> Group:
    return make_group(group_id, segments, rewards)


# --- by trajectory ----------------------------------------------------------------------------------------------


def test_every_trained_token_has_its_trajectorys_advantage_and_no_other_token_has_any() -> None:
    selection = select(random_groups(3, num_groups=3), settings(scale="group_std"))
    batch = selection.batch
    assert not batch.advantages[~batch.loss_mask].any()
    for row, place in zip(by_segment(selection), range(len(selection.trajectories)), strict=True):
        mine = [
            t.reward for t, g in zip(selection.trajectories, selection.group_index, strict=True)
            if g == selection.group_index[place]
        ]  # fmt: skip
        reward = selection.trajectories[place].reward
        assert reward is not None
        wanted = (reward - statistics.fmean(mine)) / (statistics.stdev(mine) + 1e-6)  # type: ignore[arg-type,type-var]
        assert row == pytest.approx([wanted] * len(row), rel=1e-6)


def test_the_environments_credit_overrides_and_nan_leaves_a_token_to_the_trainer() -> None:
    first = replace(segment_of((3, None)), advantages=Logprobs([9.0, 9.0, math.nan, 0.25, math.nan, 9.0]))
    selection = select([group_of([1.0, 0.0], first, segment_of((1, None)))], settings())
    assert by_segment(selection) == [[0.5, 0.25, 0.5], [-0.5]]
    assert selection.batch.advantages[:2].tolist() == [0.0, 0.0]


# --- what is added to a reward ----------------------------------------------------------------------------------


def test_a_baseline_compares_the_trajectories_of_one_agent() -> None:
    group = group_of([1.0, 0.0, 6.0, 2.0], *[segment_of((1, None)) for _ in range(4)])
    sides = tuple(replace(t, agent=agent) for t, agent in zip(group.trajectories, "aabb", strict=True))
    assert by_segment(select([replace(group, trajectories=sides)], settings())) == [[0.5], [-0.5], [2.0], [-2.0]]


def test_the_penalty_for_length_enters_before_the_baseline_and_is_counted() -> None:
    lengths = (4, 7, 10, 30)
    group = group_of([1.0, 1.0, 0.0, 0.0], *(segment_of((n, None)) for n in lengths))
    selection = select([group], settings(overlong_max_length=10, overlong_buffer_length=6))
    shaped = [1.0 + 0.0, 1.0 - 0.5, 0.0 - 1.0, 0.0 - 1.0]
    wanted = [s - sum(shaped) / 4 for s in shaped]
    assert [row[0] for row in by_segment(selection)] == pytest.approx(wanted, rel=1e-6)
    assert selection.metrics == {"overlong_shaped_share": 0.75, "overlong_penalty_mean": -2.5 / 4}
    assert selection.batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]  # as the environment gave them


def test_filtered_trajectories_are_not_trained_on_and_stay_in_the_baseline() -> None:
    group = group_of([1.0, 0.0, 0.0], *(segment_of((n, None)) for n in (2, 3, 4)))
    first, second, third = group.trajectories
    cut = replace(group, trajectories=(
        first, replace(second, truncated=True), replace(third, status=TrajectoryStatus.TRUNCATED_LENGTH)
    ))  # fmt: skip
    selection = select([cut], settings(overlong_filter=True))
    assert by_segment(selection) == [[pytest.approx(2 / 3)] * 2, [], []]
    batch = selection.batch
    assert batch.num_loss_tokens == 2
    assert (batch.versions >= 0).tolist() == batch.loss_mask.tolist()
    assert batch.observation_mask.sum() == 1  # of the trajectory that stays
    assert selection.metrics == {"overlong_filtered_share": pytest.approx(2 / 3)}


def test_a_kl_in_the_reward_is_summed_over_the_trajectory_before_the_baseline() -> None:
    """The reference is made up: -1, -2, ... at the batch's tokens in order."""
    group = group_of([1.0, 0.0], segment_of((2, None), (1, None)), segment_of((1, None)))

    def reference(batch: Batch) -> torch.Tensor:
        return -1.0 - torch.arange(batch.num_tokens, dtype=torch.float64)

    selection = select([group], settings(reward_kl_coef=0.1), reference=reference)
    # Behaviour is -5 everywhere; the trained tokens lie at 2, 3, 5 of the first segment, and at 7 + 2 of the second.
    gaps = [[-5 + 3, -5 + 4, -5 + 6], [-5 + 10]]
    rewards = [1.0 - 0.1 * sum(gaps[0]), 0.0 - 0.1 * sum(gaps[1])]
    half = (rewards[0] - rewards[1]) / 2
    assert by_segment(selection) == [pytest.approx([half] * 3), pytest.approx([-half])]
    assert selection.metrics["reward_kl"] == pytest.approx((sum(gaps[0]) + sum(gaps[1])) / 4)
    assert selection.metrics["reward_kl_penalty_mean"] == pytest.approx(-0.1 * (sum(gaps[0]) + sum(gaps[1])) / 2)
    assert selection.reference_logprobs is not None


@pytest.mark.parametrize("bad", [math.nan, 0.5, -1e4, -math.inf])
def test_a_behaviour_logprob_that_cannot_be_right_is_not_priced(bad: float) -> None:
    first = segment_of((2, None))
    first = replace(first, behaviour_logprobs=Logprobs([0.0, 0.0, bad, -5.0, 0.0]))
    group = group_of([0.0, 0.0], first, segment_of((1, None)))
    reference = lambda batch: torch.full((batch.num_tokens,), -6.0)  # noqa: E731
    selection = select([group], settings(reward_kl_coef=1.0), reference=reference)
    assert [row[0] for row in by_segment(selection)] == [0.0, 0.0]  # each pays one nat, for one token


# --- whitening --------------------------------------------------------------------------------------------------


def test_whitened_advantages_have_mean_0_and_deviation_1_and_groups_without_a_difference_keep_0() -> None:
    groups = [
        group_of([1.0, 0.0], segment_of((5, None)), segment_of((2, None))),
        group_of([1.0, 1.0], segment_of((3, None)), segment_of((4, None)), group_id=1),
    ]
    rows = by_segment(select(groups, settings(whiten=True)))
    raw = [0.5] * 5 + [-0.5] * 2
    wanted = [(a - statistics.fmean(raw)) / (statistics.stdev(raw) + 1e-6) for a in raw]
    assert rows[0] + rows[1] == pytest.approx(wanted, rel=1e-6)
    assert rows[2:] == [[0.0] * 3, [0.0] * 4]


def test_without_a_group_baseline_whitening_is_the_baseline() -> None:
    groups = [
        group_of([r, 0.0], segment_of((1, None)), segment_of((1, None)), group_id=i) for i, r in enumerate((1.0, 0.0))
    ]
    rows = by_segment(select(groups, settings(baseline="none", whiten=True)))
    deviation = statistics.stdev([1.0, 0.0, 0.0, 0.0])
    assert [row[0] for row in rows] == pytest.approx([x / deviation for x in (3 / 4, -1 / 4, -1 / 4, -1 / 4)], rel=1e-5)


# --- by turn ----------------------------------------------------------------------------------------------------


def expected_turns(rewards: Sequence[float], turns: Sequence[Sequence[float]], discount: float) -> list[list[float]]:
    """Return each trajectory's advantage per turn: its return less the mean of the same turn in the group."""
    returns = []
    for total, row in zip(rewards, turns, strict=True):
        paid = [*row[:-1], row[-1] + total - sum(row)]
        returns.append([sum(discount ** (j - k) * paid[j] for j in range(k, len(paid))) for k in range(len(paid))])
    found = []
    for row in returns:
        found.append([])
        for k, value in enumerate(row):
            peers = [other[k] for other in returns if len(other) > k]
            alike = max(peers) - min(peers) <= 1e-6
            found[-1].append(0.0 if alike else value - statistics.fmean(peers))
    return found


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_turns_tokens_get_what_was_earned_from_it_on_less_the_same_turn_of_the_group(discount: float) -> None:
    turns = [[0.5, 0.0, 0.25], [0.0, 1.0], [0.25], [0.0, 0.5]]
    rewards = [1.75, 1.0, 0.25, 0.0]  # the last one's result cost it 0.5 at its last turn
    sizes = [[2, 1, 3], [1, 2], [4], [2, 2]]
    segments = [
        segment_of(*zip(n, row, strict=True))
        for n, row in zip(sizes, turns, strict=True)
    ]  # fmt: skip
    found = by_segment(select([group_of(rewards, *segments)], settings(level="turn", turn_discount=discount)))
    wanted = expected_turns(rewards, turns, discount)
    for row, n, values in zip(found, sizes, wanted, strict=True):
        spread = [value for size, value in zip(n, values, strict=True) for _ in range(size)]
        assert row == pytest.approx(spread, rel=1e-6, abs=1e-7)


def test_turns_go_on_over_the_segments_of_a_trajectory() -> None:
    whole = group_of([1.0, 0.0], segment_of((1, 0.5), (2, 0.0)), segment_of((1, 0.0), (1, 0.0)))
    first, second = whole.trajectories
    rewritten = replace(first, segments=(segment_of((1, 0.5)), segment_of((2, 0.0))))
    parts = replace(whole, trajectories=(rewritten, second))
    joined, apart = (by_segment(select([g], settings(level="turn"))) for g in (whole, parts))
    assert joined[0] == apart[0] + apart[1]
    assert joined[1] == apart[2]


def test_a_turn_that_nobody_said_anything_of_earned_nothing_by_itself() -> None:
    late = group_of([1.0, 0.0], segment_of((1, 0.5), (1, None)), segment_of((1, None)))
    first, second = late.trajectories
    late = replace(late, trajectories=(first, replace(second, status=TrajectoryStatus.TIMED_OUT)))
    assert by_segment(select([late], settings(level="turn"))) == [[0.5, 0.0], [-0.5]]
    never = tuple(
        replace(second, trajectory_id=str(i), reward=float(i), status=TrajectoryStatus.TIMED_OUT) for i in (0, 1)
    )
    assert by_segment(select([replace(late, trajectories=never)], settings(level="turn"))) == [[-0.5], [0.5]]


def test_a_process_models_scores_pay_their_rise() -> None:
    """Scores 0.25, 0.75 and a reward of 1: paid are 0.25 and 0.5, and the rest of the reward at the last turn."""
    group = group_of([1.0, 0.0], segment_of((1, 0.25), (1, 0.75)), segment_of((1, 0.5), (1, 0.5)))
    found = by_segment(select([group], settings(level="turn", turn_potentials=True)))
    assert found == [pytest.approx([(1.0 - 0.0) / 2, (0.75 + 0.5) / 2]), pytest.approx([-0.5, -0.625])]


def test_length_and_kl_are_credited_by_turn_too() -> None:
    group = group_of([0.0, 0.0], segment_of((1, 0.0), (5, 0.0)), segment_of((1, 0.0), (1, 0.0)))
    shaped = settings(level="turn", overlong_max_length=6, overlong_buffer_length=4)
    assert [sorted(set(row)) for row in by_segment(select([group], shaped))] == [[-0.5], [0.5]]
    # Only the second turn of the first trajectory diverges: by 5 tokens x 1 nat.
    at = torch.zeros(16, dtype=torch.float64)
    at[:] = -5.0
    at[4:9] = -6.0
    paid = settings(level="turn", reward_kl_coef=0.1)
    rows = by_segment(select([group], paid, reference=lambda batch: at))
    assert rows == [pytest.approx([-0.25] * 6), pytest.approx([0.25] * 2)]


def test_nothing_at_all_has_no_turns() -> None:
    assert select([], settings(level="turn", whiten=True)).batch.num_tokens == 0


def test_an_environment_without_rewards_per_turn_is_refused_by_name() -> None:
    group = group_of([1.0, 0.0], segment_of((1, None)), segment_of((1, None)))
    with pytest.raises(ConfigError, match=r"environment 'synthetic' gives no reward per turn.*level = \"trajectory\""):
        select([group], settings(level="turn"))
    with pytest.raises(ConfigError, match="'synthetic' gives no reward per turn"):
        select(random_groups(1), settings(level="turn"))  # turns are not told apart at all
    mixed = group_of([1.0, 0.0], segment_of((1, 0.5)), make_segment([1], [([2], [])]))
    with pytest.raises(EnvironmentFault, match="trajectory task-0/1: a segment has tokens and no turns"):
        select([mixed], settings(level="turn"))


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_group_and_trajectory(reward: float) -> None:
    group = group_of([1.0, reward], segment_of((1, None)), segment_of((1, None)), group_id=17)
    with pytest.raises(EnvironmentFault, match=r"group 17, trajectory task-17/1 .*reward must be a finite number"):
        select([group], settings())


def test_other_numbers_of_an_environment_are_refused_too() -> None:
    bad_turn = group_of([1.0, 0.0], segment_of((1, 0.5), (1, math.nan)), segment_of((1, 0.0)))
    with pytest.raises(EnvironmentFault, match=r"task-0/0 .*the reward of turn 1 of segment 0 must be a finite"):
        select([bad_turn], settings())
    bad_credit = replace(segment_of((1, None)), advantages=Logprobs([0.0, 0.0, math.inf, 0.0]))
    with pytest.raises(EnvironmentFault, match=r"task-0/1 .*the advantages of segment 0"):
        select([group_of([1.0, 0.0], segment_of((1, None)), bad_credit)], settings())


@pytest.mark.parametrize("spans", [[(2, 3)], [(2, 5)], [(3, 4), (2, 3)], [(2, 4), (3, 4)], [(2, 4), (4, 5)]])
def test_turns_must_cover_the_trained_tokens(spans: list[tuple[int, int]]) -> None:
    turns = tuple(TurnSpan(start=a, end=b) for a, b in spans)
    segment = replace(make_segment([1, 2], [([7, 7], [3])]), turns=turns)
    with pytest.raises(ShapeError, match="its turns do not cover exactly"):
        select([group_of([1.0], segment)], settings())


@pytest.mark.parametrize(
    ("credit", "words"),
    [
        ({"level": "token"}, "level must be one of trajectory, turn, got 'token'"),
        ({"level": "turn", "turn_discount": 1.5}, "turn_discount must be from 0 to 1, got 1.5"),
        ({"turn_discount": 0.9}, 'turn_discount = 0.9 has an effect at level = "turn" only'),
        ({"turn_potentials": True}, 'turn_potentials = True has an effect at level = "turn" only'),
        ({"reward_kl_coef": -0.1}, "reward_kl_coef must be >= 0, got -0.1"),
        ({"reward_kl_coef": math.nan}, "reward_kl_coef must be >= 0"),
        ({"overlong_max_length": 100}, "overlong_buffer_length must be from 1 to overlong_max_length = 100 tokens"),
        ({"overlong_buffer_length": 5}, "overlong_buffer_length must be from 1 to overlong_max_length = 0 tokens"),
        (
            {"overlong_max_length": 100, "overlong_buffer_length": 20, "overlong_filter": True},
            "overlong_filter and overlong_max_length = 100 exclude each other",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(credit: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CreditSettings(**credit)  # type: ignore[arg-type]
