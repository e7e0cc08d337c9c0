"""Attention over a microbatch's token tree, as transformers' attention interface calls it.

Legend: `N` slots, `R` rows of a block, `L` queries of a row, `K` keys of a row, `H` query heads, `J` key heads, `D` the
width of a head.

On a CPU, each block is three batched matrix products around a softmax, in float32 whatever the model's dtype. The
scores are computed again in the backward pass instead of being kept. Where the CPU multiplies bfloat16 in tiles, a
bfloat16 model's products do so too (`asyncrl.learner.products`). Queries, keys, values and the incoming gradient lose
nothing by it; the softmax's weights and the gradients of the scores are rounded, as flash kernels round them. On text,
with 135M parameters: log-probs lie 0.0247 nats from those of a float32 model on average (0.0246 with float32 products),
the gradient 3.9% of its norm (3.7%).
On a GPU, flash-attn's variable-length kernel takes the same rows; that path has not been tried.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from transformers import AttentionInterface

from asyncrl.learner.products import bfloat16_products
from asyncrl.packing import AttentionBlock

NAME = "asyncrl_tree"
"""What the model's configuration calls this attention."""


def register() -> None:
    """Make the attention known to transformers; may be called again."""
    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    blocks: tuple[AttentionBlock, ...],
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Return ([1, N, H, D], None) for query [1, H, N, D], key and value [1, J, N, D]; differentiable.

    `blocks` reaches this function through the model's keyword arguments.
    """
    assert attention_mask is None
    assert query.shape[0] == 1
    heads = query.shape[1] // key.shape[1]
    q = query[0].transpose(0, 1).reshape(query.shape[2], key.shape[1], heads, -1)  # [N, J, H / J, D], a view
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if q.is_cuda and importlib.util.find_spec("flash_attn") is not None:
        return _flash_attention(q, k, v, blocks, scaling).unsqueeze(0), None
    result: torch.Tensor = _TreeAttention.apply(q, k, v, blocks, scaling)  # type: ignore[no-untyped-call]
    return result.flatten(1, 2).unsqueeze(0), None


class _TreeAttention(torch.autograd.Function):
    """q [N, J, H / J, D], k and v [N, J, D] to [N, J, H / J, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[AttentionBlock, ...], scale: float
    ) -> torch.Tensor:
        wide_q, wide_k, wide_v = (_by_head(tensor) for tensor in (q, k, v))
        before, after = _scales(scale)
        wide_q.mul_(before)
        wide_result = torch.empty_like(wide_q)
        with bfloat16_products(q.dtype):
            for block in blocks:
                rows = _Rows(block, k)
                weights = _weights(rows.queries(wide_q), rows.keys(wide_k), block, after)
                rows.put_queries(wide_result, torch.bmm(weights, rows.keys(wide_v)))
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scale = blocks, scale
        return _by_slot(wide_result, q)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        wide_q, wide_k, wide_v, wide_grad = (_by_head(tensor) for tensor in (q, k, v, grad))
        before, after = _scales(ctx.scale)
        wide_q.mul_(before)
        grad_q, grad_k, grad_v = torch.empty_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        with bfloat16_products(q.dtype):
            for block in ctx.blocks:
                rows = _Rows(block, k)
                block_q, block_k = rows.queries(wide_q), rows.keys(wide_k)
                weights = _weights(block_q, block_k, block, after)
                # Padded queries must send nothing back: their rows of the incoming gradient are zero.
                block_grad = rows.real_queries(wide_grad)
                rows.add_keys(grad_v, torch.bmm(weights.transpose(1, 2), block_grad))
                grad_weights = torch.bmm(block_grad, rows.keys(wide_v).transpose(1, 2))
                grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                rows.put_queries(grad_q, torch.bmm(grad_scores, block_k))
                rows.add_keys(grad_k, torch.bmm(grad_scores.transpose(1, 2), block_q))
        grad_q.mul_(before * after)
        grad_k.mul_(after)
        return _by_slot(grad_q, q), _by_slot(grad_k, k), _by_slot(grad_v, v), None, None


def _scales(scale: float) -> tuple[float, float]:
    """Return what queries and what scores are multiplied by.

    A power of two goes to the few queries, because it leaves a bfloat16 number one; anything else to the scores.
    """
    return (scale, 1.0) if math.frexp(scale)[0] == 0.5 else (1.0, scale)


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """[N, J, ...] to [J * N, rest] in float32 (or float64): a key head's slots lie together."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    slots, heads = tensor.shape[:2]
    return tensor.transpose(0, 1).to(wide, copy=True, memory_format=torch.contiguous_format).view(heads * slots, -1)


def _by_slot(wide: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[J * N, rest] to the shape and dtype of `like` [N, J, ...]."""
    slots, heads = like.shape[:2]
    return wide.to(like.dtype).view(heads, slots, *like.shape[2:]).transpose(0, 1).contiguous()


class _Rows:
    """Where the queries and keys of a block lie in arrays of [J * N, width]."""

    def __init__(self, block: AttentionBlock, k: torch.Tensor) -> None:
        num_slots, num_heads, self._width = k.shape
        self._num_matrices = num_heads * block.num_rows
        heads = torch.arange(num_heads, device=k.device).unsqueeze(1)
        self._queries = (heads * num_slots + block.query_index).view(-1)
        self._keys = (heads * num_slots + block.key_index).view(-1)
        self._real_slots = (heads * num_slots + block.slot_index).view(-1)
        self._real_places = (heads * len(block.query_index) + block.result_index).view(-1)
        self._padded = len(block.result_index) < len(block.query_index)

    def queries(self, wide: torch.Tensor) -> torch.Tensor:
        """[J * N, (H / J) * D] to [J * R, L * (H / J), D]: the query heads of one key head share a matrix."""
        return wide.index_select(0, self._queries).view(self._num_matrices, -1, self._width)

    def real_queries(self, wide: torch.Tensor) -> torch.Tensor:
        """The same, with 0 for padded queries."""
        if not self._padded:
            return self.queries(wide)
        rows = wide.new_zeros(len(self._queries), wide.shape[1])
        rows.index_copy_(0, self._real_places, wide.index_select(0, self._real_slots))
        return rows.view(self._num_matrices, -1, self._width)

    def keys(self, wide: torch.Tensor) -> torch.Tensor:
        """[J * N, D] to [J * R, K, D]."""
        return wide.index_select(0, self._keys).view(self._num_matrices, -1, self._width)

    def put_queries(self, wide: torch.Tensor, rows: torch.Tensor) -> None:
        """Write [J * R, L * (H / J), D] where its real queries lie in [J * N, (H / J) * D]."""
        flat = rows.view(-1, wide.shape[1])
        wide.index_copy_(0, self._real_slots, flat.index_select(0, self._real_places) if self._padded else flat)

    def add_keys(self, wide: torch.Tensor, rows: torch.Tensor) -> None:
        """Add [J * R, K, D] where its keys lie in [J * N, D] (padded ones are exactly zero)."""
        wide.index_add_(0, self._keys, rows.view(-1, self._width))


def _weights(q: torch.Tensor, k: torch.Tensor, block: AttentionBlock, scale: float) -> torch.Tensor:
    """[J * R, L * (H / J), K] softmax over the visible keys."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if scale != 1.0:
        scores.mul_(scale)
    hidden = block.hidden[..., block.num_open :]
    # Adding is several times faster than filling in by a mask that is broadcast.
    bias = torch.zeros(hidden.shape, dtype=scores.dtype, device=scores.device).masked_fill_(hidden, float("-inf"))
    rows, queries, keys = block.hidden.shape
    scores.view(-1, rows, queries, scores.shape[1] // queries, keys)[..., block.num_open :].add_(bias.unsqueeze(2))
    return torch.softmax(scores, -1)


def _flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[AttentionBlock, ...], scale: float
) -> torch.Tensor:
    """The same by flash-attn: each row is one variable-length sequence, causal from its last key. Not tried."""
    from flash_attn import flash_attn_varlen_func

    result = torch.empty(len(q), q.shape[1] * q.shape[2], q.shape[3], dtype=q.dtype, device=q.device)
    for block in blocks:
        num_queries, num_keys = block.hidden.shape[1:]
        visible = (~block.hidden).sum(-1).amax(-1)  # keys of each row
        real = torch.bincount(block.result_index // num_queries, minlength=block.num_rows)
        keys = block.key_index.view(-1, num_keys)[torch.arange(num_keys, device=q.device) < visible[:, None]]
        edges = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (real, visible)]
        rows = flash_attn_varlen_func(
            q[block.slot_index].flatten(1, 2),
            k[keys],
            v[keys],
            *edges,
            num_queries,
            num_keys,
            softmax_scale=scale,
            causal=True,
        )
        result = result.index_put((block.slot_index,), rows)
    return result
