"""Order statistics of a tensor of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999}
"""name -> share."""


def quantiles(values: torch.Tensor, shares: Sequence[float] = tuple(QUANTILES.values())) -> torch.Tensor:
    """Return [len(shares)], linearly interpolated quantiles of `values` [n] of any n; NaN for n = 0."""
    if values.numel() == 0:
        return values.new_full((len(shares),), math.nan)
    ordered = values.sort().values
    at = torch.tensor(shares, dtype=torch.float64, device=values.device) * (values.numel() - 1)
    low = at.floor().long()
    high = (low + 1).clamp(max=values.numel() - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return Spearman's rank correlation of two [n], ties sharing their mean rank; NaN where either is constant."""
    ranks = []
    for values in (x, y):
        _, place, number = torch.unique(values, return_inverse=True, return_counts=True)
        last = number.double().cumsum(0)
        rank = (last - (number.double() - 1) / 2)[place]
        ranks.append(rank - rank.mean())
    scale = (ranks[0].square().sum() * ranks[1].square().sum()).sqrt()
    return float((ranks[0] * ranks[1]).sum() / scale) if x.numel() and float(scale) > 0 else math.nan
