"""Advantages and returns against their definitions in plain loops."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from asyncrl.advantages import (
    gae,
    group_advantages,
    overlong_filter,
    overlong_penalty,
    override,
    process_rewards,
    reference_kl_rewards,
    reward_to_go,
    spread,
    spread_turns,
    turn_advantages,
    turn_returns,
    whiten,
    zero_variance,
)
from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.presets import BASELINES, SCALES

T64 = torch.float64


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=T64)


# --- groups -----------------------------------------------------------------------------------------------------


def expected_group_advantages(rewards: list[float], groups: list[int], baseline: str, scale: str) -> list[float]:
    found = []
    for r, g in zip(rewards, groups, strict=True):
        mine = [x for x, other in zip(rewards, groups, strict=True) if other == g]
        if baseline == scale == "none":
            found.append(r)
            continue
        if len(mine) < 2 or max(mine) - min(mine) <= 1e-6:
            found.append(0.0)
            continue
        mean = statistics.fmean(mine)
        rest = (sum(mine) - r) / (len(mine) - 1)
        a = r - {"mean": mean, "leave_one_out": rest, "none": 0.0}[baseline]
        a /= {
            "none": 1.0,
            "group_std": statistics.stdev(mine) + 1e-6,
            "batch_std": statistics.stdev(rewards) + 1e-6,
            "group_mean": mean,
        }[scale]
        found.append(a)
    return found


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_group_advantages_equal_their_definition(baseline: str, scale: str) -> None:
    rng = random.Random(5)
    for _ in range(20):
        groups = [rng.choice([3, -1, 70, 4]) for _ in range(rng.randint(2, 25))]
        rewards = [rng.choice([0.0, 1.0, 0.25, rng.random()]) for _ in groups]
        found = group_advantages(f64(rewards), torch.tensor(groups), baseline=baseline, scale=scale)
        assert found.tolist() == pytest.approx(
            expected_group_advantages(rewards, groups, baseline, scale), rel=1e-9, abs=1e-15
        )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_a_difference_and_single_trajectories_get_exactly_zero(
    baseline: str, scale: str, dtype: torch.dtype
) -> None:
    """0.35 leaves a residue in a float32 mean, which a division by a tiny std would turn into thousands."""
    rewards = torch.tensor([0.35] * 7 + [5.0] + [0.1, 0.1 + 5e-7] + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([0] * 7 + [1] + [2] * 2 + [3] * 2)
    found = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    assert found.dtype == dtype
    assert found[:10].tolist() == [0.0] * 10
    assert (found[10:] != 0).all()
    assert zero_variance(rewards, groups).tolist() == [True] * 10 + [False] * 2


def test_failed_trajectories_leave_every_statistic() -> None:
    rewards = torch.tensor([1.0, math.nan, 0.0, 1.0, math.inf, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    valid = torch.tensor([True, False, True, True, False, True])
    for baseline in ("mean", "leave_one_out"):
        for scale in SCALES:
            found = group_advantages(rewards, groups, baseline=baseline, scale=scale, valid=valid)
            alone = group_advantages(rewards[valid], groups[valid], baseline=baseline, scale=scale)
            torch.testing.assert_close(found[valid], alone, rtol=0, atol=0)
            assert found[~valid].tolist() == [0.0, 0.0]
    only_one_left = group_advantages(rewards[:3], groups[:3], valid=torch.tensor([True, False, False]))
    assert only_one_left.tolist() == [0.0, 0.0, 0.0]


def test_a_reward_that_is_not_finite_is_an_error_and_not_a_nan() -> None:
    for reward in (math.inf, -math.inf, math.nan):
        with pytest.raises(ConfigError, match="sequence 1 of group 8 has"):
            group_advantages(torch.tensor([0.0, reward]), torch.tensor([8, 8]))


def test_group_advantages_refuse_what_they_cannot_mean() -> None:
    rewards, groups = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="baseline must be one of mean, leave_one_out, none, got 'median'"):
        group_advantages(rewards, groups, baseline="median")
    with pytest.raises(ConfigError, match="scale must be one of"):
        group_advantages(rewards, groups, scale="std")
    with pytest.raises(ConfigError, match="needs rewards >= 0"):
        group_advantages(-rewards, groups, scale="group_mean")
    with pytest.raises(ConfigError, match="must be integers"):
        group_advantages(rewards, rewards)
    with pytest.raises(ShapeError, match=r"must be \[S\], got \[2\] and \[3\]"):
        group_advantages(rewards, torch.zeros(3, dtype=torch.int64))
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_leave_one_out_is_the_mean_baseline_times_g_over_g_minus_1() -> None:
    rewards, groups = f64([1.0, 0.0, 0.0, 0.5]), torch.zeros(4, dtype=torch.int64)
    found = group_advantages(rewards, groups, baseline="leave_one_out")
    torch.testing.assert_close(found, group_advantages(rewards, groups) * 4 / 3)


# --- tokens -----------------------------------------------------------------------------------------------------


def test_a_sequences_advantage_is_spread_over_its_active_tokens() -> None:
    mask = torch.tensor([True, False, True, True, False])
    found = spread(f64([2.0, 9.0, -1.0]), torch.tensor([0, 2, 2, 5]), mask)
    assert found.tolist() == [2.0, 0.0, -1.0, -1.0, 0.0]
    with pytest.raises(ShapeError, match="sequence_advantages"):
        spread(f64([2.0]), torch.tensor([0, 2, 2, 5]), mask)


def test_the_environment_overrides_single_tokens() -> None:
    nan = math.nan
    assert override(f64([1.0, 1.0, 1.0]), f64([nan, -3.0, 0.0])).tolist() == [1.0, -3.0, 0.0]
    with pytest.raises(ConfigError, match="token 1 is not"):
        override(f64([1.0, 1.0]), f64([nan, math.inf]))
    with pytest.raises(ShapeError, match="per_token"):
        override(f64([1.0, 1.0]), f64([nan]))


def test_whitening_uses_active_tokens_only() -> None:
    mask = torch.tensor([True, False, True, True])
    found = whiten(f64([1.0, math.nan, 2.0, 6.0]), mask)
    assert found[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert found[mask].std().item() == pytest.approx(1.0, rel=1e-5)
    assert found[1] == 0.0
    assert whiten(f64([4.0, math.nan]), torch.tensor([True, False])).tolist() == [4.0, 0.0]


# --- over time --------------------------------------------------------------------------------------------------


def expected_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float, after: float
) -> tuple[list[float], list[float]]:
    """One sequence, by the definition: the action tokens alone, from the last one back."""
    on = [i for i, m in enumerate(mask) if m]
    earned = {i: 0.0 for i in on}
    for i, r in enumerate(rewards):
        owners = [k for k in on if k <= i]
        if owners:
            earned[owners[-1]] += r
    advantages, returns, running, following = [0.0] * len(mask), [0.0] * len(mask), 0.0, after
    for i in reversed(on):
        running = earned[i] + gamma * following - values[i] + gamma * lam * running
        advantages[i], returns[i], following = running, running + values[i], values[i]
    return advantages, returns


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_gae_runs_over_action_tokens_only(gamma: float, lam: float) -> None:
    rng = random.Random(2)
    lengths = [0, 1, 9, 4, 0, 17, 1, 33]
    masks = [[rng.random() < 0.5 for _ in range(n)] for n in lengths]
    masks[3] = [False] * 4
    rewards = [[rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(n)] for n in lengths]
    values = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    after = [rng.gauss(0, 1) for _ in lengths]
    rows = zip(rewards, values, masks, after, strict=True)
    expected = [expected_gae(r, v, m, gamma, lam, a) for r, v, m, a in rows]
    mask = torch.tensor([m for row in masks for m in row])
    value = torch.where(mask, f64([v for row in values for v in row]), math.nan)
    found = gae(
        f64([r for row in rewards for r in row]),
        value,
        mask,
        torch.tensor([0, *lengths]).cumsum(0),
        gamma=gamma,
        lam=lam,
        bootstrap_values=f64(after),
    )
    for k in (0, 1):
        flat = [x for pair in expected for x in pair[k]]
        assert found[k].tolist() == pytest.approx(flat, rel=1e-10, abs=1e-12)


def test_tool_tokens_neither_delay_nor_lose_a_reward() -> None:
    """The same two actions, with and without a long observation between and a reward that lands on it."""
    plain = gae(f64([1.0, 5.0]), f64([0.3, 0.2]), torch.tensor([True, True]), torch.tensor([0, 2]), gamma=0.9, lam=0.8)
    mask = torch.tensor([False, True, False, False, False, True, False])
    rewards = f64([99.0, 0.0, 0.0, 1.0, 0.0, 0.0, 5.0])
    held = gae(rewards, f64([math.nan, 0.3, 7, 7, 7, 0.2, 7]), mask, torch.tensor([0, 7]), gamma=0.9, lam=0.8)
    for k in (0, 1):
        torch.testing.assert_close(held[k][mask], plain[k])
        assert held[k][~mask].eq(0).all()


def test_a_truncated_episode_goes_on_with_the_next_value() -> None:
    arguments = (f64([0.0, 0.0]), f64([1.0, 1.0]), torch.tensor([True, True]), torch.tensor([0, 1, 2]))
    assert gae(*arguments)[1].tolist() == [0.0, 0.0]
    assert gae(*arguments, gamma=0.5, bootstrap_values=f64([4.0, 0.0]))[1].tolist() == [2.0, 0.0]


def test_gae_refuses_what_it_cannot_use() -> None:
    ones, mask, cu = f64([1.0, 1.0]), torch.tensor([True, False]), torch.tensor([0, 2])
    with pytest.raises(ConfigError, match=r"gamma must be in \[0, 1\], got 1.5"):
        gae(ones, ones, mask, cu, gamma=1.5)
    with pytest.raises(ConfigError, match="lam must be in"):
        gae(ones, ones, mask, cu, lam=-0.1)
    with pytest.raises(ConfigError, match="values must be finite"):
        gae(ones, f64([math.nan, 0.0]), mask, cu)
    with pytest.raises(ConfigError, match="rewards must be finite"):
        gae(f64([0.0, math.inf]), ones, mask, cu)
    with pytest.raises(ShapeError, match=r"values must be \[T\]"):
        gae(ones, f64([1.0]), mask, cu)
    with pytest.raises(ShapeError, match=r"bootstrap_values must be \[S\]"):
        gae(ones, ones, mask, cu, bootstrap_values=ones)
    assert gae(f64([0.0, math.nan]), f64([0.0, math.nan]), mask, cu)[0].tolist() == [0.0, 0.0]
    empty = torch.zeros(0)
    assert gae(empty, empty, empty.bool(), torch.tensor([0]))[0].tolist() == []


def test_reward_to_go_counts_action_tokens() -> None:
    mask = torch.tensor([True, False, True, True, True])
    rewards = f64([1.0, 2.0, 4.0, 8.0, 16.0])
    found = reward_to_go(rewards, mask, torch.tensor([0, 3, 5]), gamma=0.5)
    assert found.tolist() == [3.0 + 0.5 * 4.0, 0.0, 4.0, 8.0 + 0.5 * 16.0, 16.0]


def test_turn_returns_discount_turns_and_not_tokens() -> None:
    found = turn_returns(f64([1.0, 0.0, 2.0, 5.0]), torch.tensor([0, 3, 3, 4]), gamma=0.5)
    assert found.tolist() == [1.5, 1.0, 2.0, 5.0]
    tokens = spread_turns(found, torch.tensor([0, 0, -7, 2, 3]), torch.tensor([True, True, False, True, True]))
    assert tokens.tolist() == [1.5, 1.5, 0.0, 2.0, 5.0]
    with pytest.raises(ShapeError, match=r"turn_index must be in \[0, 4\)"):
        spread_turns(found, torch.tensor([4]), torch.tensor([True]))
    assert spread_turns(f64([]), torch.tensor([0]), torch.tensor([False])).tolist() == [0.0]


def test_turns_are_compared_with_the_same_turn_of_the_group() -> None:
    offsets = torch.tensor([0, 2, 4, 5, 6])  # two trajectories of two turns, two of one, in groups 1, 1, 1, 2
    rewards = f64([1.0, 2.0, 0.0, 6.0, 3.0, 9.0])
    found = turn_advantages(rewards, offsets, torch.tensor([1, 1, 1, 2]))
    assert found.tolist() == pytest.approx([3.0 - 4.0, 2.0 - 4.0, 6.0 - 4.0, 6.0 - 4.0, 3.0 - 4.0, 0.0])
    with pytest.raises(ShapeError, match="group_index"):
        turn_advantages(rewards, offsets, torch.tensor([1]))


# --- added to the reward ----------------------------------------------------------------------------------------


def test_process_rewards_add_up_to_the_last_potential_however_many_steps() -> None:
    offsets, ends = torch.tensor([0, 3, 3, 4]), torch.tensor([1, 3, 4, 7])
    found = process_rewards(f64([0.5, 0.2, 0.9, 0.4]), offsets, ends, 8, initial=0.1)
    assert found.tolist() == pytest.approx([0, 0.4, 0, -0.3, 0.7, 0, 0, 0.3])
    assert found[:5].sum().item() == pytest.approx(0.9 - 0.1)
    with pytest.raises(ShapeError, match=r"step_ends must be in \[0, 5\)"):
        process_rewards(f64([0.5]), torch.tensor([0, 1]), torch.tensor([5]), 5)
    with pytest.raises(ConfigError, match="potentials must be finite"):
        process_rewards(f64([math.nan]), torch.tensor([0, 1]), torch.tensor([0]), 5)
    assert process_rewards(f64([]), torch.tensor([0]), torch.tensor([]), 2).tolist() == [0.0, 0.0]


def test_kl_in_the_reward_is_the_sampling_policys_and_off_observations() -> None:
    mask = torch.tensor([True, False, True])
    found = reference_kl_rewards(f64([-1.0, math.nan, -0.5]), f64([-1.5, 3.0, -90.0]), mask, coef=0.1)
    assert found.tolist() == pytest.approx([-0.05, 0.0, -2.0])
    with pytest.raises(ConfigError, match="coef must be >= 0"):
        reference_kl_rewards(f64([0.0]), f64([0.0]), torch.tensor([True]), coef=-1.0)


def test_overlong_shaping_falls_from_zero_to_minus_one() -> None:
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 30000])
    found = overlong_penalty(lengths, max_length=20480, buffer_length=4096)
    assert found.tolist() == pytest.approx([0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0])
    for buffer in (0, 20481):
        with pytest.raises(ConfigError, match="buffer_length must be in"):
            overlong_penalty(lengths, max_length=20480, buffer_length=buffer)


def test_overlong_filtering_masks_whole_sequences() -> None:
    mask = torch.tensor([True, True, False, True])
    found = overlong_filter(mask, torch.tensor([False, True]), torch.tensor([0, 2, 4]))
    assert found.tolist() == [True, True, False, False]
