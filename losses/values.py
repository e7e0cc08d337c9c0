"""What a critic learns from: the clipped squared error, and the cross-entropy of a yes/no probability.

`T` is predictions: one a packed token, or one a question. A prediction is a value V of the state in which a token was
sampled; its target R is the return from there. Both losses are means over the active predictions of the whole
optimizer batch, so give `num_loss_tokens` for microbatches. Computed in float64; slots where `loss_mask` is False are
never read.
"""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.inputs import Count, LossOutput
from asyncrl.losses.recording import Recorder
from asyncrl.losses.reduction import ExplainedVariance

_UNIT_TOLERANCE = 1e-6  # a float32 return computed from rewards in [0, 1] may miss the interval by about this


def clipped_value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    old_values: torch.Tensor | None = None,
    clip: float = 0.0,
    num_loss_tokens: Count | None = None,
) -> LossOutput:
    """Mean of 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) over the active predictions.

    `values` [T] get the gradient; `returns` [T]; `loss_mask` [T] bool; `old_values` [T] are V before the first update
    on this batch, and only read with `clip` c > 0 (0 clips nothing). Where the clipped term is the larger one the
    gradient is 0: V has moved by more than c from V_old, away from R. Ties take the unclipped branch.
    Source: the critic of PPO as in its authors' code (openai/baselines, ppo2), arXiv:1707.06347.
    Raises: ShapeError; ConfigError for `clip` < 0, a missing `old_values`, 16-bit values or returns that are not
    finite.

    Example:
        >>> clipped_value_loss(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([True])).loss.item()
        0.125
    """
    mask, value, target = _prepared("values", values, returns, loss_mask)
    if not clip >= 0:
        raise ConfigError(f"clip must be >= 0 (0 clips nothing), got {clip}")
    token_loss = 0.5 * (value - target).square()
    record = Recorder()
    if clip:
        if old_values is None or old_values.shape != values.shape:
            raise ConfigError(f"clip = {clip:g} needs old_values [T], the values before the first update")
        old = torch.where(mask, old_values.detach().double(), 0.0)
        clipped_loss = 0.5 * (value.clamp(old - clip, old + clip) - target).square()
        clipped = clipped_loss > token_loss
        token_loss = torch.where(clipped, clipped_loss, token_loss)
        record.mean("value_clip_fraction", clipped, mask)
    return _output(values, token_loss, mask, value, target, num_loss_tokens, record)


def yes_no_value(yes_logits: torch.Tensor, no_logits: torch.Tensor) -> torch.Tensor:
    """Return [T] in [0, 1], p(yes) / (p(yes) + p(no)) = sigmoid(z_yes - z_no). Differentiable.

    Source: generative verifiers, arXiv:2408.15240.
    """
    return torch.sigmoid(yes_logits - no_logits)


def yes_no_loss(
    yes_logits: torch.Tensor,
    no_logits: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    num_loss_tokens: Count | None = None,
) -> LossOutput:
    """Mean cross-entropy (nats) of V = sigmoid(z_yes - z_no) against soft targets R in [0, 1].

    `yes_logits` and `no_logits` [T] get the gradients V - R and R - V: unlike a squared error's they carry no factor
    V (1 - V), which would vanish where the answer is confident and wrong.
    Source: generative verifiers, arXiv:2408.15240, with the return in place of correctness.
    Raises: ShapeError; ConfigError for 16-bit logits, and for returns that are not finite or outside [0, 1].
    """
    mask, _, target = _prepared("yes_logits", yes_logits, returns, loss_mask)
    if no_logits.shape != yes_logits.shape:
        raise ShapeError(f"no_logits must be [T] = {list(yes_logits.shape)}, got {list(no_logits.shape)}")
    outside = (target < -_UNIT_TOLERANCE) | (target > 1 + _UNIT_TOLERANCE)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise ConfigError(f"returns must be in [0, 1] for a yes/no value: entry {first} is {float(target[first]):g}")
    target = target.clamp(0.0, 1.0)
    logit = torch.where(mask, yes_logits.double() - no_logits.double(), 0.0)
    token_loss = torch.where(mask, torch.nn.functional.softplus(logit) - target * logit, 0.0)
    return _output(yes_logits, token_loss, mask, torch.sigmoid(logit), target, num_loss_tokens, Recorder())


def _prepared(
    name: str, values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mask, and values and returns in float64 with 0 in every slot that may not be read."""
    if values.dim() != 1:
        raise ShapeError(f"{name} must be [T], got {list(values.shape)}")
    for other, tensor in (("returns", returns), ("loss_mask", loss_mask)):
        if tensor.shape != values.shape:
            raise ShapeError(f"{other} must be [T] = {list(values.shape)}, got {list(tensor.shape)}")
    if values.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"{name} must be float32 or float64, got {values.dtype}")
    mask = loss_mask.detach().bool()
    target = torch.where(mask, returns.detach().double(), 0.0)
    if not bool(target.isfinite().all()):
        first = int((~target.isfinite()).nonzero()[0])
        raise ConfigError(f"returns must be finite where the loss is taken: entry {first} is {float(target[first])}")
    # `where`, because 0 * NaN is NaN, forward and backward.
    return mask, torch.where(mask, values.double(), 0.0), target


def _output(
    given: torch.Tensor,
    token_loss: torch.Tensor,
    mask: torch.Tensor,
    value: torch.Tensor,
    target: torch.Tensor,
    num_loss_tokens: Count | None,
    record: Recorder,
) -> LossOutput:
    number = mask.sum() if num_loss_tokens is None else num_loss_tokens
    count = torch.as_tensor(number, dtype=torch.float64, device=mask.device).clamp(min=1.0)
    record.mean("value_loss", token_loss, mask)
    record.mean("value_mean", value, mask)
    record.mean("return_mean", target, mask)
    error = torch.where(mask, target - value.detach(), 0.0)
    moments = (mask.sum(), target.sum(), target.square().sum(), error.sum(), error.square().sum())
    record.add(lambda v: {"value_explained_variance": ExplainedVariance(*v)}, *moments)
    loss = (given[:0].sum() + token_loss.sum()) / count  # a graph also where nothing is active
    return LossOutput(
        loss=loss.to(given.dtype), token_loss=token_loss.detach().to(given.dtype), metrics=record.records()
    )
