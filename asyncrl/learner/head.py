"""Log-probs and exact entropy from the LM head, tile by tile.

Legend: `P` predictions, `C` hidden width, `V` vocabulary.

The [P, V] logits never exist: the vocabulary is walked in tiles with a running log-sum-exp, and the backward pass
computes each tile again (a third more arithmetic in the head, for memory that does not grow with P).
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.learner.products import bfloat16_products

_TILE_ROWS = 1024
_TILE_WORDS = 1024  # 1024 x 1024 float32 is 4 MiB: the passes over a tile run in the second-level caches of two cores
_SLAB_WORDS = 4096  # the two products of the backward pass want larger matrices; these are of the model's dtype


def logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    logits_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([P] log-prob of each target, [P] entropy), nats, under softmax(hidden @ weight.T / temperature).

    hidden: [P, C]; weight: [V, C]; target_ids: [P] int64. Both results are float32 (float64 for float64 inputs) and
    differentiable. The logits of both passes are products in `logits_dtype`; a bfloat16 product rounds a logit of 20 by
    up to 0.06, and a probability in the gradient by as many per cent.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Head.apply(hidden, weight, target_ids, temperature, logits_dtype)  # type: ignore[no-untyped-call]
    return result


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        temperature: float,
        logits_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.product_dtype = wide if logits_dtype == torch.float32 else hidden.dtype
        ctx.temperature = temperature
        rows_P = hidden.to(ctx.product_dtype)
        largest = torch.full((len(hidden),), float("-inf"), dtype=wide, device=hidden.device)
        total = torch.zeros_like(largest)  # sum of exp(logit - largest)
        weighted = torch.zeros_like(largest)  # sum of exp(logit - largest) * logit
        target = torch.zeros_like(largest)
        for words in _tiles(len(weight), _TILE_WORDS):
            words_V = weight[words].to(ctx.product_dtype)
            for rows in _tiles(len(hidden), _TILE_ROWS):
                logits = _logits(rows_P[rows], words_V, temperature, hidden.dtype)
                place = target_ids[rows] - words.start
                found = logits.gather(1, place.clamp(0, len(words_V) - 1).unsqueeze(1)).squeeze(1)
                target[rows] = torch.where((place >= 0) & (place < len(words_V)), found, target[rows])
                new_largest = torch.maximum(largest[rows], logits.amax(1))
                kept = torch.exp(largest[rows] - new_largest)
                exp = (logits - new_largest.unsqueeze(1)).exp_()
                total[rows] = total[rows] * kept + exp.sum(1)
                weighted[rows] = weighted[rows] * kept + exp.mul_(logits).sum(1)
                largest[rows] = new_largest
        log_total = largest + total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, target_ids, log_total, entropy)
        ctx.set_materialize_grads(False)
        return target - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, target_ids, log_total, entropy = ctx.saved_tensors
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        wide = log_total.dtype
        grad = torch.zeros_like(log_total) if grad_logprob is None else grad_logprob.to(wide)
        grad = grad / ctx.temperature
        bonus = None if grad_entropy is None else grad_entropy.to(wide) / ctx.temperature
        rows_P = hidden.to(ctx.product_dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for slab in _tiles(len(weight), _SLAB_WORDS):
            words_V = weight[slab].to(ctx.product_dtype)
            grad_words = torch.zeros(words_V.shape, dtype=wide, device=weight.device)
            for rows in _tiles(len(hidden), _TILE_ROWS):
                targets = target_ids[rows] - slab.start
                grad_logits = hidden.new_empty(len(targets), len(words_V))
                for words in _tiles(len(words_V), _TILE_WORDS):
                    tile = _logits(rows_P[rows], words_V[words], ctx.temperature, hidden.dtype)
                    tile.sub_(log_total[rows].unsqueeze(1))
                    factor = grad[rows].neg().unsqueeze(1)
                    if bonus is not None:
                        factor = factor - bonus[rows].unsqueeze(1) * (tile + entropy[rows].unsqueeze(1))
                    tile.exp_().mul_(factor)
                    inside = torch.nonzero((targets >= words.start) & (targets < words.stop)).squeeze(1)
                    tile[inside, targets[inside] - words.start] += grad[rows][inside]
                    grad_logits[:, words] = tile
                grad_hidden[rows] += grad_logits @ weight[slab]
                grad_words += grad_logits.T @ hidden[rows]
            grad_weight[slab] = grad_words
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _tiles(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _logits(rows: torch.Tensor, words: torch.Tensor, temperature: float, model_dtype: torch.dtype) -> torch.Tensor:
    """[rows, words] float32 (or float64), in memory of its own."""
    # Exact where tiles multiply them: both operands hold numbers of the model's dtype.
    with bfloat16_products(model_dtype):
        logits = torch.nn.functional.linear(rows, words)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)
