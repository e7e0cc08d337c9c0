"""One optimizer step on groups: advantages, microbatches, loss, gradients, update. `report` lists its metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from asyncrl.dealing import deal
from asyncrl.learner.attribution import extreme_tokens, token_by_token
from asyncrl.learner.credit import Selection, select
from asyncrl.learner.critic import Critic
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.preferences import choose_pairs, deal_pairs, pair_inputs, split_pairs
from asyncrl.learner.ranks import ALONE, Ranks, merge_over
from asyncrl.learner.report import attribute, describe, diagnose
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.teachers import Teachers
from asyncrl.losses import LossInputs, denominators, evaluate, finalise, next_entropy_coef, reduce, resolve
from asyncrl.losses.reduction import Record
from asyncrl.packing import Batch, Microbatch, check_staleness, split, to_device
from asyncrl.protocols import PLAIN_STEP, StepOptions, StepResult
from asyncrl.types import Group, PolicyVersion


class Stepper:
    """Takes optimizer steps on one model.

    `teachers` are the teacher and the reference, where the loss needs them; a `critic` replaces the groups' baseline.
    """

    def __init__(
        self,
        model: PolicyModel,
        optimizer: Optimizer,
        settings: LearnerSettings,
        *,
        max_off_policyness: int,
        teachers: Teachers | None = None,
        critic: Critic | None = None,
        version: PolicyVersion = 0,
        adapted: Mapping[str, float] = MappingProxyType({}),
        ranks: Ranks = ALONE,
    ) -> None:
        """`adapted` is what `adapted` gave before a restart; `ranks` hold the model between them and share each batch.

        All of them are given the same groups, and come to the same result.
        """
        self._ranks = ranks
        self.version = version
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._loss_settings = dict(settings.loss_settings)
        if settings.entropy_target and "entropy_coef" in adapted:
            self._loss_settings["entropy_coef"] = adapted["entropy_coef"]
        self._loss = resolve(settings.loss, **self._loss_settings)
        self._max_off_policyness = max_off_policyness
        self._device = next(iter(optimizer.masters.values())).device
        self._critic = critic
        self._teachers = teachers or Teachers(self._loss, model, self._device)

    @property
    def adapted(self) -> dict[str, float]:
        """What moves from step to step besides weights and optimizer; a checkpoint keeps it."""
        return {"entropy_coef": self._loss.entropy_coef} if self._settings.entropy_target else {}

    def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """Return what one optimizer step on `groups` did; the version advances whether or not the weights changed.

        Raises: StalenessError for a token outside the bound; ShapeError for segments that contradict themselves.
        """
        clock = _Clock()
        selection = self._select(groups)
        batch = selection.batch
        check_staleness(batch, version=self.version, max_off_policyness=self._max_off_policyness)
        metrics: dict[str, float] = describe(selection)
        if not batch.num_loss_tokens:
            self.version += 1
            return StepResult(version=self.version, metrics=metrics, stepped=False)
        microbatches = self._split(batch)
        metrics |= self._work(microbatches)
        metrics["num_segments_idle"] = float(self._without_gradient(batch).sum())
        metrics["seconds_packing"] = clock.lap()
        influence = torch.zeros(batch.num_tokens, dtype=torch.float64) if self._settings.diagnostics else None
        reference = selection.reference_logprobs
        loss, records, whole = self.accumulate(batch, microbatches, reference=reference, influence=influence)
        metrics["seconds_forward_backward"] = clock.lap()
        norm = self._optimizer.gradient_norm()
        metrics |= {"loss": loss, "grad_norm": norm, "grad_norm_nonfinite": float(not math.isfinite(norm))}
        if influence is not None:
            seen, histograms = diagnose(whole, records, selection, self._settings)
            top_ratios = attribute(whole, selection)
            spikes = extreme_tokens(whole, influence, selection)
            shown = token_by_token(whole, influence, selection)
        else:
            seen, histograms, top_ratios, spikes, shown = finalise(records), {}, [], [], {}
        metrics |= seen | self._adapt(seen)
        metrics["seconds_diagnostics"] = clock.lap()
        metrics["learning_rate"] = self._optimizer.learning_rate(options.learning_rate_scale)
        stepped = math.isfinite(norm) and (self._critic is None or self._critic.can_step)
        stepped = stepped and options.update and _are_within(metrics, options.limits)
        stepped = bool(self._ranks.first_says(stepped))
        if stepped and not (self._critic is not None and self._critic.freezes_policy):
            self._optimizer.step(norm, scale=options.learning_rate_scale)
            self._teachers.advance()
        else:
            self._optimizer.discard()
        if self._critic is not None:
            metrics |= self._critic.finish(batch, stepped=stepped)
        metrics["seconds_optimizer"] = clock.lap()
        metrics["seconds_step"] = clock.total()
        metrics["tokens_per_second"] = batch.num_tokens / metrics["seconds_step"]
        result = StepResult(
            version=self.version + 1,
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            stepped=stepped,
            histograms=histograms,
            top_ratios=top_ratios,
            spikes=spikes,
            shown=shown,
        )
        self.version += 1
        return result

    def _adapt(self, seen: Mapping[str, float]) -> dict[str, float]:
        """Move the entropy coefficient for the next step, and return the one that this step had."""
        coef, settings = self._loss.entropy_coef, self._settings
        if not settings.entropy_target:
            return {"entropy_coef": coef} if coef else {}
        following = next_entropy_coef(
            coef, seen["entropy"], target=settings.entropy_target, delta=settings.entropy_coef_step
        )
        self._loss_settings["entropy_coef"] = self._ranks.first_says(following)
        self._loss = resolve(settings.loss, **self._loss_settings)
        return {"entropy_coef": coef}

    def _select(self, groups: Sequence[Group]) -> Selection:
        if self._loss.objective == "pairs":
            return choose_pairs(groups, self._settings.pairs)
        assign = None if self._critic is None else self._critic.assign
        return select(groups, self._settings, reference=self._teachers.reference_logprobs, assign=assign)

    def _split(self, batch: Batch) -> list[Microbatch]:
        """Return the microbatches of this rank's share of the batch."""
        size, share = self._settings.microbatch_tokens, self._settings.share_prefixes
        if self._loss.objective == "pairs":
            pairs = deal_pairs(batch, self._ranks.num_shares)[self._ranks.share]
            return split_pairs(batch, max_tokens=size, share_prefixes=share, pairs=pairs)
        idle = self._without_gradient(batch)
        shares = deal(batch, self._ranks.num_shares, max_tokens=size, share_prefixes=share, apart=idle)
        return split(
            batch,
            max_tokens=size,
            share_prefixes=share,
            observations=self._loss.observation_coef > 0,
            apart=idle,
            members=shares[self._ranks.share],
        )

    def _work(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """Return what all ranks have to forward, given this one's microbatches."""
        slots = sum(microbatch.num_slots for microbatch in microbatches)
        work = torch.zeros(self._ranks.num_shares, 2, dtype=torch.float64)
        work[self._ranks.share] = torch.tensor([len(microbatches), slots], dtype=torch.float64)
        self._ranks.add_up_shares(work)
        found = {"num_microbatches": float(work[:, 0].sum()), "tokens_forwarded": float(work[:, 1].sum())}
        if self._ranks.count > 1:
            found["rank_imbalance"] = float(work[:, 1].max() / work[:, 1].mean()) - 1.0
        return found

    def accumulate(
        self,
        batch: Batch,
        microbatches: Sequence[Microbatch],
        *,
        reference: torch.Tensor | None = None,
        influence: torch.Tensor | None = None,
    ) -> tuple[float, dict[str, Record], LossInputs]:
        """Add the gradients of the batch's losses to the optimizers' sums; `reference` [T] where it is known already.

        `microbatches` are this rank's, and what is returned is of all ranks': the loss, the loss's own metrics merged
        over microbatches, and the whole batch's inputs (detached).
        |d loss / d policy_logprob| of each token is written into `influence` [T] float64, which holds zeros.
        """
        counts = self._denominators(batch, microbatches)
        read = self._teachers.read(batch, reference=reference)
        policy = torch.zeros(batch.num_tokens, dtype=torch.float64)
        entropy = torch.zeros(batch.num_tokens, dtype=torch.float64)
        total, parts = 0.0, []
        idle = self._without_gradient(batch)
        learning = [m for m in microbatches if not bool(idle[m.segment_index].all())]
        rest = [m for m in microbatches if bool(idle[m.segment_index].all())]
        for microbatch, learns in [*self._in_step(learning, True), *self._in_step(rest, False)]:
            if microbatch is None:
                self._model.keep_pace(self._device, backward=learns, between=read.keep_pace)
                continue
            there = to_device(microbatch, self._device)
            with torch.set_grad_enabled(learns):
                hidden = self._model.hidden(there)
                logprobs_T, entropy_T = self._model.logprobs(there, hidden)
                given = {**counts, **read.given(microbatch, hidden)}
                inputs = self._inputs(batch, microbatch, logprobs_T, entropy_T, given)
                output = evaluate(self._settings.loss, inputs, **self._loss_settings)
            losses = [output.loss] if learns else []
            if self._critic is not None:
                losses += self._critic.losses(batch, there, hidden)
            if losses:
                if influence is not None and logprobs_T.requires_grad:
                    logprobs_T.retain_grad()
                torch.stack(losses).sum().backward()
            if influence is not None and logprobs_T.grad is not None:
                influence[microbatch.token_index] = logprobs_T.grad.abs().double().cpu()
            total += float(output.loss.detach())
            parts.append(output.metrics)
            policy[microbatch.token_index] = logprobs_T.detach().double().cpu()
            entropy[microbatch.token_index] = entropy_T.detach().double().cpu()
        self._model.release()
        self._teachers.release()
        self._ranks.add_up_shares(policy, entropy, *([] if influence is None else [influence]))
        total, records = self._ranks.total_of_shares(total), merge_over(self._ranks, reduce(parts))
        if self._critic is not None:
            self._critic.accumulate(batch)
        whole = LossInputs(
            policy_logprobs=policy,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            versions=batch.versions,
            policy_version=self.version,
            rewards=batch.rewards,
            group_index=batch.group_index,
            entropy=entropy,
        )
        return total, records, whole

    def _in_step(self, microbatches: Sequence[Microbatch], learns: bool) -> Iterator[tuple[Microbatch | None, bool]]:
        """Yield this rank's microbatches, and None where another rank has more of the kind."""
        for microbatch in self._ranks.in_step(microbatches):
            yield microbatch, learns

    def _without_gradient(self, batch: Batch) -> torch.Tensor:
        """Return [S] bool: segments that have no gradient, because every advantage is 0 or their reward is too small.

        Such groups are half of a batch early in training; they are forwarded for the diagnostics alone.
        """
        idle = torch.zeros(batch.num_segments, dtype=torch.bool)
        if self._critic is not None and self._critic.warms_up:
            return ~idle
        if self._critic is not None and self._critic.trains_body:
            return idle
        if self._loss.min_reward is not None and not self._loss.observation_coef:
            idle |= batch.rewards <= self._loss.min_reward
        if self._loss.needs_advantage:
            active = (batch.advantages != 0) & batch.loss_mask
            before = torch.cat([torch.zeros(1, dtype=torch.int64), active.long().cumsum(0)])
            idle |= before[batch.cu_seqlens[1:]] == before[batch.cu_seqlens[:-1]]
        return idle

    def _denominators(self, batch: Batch, microbatches: Sequence[Microbatch]) -> dict[str, Any]:
        """Return the counts of the whole batch that the loss divides by, before the first backward pass.

        Only a loss that leaves dropped tokens out of its denominator has to see the log-probs first.
        """
        policy = batch.behaviour_logprobs
        if self._loss.renormalise:
            policy = torch.zeros_like(batch.behaviour_logprobs)
            with torch.no_grad():
                for microbatch in self._ranks.in_step(microbatches):
                    if microbatch is None:
                        self._model.keep_pace(self._device, backward=False)
                        continue
                    logprobs_T, _ = self._model.logprobs(to_device(microbatch, self._device))
                    policy[microbatch.token_index] = logprobs_T.float().cpu()
            self._ranks.add_up_shares(policy)
        inputs = LossInputs(
            policy_logprobs=policy,
            behaviour_logprobs=batch.behaviour_logprobs,
            proximal_logprobs=policy,
            reference_logprobs=policy,
            teacher_logprobs=policy,
            teacher_divergence=torch.zeros_like(policy),
            entropy=torch.zeros_like(policy),
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            observation_mask=batch.observation_mask,
            **self._by_sequence(batch, torch.arange(batch.num_segments), batch.cu_seqlens),
        )
        return denominators(self._settings.loss, inputs, **self._loss_settings)

    def _by_sequence(self, batch: Batch, segments: torch.Tensor, cu_seqlens: torch.Tensor) -> dict[str, Any]:
        """Return the loss's inputs that are by sequence: a segment, or where trajectories are compared all of one's."""
        found = {
            "cu_seqlens": cu_seqlens,
            "rewards": batch.rewards[segments],
            "group_index": batch.group_index[segments],
        }
        if self._loss.objective == "pairs":
            found = pair_inputs(batch, segments)
        return {name: values.to(self._device) for name, values in found.items()}

    def _inputs(
        self,
        batch: Batch,
        microbatch: Microbatch,
        logprobs_T: torch.Tensor,
        entropy_T: torch.Tensor,
        given: Mapping[str, Any],
    ) -> LossInputs:
        """Return the loss's inputs; `given` are counts of the whole batch, and what teachers found here, by name."""
        tokens, segments, device = microbatch.token_index, microbatch.segment_index, self._device
        here = dict(given)
        if "num_prompt_tokens" in here:
            here["num_prompt_tokens"] = here["num_prompt_tokens"][segments].to(device)
        return LossInputs(
            policy_logprobs=logprobs_T,
            behaviour_logprobs=batch.behaviour_logprobs[tokens].to(device),
            # One optimizer step a batch: the weights just before the update are the ones that were just forwarded.
            proximal_logprobs=logprobs_T.detach(),
            advantages=batch.advantages[tokens].to(device),
            loss_mask=batch.loss_mask[tokens].to(device),
            observation_mask=batch.observation_mask[tokens].to(device) if self._loss.observation_coef else None,
            versions=batch.versions[tokens].to(device),
            policy_version=self.version,
            entropy=entropy_T,
            token_fields={name: values[tokens].to(device) for name, values in batch.token_fields.items()},
            **self._by_sequence(batch, segments, microbatch.cu_seqlens),
            **here,
        )


def _are_within(metrics: Mapping[str, float], limits: Mapping[str, tuple[float, float]]) -> bool:
    """Tell whether every metric that was measured lies within its limits; NaN is not measured."""
    return not any(metrics[name] < least or metrics[name] > most
                   for name, (least, most) in limits.items() if name in metrics)  # fmt: skip


class _Clock:
    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def lap(self) -> float:
        """Return seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def total(self) -> float:
        """Return seconds since the start."""
        return time.perf_counter() - self._start
