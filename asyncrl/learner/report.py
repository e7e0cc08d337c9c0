"""What a step reports: of the batch before it is forwarded, and of the whole batch after.

Metrics of a step (nats, tokens, seconds; an absent key was not measurable in this step):

| name | what |
|---|---|
| loss | of the whole batch, every term included; a critic's own is value_loss |
| grad_norm, grad_norm_nonfinite | global norm before clipping; 1 where it was not finite and the step was skipped |
| learning_rate | that was applied |
| tokens_trained, num_loss_tokens | sampled tokens in the loss |
| tokens_batch, tokens_forwarded | tokens of all segments; tokens that the body read, shared prefixes once |
| rank_imbalance | of several ranks: tokens that the one with most forwards over their mean, less 1 |
| num_segments_idle | segments with no gradient (advantages 0): forwarded for the diagnostics alone |
| num_microbatches, num_segments, num_trajectories, num_failed_trajectories | counts of the batch |
| seconds_packing, _forward_backward, _diagnostics, _optimizer, _step | of the step's parts and all of it |
| tokens_per_second | tokens_batch / seconds_step |
| reward_mean, reward_std, advantage_abs_mean, turns_mean, truncated_share | over trajectories that have a reward |
| overlong_shaped_share, overlong_penalty_mean | trajectories that length cost reward, and how much of all |
| overlong_filtered_share | trajectories that were cut at a limit on tokens and are not trained on |
| reward_kl, reward_kl_penalty_mean | behaviour to reference a token (k1, nats); what it cost a trajectory |
| importance_ratio_max, _min, _mean, _p50, _p95, _p99, _p999 | policy / behaviour by token, before any clipping |
| token_weight_staleness_BUCKET_histogram_pN_bound | their quantiles by staleness, at the edge above |
| ess_token | effective sample size of the token ratios over their number |
| clip_fraction_low, clip_fraction_high | tokens whose ratio passes a bound and loses gradient; 0.2 where none is set |
| clipped_low_frac, clipped_high_frac, clipped_dual_frac | tokens whose gradient the loss itself zeroed by its bounds |
| kl_k1, kl_k3, chi2 | behaviour to policy |
| repetition_mean, repetition_max | by completion: 1 - distinct 3-grams / all 3-grams |
| longest_run_share_mean, longest_run_share_max | by completion: longest run of one token / length |
| reward_part_NAME_mean, reward_part_NAME_std | of each part that the environment gave |
| reward_variance_share_NAME | of the reward's variance over trajectories, from the part paid_NAME; they sum to 1 |
| bad_logprobs_positive, _nonfinite, _floor | behaviour log-probs that cannot be right, see losses/LOSSES.md |
| entropy_coef | of the entropy term in this step's loss |
| staleness_max, staleness_mean | optimizer steps, over the trained tokens |
| entropy | exact, of the policy at the trained tokens |
| mismatch_* | engine against learner at staleness 0 |
| teacher_divergence, divergence_clipped_frac | of a teacher, over the trained tokens, as cut; share of tokens cut |
| num_segments_told | segments that a teacher reads behind a prompt of its own |
| num_pairs, num_unpaired_trajectories, num_groups_without_pair | of a preference loss |
| value_loss | of a critic, over the states: half a squared error, or a cross-entropy in nats ("yes_no") |
| value_mean, return_mean | over the states, before the update; rescaled to 0 to 1 by "yes_no" |
| value_explained_variance | 1 - Var(return - value) / Var(return) over the states, before the update; 1 is perfect |
| value_clip_fraction | states whose value has no gradient for value_clip; over all updates on the batch |
| value_states, value_nonfinite | states with a value (tokens, or questions); those without a finite one: skipped step |
| return_clamped_share | returns outside of 0 to 1, which "yes_no" brings to its ends |
| critic_grad_norm, critic_grad_norm_nonfinite, critic_learning_rate | as of the policy, for a critic's own weights |
| critic_warmup | 1 while the policy's loss is left out |
| critic_updates_skipped | further updates on the batch whose gradient was not finite |

and everything else that `asyncrl.losses.diagnostics` and the loss itself report, under their own names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from asyncrl.learner.credit import Selection
from asyncrl.learner.settings import LearnerSettings
from asyncrl.losses import LossInputs, diagnostics, finalise, top_ratios
from asyncrl.losses.reduction import Counts, Histogram, Record
from asyncrl.losses.statistics import QUANTILES
from asyncrl.losses.text import longest_run_share, repetition_n
from asyncrl.types import Segment, Trajectory

_TOP_RATIOS = 64
_CLIP_SEEN = 0.2  # bounds that clip fractions are counted against where the loss itself has none

_RENAMED = {
    "token_ess_frac": "ess_token",
    "clip_frac_low": "clip_fraction_low",
    "clip_frac_high": "clip_fraction_high",
    **{f"token_weight_{part}": f"importance_ratio_{part}" for part in ("max", "min", "mean", *QUANTILES)},
}
"""Names that `asyncrl.metrics` and users know, for the same numbers in `asyncrl.losses.diagnostics`."""


def describe(selection: Selection) -> dict[str, float]:
    """Return what can be said of a batch before it is forwarded."""
    batch = selection.batch
    metrics: dict[str, float] = {
        "tokens_trained": batch.num_loss_tokens,
        "tokens_batch": batch.num_tokens,
        "num_segments": batch.num_segments,
        "num_trajectories": len(selection.trajectories),
        "num_failed_trajectories": selection.num_failed,
        **selection.metrics,
    }
    if batch.teacher_prompts is not None:
        metrics["num_segments_told"] = float(batch.teacher_prompts.given.sum())
    if selection.trajectories:
        rewards = torch.tensor([t.reward for t in selection.trajectories], dtype=torch.float64)
        metrics["reward_mean"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std(correction=0))
        metrics["turns_mean"] = sum(t.num_turns for t in selection.trajectories) / len(rewards)
        metrics["truncated_share"] = sum(t.truncated for t in selection.trajectories) / len(rewards)
        metrics |= _reward_parts(selection.trajectories) | _variance_shares(selection.trajectories)
        metrics |= _repetition(selection.trajectories)
    if batch.num_loss_tokens:
        metrics["advantage_abs_mean"] = float(batch.advantages[batch.loss_mask].abs().mean())
    return metrics


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and deviation of each part of the reward: a part that does not vary teaches nothing in a group."""
    found: dict[str, float] = {}
    for name in sorted({name for t in trajectories for name in t.reward_parts}):
        values = torch.tensor([t.reward_parts[name] for t in trajectories if name in t.reward_parts])
        found[f"reward_part_{name}_mean"] = float(values.double().mean())
        found[f"reward_part_{name}_std"] = float(values.double().std(correction=0))
    return found


def _variance_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return Cov(part, reward) / Var(reward) of each part that is a term of the reward: which of them it teaches.

    Terms are called paid_NAME and sum to the reward, so the shares sum to 1 where no trainer's own term was added; a
    negative one belongs to a term that works against the others. None where all rewards are equal.
    """
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    if rewards.max() == rewards.min():  # the variance itself may be a rounding error above 0
        return {}
    variance = float(rewards.var(correction=0))
    found: dict[str, float] = {}
    for name in sorted({name for t in trajectories for name in t.reward_parts if name.startswith("paid_")}):
        paid = torch.tensor([t.reward_parts.get(name, 0.0) for t in trajectories], dtype=torch.float64)
        covariance = float(((paid - paid.mean()) * (rewards - rewards.mean())).mean())
        found[f"reward_variance_share_{name.removeprefix('paid_')}"] = covariance / variance
    return found


def _repetition(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return how far completions repeat themselves; n-grams do not reach from one turn into the next."""
    completions = [
        segment.token_ids[start:end] for t in trajectories for segment in t.segments for start, end in _runs(segment)
    ]
    if not completions:
        return {}
    repeated = [repetition_n(token_ids) for token_ids in completions]
    runs = [longest_run_share(token_ids) for token_ids in completions]
    return {
        "repetition_mean": fmean(repeated),
        "repetition_max": max(repeated),
        "longest_run_share_mean": fmean(runs),
        "longest_run_share_max": max(runs),
    }


def _runs(segment: Segment) -> list[tuple[int, int]]:
    """Return (start, end) of each turn's sampled tokens; where turns are not told apart, of each run of them."""
    if segment.turns:
        return [(turn.start, turn.end) for turn in segment.turns if turn.end > turn.start]
    padded = [0, *segment.loss_mask, 0]
    edges = [place for place in range(len(padded) - 1) if padded[place] != padded[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def diagnose(
    whole: LossInputs, records: Mapping[str, Record], selection: Selection, settings: LearnerSettings
) -> tuple[dict[str, float], dict[str, dict[str, list[float]]]]:
    """Return (metrics, histograms) of the whole batch, before any clipping, and of the loss itself."""
    loss = settings.resolved_loss
    bounds = {"clip_low": _CLIP_SEEN, "clip_high": _CLIP_SEEN}
    if loss.clip == "ppo" and loss.ratio == "token":
        bounds = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.dual_clip is not None:
        bounds["dual_clip"] = loss.dual_clip
    owner_S = selection.batch.trajectory_index
    truncated_N = torch.tensor([t.truncated for t in selection.trajectories], dtype=torch.bool)
    if whole.rewards is not None:  # a reward counts once, however many segments its trajectory has
        again_S = torch.cat([torch.zeros(1, dtype=torch.bool), owner_S[1:] == owner_S[:-1]])
        whole = replace(whole, rewards=torch.where(again_S, torch.nan, whole.rewards))
    seen = diagnostics(whole, truncated=truncated_N[owner_S], **bounds)
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


def attribute(whole: LossInputs, selection: Selection) -> list[dict[str, Any]]:
    """Return the largest token ratios with where they come from; None stands for a number that is not finite."""
    batch = selection.batch
    rows: list[dict[str, Any]] = []
    for row in top_ratios(whole, _TOP_RATIOS):
        place = int(row["token"])
        trajectory = selection.trajectories[int(batch.trajectory_index[int(row["sequence"])])]
        rows.append(
            {
                **{name: value if math.isfinite(value) else None for name, value in row.items()},
                "token_id": int(batch.token_ids[place]),
                "position_in_segment": int(batch.position_ids[place]),
                "segment": int(row["sequence"]),
                "trajectory_id": trajectory.trajectory_id,
                "task_id": trajectory.task_id,
            }
        )
    return rows
