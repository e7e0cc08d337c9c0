"""One optimizer step on groups: advantages, microbatches, loss, gradients, update, and what was seen.

Metrics of a step (nats, tokens, seconds; an absent key was not measurable in this step):

| name | what |
|---|---|
| loss | of the whole batch, every term included |
| grad_norm, grad_norm_nonfinite | global norm before clipping; 1 where it was not finite and the step was skipped |
| learning_rate | that was applied |
| tokens_trained, num_loss_tokens | sampled tokens in the loss |
| tokens_batch, tokens_forwarded | tokens of all segments; tokens that the body read, shared prefixes once |
| num_segments_idle | segments with no gradient (advantages 0): forwarded for the diagnostics alone |
| num_microbatches, num_segments, num_trajectories, num_failed_trajectories | counts of the batch |
| seconds_packing, seconds_forward_backward, seconds_optimizer, seconds_step | of the step's parts and all of it |
| tokens_per_second | tokens_batch / seconds_step |
| reward_mean, reward_std, advantage_abs_mean, turns_mean, truncated_share | over trajectories that have a reward |
| importance_ratio_max, _min, _mean, _p50, _p95, _p99 | policy / behaviour by token, before any clipping |
| ess_token | effective sample size of the token ratios over their number |
| clip_fraction_low, clip_fraction_high | tokens whose gradient the loss's bounds zero, by direction |
| kl_k1, kl_k3, chi2 | behaviour to policy |
| staleness_max, staleness_mean | optimizer steps, over the trained tokens |
| entropy | exact, of the policy at the trained tokens |
| mismatch_* | engine against learner at staleness 0 |

and everything else that `asyncrl.losses.diagnostics` and the loss itself report, under their own names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.advantages import group_advantages
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.settings import LearnerSettings
from asyncrl.losses import LossInputs, denominators, diagnostics, evaluate, finalise, reduce, top_ratios
from asyncrl.losses.reduction import Counts, Histogram, Record
from asyncrl.packing import Batch, Microbatch, check_staleness, lay_out, split, to_device
from asyncrl.protocols import StepResult
from asyncrl.types import Group, PolicyVersion, Segment, Trajectory

_TOP_RATIOS = 64
_CLIP_SEEN = 0.2  # bounds that clip fractions are counted against where the loss itself has none

_RENAMED = {
    "token_ess_frac": "ess_token",
    "clip_frac_low": "clip_fraction_low",
    "clip_frac_high": "clip_fraction_high",
    **{f"token_weight_{part}": f"importance_ratio_{part}" for part in ("max", "min", "mean", "p50", "p95", "p99")},
}
"""Names that `asyncrl.metrics` and users know, for the same numbers in `asyncrl.losses.diagnostics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of the groups that can be trained on."""

    trajectories: Sequence[Trajectory]
    """Those with a reward, in order."""
    group_index: Sequence[int]
    """[len(trajectories)] place of each one's group."""
    num_failed: int
    """Trajectories without a reward: masked, never a reward of 0."""
    batch: Batch


def select(groups: Sequence[Group], *, baseline: str, scale: str) -> Selection:
    """Return the trajectories that have a reward, laid out with their advantages.

    A trajectory's advantage goes to every trained token of all its segments; a segment's own per-token advantages
    override it. Raises: ShapeError, ConfigError from the segments and rewards.
    """
    chosen = [(place, t) for place, group in enumerate(groups) for t in group.trajectories if t.reward is not None]
    rewards = [float(t.reward) for _, t in chosen if t.reward is not None]
    places = [place for place, _ in chosen]
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(places, dtype=torch.int64),
        baseline=baseline,
        scale=scale,
    ).tolist()
    segments: list[Segment] = []
    owners: list[int] = []
    for index, (_, trajectory) in enumerate(chosen):
        segments.extend(trajectory.segments)
        owners.extend([index] * len(trajectory.segments))
    batch = lay_out(
        segments,
        trajectory_index=owners,
        group_index=[places[owner] for owner in owners],
        advantages=[advantages[owner] for owner in owners],
        rewards=[rewards[owner] for owner in owners],
    )
    return Selection(
        trajectories=[t for _, t in chosen],
        group_index=places,
        num_failed=sum(len(group.trajectories) for group in groups) - len(chosen),
        batch=batch,
    )


class Stepper:
    """Takes optimizer steps on one model. `reference` is the frozen model of a KL term, where the loss has one."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: Optimizer,
        settings: LearnerSettings,
        *,
        max_off_policyness: int,
        reference: PolicyModel | None = None,
        version: PolicyVersion = 0,
    ) -> None:
        self.version = version
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._loss = settings.resolved_loss
        self._max_off_policyness = max_off_policyness
        self._reference = reference
        self._device = next(iter(optimizer.masters.values())).device

    def step(self, groups: Sequence[Group], *, learning_rate_scale: float = 1.0) -> StepResult:
        """Return what one optimizer step on `groups` did; the version advances whether or not the weights changed.

        Raises: StalenessError for a token outside the bound; ShapeError for segments that contradict themselves.
        """
        clock = _Clock()
        selection = select(groups, baseline=self._settings.baseline, scale=self._settings.scale)
        batch = selection.batch
        check_staleness(batch, version=self.version, max_off_policyness=self._max_off_policyness)
        metrics: dict[str, float] = _describe(selection)
        if not batch.num_loss_tokens:
            self.version += 1
            return StepResult(version=self.version, metrics=metrics, stepped=False)
        microbatches = split(
            batch,
            max_tokens=self._settings.microbatch_tokens,
            share_prefixes=self._settings.share_prefixes,
            observations=self._loss.observation_coef > 0,
            apart=self._without_gradient(batch),
        )
        metrics["num_microbatches"] = len(microbatches)
        metrics["num_segments_idle"] = float(self._without_gradient(batch).sum())
        metrics["tokens_forwarded"] = sum(microbatch.num_slots for microbatch in microbatches)
        metrics["seconds_packing"] = clock.lap()
        loss, records, whole = self.accumulate(batch, microbatches)
        metrics["seconds_forward_backward"] = clock.lap()
        norm = self._optimizer.gradient_norm()
        metrics |= {"loss": loss, "grad_norm": norm, "grad_norm_nonfinite": float(not math.isfinite(norm))}
        metrics["learning_rate"] = self._optimizer.learning_rate(learning_rate_scale)
        stepped = math.isfinite(norm)
        if stepped:
            self._optimizer.step(norm, scale=learning_rate_scale)
        else:
            self._optimizer.discard()
        metrics["seconds_optimizer"] = clock.lap()
        seen, histograms = _diagnose(whole, records, self._settings)
        metrics |= seen
        metrics["seconds_step"] = clock.total()
        metrics["tokens_per_second"] = batch.num_tokens / metrics["seconds_step"]
        result = StepResult(
            version=self.version + 1,
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            stepped=stepped,
            histograms=histograms,
            top_ratios=_top_ratios(whole, selection),
        )
        self.version += 1
        return result

    def accumulate(
        self, batch: Batch, microbatches: Sequence[Microbatch]
    ) -> tuple[float, dict[str, Record], LossInputs]:
        """Add the gradients of the batch's loss to the optimizer's sums.

        Returns the loss, the loss's own metrics merged over microbatches, and the whole batch's inputs (detached).
        """
        counts = self._denominators(batch, microbatches)
        policy = torch.zeros(batch.num_tokens, dtype=torch.float64)
        entropy = torch.zeros(batch.num_tokens, dtype=torch.float64)
        total, parts = 0.0, []
        idle = self._without_gradient(batch)
        for microbatch in microbatches:
            there = to_device(microbatch, self._device)
            learns = not bool(idle[microbatch.segment_index].all())
            with torch.set_grad_enabled(learns):
                logprobs_T, entropy_T = self._model.logprobs(there)
                inputs = self._inputs(batch, microbatch, logprobs_T, entropy_T, self._reference_logprobs(there), counts)
                output = evaluate(self._settings.loss, inputs, **self._settings.loss_settings)
            if learns:
                output.loss.backward()
            total += float(output.loss.detach())
            parts.append(output.metrics)
            policy[microbatch.token_index] = logprobs_T.detach().double().cpu()
            entropy[microbatch.token_index] = entropy_T.detach().double().cpu()
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
        return total, reduce(parts), whole

    def _without_gradient(self, batch: Batch) -> torch.Tensor:
        """Return [S] bool: segments whose advantages are all 0 under a loss that has no other term.

        Such groups are half of a batch early in training; they are forwarded for the diagnostics alone.
        """
        if not self._loss.needs_advantage:
            return torch.zeros(batch.num_segments, dtype=torch.bool)
        active = (batch.advantages != 0) & batch.loss_mask
        before = torch.cat([torch.zeros(1, dtype=torch.int64), active.long().cumsum(0)])
        return before[batch.cu_seqlens[1:]] == before[batch.cu_seqlens[:-1]]

    def _denominators(self, batch: Batch, microbatches: Sequence[Microbatch]) -> dict[str, Any]:
        """Return the counts of the whole batch that the loss divides by, before the first backward pass.

        Only a loss that leaves dropped tokens out of its denominator has to see the log-probs first.
        """
        policy = batch.behaviour_logprobs
        if self._loss.renormalise:
            policy = torch.zeros_like(batch.behaviour_logprobs)
            with torch.no_grad():
                for microbatch in microbatches:
                    logprobs_T, _ = self._model.logprobs(to_device(microbatch, self._device))
                    policy[microbatch.token_index] = logprobs_T.float().cpu()
        inputs = LossInputs(
            policy_logprobs=policy,
            behaviour_logprobs=batch.behaviour_logprobs,
            proximal_logprobs=policy,
            reference_logprobs=policy,
            entropy=torch.zeros_like(policy),
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            observation_mask=batch.observation_mask,
            cu_seqlens=batch.cu_seqlens,
            rewards=batch.rewards,
            group_index=batch.group_index,
        )
        return denominators(self._settings.loss, inputs, **self._settings.loss_settings)

    def _reference_logprobs(self, microbatch: Microbatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference.logprobs(microbatch)[0]

    def _inputs(
        self,
        batch: Batch,
        microbatch: Microbatch,
        logprobs_T: torch.Tensor,
        entropy_T: torch.Tensor,
        reference_T: torch.Tensor | None,
        counts: Mapping[str, Any],
    ) -> LossInputs:
        tokens, segments, device = microbatch.token_index, microbatch.segment_index, self._device
        here = dict(counts)
        if "num_prompt_tokens" in here:
            here["num_prompt_tokens"] = here["num_prompt_tokens"][segments].to(device)
        return LossInputs(
            policy_logprobs=logprobs_T,
            behaviour_logprobs=batch.behaviour_logprobs[tokens].to(device),
            # One optimizer step a batch: the weights just before the update are the ones that were just forwarded.
            proximal_logprobs=logprobs_T.detach(),
            reference_logprobs=reference_T,
            advantages=batch.advantages[tokens].to(device),
            loss_mask=batch.loss_mask[tokens].to(device),
            observation_mask=batch.observation_mask[tokens].to(device) if self._loss.observation_coef else None,
            cu_seqlens=microbatch.cu_seqlens.to(device),
            versions=batch.versions[tokens].to(device),
            policy_version=self.version,
            rewards=batch.rewards[segments].to(device),
            group_index=batch.group_index[segments].to(device),
            entropy=entropy_T,
            **here,
        )


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


def _describe(selection: Selection) -> dict[str, float]:
    """Return what can be said of a batch before it is forwarded."""
    batch = selection.batch
    metrics: dict[str, float] = {
        "tokens_trained": batch.num_loss_tokens,
        "tokens_batch": batch.num_tokens,
        "num_segments": batch.num_segments,
        "num_trajectories": len(selection.trajectories),
        "num_failed_trajectories": selection.num_failed,
    }
    if selection.trajectories:
        rewards = torch.tensor([t.reward for t in selection.trajectories], dtype=torch.float64)
        metrics["reward_mean"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std(correction=0))
        metrics["turns_mean"] = sum(t.num_turns for t in selection.trajectories) / len(rewards)
        metrics["truncated_share"] = sum(t.truncated for t in selection.trajectories) / len(rewards)
    if batch.num_loss_tokens:
        metrics["advantage_abs_mean"] = float(batch.advantages[batch.loss_mask].abs().mean())
    return metrics


def _diagnose(
    whole: LossInputs, records: Mapping[str, Record], settings: LearnerSettings
) -> tuple[dict[str, float], dict[str, dict[str, list[float]]]]:
    """Return (metrics, histograms) of the whole batch, before any clipping, and of the loss itself."""
    loss = settings.resolved_loss
    low, high = (loss.clip_low, loss.clip_high) if loss.clip == "ppo" else (_CLIP_SEEN, _CLIP_SEEN)
    seen = diagnostics(whole, clip_low=low, clip_high=high)
    metrics = {**finalise(records), **seen.values}
    histograms: dict[str, dict[str, list[float]]] = {}
    for name, record in seen.records.items():
        if isinstance(record, Histogram):
            histograms[name.removesuffix("_histogram")] = {"edges": [*record.edges], "counts": [*record.counts]}
        elif isinstance(record, Counts):
            keys = [key for key, _ in record.counts]
            # One bin an integer: the edges lie between them.
            span = range(min(keys), max(keys) + 1) if keys else range(0)
            found = dict(record.counts)
            histograms[name] = {
                "edges": [key + 0.5 for key in span][:-1],
                "counts": [float(found.get(key, 0.0)) for key in span],
            }
    return {_RENAMED.get(name, name): value for name, value in metrics.items()}, histograms


def _top_ratios(whole: LossInputs, selection: Selection) -> list[dict[str, Any]]:
    """Return the largest token ratios with where they come from."""
    batch = selection.batch
    rows: list[dict[str, Any]] = []
    for row in top_ratios(whole, _TOP_RATIOS):
        place = int(row["token"])
        trajectory = selection.trajectories[int(batch.trajectory_index[int(row["sequence"])])]
        rows.append(
            {
                **row,
                "token_id": int(batch.token_ids[place]),
                "position_in_segment": int(batch.position_ids[place]),
                "segment": int(row["sequence"]),
                "trajectory_id": trajectory.trajectory_id,
                "task_id": trajectory.task_id,
            }
        )
    return rows
