"""Log-probs and exact entropy from the LM head, tile by tile.

Legend: `P` predictions, `C` hidden width, `V` vocabulary.

The [P, V] logits never exist: the vocabulary is walked in tiles with a running log-sum-exp, and the backward pass
computes each tile again (a third more arithmetic in the head, for memory that does not grow with P). What it computes
again are log-probs in the model's dtype: of a bfloat16 product only the result is rounded, and where the probability
lies a log-prob is small, whatever size the logits have.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.learner.products import bfloat16_products, with_columns

_TILE_ROWS = 1024
_TILE_WORDS = 1024  # 1024 x 1024 float32 is 4 MiB: the passes over a tile run in the second-level caches of two cores
_BACKWARD_TILE = 2048  # rows and words; these tiles are of the model's dtype, and three products want them large


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
    differentiable. The logits of the forward pass are products in `logits_dtype`; a bfloat16 product rounds a logit of
    20 by up to 0.06. The backward pass rounds log-probs to the model's dtype, whatever `logits_dtype` is.
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
        """A logit's gradient is grad * [v is the target] - p * pull, with pull = grad + bonus * (log p + entropy).

        Without a bonus `pull` is one number a row. It is then left out of the tile, which holds p - [v is the target],
        and multiplied into what the two products take and give: one pass over a tile instead of three.
        """
        hidden, weight, target_ids, log_total, entropy = ctx.saved_tensors
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        wide = log_total.dtype
        grad = torch.zeros_like(log_total) if grad_logprob is None else grad_logprob.to(wide)
        grad = grad / ctx.temperature
        bonus = None if grad_entropy is None else grad_entropy.to(wide) / ctx.temperature
        factor = -(grad if bonus is None else torch.ones_like(grad)).unsqueeze(1)
        factored = (hidden * factor).to(hidden.dtype)
        shifted = with_columns(hidden, log_total * -ctx.temperature)
        grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        trained = ctx.needs_input_grad[1]  # not of a frozen model: a third of the arithmetic here
        grad_weight = torch.empty_like(weight) if trained else None
        for words in _tiles(len(weight), _BACKWARD_TILE):
            words_V = with_columns(weight[words], None)
            grad_words = torch.zeros(weight[words].shape if trained else (), dtype=wide, device=weight.device)
            for rows in _tiles(len(hidden), _BACKWARD_TILE):
                tile = torch.nn.functional.linear(shifted[rows], words_V)  # log p
                if ctx.temperature != 1.0:
                    tile.div_(ctx.temperature)
                at = torch.nonzero((target_ids[rows] >= words.start) & (target_ids[rows] < words.stop)).squeeze(1)
                place = target_ids[rows][at] - words.start
                if bonus is None:
                    of_target = tile[at, place].expm1()  # of a likely target p rounds to 1, and p - 1 to nothing
                    tile.exp_()[at, place] = of_target
                else:
                    pull = tile + entropy[rows].unsqueeze(1)  # wide
                    pull.mul_(bonus[rows].unsqueeze(1)).add_(grad[rows].unsqueeze(1))
                    pull.mul_(tile.to(wide).exp_())
                    pull[at, place] -= grad[rows][at]
                    tile = pull.to(hidden.dtype)
                grad_hidden[rows] += tile @ weight[words]
                if trained:
                    grad_words += tile.T @ factored[rows]
            if grad_weight is not None:
                grad_weight[words] = grad_words
        return grad_hidden.mul_(factor).to(hidden.dtype), grad_weight, None, None, None


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
