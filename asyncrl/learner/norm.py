"""RMS norms of a bfloat16 model on a CPU, with a backward pass of their own: half the time, and a fifth of the memory.

Legend: `N` slots, `C` hidden width.

transformers writes the norm in single operations of float32, which autograd keeps three [N, C] arrays of. Here float32
exists for a few rows at a time and one number a row is kept. The output is rounded once instead of twice.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

_TILE_ROWS = 512  # 512 x 576 float32 is 1.2 MiB: what the passes over a tile work on stays in a core's cache


def install(model: torch.nn.Module) -> int:
    """Replace the model's RMS norms, keeping their parameters and names; return how many were replaced.

    A norm is one whose class is named so, that has one bfloat16 weight on a CPU (or on no device yet, for a CPU) and an
    epsilon, and that computes what `RMSNorm` computes, within rounding; anything else is left as it is.
    """
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, RMSNorm):
                eps = getattr(child, "variance_epsilon", None)
                parameters = dict(child.named_parameters())
                if parameters.keys() != {"weight"} or not isinstance(eps, float):
                    continue
                weight = parameters["weight"]
                if weight.dtype == torch.bfloat16 and weight.device.type in ("cpu", "meta"):
                    norm = RMSNorm(weight, eps)
                    if _agree(child, norm):
                        setattr(parent, name, norm)
                        found += 1
    return found


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, as Llama's.

    Source: RMSNorm, arXiv:1910.07467, equation 4, with epsilon inside the root.
    """

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the shape and dtype of `hidden` [..., C]."""
        result: torch.Tensor = _Norm.apply(hidden, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        wide_weight = weight.to(_wide(weight.dtype))
        result = torch.empty_like(flat)
        scale = flat.new_empty(len(flat), 1, dtype=wide_weight.dtype)
        for rows in _tiles(len(flat)):
            wide = flat[rows].to(wide_weight.dtype, copy=True)
            square = torch.linalg.vector_norm(wide, dim=1, keepdim=True).square_()
            scale[rows] = torch.rsqrt(square.div_(flat.shape[1]).add_(eps))
            result[rows] = wide.mul_(scale[rows]).mul_(wide_weight)
        ctx.save_for_backward(flat, weight, scale)
        return result.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """With y = x * s * w and s = (mean(x^2) + eps)^-1/2: dx = s * (g * w - x * s * mean(g * w * x * s))."""
        flat, weight, scale = ctx.saved_tensors
        flat_grad = grad.reshape(flat.shape)
        wide_weight = weight.to(scale.dtype)
        result = torch.empty_like(flat)
        grad_weight = torch.zeros_like(wide_weight)
        for rows in _tiles(len(flat)):
            normed = flat[rows].to(scale.dtype, copy=True).mul_(scale[rows])
            wide_grad = flat_grad[rows].to(scale.dtype, copy=True)
            product = wide_grad * normed
            grad_weight += product.sum(0)
            along = torch.mv(product, wide_weight).div_(flat.shape[1]).unsqueeze(1)
            result[rows] = wide_grad.mul_(wide_weight).addcmul_(normed, along, value=-1).mul_(scale[rows])
        return result.view(grad.shape), grad_weight.to(weight.dtype), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(count: int) -> list[slice]:
    return [slice(first, min(first + _TILE_ROWS, count)) for first in range(0, count, _TILE_ROWS)]


def _agree(theirs: torch.nn.Module, ours: RMSNorm) -> bool:
    width = ours.weight.shape[0]
    if ours.weight.is_meta:
        theirs = copy.deepcopy(theirs).to_empty(device="cpu")
        ours = RMSNorm(next(theirs.parameters()), ours.eps)
        torch.nn.init.constant_(ours.weight, 0.5)
    # Neither centred nor of unit size, so that a norm that subtracts a mean or scales by 1 + weight is told apart.
    rows = torch.linspace(-1.0, 3.0, 4 * width, dtype=ours.weight.dtype, device=ours.weight.device).view(4, width)
    with torch.no_grad():
        wanted, found = theirs(rows).float(), ours(rows).float()
    return bool(torch.allclose(wanted, found, rtol=2**-6, atol=0.0))
