"""What must not change a loss, and what every surrogate is on-policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_reference import NAMES, Batch, hard_batch, replace
from test_loss_values import packed, value_and_gradient

from asyncrl.losses import LossInputs, denominators, evaluate, finalise, reduce

EXACT = 1e-12


def gradient_of(name: str, inputs: LossInputs, **settings: Any) -> torch.Tensor:
    return torch.tensor(value_and_gradient(name, inputs, **settings)[1], dtype=torch.float64)


def subset(batch: Batch, chosen: list[int]) -> Batch:
    """Return the sequences `chosen`, in that order, with the pairs that lie wholly among them."""
    place = {old: new for new, old in enumerate(chosen)}
    return Batch(
        sequences=[batch.sequences[i] for i in chosen],
        rewards=[batch.rewards[i] for i in chosen],
        groups=[batch.groups[i] for i in chosen],
        pairs=[(place[a], place[b]) for a, b in batch.pairs if a in place and b in place],
    )


def by_sequence(batch: Batch, flat: list[float], order: list[int]) -> dict[int, list[float]]:
    """Return a packed gradient as original sequence -> its part."""
    found, at = {}, 0
    for i in order:
        found[i] = flat[at : at + len(batch.sequences[i])]
        at += len(batch.sequences[i])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_packing_order_does_not_change_a_loss(name: str) -> None:
    batch = hard_batch(11)
    order = [6, 2, 0, 9, 5, 3, 8, 7, 4, 1]
    value, gradient = value_and_gradient(name, packed(batch))
    turned_value, turned_gradient = value_and_gradient(name, packed(subset(batch, order)))
    assert turned_value == pytest.approx(value, rel=EXACT, abs=EXACT)
    turned = by_sequence(batch, turned_gradient, order)
    for i, part in by_sequence(batch, gradient, list(range(len(order)))).items():
        assert turned[i] == pytest.approx(part, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_padding_tokens_change_nothing(name: str) -> None:
    batch = hard_batch(12)
    blank = replace(batch.sequences[6][0], active=False, observed=False)
    padded = replace(batch, sequences=[[*sequence, blank, blank] for sequence in batch.sequences])
    value, gradient = value_and_gradient(name, packed(batch))
    padded_value, padded_gradient = value_and_gradient(name, packed(padded))
    assert padded_value == pytest.approx(value, rel=EXACT, abs=EXACT)
    order = list(range(len(batch.sequences)))
    parts = by_sequence(padded, padded_gradient, order)
    for i, part in by_sequence(batch, gradient, order).items():
        assert parts[i] == pytest.approx([*part, 0.0, 0.0], rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[3], [0, 6, 7], [4], [2, 5, 1], [8, 9]]])
@pytest.mark.parametrize("aggregation", [None, "prompt_mean", "const", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("name", NAMES)
def test_microbatches_add_up_to_the_whole_batch(name: str, aggregation: str | None, cut: list[list[int]]) -> None:
    batch = replace(hard_batch(13), pairs=[(6, 7), (8, 9)])
    settings: dict[str, Any] = {} if aggregation is None or name == "dpo" else {"aggregation": aggregation}
    if name == "mis_renorm" and aggregation in ("prompt_mean", "const"):
        settings = {}
    value, gradient = value_and_gradient(name, packed(batch), **settings)
    given = denominators(name, packed(batch), **settings)
    tokens_of_prompt = given.pop("num_prompt_tokens")
    total, found = [], {}
    for chosen in cut:
        part = subset(batch, chosen)
        inputs = packed(part, num_prompt_tokens=tokens_of_prompt[chosen], **given)
        part_value, part_gradient = value_and_gradient(name, inputs, **settings)
        total.append(part_value)
        found |= by_sequence(batch, part_gradient, chosen)
    assert math.fsum(total) == pytest.approx(value, rel=EXACT, abs=EXACT)
    for i, part in by_sequence(batch, gradient, list(range(10))).items():
        assert found[i] == pytest.approx(part, rel=EXACT, abs=EXACT)


def test_metrics_of_microbatches_reduce_to_those_of_the_whole_batch() -> None:
    batch = hard_batch(14)
    for name in ("grpo", "ctpo", "cispo", "mis", "echo"):
        whole = finalise(evaluate(name, packed(batch)).metrics)
        parts = [
            evaluate(name, packed(subset(batch, chosen))).metrics for chosen in ([0, 1, 2, 3], [4, 5], [6, 7, 8, 9])
        ]
        assert finalise(reduce(parts)) == pytest.approx(whole, rel=EXACT, nan_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_outside_the_masks_has_no_gradient(name: str) -> None:
    batch = hard_batch(15)
    gradient = gradient_of(name, packed(batch))
    off = torch.tensor([not (t.active or t.observed) for t in batch.tokens])
    assert gradient.isfinite().all()
    assert (gradient[off] == 0).all()


# --- on-policy --------------------------------------------------------------------------------------------------

SURROGATES = sorted(
    {*NAMES}
    - {"dpo", "sft", "rejection_sft", "opd", "echo", "distillation"}
    - {n for n in NAMES if n.startswith("kl_")}
)


def on_policy(batch: Batch) -> Batch:
    """Return the batch with all policies equal, and one advantage per sequence."""
    sequences = [
        [
            replace(t, behaviour=t.policy, proximal=t.policy, reference=t.policy, advantage=math.sin(3.0 * i + 1.0))
            for t in sequence
        ]
        for i, sequence in enumerate(batch.sequences)
    ]
    return replace(batch, sequences=sequences)


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_every_surrogate_has_the_gradient_of_reinforce(name: str) -> None:
    inputs = packed(on_policy(hard_batch(16)))
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "sum"):
        expected = gradient_of("reinforce", inputs, aggregation=aggregation)
        torch.testing.assert_close(gradient_of(name, inputs, aggregation=aggregation), expected, rtol=EXACT, atol=1e-15)


def test_on_policy_distillation_on_policy_is_reinforce_on_the_teachers_advantage() -> None:
    inputs = packed(on_policy(hard_batch(16)))
    assert inputs.teacher_logprobs is not None
    advantage = (inputs.teacher_logprobs - inputs.policy_logprobs.detach()).clamp(-20, 20)
    expected = gradient_of("reinforce", packed(on_policy(hard_batch(16)), advantages=advantage))
    torch.testing.assert_close(gradient_of("opd", inputs), expected, rtol=EXACT, atol=1e-15)


def test_gspo_and_its_token_form_agree_exactly_when_the_advantage_is_constant_in_a_sequence() -> None:
    batch = hard_batch(17)
    sequences = [[replace(t, advantage=math.cos(i)) for t in s] for i, s in enumerate(batch.sequences)]
    inputs = packed(replace(batch, sequences=sequences))
    moderate = packed(
        replace(batch, sequences=[[replace(t, behaviour=t.policy - 0.1 * t.entropy) for t in s] for s in sequences])
    )
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    assert evaluate("gspo", inputs).loss.item() == pytest.approx(evaluate("gspo_token", inputs).loss.item(), rel=EXACT)
    torch.testing.assert_close(
        gradient_of("gspo", moderate, **wide), gradient_of("gspo_token", moderate, **wide), rtol=EXACT, atol=1e-15
    )


def test_k2_and_the_straight_through_form_have_one_gradient_and_k3_one_value() -> None:
    inputs = packed(hard_batch(18))
    mixed = value_and_gradient("kl_k3_value_k2_grad", inputs)
    assert mixed[1] == pytest.approx(value_and_gradient("kl_k2", inputs)[1], rel=EXACT)
    assert mixed[0] == pytest.approx(value_and_gradient("kl_k3", inputs)[0], rel=EXACT)


def test_tiny_kl_keeps_its_digits_in_float32() -> None:
    """exp(d) - d - 1 in float32 would be 0 or 6e-8 here."""
    d = 1e-4
    batch = hard_batch(1, (4,))
    sequences = [[replace(t, active=True, observed=False, policy=-0.5, reference=-0.5 + d) for t in batch.sequences[0]]]
    inputs = packed(replace(batch, sequences=sequences, pairs=[]), torch.float32, pairs=None)
    assert evaluate("kl_k3", inputs).loss.item() == pytest.approx(d * d / 2, rel=2e-3)
