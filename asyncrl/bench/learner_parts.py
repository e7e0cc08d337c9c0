"""The learner's own code under `asyncrl bench learner`: what can be timed, and what its numbers are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncrl.bench.learner_batches import Text, ragged_batch, ragged_groups, ragged_lengths, sharing_groups
from asyncrl.bench.learner_settings import LearnerBench
from asyncrl.bench.timing import Report, timed
from asyncrl.learner.credit import select
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.step import Stepper
from asyncrl.losses import LossInputs, denominators, diagnostics, evaluate, finalise, reduce, top_ratios
from asyncrl.packing import Batch, Microbatch, split

_NUMBERS_TOKENS = 2176  # of the batch whose numbers are compared: a float32 model reads it too, which is slow
_RANKS = 2


class LearnerParts:
    """Model, optimizer and batches, as a learner process has them."""

    def __init__(self, bench: LearnerBench) -> None:
        self._bench = bench
        self._settings = LearnerSettings(
            loss="reinforce", baseline="none", scale="none", microbatch_tokens=bench.microbatch_tokens
        )
        self._model = load_model(bench.model, dtype=torch.bfloat16, device=torch.device("cpu"))
        self._optimizer = Optimizer(self._model.tensors(), self._settings)
        self._stepper = Stepper(self._model, self._optimizer, self._settings, max_off_policyness=0)
        self._text = Text(bench.model)
        self._ragged = ragged_batch(bench, self._text)
        groups = sharing_groups(
            self._text,
            bench.sharing_groups,
            size=bench.sharing_size,
            prompt_tokens=bench.sharing_prompt,
            completion_tokens=bench.sharing_completion,
        )
        self._sharing = select(groups, self._settings).batch
        warm = ragged_groups(self._text, [min(bench.shortest, 64)] * 2, prompt_tokens=1)
        self._gradient(select(warm, self._settings).batch)  # the first call of every kernel

    def ragged(self) -> Report:
        """Forward and backward of the ragged batch."""
        return self._timed(self._ragged, share=True)

    def shared(self) -> Report:
        """Forward and backward of the groups, their prompts read once."""
        return self._timed(self._sharing, share=True)

    def apart(self) -> Report:
        """The same without sharing."""
        return self._timed(self._sharing, share=False)

    def sharing_gradients(self) -> Report:
        """How far the two gradients of the same groups lie from each other."""
        apart = self._gradient(self._sharing, share=False)
        return {"gradient_relative_difference": _distance(self._gradient(self._sharing), apart)}

    def _timed(self, batch: Batch, *, share: bool) -> Report:
        def run() -> Report:
            microbatches = split(batch, max_tokens=self._bench.microbatch_tokens, share_prefixes=share)
            loss, _, _ = self._stepper.accumulate(batch, microbatches)
            forwarded = sum(microbatch.num_slots for microbatch in microbatches)
            return {"loss": loss, "num_tokens": batch.num_tokens, "tokens_forwarded": forwarded}

        report = timed(run)
        norm = self._optimizer.gradient_norm()
        self._optimizer.discard()
        return {**report, "grad_norm": norm}

    def _gradient(self, batch: Batch, *, share: bool = True, max_tokens: int = 0) -> torch.Tensor:
        """Return the batch's whole gradient, flat, float32."""
        size = max_tokens or self._bench.microbatch_tokens
        return self._sum_of(batch, split(batch, max_tokens=size, share_prefixes=share))

    def _sum_of(self, batch: Batch, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        self._stepper.accumulate(batch, microbatches)
        flat = torch.cat([total.flatten() for total in self._optimizer.gradients().values()])
        self._optimizer.discard()
        return flat

    # --- what the numbers are worth -------------------------------------------------------------------------------

    def numbers(self) -> Report:
        """Log-probs against a float32 model's; how much split, order and ranks change them and the gradient."""
        bench = self._bench
        lengths = ragged_lengths(
            0, shortest=bench.shortest, longest=bench.longest, total=min(_NUMBERS_TOKENS, sum(self._lengths()))
        )
        groups = ragged_groups(Text(bench.model), lengths, prompt_tokens=bench.prompt_tokens)
        batch = select(groups, self._settings).batch
        turned = select(groups[::-1], self._settings).batch
        small = max(16, bench.microbatch_tokens // 4)
        logprobs = _logprobs(self._model, batch, bench.microbatch_tokens)
        gradient = self._gradient(batch)
        in_parts, parts_gradient = _logprobs(self._model, batch, small), self._gradient(batch, max_tokens=small)
        order = _places(batch, turned)
        turned_logprobs = _logprobs(self._model, turned, bench.microbatch_tokens)[order]
        microbatches = split(batch, max_tokens=small)
        ranks = torch.stack([self._sum_of(batch, microbatches[rank::_RANKS]) for rank in range(_RANKS)]).sum(0)
        wide = load_model(bench.model, dtype=torch.float32, device=torch.device("cpu"))
        reference = _logprobs(wide, batch, bench.microbatch_tokens)
        mask = batch.loss_mask
        return {
            "num_tokens": int(mask.sum()),
            "logprob_bfloat16_to_float32": _difference(logprobs, reference, mask),
            "logprob_split": _difference(in_parts, logprobs, mask),
            "logprob_order": _difference(turned_logprobs, logprobs, mask),
            "gradient_split": _distance(parts_gradient, gradient),
            "gradient_order": _distance(self._gradient(turned), gradient),
            "gradient_ranks": _distance(ranks, parts_gradient),
            "ranks": _RANKS,
        }

    def _lengths(self) -> list[int]:
        return self._ragged.cu_seqlens.diff().tolist()

    # --- one whole step -------------------------------------------------------------------------------------------

    def step(self) -> Report:
        """One optimizer step of `step_tokens`, and what the loss and the diagnostics alone take on the same tokens.

        Changes the weights.
        """
        bench = self._bench
        lengths = ragged_lengths(0, shortest=bench.shortest, longest=bench.longest, total=bench.step_tokens)
        groups = ragged_groups(Text(bench.model), lengths, prompt_tokens=bench.prompt_tokens)
        settings = replace(self._settings, loss="dapo")
        stepper = Stepper(self._model, self._optimizer, settings, max_off_policyness=0)
        taken: dict[str, Any] = {}

        def run() -> Report:
            taken["result"] = stepper.step(groups)
            return {}

        report = timed(run)
        batch = select(groups, settings).batch
        microbatches = split(batch, max_tokens=bench.microbatch_tokens)
        return {
            **report,
            "num_tokens": batch.num_tokens,
            "num_microbatches": len(microbatches),
            "metrics": taken["result"].metrics,
            "loss_seconds": _seconds(lambda: loss_alone(settings, batch, microbatches)),
            "diagnostics_seconds": _seconds(lambda: diagnostics_alone(batch)),
        }


def loss_alone(settings: LearnerSettings, batch: Batch, microbatches: Sequence[Microbatch]) -> None:
    """Forward and backward of the loss's own graph, from log-probs to their gradient, microbatch by microbatch."""
    counts = denominators(settings.loss, _whole(batch))
    parts = []
    for microbatch in microbatches:
        tokens, segments = microbatch.token_index, microbatch.segment_index
        policy = batch.behaviour_logprobs[tokens].add(0.01).requires_grad_()
        here = {**counts, "num_prompt_tokens": counts["num_prompt_tokens"][segments]}
        inputs = LossInputs(
            policy_logprobs=policy,
            behaviour_logprobs=batch.behaviour_logprobs[tokens],
            proximal_logprobs=policy.detach(),
            advantages=batch.advantages[tokens],
            loss_mask=batch.loss_mask[tokens],
            cu_seqlens=microbatch.cu_seqlens,
            versions=batch.versions[tokens],
            policy_version=0,
            rewards=batch.rewards[segments],
            group_index=batch.group_index[segments],
            entropy=policy.detach().neg(),
            **here,
        )
        output = evaluate(settings.loss, inputs)
        output.loss.backward()
        parts.append(output.metrics)
    finalise(reduce(parts))


def diagnostics_alone(batch: Batch) -> None:
    """What a step looks at beside its loss: diagnostics and extreme tokens."""
    whole = _whole(batch)
    diagnostics(whole)
    top_ratios(whole)


def _whole(batch: Batch) -> LossInputs:
    # Ratios between e^-0.3 and e^0.3, so that nothing is equal and nothing is clamped.
    spread = torch.linspace(-0.3, 0.3, batch.num_tokens, dtype=torch.float64)
    return LossInputs(
        policy_logprobs=batch.behaviour_logprobs + spread,
        behaviour_logprobs=batch.behaviour_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_seqlens,
        versions=batch.versions,
        policy_version=0,
        rewards=batch.rewards,
        group_index=batch.group_index,
        entropy=-(batch.behaviour_logprobs + spread),
    )


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _logprobs(model: PolicyModel, batch: Batch, max_tokens: int) -> torch.Tensor:
    """[T] float64."""
    found = torch.zeros(batch.num_tokens, dtype=torch.float64)
    with torch.no_grad():
        for microbatch in split(batch, max_tokens=max_tokens):
            found[microbatch.token_index] = model.logprobs(microbatch)[0].double()
    return found


def _places(batch: Batch, turned: Batch) -> torch.Tensor:
    """Return [T], where each token of `batch` lies in the same batch with its segments in the opposite order."""
    bounds = turned.cu_seqlens.tolist()
    count = batch.num_segments
    return torch.cat([torch.arange(bounds[count - 1 - s], bounds[count - s]) for s in range(count)])


def _difference(found: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    gap = (found - wanted)[mask].abs()
    return {"mean": float(gap.mean()), "max": float(gap.max())}


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
