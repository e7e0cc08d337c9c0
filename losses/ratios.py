"""Log ratios of policies, and the ratios made of them. `T` packed tokens, `S` sequences.

Every per-token difference is clamped to 20 nats before anything is summed, and every sum again before exp; a clamp's
derivative is 1 inside and 0 outside. LOSSES.md says which loss uses which form.
"""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError
from asyncrl.losses.inputs import Prepared
from asyncrl.losses.segments import prefix_sum

MAX_LOG_RATIO = 20.0
"""Nats. exp(20) = 4.9e8 and its square stay exact enough to sum; a larger gap is an error upstream, and is counted."""


def log_ratio(numerator_T: torch.Tensor, denominator_T: torch.Tensor, usable_T: torch.Tensor) -> torch.Tensor:
    """Return [T], clamp(numerator - denominator), 0 where not `usable_T`. Differentiable."""
    difference = torch.where(usable_T, numerator_T - denominator_T, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def aggregate_log_ratio(log_ratio_T: torch.Tensor, prepared: Prepared, level: str) -> torch.Tensor:
    """Return [T], the log ratio that token t is weighted by, before its own clamp. Differentiable but for "prefix".

    `level`: "token"; "prefix" (sum over the active tokens up to t); "sequence_mean" and "sequence_product" (mean and
    sum over the sequence's active tokens).
    """
    if level == "token":
        return log_ratio_T
    if level == "prefix":
        return prefix_sum(log_ratio_T, prepared.segments)
    total_S = prepared.segments.sum(log_ratio_T)
    if level == "sequence_mean":
        total_S = total_S / prepared.lengths.clamp(min=1.0)
    return prepared.segments.spread(total_S)


def bounded_exp(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Return exp of the log ratio clamped to 20 nats."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def stopped_form(policy_T: torch.Tensor, log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Return [T], sg(ratio) exp(logp - sg logp): the ratio's value with a gradient through token t alone.

    Zero gradient where the aggregated log ratio is clamped.
    Source: GSPO-token, arXiv:2507.18071; CTPO, arXiv:2605.07331.
    """
    # The small difference comes first: adding it to the large term would round it away.
    return bounded_exp(policy_T - policy_T.detach() + log_ratio_T.detach())


def action_position(prepared: Prepared) -> torch.Tensor:
    """Return [T] float64, 1-based index of each token among its sequence's active tokens; observations do not count."""
    counts = prepared.mask.long().cumsum(0)
    before = torch.cat([counts.new_zeros(1), counts])[prepared.segments.cu_seqlens[:-1]]
    return (counts - prepared.segments.spread(before)).double()


def loglinear_proximal(
    policy_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, versions: torch.Tensor, policy_version: int
) -> torch.Tensor:
    """Return [T], an approximation of the proximal log-probs without a second forward pass, in nats.

    `policy_logprobs` and `behaviour_logprobs` [T] nats, `versions` [T] the version that sampled each token. For several
    updates on one batch: with one, the proximal policy is the one that is forwarded, and needs no approximation.
    behaviour + a (policy - behaviour) with a = (v_proximal - v_behaviour) / (v_policy - v_behaviour) in [0, 1] and
    v_proximal = v_policy - 1; detached. Source: A-3PO, arXiv:2512.06547.
    Raises: ConfigError for a token newer than `policy_version`.
    """
    staleness = (policy_version - versions).double()
    if staleness.numel() and float(staleness.min()) < 0:
        raise ConfigError(f"a token is newer than policy_version {policy_version}: {int(versions.max())}")
    share = ((staleness - 1.0) / staleness.clamp(min=1.0)).clamp(0.0, 1.0).to(policy_logprobs.dtype)
    return (behaviour_logprobs + share * (policy_logprobs - behaviour_logprobs)).detach()
