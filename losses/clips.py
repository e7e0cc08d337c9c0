"""What bounds a ratio: objectives per token, as losses to minimise. `T` packed tokens.

Ties take the unclipped branch: the clipped branch is chosen only where its loss is strictly greater, so that a ratio
of exactly 1 + clip_high still learns and on-policy gradients are whole (`torch.min` would halve them).
"""

from __future__ import annotations

import torch

from asyncrl.losses.presets import LossSettings


def ppo_clip(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> torch.Tensor:
    """Return [T], -min(r A, clip(r, low, high) A), for A < 0 at most -dual_clip A.

    Zero gradient where (A > 0, r > high), (A < 0, r < low) and, with a dual clip, (A < 0, r > dual_clip).
    Source: PPO, arXiv:1707.06347; dual clip: arXiv:1912.09729.
    """
    loss = -ratio_T * advantages_T
    clipped = -ratio_T.clamp(low, high) * advantages_T
    loss = torch.where(clipped > loss, clipped, loss)
    if dual_clip is not None:
        bound = -dual_clip * advantages_T
        loss = torch.where((advantages_T < 0) & (bound < loss), bound, loss)
    return loss


def sqrt_window(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, position_T: torch.Tensor, settings: LossSettings
) -> torch.Tensor:
    """Return [T], the PPO objective with log-space bounds that grow with the square root of the action position.

    Zero gradient for A > 0 above the window; for A < 0 below it and, with `window_dual`, above it.
    Source: CTPO, arXiv:2605.07331 and its published code.
    """
    low = (-settings.window_low * position_T.sqrt()).exp()
    high = (settings.window_high * position_T.sqrt()).exp()
    loss = -ratio_T * advantages_T
    clipped = -torch.minimum(torch.maximum(ratio_T, low), high) * advantages_T
    loss = torch.where(clipped > loss, clipped, loss)
    if settings.window_dual:
        bound = -high * advantages_T
        loss = torch.where((advantages_T < 0) & (bound < loss), bound, loss)
    return loss


def within(ratio_T: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return [T] bool, True where low <= ratio <= high."""
    return (ratio_T >= low) & (ratio_T <= high)


def probability_moved(
    policy_T: torch.Tensor, behaviour_T: torch.Tensor, advantages_T: torch.Tensor, limit: float
) -> torch.Tensor:
    """Return [T] bool, True where the token's probability has moved by more than `limit` the way the advantage points.

    Source: DPPO, arXiv:2602.04879 (total variation in probability space).
    """
    moved = policy_T.detach().exp() - behaviour_T.exp()
    return ((advantages_T > 0) & (moved > limit)) | ((advantages_T < 0) & (moved < -limit))
