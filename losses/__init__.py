"""Every policy loss by name, composed from ratio, anchor, clip, correction and aggregation; and what to watch.

Names are loaded on first use, so that checking a loss's name and settings (`resolve`, `LOSSES`) imports no torch.

Example:
    >>> import torch
    >>> from asyncrl.losses import LossInputs, evaluate
    >>> policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> inputs = LossInputs(policy_logprobs=policy, behaviour_logprobs=policy.detach(), advantages=torch.ones(2),
    ...                     loss_mask=torch.tensor([True, True]), cu_seqlens=torch.tensor([0, 2]))
    >>> evaluate("dapo", inputs).loss.item()
    -1.0
"""

if __name__ == "losses":
    raise ImportError("import this package as asyncrl.losses")

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.losses.compose import denominators as denominators
    from asyncrl.losses.compose import evaluate as evaluate
    from asyncrl.losses.distillation import append_tail as append_tail
    from asyncrl.losses.distillation import divergence as divergence
    from asyncrl.losses.distillation import forward_kl as forward_kl
    from asyncrl.losses.distillation import generalised_jsd as generalised_jsd
    from asyncrl.losses.distillation import keep_with_tail as keep_with_tail
    from asyncrl.losses.distillation import reverse_kl as reverse_kl
    from asyncrl.losses.distillation import top_k_divergence as top_k_divergence
    from asyncrl.losses.inputs import LossInputs as LossInputs
    from asyncrl.losses.inputs import LossOutput as LossOutput
    from asyncrl.losses.monitoring import Diagnostics as Diagnostics
    from asyncrl.losses.monitoring import diagnostics as diagnostics
    from asyncrl.losses.monitoring import top_ratios as top_ratios
    from asyncrl.losses.presets import LOSSES as LOSSES
    from asyncrl.losses.presets import LossSettings as LossSettings
    from asyncrl.losses.presets import resolve as resolve
    from asyncrl.losses.reduction import finalise as finalise
    from asyncrl.losses.reduction import reduce as reduce
    from asyncrl.losses.regularisers import next_entropy_coef as next_entropy_coef
    from asyncrl.losses.values import clipped_value_loss as clipped_value_loss
    from asyncrl.losses.values import yes_no_loss as yes_no_loss
    from asyncrl.losses.values import yes_no_value as yes_no_value

_HOMES = {
    "denominators": "compose",
    "evaluate": "compose",
    "append_tail": "distillation",
    "divergence": "distillation",
    "forward_kl": "distillation",
    "generalised_jsd": "distillation",
    "keep_with_tail": "distillation",
    "reverse_kl": "distillation",
    "top_k_divergence": "distillation",
    "LossInputs": "inputs",
    "LossOutput": "inputs",
    "Diagnostics": "monitoring",
    "diagnostics": "monitoring",
    "top_ratios": "monitoring",
    "LOSSES": "presets",
    "LossSettings": "presets",
    "resolve": "presets",
    "finalise": "reduction",
    "reduce": "reduction",
    "next_entropy_coef": "regularisers",
    "clipped_value_loss": "values",
    "yes_no_loss": "values",
    "yes_no_value": "values",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
