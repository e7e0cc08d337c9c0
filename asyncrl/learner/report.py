"""What a step reports: of the batch before it is forwarded, and of the whole batch after.

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
| overlong_shaped_share, overlong_penalty_mean | trajectories that length cost reward, and how much of all |
| overlong_filtered_share | trajectories that were cut at a limit on tokens and are not trained on |
| reward_kl, reward_kl_penalty_mean | behaviour to reference a token (k1, nats); what it cost a trajectory |
| importance_ratio_max, _min, _mean, _p50, _p95, _p99 | policy / behaviour by token, before any clipping |
| ess_token | effective sample size of the token ratios over their number |
| clip_fraction_low, clip_fraction_high | tokens whose gradient the loss's bounds zero, by direction |
| kl_k1, kl_k3, chi2 | behaviour to policy |
| entropy_coef | of the entropy term in this step's loss |
| staleness_max, staleness_mean | optimizer steps, over the trained tokens |
| entropy | exact, of the policy at the trained tokens |
| mismatch_* | engine against learner at staleness 0 |
| teacher_divergence, divergence_clipped_frac | of a teacher, over the trained tokens, as cut; share of tokens cut |
| num_pairs, num_unpaired_trajectories, num_groups_without_pair | of a preference loss |

and everything else that `asyncrl.losses.diagnostics` and the loss itself report, under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.learner.credit import Selection
from asyncrl.learner.settings import LearnerSettings
from asyncrl.losses import LossInputs, diagnostics, finalise, top_ratios
from asyncrl.losses.reduction import Counts, Histogram, Record

_TOP_RATIOS = 64
_CLIP_SEEN = 0.2  # bounds that clip fractions are counted against where the loss itself has none

_RENAMED = {
    "token_ess_frac": "ess_token",
    "clip_frac_low": "clip_fraction_low",
    "clip_frac_high": "clip_fraction_high",
    **{f"token_weight_{part}": f"importance_ratio_{part}" for part in ("max", "min", "mean", "p50", "p95", "p99")},
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
    if selection.trajectories:
        rewards = torch.tensor([t.reward for t in selection.trajectories], dtype=torch.float64)
        metrics["reward_mean"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std(correction=0))
        metrics["turns_mean"] = sum(t.num_turns for t in selection.trajectories) / len(rewards)
        metrics["truncated_share"] = sum(t.truncated for t in selection.trajectories) / len(rewards)
    if batch.num_loss_tokens:
        metrics["advantage_abs_mean"] = float(batch.advantages[batch.loss_mask].abs().mean())
    return metrics


def diagnose(
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


def attribute(whole: LossInputs, selection: Selection) -> list[dict[str, Any]]:
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
