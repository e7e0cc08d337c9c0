"""What an optimizer step makes of input that is bad or empty, and that every diagnostic is in its metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups
from test_learner_step import job_for, step
from tiny_model import build_tiny_model

from asyncrl.errors import EngineError, EnvironmentFault
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.process import Learner
from asyncrl.protocols import StepOptions
from asyncrl.types import Group, Logprobs, Trajectory, TurnSpan


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, num_layers=1)


@pytest.fixture
def learner(model_path: Path, tmp_path: Path) -> Learner:
    return Learner(job_for(model_path, tmp_path))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner._optimizer.masters.items()}


def unchanged(learner: Learner, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], tensor) for name, tensor in learner._optimizer.masters.items())


def renewed(group: Group, place: int, **changes: Any) -> Group:
    """Return the group with one trajectory changed; `segment` changes are those of its only segment."""
    trajectory = group.trajectories[place]
    segment = changes.pop("segment", {})
    trajectory = replace(trajectory, segments=(replace(trajectory.segments[0], **segment),), **changes)
    others: list[Trajectory] = list(group.trajectories)
    others[place] = trajectory
    return replace(group, trajectories=tuple(others))


BAD = [("positive", 0.5), ("floor", -1e4), ("nonfinite", math.nan), ("nonfinite", -math.inf), ("nonfinite", math.inf)]


def with_logprob(value: float) -> list[Group]:
    first, second = random_groups(1)
    logprobs = list(second.trajectories[0].segments[0].behaviour_logprobs)
    logprobs[second.trajectories[0].segments[0].loss_mask.index(1)] = value
    return [first, renewed(second, 0, segment={"behaviour_logprobs": Logprobs(logprobs)})]


@pytest.mark.parametrize("loss", ["dapo", "mis_renorm", "sft"])
@pytest.mark.parametrize("setting", ["cap", "mask"])
@pytest.mark.parametrize(("kind", "value"), BAD)
def test_a_bad_behaviour_logprob_is_counted_and_the_step_is_finite(
    model_path: Path, tmp_path: Path, kind: str, value: float, setting: str, loss: str
) -> None:
    settings = {"loss": loss, "loss_settings": {"bad_logprobs": setting}, "max_grad_norm": 1.0}
    learner = Learner(job_for(model_path, tmp_path, **settings))
    before = weights(learner)
    result = step(learner, with_logprob(value))
    assert result.stepped
    assert math.isfinite(result.metrics["grad_norm"])
    assert not unchanged(learner, before)
    assert all(tensor.isfinite().all() for tensor in learner._optimizer.masters.values())
    kinds = {k: result.metrics[f"bad_logprobs_{k}"] for k in ("positive", "floor", "nonfinite")}
    assert kinds == {"positive": 0.0, "floor": 0.0, "nonfinite": 0.0, kind: 1.0}
    json.dumps(list(result.top_ratios), allow_nan=False)


@pytest.mark.parametrize(("kind", "value"), BAD)
def test_a_bad_behaviour_logprob_ends_the_run_where_that_is_asked_for(
    model_path: Path, tmp_path: Path, kind: str, value: float
) -> None:
    learner = Learner(job_for(model_path, tmp_path, loss_settings={"bad_logprobs": "raise"}))
    before = weights(learner)
    with pytest.raises(EngineError, match=f"1 {kind}.*set bad_logprobs to 'cap' or 'mask'"):
        step(learner, with_logprob(value))
    assert unchanged(learner, before)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "grpo"},
        {"loss": "echo"},
        {"credit": CreditSettings(overlong_max_length=9, overlong_buffer_length=3, reward_kl_coef=0.1, whiten=True)},
        {"credit": CreditSettings(overlong_filter=True)},
        {"entropy_target": 1.0},
    ],
)
def test_an_empty_batch_is_a_step_that_is_skipped_and_counts(
    model_path: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    learner = Learner(job_for(model_path, tmp_path, **settings))
    before = weights(learner)
    blank = make_segment([1, 2, 3], [])
    for version, groups in enumerate([[], [make_group(0, [blank, blank], [1.0, 0.0])]], start=1):
        result = step(learner, groups)
        assert (result.stepped, result.version) == (False, version)
        assert result.metrics["tokens_trained"] == 0
    assert unchanged(learner, before)


def test_a_segment_without_an_active_token_changes_nothing_for_the_others(model_path: Path, tmp_path: Path) -> None:
    found = []
    for blank in (False, True):
        learner = Learner(job_for(model_path, tmp_path / str(blank)))
        (group,) = random_groups(2, num_groups=1)
        if blank:
            first = group.trajectories[0]
            first = replace(first, segments=(*first.segments, make_segment([4, 5], [])))
            group = replace(group, trajectories=(first, *group.trajectories[1:]))
        result = step(learner, [group])
        found.append({name: result.metrics[name] for name in ("loss", "grad_norm", "seq_ess", "num_loss_tokens")})
        assert result.metrics["num_segments"] == 4 + blank
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_group_of_one_trajectory_has_no_gradient_and_is_counted(learner: Learner) -> None:
    before = weights(learner)
    result = step(learner, [make_group(0, [make_segment([1, 2], [([3, 4], [])])], [1.0])])
    assert result.stepped
    assert result.metrics["grad_norm"] == 0.0
    assert result.metrics["zero_variance_frac"] == 1.0
    assert unchanged(learner, before)


def test_sequences_of_one_sampled_token_are_trained_on(learner: Learner) -> None:
    segments = [make_segment([1], [([3 + i], [])]) for i in range(2)]
    result = step(learner, [make_group(0, segments, [1.0, 0.0])])
    assert result.metrics["grad_norm"] > 0
    assert result.metrics["length_max"] == 1.0
    assert result.metrics["seq_weight_max"] == result.metrics["importance_ratio_max"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_names_group_and_trajectory_and_leaves_the_weights(
    learner: Learner, reward: float
) -> None:
    first, second = random_groups(1)
    before = weights(learner)
    with pytest.raises(EnvironmentFault, match=r"group 1, trajectory task-1/2 of environment 'synthetic': the reward"):
        step(learner, [first, renewed(second, 2, reward=reward)])
    assert unchanged(learner, before)
    assert step(learner, [first, second]).version == 1


def test_rewards_that_are_huge_stay_finite(learner: Learner) -> None:
    groups = [renewed(group, 0, reward=-1e30) for group in random_groups(1)]
    result = step(learner, groups)
    assert result.stepped
    assert math.isfinite(result.metrics["grad_norm"])


@pytest.mark.parametrize(
    ("options", "stepped"),
    [
        (StepOptions(), True),
        (StepOptions(update=False), False),
        (StepOptions(limits={"importance_ratio_max": (-math.inf, 1e-3)}), False),
        (StepOptions(limits={"ess_token": (1.1, math.inf)}), False),
        (StepOptions(limits={"importance_ratio_max": (-math.inf, 1e9), "ess_token": (0.0, math.inf)}), True),
        (StepOptions(limits={"not_measured": (0.0, 0.0)}), True),
    ],
)
def test_a_step_outside_its_limits_measures_everything_and_leaves_the_weights(
    learner: Learner, options: StepOptions, stepped: bool
) -> None:
    before = weights(learner)
    result = step(learner, random_groups(3), options)
    assert result.stepped is stepped
    assert unchanged(learner, before) is not stepped
    assert result.version == 1
    assert result.metrics["grad_norm"] > 0
    assert result.metrics["ess_token"] > 0
    assert step(learner, random_groups(3)).stepped, "nothing of the gradient was left behind"


# --- what a step reports ----------------------------------------------------------------------------------------

WEIGHTS = [f"{kind}_{part}" for kind in ("importance_ratio", "seq_weight", "geo_weight")
           for part in ("max", "min", "mean", "p50", "p95", "p99", "p999")]  # fmt: skip
EVERYTHING = [
    *WEIGHTS,
    *("token_ess", "ess_token", "seq_ess", "seq_ess_frac"),
    *(f"{kind}_ess_staleness_{lag}{part}" for kind in ("token", "seq") for lag in (0, 1) for part in ("", "_frac")),
    *("frac_ratio_below", "frac_ratio_above", "clip_fraction_low", "clip_fraction_high", "clip_frac_dual"),
    *("clipped_low_frac", "clipped_high_frac", "zero_adv_token_frac"),
    *("kl_k1", "kl_k3", "chi2", "log_ratio_clamped"),
    *("mismatch_k1", "mismatch_k3", "mismatch_abs_mean", "mismatch_abs_max"),
    *("mismatch_prob_mean", "mismatch_prob_max", "mismatch_confident"),
    *("staleness_max", "staleness_mean", "staleness_tokens_0", "staleness_tokens_1", "staleness_negative"),
    *("seq_staleness_max_mean", "seq_versions_mean", "seq_versions_max", "seq_multi_version_frac"),
    *("sqrt_t_exponent", "sqrt_t_sigma_1", "sqrt_t_predicted_ess_frac"),
    *("zero_variance_frac", "zero_variance_all_fail_frac", "zero_variance_all_pass_frac"),
    *("zero_variance_expected_frac", "success_rate", "groups_kept"),
    *("entropy", "sampled_entropy"),
    *("repetition_mean", "repetition_max", "longest_run_share_mean", "longest_run_share_max"),
    *("truncated_frac", "truncated_share", "length_mean", "length_p50", "length_p95", "length_max"),
    *("length_reward_rank_correlation", "grad_norm", "grad_norm_nonfinite"),
    *("bad_logprobs_positive", "bad_logprobs_nonfinite", "bad_logprobs_floor", "policy_logprobs_nonfinite"),
]


def test_every_diagnostic_is_in_the_metrics_of_a_step(learner: Learner) -> None:
    learner._stepper.version = 1
    result = step(learner, random_groups(5, num_groups=3, versions=(0, 1)))
    assert sorted(set(EVERYTHING) - set(result.metrics)) == []
    for kind in ("token", "seq", "geo"):
        assert sum(result.histograms[f"{kind}_weight"]["counts"]) > 0
    assert result.histograms["staleness_tokens"]["edges"] == [0.5]


def test_repetition_truncation_and_parts_of_the_reward_are_what_they_say(learner: Learner) -> None:
    looping = make_segment([1], [([7] * 6, [2, 2, 2]), ([8, 9, 8, 9, 8], [])])
    plain = make_segment([1], [([3, 4, 5, 6], [])])
    group = make_group(0, [looping, plain], [1.0, 0.0])
    parts = {"reward_parts": {"solved": 1.0}, "truncated": True}
    group = renewed(group, 0, **parts)
    for turns in ((), (TurnSpan(start=1, end=7), TurnSpan(start=10, end=15))):
        learner._stepper.version = 0
        found = step(learner, [renewed(group, 0, segment={"turns": turns})]).metrics
        repeated = [1 - 1 / 4, 1 - 2 / 3, 0.0]  # 4 equal 3-grams; 3 of which 2 differ; none
        assert found["repetition_mean"] == pytest.approx(sum(repeated) / 3)
        assert found["repetition_max"] == pytest.approx(0.75)
        assert found["longest_run_share_max"] == 1.0
        assert found["longest_run_share_mean"] == pytest.approx((1.0 + 0.2 + 0.25) / 3)
        assert (found["truncated_frac"], found["truncated_share"]) == (0.5, 0.5)
        assert (found["reward_part_solved_mean"], found["reward_part_solved_std"]) == (1.0, 0.0)


def test_the_rewards_variance_is_shared_out_among_its_terms(learner: Learner) -> None:
    terms = [(1.0, 0.0), (1.0, 0.2), (0.0, 0.3), (0.0, 0.1)]
    segments = [make_segment([1, 2], [([3 + i], [])]) for i in range(4)]
    group = make_group(0, segments, [sum(term) for term in terms])
    for place, (solved, style) in enumerate(terms):
        group = renewed(group, place, reward_parts={"paid_solved": solved, "paid_style": style, "solved": solved})
    found = step(learner, [group]).metrics
    shares = {name: value for name, value in found.items() if name.startswith("reward_variance_share_")}
    # rewards 1.0, 1.2, 0.3, 0.1 have the mean 0.65 and the variance 0.2125; Cov(solved, reward) is 0.225
    assert shares == {
        "reward_variance_share_solved": pytest.approx(0.225 / 0.2125),
        "reward_variance_share_style": pytest.approx(-0.0125 / 0.2125),
    }
    learner._stepper.version = 0
    same = make_group(0, segments, [0.1] * 4)
    found = step(learner, [renewed(same, 0, reward_parts={"paid_solved": 0.1})]).metrics
    assert not any(name.startswith("reward_variance_share_") for name in found)


def test_turns_that_touch_are_completions_of_their_own(learner: Learner) -> None:
    joined = make_segment([1], [([7] * 4, [])])
    turns = (TurnSpan(start=1, end=3), TurnSpan(start=3, end=5))
    group = make_group(0, [joined, make_segment([1], [([8], [])])], [1.0, 0.0])
    assert step(learner, [renewed(group, 0, segment={"turns": turns})]).metrics["repetition_max"] == 0.0
    learner._stepper.version = 0
    assert step(learner, [group]).metrics["repetition_max"] == 0.5


def test_a_loss_of_ones_own_is_trained_on_by_its_name(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def loss(inputs, *, scale=1.0):\n    return -scale * inputs.advantages * inputs.policy_logprobs\n"
    (tmp_path / "my_step_losses.py").write_text(text, encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for settings in ({"loss": "reinforce"}, {"loss": "my_step_losses:loss", "loss_settings": {"scale": 1.0}}):
        learner = Learner(job_for(model_path, tmp_path / str(len(found)), **settings))
        found.append(step(learner, random_groups(1)).metrics)
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-6)


def test_a_reward_counts_once_however_many_segments_its_trajectory_has(learner: Learner) -> None:
    group = make_group(0, [make_segment([1, 2], [([3 + i], [])]) for i in range(2)], [1.0, 0.0])
    first, second = group.trajectories
    many = replace(first, segments=(*first.segments, *(make_segment([9, i], [([5], [])]) for i in range(2))))
    found = step(learner, [replace(group, trajectories=(many, second))]).metrics
    assert found["success_rate"] == 0.5
    assert found["zero_variance_expected_frac"] == pytest.approx(2 * 0.5**2)


def test_the_largest_ratios_have_all_that_is_needed_to_explain_them(learner: Learner) -> None:
    learner._stepper.version = 1
    result = step(learner, random_groups(5, num_groups=6, versions=(0, 1), turns=3))
    assert len(result.top_ratios) == 64
    for row in result.top_ratios:
        assert row["ratio"] == pytest.approx(math.exp(row["policy_logprob"] - row["behaviour_logprob"]), rel=1e-5)
        assert row["version"] in (0, 1)
        assert row["position"] >= 1
        assert {"advantage", "token_id", "position_in_segment", "trajectory_id", "task_id"} <= set(row)


def test_bounds_that_are_not_on_a_tokens_ratio_are_not_counted_on_it(model_path: Path, tmp_path: Path) -> None:
    """The bounds of gspo, 3e-4, are on a mean: nearly every token's own ratio is further away."""
    learner = Learner(job_for(model_path, tmp_path, loss="gspo"))
    result = step(learner, random_groups(1, num_groups=1))
    rows = [(row["ratio"], row["advantage"]) for row in result.top_ratios]
    assert len(rows) == result.metrics["num_loss_tokens"]
    above = sum(r > 1.2 for r, _ in rows) / len(rows)
    assert result.metrics["frac_ratio_above"] == pytest.approx(above)
    assert result.metrics["clip_fraction_high"] == pytest.approx(sum(r > 1.2 and a > 0 for r, a in rows) / len(rows))
    assert above < sum(r > 1.0004 for r, _ in rows) / len(rows)
