"""One step of AdamW on a model's adapter, with the settings of that step."""

from __future__ import annotations

import math

import torch

from asyncrl.errors import ConfigError
from asyncrl.tinker.adapters import Adapted
from asyncrl.tinker.orders import StepOrder


def take_step(model: Adapted, order: StepOrder) -> dict[str, float]:
    """Apply the summed gradients, forget them, and return metrics by "name:reduction".

    `torch.optim.AdamW` with decoupled weight decay. The norm to clip to is that of the sum over all passes since the
    last step. Raises: ConfigError where there was no pass, a setting is out of range, or a gradient is not finite: the
    weights and moments stay as they are, and gradients that are not finite are forgotten.
    """
    _check(order)
    if not model.passes:
        raise ConfigError("optim_step needs gradients: there was no forward_backward since the last one")
    norm = model.gradient_norm()
    if not math.isfinite(norm):
        passes = model.passes
        model.discard()
        raise ConfigError(f"the gradient of {passes} forward_backward is {norm}: it is forgotten, no step was taken")
    if order.max_grad_norm and norm > order.max_grad_norm:
        torch._foreach_mul_(
            [p.grad for p in model.parameters.values() if p.grad is not None], order.max_grad_norm / norm
        )
    for group in model.adam.param_groups:
        group.update(
            lr=order.learning_rate,
            betas=(order.beta1, order.beta2),
            eps=order.eps,
            weight_decay=order.weight_decay,
        )
    model.adam.step()
    model.discard()
    model.steps += 1
    return {"grad_norm:max": norm, "step:max": float(model.steps)}


def _check(order: StepOrder) -> None:
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "eps"):
        value = getattr(order, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be >= 0 and finite, got {value}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(order, name) < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {getattr(order, name)}")
