"""Steps on demonstrations: the same as plain transformers with plain AdamW, and how they sit beside the other steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from synthetic_groups import make_segment, random_groups
from test_learner_numerics import load, model_directory, with_exact_norms
from test_learner_step import job_for, model_path, step

from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.process import Learner
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.supervised import SupervisedStepper
from asyncrl.protocols import StepResult
from asyncrl.types import Segment
from asyncrl.wire import SaveRequest, SupervisedStepRequest

__all__ = ["model_path"]  # a fixture

_TEMPERATURE = 0.7
_PROMPT = list(range(40, 60))


def demonstrations() -> list[Segment]:
    """Return segments of 1, 3, 9 and 12 trained tokens, two of them over several turns; three share their beginning."""
    return [
        make_segment(_PROMPT, [([7], [])]),
        make_segment(_PROMPT, [([9, 8, 7], [])]),
        make_segment([*_PROMPT, 99], [([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5], [])]),
        make_segment([3], [(list(range(10, 16)), [300, 301]), (list(range(20, 26)), [])]),
    ]


def plain_loss(model: torch.nn.Module, segments: list[Segment]) -> torch.Tensor:
    """Return the mean of -log p over the masked tokens of all segments, from whole logits."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for segment in segments:
        tokens = torch.tensor(list(segment.token_ids))
        mask = torch.tensor(list(segment.loss_mask), dtype=torch.bool)
        logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / _TEMPERATURE, -1)
        chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
        total = total - chosen[mask[1:]].sum()
        count += int(mask.sum())
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_tokens", [10_000, 25])
def test_two_steps_give_the_weights_of_plain_adamw_however_the_batch_is_cut(microbatch_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    segments, rates = demonstrations(), (1e-3, 4e-3)
    model = load(torch.float64)
    settings = LearnerSettings(microbatch_tokens=microbatch_tokens, weight_decay=0.1, max_grad_norm=0.5)
    stepper = SupervisedStepper(model, Optimizer(model.tensors(), settings), settings)
    results = [stepper.step(segments, learning_rate=rate, version=place) for place, rate in enumerate(rates)]

    plain = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float64, attn_implementation="sdpa")
    with_exact_norms(plain)
    matrices = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=settings.adam_betas, eps=settings.adam_eps)
    for result, rate in zip(results, rates, strict=True):
        loss = plain_loss(plain, segments)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-10)
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        assert result.metrics["tokens_trained"] == 25
    assert [result.version for result in results] == [1, 2]
    assert (results[0].metrics["num_microbatches"] > 1) == (microbatch_tokens == 25)
    wanted = dict(plain.named_parameters())
    for name, parameter in model.tensors().items():
        torch.testing.assert_close(parameter.detach(), wanted[name].detach(), rtol=1e-8, atol=1e-8)  # updates are 1e-3
    with torch.no_grad():
        assert stepper.loss(segments) == pytest.approx(float(plain_loss(plain, segments)), rel=1e-7)


def test_measuring_leaves_no_gradient(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    assert learner._supervised.loss(demonstrations()) > 0
    assert learner._optimizer.gradient_norm() == 0
    learner.close()


def supervised_step(learner: Learner, learning_rate: float = 2e-3) -> StepResult:
    reply = learner.answer(SupervisedStepRequest(segments=demonstrations(), learning_rate=learning_rate))
    return reply.result  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_moments_go_on_into_the_other_steps_and_the_learning_rate_does_not(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path / "a", learning_rate=1e-3, warmup_steps=4))
    losses = [supervised_step(learner).metrics["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    moments = {k: v.clone() for k, v in learner._optimizer.state().items() if k.startswith("exp_avg.")}
    assert any(moment.abs().sum() > 0 for moment in moments.values())
    (tmp_path / "saved").mkdir()
    learner.answer(SaveRequest(directory=str(tmp_path / "saved")))
    resume = job_for(model_path, tmp_path / "b", learning_rate=1e-3, warmup_steps=4, resume_from=tmp_path / "saved")
    for one in (learner, again := Learner(resume)):
        assert one.hello().version == 3
        result = step(one, random_groups(1, versions=(3,)))
        assert result.version == 4
        assert result.metrics["learning_rate"] == 0.25 * 1e-3, "the warmup begins after the demonstrations"
        assert {float(v) for k, v in one._optimizer.state().items() if k.startswith("step.")} == {4.0}
    ours, theirs = learner._optimizer.state(), again._optimizer.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    name = next(name for name in moments if "norm" not in name)
    assert not torch.equal(ours[name], moments[name])
    for one in (learner, again):
        one.close()


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_version_counts(model_path: Path, tmp_path: Path) -> None:
    learner = Learner(job_for(model_path, tmp_path))
    masters = [master.clone() for master in learner._optimizer.masters.values()]
    with torch.no_grad():
        next(iter(learner._model.tensors().values()))[7, 0] = math.nan
    result = supervised_step(learner)
    assert (result.stepped, result.version, result.metrics["grad_norm_nonfinite"]) == (False, 1, 1.0)
    assert "loss" not in result.metrics
    assert all(torch.equal(a, b) for a, b in zip(masters, learner._optimizer.masters.values(), strict=True))
    assert learner._optimizer.gradient_norm() == 0
    assert learner.hello().version == 1
    learner.close()
