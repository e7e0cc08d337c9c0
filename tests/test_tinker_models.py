"""The models of the service against plain transformers in float64, with W + s B A written out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from test_learner_numerics import with_exact_norms
from tiny_model import build_tiny_model

from asyncrl.tinker.job import ModelsJob
from asyncrl.tinker.models import Models
from asyncrl.tinker.orders import (
    AdapterShape,
    CreateOrder,
    LoadOrder,
    PassOrder,
    PassReply,
    Refusal,
    Row,
    SampleOrder,
    SampleReply,
    SaveOrder,
    StepOrder,
    UnloadOrder,
)
from asyncrl.types import Logprobs, TokenIds

_SHAPE = AdapterShape(rank=4)
_STEP = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "max_grad_norm": 0.0}


@cache
def base(tied: bool = True) -> Path:
    return build_tiny_model(Path(mkdtemp()), tied=tied)


def models(*, tied: bool = True, dtype: str = "float64", **settings: int) -> Models:
    found = Models(ModelsJob(model=str(base(tied)), dtype=dtype, threads=1, **settings))
    if dtype == "float64":
        with_exact_norms(found._policy.model)
    return found


def created(found: Models, name: str = "m", shape: AdapterShape = _SHAPE, seed: int = 1) -> str:
    reply = found.answer(CreateOrder(model=name, shape=shape, seed=seed))
    assert not isinstance(reply, Refusal), reply
    return name


def disturb(found: Models, name: str) -> None:
    """Give B numbers too, so that A has a gradient."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in found.models[name].parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def rows(*, seed: int = 0, count: int = 3, length: int = 9, shared: int = 4) -> list[Row]:
    """Return rows that begin alike, with targets that are not the next tokens everywhere."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 256, (shared,), generator=generator).tolist()
    made = []
    for index in range(count):
        own = torch.randint(0, 256, (length + index,), generator=generator).tolist()
        tokens, size = [*prompt, *own], shared + length + index
        targets = [*tokens[1:], 17]
        targets[size // 2] = 99
        advantages = torch.randn(size, generator=generator) * (torch.arange(size) >= shared)
        made.append(
            Row(
                token_ids=TokenIds(tokens),
                target_ids=TokenIds(targets),
                values={
                    "logprobs": Logprobs((-5.9 + 0.5 * torch.randn(size, generator=generator)).tolist()),
                    "advantages": Logprobs(advantages.tolist()),
                },
            )
        )
    return made


def weighted(made: list[Row]) -> list[Row]:
    return [
        Row(token_ids=row.token_ids, target_ids=row.target_ids, values={"weights": row.values["advantages"]})
        for row in made
    ]


def reference_loss(loss: str, logprobs: torch.Tensor, values: Mapping[str, Logprobs]) -> torch.Tensor:
    """Return the sum over tokens, as the page "Loss Functions" of Tinker writes it."""
    given = {name: torch.tensor(list(found), dtype=torch.float64) for name, found in values.items()}
    if loss == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    ratio, advantages = torch.exp(logprobs - given["logprobs"]), given["advantages"]
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return -(ratio.clamp(0.0, 4.0).detach() * logprobs * advantages).sum()


def reference(
    loss: str, made: list[Row], factors: Mapping[str, torch.Tensor], scale: float, *, tied: bool
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Return (log-probs by row, loss, gradients by name) of transformers' model with W + s B A for every W."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base(tied), dtype=torch.float64, attn_implementation="sdpa")
    with_exact_norms(model)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in factors.items()}
    weights = dict(model.named_parameters())
    weights["lm_head.weight"] = model.get_output_embeddings().weight
    changed = {}
    for name in leaves:
        if name.endswith("lora_A.weight"):
            place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
            product = leaves[name.replace("lora_A", "lora_B")] @ leaves[name]
            changed[place] = weights[place].detach() + scale * product
    head = changed.pop("lm_head.weight", weights["lm_head.weight"].detach())
    total, found = torch.zeros((), dtype=torch.float64), []
    for row in made:
        states = torch.func.functional_call(
            model, changed, kwargs={"input_ids": torch.tensor([list(row.token_ids)]), "output_hidden_states": True}
        ).hidden_states[-1][0]
        every = torch.log_softmax(states @ head.T, -1)
        logprobs = every.gather(1, torch.tensor(list(row.target_ids))[:, None])[:, 0]
        found.append(logprobs.detach())
        total = total + reference_loss(loss, logprobs, row.values)
    total.backward()
    return found, total.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_loss_and_gradients_are_those_of_the_formula(loss: str) -> None:
    for tied, microbatch_tokens in ((True, 4096), (False, 16)):
        found = models(tied=tied, microbatch_tokens=microbatch_tokens)
        name = created(found)
        disturb(found, name)
        model = found.models[name]
        made = weighted(rows()) if loss == "cross_entropy" else rows()
        factors = {key: parameter.detach() for key, parameter in model.parameters.items()}
        logprobs, total, gradients = reference(loss, made, factors, 32 / 4, tied=tied)
        reply = found.answer(PassOrder(model=name, rows=made, loss=loss))
        assert isinstance(reply, PassReply), reply
        assert reply.metrics["loss:sum"] == pytest.approx(float(total), rel=1e-10)
        for row, expected in zip(reply.logprobs, logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(list(row)), expected.float(), rtol=1e-6, atol=0)
        assert gradients.keys() == model.parameters.keys()
        for key, parameter in model.parameters.items():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_passes_over_parts_of_a_batch_add_up_to_one_pass() -> None:
    whole, parts = models(), models()
    for found in (whole, parts):
        disturb(found, created(found))
    made = rows()
    whole.answer(PassOrder(model="m", rows=made, loss="importance_sampling"))
    for row in made:
        parts.answer(PassOrder(model="m", rows=[row], loss="importance_sampling"))
    for name, parameter in whole.models["m"].parameters.items():
        other = parts.models["m"].parameters[name].grad
        assert parameter.grad is not None
        assert other is not None
        torch.testing.assert_close(parameter.grad, other, rtol=1e-9, atol=1e-12)


def trained(found: Models, name: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        reply = found.answer(PassOrder(model=name, rows=weighted(rows(seed=step % 2)), loss="cross_entropy"))
        assert isinstance(reply, PassReply), reply
        losses.append(reply.metrics["loss:sum"])
        assert not isinstance(found.answer(StepOrder(model=name, **_STEP)), Refusal)
    return losses


@pytest.mark.slow
def test_a_saved_model_goes_on_as_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    found = models(dtype="float32")
    created(found)
    trained(found, "m", range(3))
    found.answer(SaveOrder(model="m", directory=str(tmp_path / "m" / "w" / "s"), optimizer=True))
    rest = trained(found, "m", range(3, 5))
    other = models(dtype="float32")
    for optimizer in (True, False):
        other.answer(LoadOrder(model=f"m{optimizer}", directory=str(tmp_path / "m" / "w" / "s"), optimizer=optimizer))
    assert trained(other, "mTrue", range(3, 5)) == rest
    assert trained(other, "mFalse", range(3, 5))[1] != rest[1], "Adam began anew"


@pytest.mark.slow
def test_what_peft_loads_from_a_saved_model_computes_the_same(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = models(dtype="float32", tied=False)
    created(found)
    trained(found, "m", range(3))
    place = tmp_path / "m" / "w" / "s"
    found.answer(SaveOrder(model="m", directory=str(place), optimizer=False))
    plain = AutoModelForCausalLM.from_pretrained(base(False), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, place)
    made = rows()
    reply = found.answer(PassOrder(model="m", rows=weighted(made), loss="cross_entropy", backward=False))
    assert isinstance(reply, PassReply)
    for row, ours in zip(made, reply.logprobs, strict=True):
        logits = theirs(input_ids=torch.tensor([list(row.token_ids)])).logits[0]
        every = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(list(row.target_ids))[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(list(ours)), every.detach(), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_sampled_logprobs_are_those_that_a_pass_finds(tmp_path: Path) -> None:
    found = models(dtype="float32")
    created(found)
    trained(found, "m", range(3))
    place = tmp_path / "m" / "w" / "s"
    found.answer(SaveOrder(model="m", directory=str(place), optimizer=False))
    prompt = TokenIds([10, 20, 30])
    order = SampleOrder(
        directory=str(place), prompt=prompt, num_samples=3, max_tokens=6, temperature=1.0, top_k=-1, top_p=1.0, seed=3,
        stop_token_ids=[], prompt_logprobs=True,
    )  # fmt: skip
    reply = found.answer(order)
    assert isinstance(reply, SampleReply), reply
    assert found.answer(order) == reply or math.isnan((reply.prompt_logprobs or Logprobs())[0])
    assert len({tuple(sequence.token_ids) for sequence in reply.sequences}) == 3
    for sequence in reply.sequences:
        assert len(sequence.token_ids) == 6
        tokens = [*prompt, *sequence.token_ids]
        row = Row(token_ids=TokenIds(tokens[:-1]), target_ids=TokenIds(tokens[1:]))
        again = found.answer(PassOrder(model="m", rows=[row], loss="cross_entropy", backward=False))
        assert isinstance(again, PassReply)
        torch.testing.assert_close(
            torch.tensor(list(again.logprobs[0])[2:]), torch.tensor(list(sequence.logprobs)), rtol=0, atol=2e-5
        )
        assert reply.prompt_logprobs is not None
        torch.testing.assert_close(
            torch.tensor(list(again.logprobs[0])[:2]), torch.tensor(list(reply.prompt_logprobs)[1:]), rtol=0, atol=2e-5
        )


@pytest.mark.slow
def test_an_order_at_fault_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    found = models(dtype="float32")
    created(found)

    def refused(order: object) -> str:
        reply = found.answer(order)
        assert isinstance(reply, Refusal), reply
        assert reply.by_user
        return reply.message

    good = rows()[0]
    assert "no forward_backward" in refused(StepOrder(model="m", **_STEP))
    assert "no model x" in refused(UnloadOrder(model="x"))
    assert "rank must be" in refused(CreateOrder(model="y", shape=AdapterShape(rank=0)))
    short = Row(token_ids=good.token_ids, target_ids=TokenIds(good.target_ids[:-1]), values=good.values)
    assert "data[0]: target_tokens has 12 entries for 13 tokens" in refused(
        PassOrder(model="m", rows=[short], loss="ppo")
    )
    assert "reads no 'logprobs'" in refused(PassOrder(model="m", rows=[good], loss="cross_entropy"))
    assert "must be one of" in refused(PassOrder(model="m", rows=[good], loss="dro"))
    assert "no option 'beta'" in refused(PassOrder(model="m", rows=[good], loss="ppo", options={"beta": 1.0}))
    assert "not distances from 1" in refused(
        PassOrder(model="m", rows=[good], loss="ppo", options={"clip_low_threshold": 0.2, "clip_high_threshold": 0.2})
    )
    wrong = Row(token_ids=TokenIds([384]), target_ids=TokenIds([1]))
    assert "from 0 to 383" in refused(PassOrder(model="m", rows=[wrong], loss="cross_entropy"))
    assert "no saved model" in refused(LoadOrder(model="m", directory=str(tmp_path / "none"), optimizer=False))
    endless = Row(token_ids=good.token_ids, target_ids=good.target_ids, values={"weights": Logprobs([1e38] * 13)})
    before = {name: parameter.detach().clone() for name, parameter in found.models["m"].parameters.items()}
    found.answer(PassOrder(model="m", rows=[endless] * 8, loss="cross_entropy"))
    assert "no step was taken" in refused(StepOrder(model="m", **_STEP))
    assert "no forward_backward" in refused(StepOrder(model="m", **_STEP))
    for name, parameter in found.models["m"].parameters.items():
        assert torch.equal(parameter, before[name])
