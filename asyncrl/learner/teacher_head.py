"""How far a student's next-token distributions are from a teacher's, from hidden states, a tile of rows at a time.

Legend: `P` predictions, `C` and `D` hidden widths of student and teacher, `V` vocabulary, `k` tokens that are known.

The [P, V] log-probs of neither ever exist: each tile is computed, reduced to one number a row and dropped, and computed
again in the backward pass. Within a tile torch differentiates `asyncrl.losses.divergence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncrl.losses import append_tail, divergence, keep_with_tail, top_k_divergence

_TILE_ELEMENTS = 1 << 22  # 16 MiB of float32 for each of the about ten arrays that a tile has at once

Measure = Callable[[slice, torch.Tensor], torch.Tensor]
"""From rows and the student's log-probs [rows, V] there to a number a row."""


def divergence_from_states(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    kind: str,
    beta: float = 0.5,
    top_k: int = 0,
    support: str = "teacher",
    temperature: float = 1.0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return [P] float32 (float64 for float64), the divergence of each row, differentiable by `hidden` and `weight`.

    hidden [P, C], weight [V, C]; of the teacher [P, D] and [V, D], never differentiated. Both are softmaxes of the
    product over `temperature`. `top_k` 0 is the whole vocabulary; else the k likeliest tokens of `support` and a tail.
    """
    teacher_hidden, teacher_weight = teacher_hidden.detach(), teacher_weight.detach()
    teacher_product = _product_dtype(teacher_hidden, logits_dtype)
    teacher_words = teacher_weight.to(teacher_product)

    def measure(rows: slice, student: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = _logprobs(teacher_hidden[rows].to(teacher_product), teacher_words, temperature).to(student.dtype)
        if top_k:
            return top_k_divergence(teacher, student, k=top_k, support=support, kind=kind, beta=beta)
        return divergence(teacher, student, kind=kind, beta=beta)

    return tiled(hidden, weight, measure, temperature=temperature, logits_dtype=logits_dtype)


def divergence_from_top_k(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    *,
    kind: str,
    beta: float = 0.5,
    temperature: float = 1.0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return [P], the divergence over k given tokens and the tail: `token_ids` [P, k] int64, their log-probs [P, k].

    The teacher's tail is 1 - sum (`append_tail`), the student's is summed from its other tokens.
    """
    known = append_tail(teacher_logprobs.detach())

    def measure(rows: slice, student: torch.Tensor) -> torch.Tensor:
        kept = keep_with_tail(student, token_ids[rows])
        return divergence(known[rows].to(student.dtype), kept, kind=kind, beta=beta)

    return tiled(hidden, weight, measure, temperature=temperature, logits_dtype=logits_dtype)


def tiled(
    hidden: torch.Tensor, weight: torch.Tensor, measure: Measure, *, temperature: float, logits_dtype: torch.dtype
) -> torch.Tensor:
    """Return [P], `measure` of log_softmax(hidden @ weight.T / temperature), tile by tile."""
    product = _product_dtype(hidden, logits_dtype)
    result: torch.Tensor = _Tiled.apply(hidden, weight, measure, temperature, product)  # type: ignore[no-untyped-call]
    return result


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        measure: Measure,
        temperature: float,
        product: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.measure, ctx.temperature, ctx.product = measure, temperature, product
        result = torch.empty(len(hidden), dtype=_wide(hidden.dtype), device=hidden.device)
        words = weight.to(product)
        for rows in _tiles(hidden, weight):
            result[rows] = measure(rows, _logprobs(hidden[rows].to(product), words, temperature))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        hidden, weight = ctx.saved_tensors
        wide = _wide(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        words = weight.to(ctx.product)
        for rows in _tiles(hidden, weight):
            logits = _logits(hidden[rows].to(ctx.product), words, ctx.temperature).requires_grad_()
            with torch.enable_grad():
                value = ctx.measure(rows, torch.log_softmax(logits, -1))
            (grad_logits,) = torch.autograd.grad(value, logits, grad[rows])
            grad_logits = grad_logits.div_(ctx.temperature).to(ctx.product)
            grad_hidden[rows] = (grad_logits @ words).to(hidden.dtype)
            grad_weight += grad_logits.T @ hidden[rows].to(ctx.product)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _tiles(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    rows = max(1, _TILE_ELEMENTS // len(weight))
    return [slice(first, first + rows) for first in range(0, len(hidden), rows)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product_dtype(hidden: torch.Tensor, logits_dtype: torch.dtype) -> torch.dtype:
    return _wide(hidden.dtype) if logits_dtype == torch.float32 else hidden.dtype


def _logits(rows: torch.Tensor, words: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.nn.functional.linear(rows, words).to(_wide(rows.dtype)).div_(temperature)


def _logprobs(rows: torch.Tensor, words: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(_logits(rows, words, temperature), -1)
