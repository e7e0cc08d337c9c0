"""Log-probs and exact entropy from the LM head, tile by tile.

Legend: `P` predictions, `C` hidden width, `V` vocabulary.

The [P, V] logits never exist: the vocabulary is walked in tiles with a running log-sum-exp, and the backward pass
computes each tile again (a third more arithmetic in the head, for memory that does not grow with P).
"""

from __future__ import annotations

from typing import Any

import torch

_TILE_ROWS = 512
_TILE_WORDS = 4096  # 512 x 4096 float32 is 8 MiB: the passes over a tile run in the last-level cache


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
    differentiable. The matrix product of the forward pass runs in `logits_dtype`; a bfloat16 product rounds a logit of
    20 by up to 0.06, a float32 one takes twice as long.
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
        product_dtype = wide if logits_dtype == torch.float32 else hidden.dtype
        rows = hidden.to(product_dtype)
        largest = torch.full((len(hidden),), float("-inf"), dtype=wide, device=hidden.device)
        total = torch.zeros_like(largest)  # sum of exp(logit - largest)
        weighted = torch.zeros_like(largest)  # sum of exp(logit - largest) * logit
        target = torch.zeros_like(largest)
        for first in range(0, len(weight), _TILE_WORDS):
            words = weight[first : first + _TILE_WORDS].to(product_dtype)
            for begin in range(0, len(hidden), _TILE_ROWS):
                part = slice(begin, begin + _TILE_ROWS)
                logits = _logits(rows[part], words, temperature, wide)
                place = target_ids[part] - first
                found = logits.gather(1, place.clamp(0, len(words) - 1).unsqueeze(1)).squeeze(1)
                target[part] = torch.where((place >= 0) & (place < len(words)), found, target[part])
                new_largest = torch.maximum(largest[part], logits.amax(1))
                kept = torch.exp(largest[part] - new_largest)
                exp = torch.exp(logits - new_largest.unsqueeze(1))
                total[part] = total[part] * kept + exp.sum(1)
                weighted[part] = weighted[part] * kept + exp.mul_(logits).sum(1)
                largest[part] = new_largest
        log_total = largest + total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, target_ids, log_total, entropy)
        ctx.temperature = temperature
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
        grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for first in range(0, len(weight), _TILE_WORDS):
            words = weight[first : first + _TILE_WORDS]
            grad_words = torch.zeros(words.shape, dtype=wide, device=weight.device)
            for begin in range(0, len(hidden), _TILE_ROWS):
                part = slice(begin, begin + _TILE_ROWS)
                logprobs = _logits(hidden[part], words, ctx.temperature, wide) - log_total[part].unsqueeze(1)
                factor = grad[part].neg().unsqueeze(1)
                if grad_entropy is not None:
                    factor = factor - grad_entropy[part].unsqueeze(1) * (logprobs + entropy[part].unsqueeze(1))
                grad_logits = logprobs.exp_().mul_(factor)
                inside = torch.nonzero((target_ids[part] >= first) & (target_ids[part] < first + len(words))).squeeze(1)
                grad_logits[inside, target_ids[part][inside] - first] += grad[part][inside]
                grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
                grad_hidden[part] += grad_logits @ words
                grad_words += grad_logits.T @ hidden[part]
            grad_weight[first : first + _TILE_WORDS] = grad_words
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _logits(rows: torch.Tensor, words: torch.Tensor, temperature: float, wide: torch.dtype) -> torch.Tensor:
    logits = torch.nn.functional.linear(rows, words).to(wide)
    return logits if temperature == 1.0 else logits.div_(temperature)
