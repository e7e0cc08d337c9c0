"""Optimizer steps on demonstrations: the loss `sft` over the whole batch, on the model and optimizer of the RL steps.

Metrics of a step: loss (nats a token, before the step), tokens_trained, tokens_batch, num_microbatches, grad_norm,
grad_norm_nonfinite, learning_rate, seconds_step, tokens_per_second; an absent key was not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from asyncrl.dealing import deal
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.settings import LearnerSettings
from asyncrl.losses import LossInputs, denominators, evaluate
from asyncrl.packing import Batch, Microbatch, lay_out, split, to_device
from asyncrl.protocols import StepResult
from asyncrl.types import PolicyVersion, Segment

_LOSS = "sft"


class SupervisedStepper:
    """Raises the likelihood of demonstrations on one model."""

    def __init__(
        self, model: PolicyModel, optimizer: Optimizer, settings: LearnerSettings, *, ranks: Ranks = ALONE
    ) -> None:
        """`ranks` hold the model between them and share each batch; all of them are given the same segments."""
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._device = next(iter(optimizer.masters.values())).device

    def step(self, segments: Sequence[Segment], *, learning_rate: float, version: PolicyVersion) -> StepResult:
        """Return what one optimizer step did to the weights of `version`; a gradient that is not finite is dropped.

        Raises: ShapeError for segments that contradict themselves.
        """
        started = time.perf_counter()
        batch, microbatches = self._split(segments)
        loss = self._accumulate(batch, microbatches)
        norm = self._optimizer.gradient_norm()
        stepped = bool(self._ranks.first_says(math.isfinite(norm)))
        if stepped:
            self._optimizer.step(norm, learning_rate=learning_rate)
        else:
            self._optimizer.discard()
        seconds = time.perf_counter() - started
        metrics = {
            "loss": loss,
            "tokens_trained": float(batch.num_loss_tokens),
            "tokens_batch": float(batch.num_tokens),
            "num_microbatches": self._ranks.total_of_shares(len(microbatches)),
            "grad_norm": norm,
            "grad_norm_nonfinite": float(not stepped),
            "learning_rate": learning_rate,
            "seconds_step": seconds,
            "tokens_per_second": batch.num_tokens / seconds,
        }
        kept = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepResult(version=version + 1, metrics=kept, stepped=stepped)

    def loss(self, segments: Sequence[Segment]) -> float:
        """Return the mean of -logp over the masked tokens, in nats; no gradient is made."""
        with torch.no_grad():
            return self._accumulate(*self._split(segments))

    def _split(self, segments: Sequence[Segment]) -> tuple[Batch, list[Microbatch]]:
        nothing = [0.0] * len(segments)
        batch = lay_out(
            segments,
            trajectory_index=range(len(segments)),
            group_index=[0] * len(segments),  # one group: what demonstrations begin with is read once a microbatch
            advantages=nothing,
            rewards=nothing,
        )
        size, share = self._settings.microbatch_tokens, self._settings.share_prefixes
        shares = deal(batch, self._ranks.num_shares, max_tokens=size, share_prefixes=share)
        members = shares[self._ranks.share]
        return batch, split(batch, max_tokens=size, share_prefixes=share, members=members)

    def _accumulate(self, batch: Batch, microbatches: Sequence[Microbatch]) -> float:
        """Return the batch's loss; where gradients are on, they are added to the optimizer's sums."""
        whole = LossInputs(
            policy_logprobs=torch.zeros(batch.num_tokens), loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens
        )
        counts = denominators(_LOSS, whole)
        total = 0.0
        for microbatch in self._ranks.in_step(microbatches):
            if microbatch is None:
                self._model.keep_pace(self._device, backward=torch.is_grad_enabled())
                continue
            logprobs_T, _ = self._model.logprobs(to_device(microbatch, self._device))
            inputs = LossInputs(
                policy_logprobs=logprobs_T,
                loss_mask=batch.loss_mask[microbatch.token_index].to(self._device),
                cu_seqlens=microbatch.cu_seqlens.to(self._device),
                **counts,
            )
            loss = evaluate(_LOSS, inputs).loss
            if torch.is_grad_enabled():
                loss.backward()
            total += float(loss.detach())
        self._model.release()
        return self._ranks.total_of_shares(total)
