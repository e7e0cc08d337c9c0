"""Users train on these numbers: changing one is a decision, not a fix.

Every loss by name, value and gradient, against `loss_reference` in float64 on hard ragged batches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import loss_reference as reference
import pytest
import torch
from loss_reference import NAMES, Batch, hard_batch

from asyncrl.errors import ConfigError
from asyncrl.losses import LOSSES, LossInputs, evaluate, finalise
from asyncrl.losses.presets import AGGREGATIONS, KL_ESTIMATORS
from asyncrl.losses.ratios import loglinear_proximal

NAN = math.nan


def packed(batch: Batch, dtype: torch.dtype = torch.float64, **changes: Any) -> LossInputs:
    """Return the batch as tensors, with NaN and infinities in every slot that may not be read."""
    tokens = batch.tokens

    def column(name: str, garbage: float, read: str = "active") -> torch.Tensor:
        values = [getattr(t, name) if getattr(t, read) else garbage for t in tokens]
        return torch.tensor(values, dtype=dtype)

    policy = [t.policy if t.active or t.observed else NAN for t in tokens]
    lengths = [len(sequence) for sequence in batch.sequences]
    fields: dict[str, Any] = {
        "policy_logprobs": torch.tensor(policy, dtype=dtype, requires_grad=True),
        "behaviour_logprobs": column("behaviour", NAN),
        "advantages": column("advantage", math.inf),
        "proximal_logprobs": column("proximal", -math.inf),
        "reference_logprobs": column("reference", NAN),
        "teacher_logprobs": column("teacher", NAN),
        "entropy": column("entropy", NAN).requires_grad_(),
        "teacher_divergence": column("divergence", NAN).requires_grad_(),
        "loss_mask": torch.tensor([t.active for t in tokens], dtype=torch.bool),
        "observation_mask": torch.tensor([t.observed for t in tokens], dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0),
        "rewards": torch.tensor(batch.rewards, dtype=dtype),
        "group_index": torch.tensor(batch.groups),
        "pairs": torch.tensor(batch.pairs, dtype=torch.int64).reshape(-1, 2),
    }
    return LossInputs(**{**fields, **changes})


def value_and_gradient(name: str, inputs: LossInputs, **settings: Any) -> tuple[float, list[float]]:
    loss = evaluate(name, inputs, **settings).loss
    (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    return loss.item(), gradient.tolist()


def assert_close(found: tuple[float, list[float]], expected: tuple[float, list[float]], rel: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel, abs=rel * 1e-2)
    assert found[1] == pytest.approx(expected[1], rel=rel, abs=rel * 1e-2)


def test_the_reference_covers_the_whole_table() -> None:
    assert set(NAMES) == set(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_equal_the_reference(name: str) -> None:
    for seed in range(12):
        batch = hard_batch(seed)
        assert_close(value_and_gradient(name, packed(batch)), reference.reference(name, batch), rel=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_float32_inputs_lose_no_more_than_their_rounding(name: str) -> None:
    batch = hard_batch(3)
    rounded = [
        [
            reference.replace(
                t,
                **{
                    key: torch.tensor(getattr(t, key), dtype=torch.float32).item()
                    for key in ("policy", "behaviour", "proximal", "reference", "teacher", "advantage")
                },
            )
            for t in sequence
        ]
        for sequence in batch.sequences
    ]
    expected = reference.reference(name, reference.replace(batch, sequences=rounded))
    inputs = packed(batch, torch.float32)
    assert evaluate(name, inputs).loss.dtype == torch.float32
    assert_close(value_and_gradient(name, inputs), expected, rel=3e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "ctpo", "opsm", "mis", "sft", "kl_k2"])
def test_every_aggregation_of_a_loss_equals_the_reference(name: str, aggregation: str) -> None:
    batch = hard_batch(5)
    found = value_and_gradient(name, packed(batch), aggregation=aggregation)
    assert_close(found, reference.reference(name, batch, aggregation), rel=1e-11)


def test_const_divides_by_all_sequences_and_the_set_length() -> None:
    batch = hard_batch(5)
    value, gradient = reference.reference("dr_grpo", batch, "sum")
    scale = 1.0 / (len(batch.sequences) * 1000)
    found = value_and_gradient("dr_grpo", packed(batch), const_length=1000)
    assert_close(found, (value * scale, [g * scale for g in gradient]), rel=1e-11)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("name", ["dapo", "gspo", "mis_renorm", "echo", "opd"])
def test_a_reference_kl_is_added_over_all_active_tokens(name: str, estimator: str) -> None:
    batch = hard_batch(7)
    how = reference.AGGREGATION.get(name, "token_mean")
    term = reference.total(
        reference.each_token(batch, reference.kl(estimator)),
        reference.weights(batch, how, reference.active_of(batch)),
    )
    found = value_and_gradient(name, packed(batch), kl_coef=0.3, kl_estimator=estimator)
    assert_close(found, reference.plus(reference.reference(name, batch), 0.3, term), rel=1e-11)


@pytest.mark.parametrize("name", ["reinforce", "gspo", "tis"])
def test_observation_tokens_have_their_own_denominator(name: str) -> None:
    batch = hard_batch(2)
    expected = reference.plus(reference.reference(name, batch), 0.25, reference.observations(batch))
    assert_close(value_and_gradient(name, packed(batch), observation_coef=0.25), expected, rel=1e-11)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_an_entropy_bonus_lowers_the_loss_and_pushes_entropy_up(name: str) -> None:
    batch, inputs = hard_batch(4), packed(hard_batch(4))
    how = reference.AGGREGATION.get(name, "token_mean")
    loss = evaluate(name, inputs, entropy_coef=0.01).loss
    expected = reference.plus(reference.reference(name, batch), -0.01, reference.entropies(batch, how))
    assert loss.item() == pytest.approx(expected[0], rel=1e-11)
    assert inputs.entropy is not None
    (pull,) = torch.autograd.grad(loss, inputs.entropy)
    weights = [w for row in reference.weights(batch, how, reference.active_of(batch)) for w in row]
    assert pull.tolist() == pytest.approx([-0.01 * w for w in weights], rel=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize(("name", "coef"), [("distillation", 1.0), ("distillation", 0.3), ("dapo", 0.3), ("gspo", 0.3)])
def test_a_divergence_is_added_over_the_active_tokens_and_cut(name: str, coef: float, clip: float | None) -> None:
    batch = hard_batch(4)
    inputs = packed(batch)
    out = evaluate(name, inputs, distillation_coef=coef, distillation_clip=clip)
    weights = reference.weights(batch, reference.AGGREGATION.get(name, "token_mean"), reference.active_of(batch))
    limit = math.inf if clip is None else clip
    cut = reference.total(reference.each_token(batch, lambda t: (min(t.divergence, limit), 0.0)), weights)[0]
    alone = 0.0 if name == "distillation" else reference.reference(name, batch)[0]
    assert out.loss.item() == pytest.approx(alone + coef * cut, rel=1e-11)
    assert inputs.teacher_divergence is not None
    (pull,) = torch.autograd.grad(out.loss, inputs.teacher_divergence)
    flat = [w for row in weights for w in row]
    wanted = [coef * w * (t.divergence <= limit) for w, t in zip(flat, batch.tokens, strict=True)]
    assert pull.tolist() == pytest.approx(wanted, rel=1e-12)
    beyond = [t.divergence > limit for t in batch.tokens if t.active]
    if clip is not None:
        assert 0 < finalise(out.metrics)["divergence_clipped_frac"] == sum(beyond) / len(beyond)


def test_a_setting_reaches_the_loss() -> None:
    batch = hard_batch(6)
    rows = reference.each_token(batch, reference.ppo(0.9, 1.5, 2.0))
    expected = reference.total(rows, reference.weights(batch, "token_mean", reference.active_of(batch)))
    found = value_and_gradient("ppo", packed(batch), clip_low=0.1, clip_high=0.5, dual_clip=2)
    assert_close(found, expected, rel=1e-11)


def test_token_losses_are_what_is_aggregated() -> None:
    batch = hard_batch(1)
    for name in ("dapo", "gspo", "opd", "kl_k3"):
        out = evaluate(name, packed(batch), aggregation="sum")
        assert out.token_loss.sum().item() == pytest.approx(out.loss.item(), rel=1e-12)
        assert not out.token_loss.requires_grad
    out = evaluate("dpo", packed(batch))
    assert out.token_loss.sum().item() == pytest.approx(out.loss.item() * len(batch.pairs), rel=1e-12)


# --- ties and bounds --------------------------------------------------------------------------------------------


def one_token(policy: float, behaviour: float, advantage: float) -> LossInputs:
    return LossInputs(
        policy_logprobs=torch.tensor([policy], dtype=torch.float64, requires_grad=True),
        behaviour_logprobs=torch.tensor([behaviour], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        loss_mask=torch.tensor([True]),
        cu_seqlens=torch.tensor([0, 1]),
    )


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo_token", "sequence_clip", "dapo_dual", "ctpo", "ctpo_no_dual"])
def test_a_tie_takes_the_unclipped_branch(name: str, advantage: float) -> None:
    bounds = "window" if name.startswith("ctpo") else "clip"
    settings = {f"{bounds}_low": 0.0, f"{bounds}_high": 0.0}
    _, gradient = value_and_gradient(name, one_token(-1.0, -1.0, advantage), **settings)
    assert gradient == [-advantage]


@pytest.mark.parametrize("name", ["icepop", "mis"])
def test_a_ratio_on_the_bound_of_a_mask_is_kept(name: str) -> None:
    part = "ratio" if name == "icepop" else "correction"
    bounds = {f"{part}_low": 1.0, f"{part}_high": 1.0}
    inputs = one_token(-1.0, -1.0, 2.0)
    inputs = reference.replace(inputs, proximal_logprobs=inputs.behaviour_logprobs)
    assert value_and_gradient(name, inputs, **bounds)[1] == [-2.0]


@pytest.mark.parametrize("name", ["prefix_is", "sequence_clip", "gspo_token", "importance_sampling"])
def test_a_log_ratio_of_exactly_20_still_has_its_gradient(name: str) -> None:
    settings = {"clip_high": 1e12} if name in ("sequence_clip", "gspo_token") else {}
    value, gradient = value_and_gradient(name, one_token(-1.0, -21.0, 1.0), **settings)
    assert gradient == [value] == [pytest.approx(-math.exp(20.0), rel=1e-14)]


def test_stopped_forms_are_gated_by_the_aggregate_and_not_by_the_token() -> None:
    """The last token's own difference is clamped; the prefix at it is not, so it still learns."""
    inputs = LossInputs(
        policy_logprobs=torch.tensor([-30.0, -1.0], dtype=torch.float64, requires_grad=True),
        behaviour_logprobs=torch.tensor([-1.0, -30.0], dtype=torch.float64),
        advantages=torch.ones(2, dtype=torch.float64),
        loss_mask=torch.tensor([True, True]),
        cu_seqlens=torch.tensor([0, 2]),
    )
    _, gradient = value_and_gradient("prefix_is", inputs, aggregation="sum")
    assert gradient == [pytest.approx(-math.exp(-20.0)), -1.0]
    _, gradient = value_and_gradient("importance_sampling", inputs, aggregation="sum")
    assert gradient == [0.0, 0.0]


# --- finite differences -----------------------------------------------------------------------------------------

SMOOTH = ["reinforce", "importance_sampling", "kl_k1", "kl_k2", "kl_k3", "kl_k3_is", "sft", "opd", "dpo", "dppo"]


@pytest.mark.parametrize("name", [*SMOOTH, "gspo"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(9, dtype=torch.float64, generator=generator)

    policy = -1.0 + noise(0.3)
    inputs = {
        "behaviour_logprobs": policy + noise(0.1),
        "reference_logprobs": policy + noise(0.1),
        "teacher_logprobs": policy + noise(0.1),
        "advantages": noise(1.0),
        "loss_mask": torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool(),
        "cu_seqlens": torch.tensor([0, 4, 4, 9]),
        "pairs": torch.tensor([[0, 2]]),
    }
    settings = {"clip_low": 0.9, "clip_high": 9.0} if name == "gspo" else {}

    def loss(at: torch.Tensor) -> torch.Tensor:
        return evaluate(name, LossInputs(policy_logprobs=at, **inputs), **settings).loss

    assert torch.autograd.gradcheck(loss, (policy.requires_grad_(),))


# --- an approximate anchor ----------------------------------------------------------------------------------------


def test_the_approximate_proximal_policy_lies_where_the_versions_say() -> None:
    """A-3PO: log prox = lb + a (lp - lb), a = (v_prox - v_b) / (v_theta - v_b), v_prox = v_theta - 1; in floats."""
    current = 9
    batch = hard_batch(11)
    versions = [current - i % 6 for i in range(len(batch.tokens))]
    policy = torch.tensor([t.policy for t in batch.tokens], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([t.behaviour for t in batch.tokens], dtype=torch.float64)
    found = loglinear_proximal(policy, behaviour, torch.tensor(versions), current)
    wanted = []
    for token, version in zip(batch.tokens, versions, strict=True):
        # What the present weights sampled has no older anchor: it is its own.
        share = (current - 1 - version) / (current - version) if version < current else 0.0
        wanted.append(token.behaviour + min(1.0, max(0.0, share)) * (token.policy - token.behaviour))
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    assert not found.requires_grad
    with pytest.raises(ConfigError, match="a token is newer than policy_version 8: 9"):
        loglinear_proximal(policy, behaviour, torch.tensor(versions), 8)
    nothing = torch.zeros(0)
    assert loglinear_proximal(nothing, nothing, nothing.long(), 0).tolist() == []


def test_decoupled_ppo_takes_the_approximate_anchor() -> None:
    """At half of the way, a log ratio of 0.3 is 0.15 of correction, and 0.15 under the clip."""
    inputs = one_token(-1.0, -1.3, 1.0)
    versions = torch.tensor([2])
    assert inputs.behaviour_logprobs is not None
    proximal = loglinear_proximal(inputs.policy_logprobs, inputs.behaviour_logprobs, versions, 4)
    loss = evaluate("decoupled_ppo", dataclasses.replace(inputs, proximal_logprobs=proximal), clip_high=0.1).loss
    assert loss.item() == pytest.approx(-math.exp(0.15) * 1.1, rel=1e-12)
