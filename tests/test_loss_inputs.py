"""What bad input gets: a defined answer, or an error with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_reference import NAMES, hard_batch, reference, replace
from test_loss_values import assert_close, packed, value_and_gradient

from asyncrl.errors import ConfigError, EngineError, ShapeError
from asyncrl.losses import LossInputs, diagnostics, evaluate, finalise, next_entropy_coef

T64 = torch.float64


def small(**changes: Any) -> LossInputs:
    fields: dict[str, Any] = {
        "policy_logprobs": torch.tensor([-1.0, -0.5, -2.0, -0.1], dtype=T64, requires_grad=True),
        "behaviour_logprobs": torch.tensor([-1.1, -0.6, -1.9, -0.1], dtype=T64),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=T64),
        "loss_mask": torch.tensor([True, True, True, True]),
        "cu_seqlens": torch.tensor([0, 2, 4]),
    }
    return LossInputs(**{**fields, **changes})


def metric(name: str, inputs: LossInputs, loss: str = "dapo", **settings: Any) -> float:
    return finalise(evaluate(loss, inputs, **settings).metrics)[name]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_is_zero_with_a_graph(name: str) -> None:
    empty = packed(hard_batch(0, ()), pairs=torch.tensor([]))
    assert value_and_gradient(name, empty) == (0.0, [])
    hole = hard_batch(0, (3, 0, 4))
    blank = [[replace(t, active=False, observed=False) for t in sequence] for sequence in hole.sequences]
    inputs = packed(replace(hole, sequences=blank, pairs=[]))
    assert value_and_gradient(name, inputs) == (0.0, [0.0] * 7)


def test_diagnostics_of_an_empty_batch_are_nan_and_not_an_error() -> None:
    for lengths in ((), (0, 0)):
        batch = replace(hard_batch(0, lengths), pairs=[])
        inputs = packed(batch, versions=torch.zeros(0, dtype=torch.int64))
        found = diagnostics(inputs)
        assert math.isnan(found["token_weight_max"])
        assert math.isnan(found["kl_k3"])
        assert found["num_loss_tokens"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_one_token_sequences_have_their_loss(name: str) -> None:
    batch = replace(hard_batch(4, (1, 1, 1)), pairs=[(0, 1), (2, 0)])
    assert_close(value_and_gradient(name, packed(batch)), reference(name, batch), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gspo", "behaviour_logprobs"),
        ("gspo", "advantages"),
        ("mis", "proximal_logprobs"),
        ("grpo", "reference_logprobs"),
        ("kl_k3", "reference_logprobs"),
        ("kl_k3_is", "behaviour_logprobs"),
        ("opd", "teacher_logprobs"),
        ("echo", "observation_mask"),
        ("rejection_sft", "rewards"),
        ("dpo", "pairs"),
        ("dpo", "reference_logprobs"),
    ],
)
def test_a_missing_input_is_named(name: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* needs {missing}"):
        evaluate(name, packed(hard_batch(1), **{missing: None}))


def test_terms_and_aggregations_name_what_they_miss() -> None:
    with pytest.raises(ConfigError, match="needs entropy"):
        evaluate("dapo", small(), entropy_coef=0.1)
    with pytest.raises(ConfigError, match="needs group_index"):
        evaluate("dapo", small(), aggregation="prompt_mean")
    with pytest.raises(ConfigError, match="diagnostics need behaviour_logprobs"):
        diagnostics(small(behaviour_logprobs=None))


@pytest.mark.parametrize(
    ("name", "settings", "missing"),
    [
        ("mis_renorm", {}, "num_kept_tokens"),
        ("gspo", {}, "num_sequences"),
        ("echo", {}, "num_observation_tokens"),
        ("dapo", {"aggregation": "prompt_mean"}, "num_prompts"),
        ("dr_grpo", {}, "num_all_sequences"),
        ("dpo", {}, "num_pairs"),
    ],
)
def test_a_denominator_of_a_microbatch_is_not_mixed_with_those_of_the_whole(
    name: str, settings: dict[str, Any], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"num_loss_tokens is given and {missing} is not"):
        evaluate(name, packed(hard_batch(1), num_loss_tokens=10), **settings)
    given = packed(hard_batch(1), **{"num_loss_tokens": 10, missing: 2})
    assert evaluate(name, given, **settings).loss.isfinite()


def test_const_takes_the_number_of_sequences_where_only_that_is_given() -> None:
    batch = hard_batch(1)
    one, other = packed(batch, num_sequences=5), packed(batch, num_all_sequences=5)
    assert evaluate("dr_grpo", one).loss == evaluate("dr_grpo", other).loss


@pytest.mark.parametrize("name", ["sft", "kl_k2", "reinforce"])
def test_an_input_that_a_loss_does_not_read_may_be_missing_or_bad(name: str) -> None:
    batch = hard_batch(1)
    expected = value_and_gradient(name, packed(batch))
    assert value_and_gradient(name, packed(batch, behaviour_logprobs=None, teacher_logprobs=None)) == expected
    bad = torch.full((len(batch.tokens),), math.nan, dtype=T64)
    assert value_and_gradient(name, packed(batch, behaviour_logprobs=bad), bad_logprobs="raise") == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.ones(3, dtype=T64)}, r"advantages must be \[T\] = \[4\], got \[3\]"),
        ({"loss_mask": torch.ones(4, 1).bool()}, r"loss_mask must be \[T\]"),
        ({"policy_logprobs": torch.zeros(2, 2)}, r"policy_logprobs must be \[T\], got \[2, 2\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 3])}, "end at T=4; it starts at 0, ends at 3"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "it starts at 1"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "shortest sequence -1"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "must be integers"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, "must be integers"),
        ({"rewards": torch.ones(4)}, r"rewards must be \[S\] = \[2\]"),
        ({"group_index": torch.ones(4).long()}, r"group_index must be \[S\]"),
        ({"pairs": torch.tensor([[0, 2]])}, "pairs must index the 2 sequences, got 0..2"),
        ({"pairs": torch.tensor([0, 1])}, r"pairs must be integers \[P, 2\]"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        evaluate("dapo", small(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_logprobs": torch.zeros(4, dtype=torch.bfloat16)}, "must be float32 or float64, got torch.bfloat16"),
        ({"behaviour_logprobs": torch.zeros(4, dtype=torch.float16)}, "wider than the clip bounds"),
        ({"loss_mask": torch.tensor([1.0, -0.3, 0.0, 1.0])}, "is it a mask"),
        ({"versions": torch.zeros(4)}, "versions must be integers"),
        ({"advantages": torch.tensor([1.0, math.nan, 0.0, math.inf], dtype=T64)}, "2 are not, the first at token 1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate("dapo", small(**changes))


def test_a_token_cannot_be_both_sampled_and_observed() -> None:
    with pytest.raises(ConfigError, match="either sampled or observed"):
        evaluate("echo", small(observation_mask=torch.tensor([True, False, False, False])))


def test_a_mask_of_zeros_and_ones_is_taken() -> None:
    bits = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    assert evaluate("dapo", small(loss_mask=bits)).loss == evaluate("dapo", small(loss_mask=bits.bool())).loss


BAD = [("positive", 0.5), ("floor", -1e4), ("nonfinite", math.nan), ("nonfinite", -math.inf), ("nonfinite", math.inf)]


@pytest.mark.parametrize(("kind", "value"), BAD)
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "ctpo", "sequence_is", "importance_sampling", "opsm"])
def test_a_bad_behaviour_logprob_stays_finite_and_is_counted(name: str, kind: str, value: float) -> None:
    inputs = small(behaviour_logprobs=torch.tensor([-1.1, value, -1.9, -0.1], dtype=T64))
    for setting in ("cap", "mask"):
        loss, gradient = value_and_gradient(name, inputs, bad_logprobs=setting)
        assert math.isfinite(loss)
        assert all(math.isfinite(g) for g in gradient)
        for other in ("positive", "floor", "nonfinite"):
            assert metric(f"bad_logprobs_{other}", inputs, name, bad_logprobs=setting) == float(other == kind)
    with pytest.raises(EngineError, match=f"1 {kind}"):
        evaluate(name, inputs, bad_logprobs="raise")
    assert diagnostics(inputs)[f"bad_logprobs_{kind}"] == 1.0


def test_a_masked_bad_logprob_drops_the_token_and_keeps_the_denominator() -> None:
    bad = torch.tensor([-1.1, -1e4, -1.9, -0.1], dtype=T64)
    dropped = value_and_gradient("importance_sampling", small(behaviour_logprobs=bad), bad_logprobs="mask")
    without = small(loss_mask=torch.tensor([True, False, True, True]), num_loss_tokens=4)
    assert dropped == value_and_gradient("importance_sampling", without)
    capped = value_and_gradient("importance_sampling", small(behaviour_logprobs=bad), bad_logprobs="cap")
    assert capped[0] < -1e8
    assert capped[1][1] == 0.0


def test_a_broken_policy_logprob_is_counted_and_reaches_the_loss() -> None:
    inputs = small(policy_logprobs=torch.tensor([-1.0, math.nan, -2.0, -0.1], dtype=T64, requires_grad=True))
    assert metric("policy_logprobs_nonfinite", inputs) == 1.0
    assert math.isnan(evaluate("dapo", inputs).loss.item())


def test_the_entropy_coefficient_moves_towards_its_target() -> None:
    assert next_entropy_coef(0.1, 0.1, target=0.2, delta=0.05) == pytest.approx(0.15)
    assert next_entropy_coef(0.1, 0.3, target=0.2, delta=0.05) == pytest.approx(0.05)
    assert next_entropy_coef(0.01, 0.3, target=0.2, delta=0.05) == 0.0
    assert next_entropy_coef(0.1, math.nan, target=0.2) == 0.1
