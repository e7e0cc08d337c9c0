"""Constant weights proximal / behaviour, and the tokens that a loss drops. `T` packed tokens."""

from __future__ import annotations

import torch

from asyncrl.losses.clips import within
from asyncrl.losses.inputs import Prepared
from asyncrl.losses.presets import LossSettings
from asyncrl.losses.ratios import aggregate_log_ratio, bounded_exp, log_ratio


def correction_weight(prepared: Prepared, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight proximal / behaviour [T], bounded as set, and the tokens it keeps [T] bool.

    "weight": as it is (decoupled PPO, arXiv:2505.24298). "truncate": min(weight, high) (TIS). "mask": 0 outside
    [low, high] (MIS, IcePop, arXiv:2510.18855). At level "sequence_product" the weight is the product over the
    sequence's active tokens; a cap there rejects long sequences, "sequence_mean" does not know length.
    """
    assert prepared.proximal is not None
    assert prepared.behaviour is not None
    per_token = log_ratio(prepared.proximal, prepared.behaviour, prepared.usable)
    weight = bounded_exp(aggregate_log_ratio(per_token, prepared, settings.correction_level))
    kept = prepared.usable
    if settings.correction == "truncate":
        weight = weight.clamp(max=settings.correction_high)
    elif settings.correction == "mask":
        kept = kept & within(weight, settings.correction_low, settings.correction_high)
    return weight, kept


def drifted(log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, prepared: Prepared, limit: float) -> torch.Tensor:
    """Return [T] bool, True where A < 0 in a sequence whose mean of behaviour - policy exceeds `limit` nats.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """
    drift = -aggregate_log_ratio(log_ratio_T.detach(), prepared, "sequence_mean")
    return (advantages_T < 0) & (drift > limit)
