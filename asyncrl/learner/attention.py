"""Attention over a microbatch's token tree, as transformers' attention interface calls it.

Legend: `N` slots, `H` query heads, `J` key heads, `G` = H / J, `D` the width of a head, `L` queries and
`K` keys of a tile.

The blocks are walked in tiles, as flash attention does (arXiv:2307.08691). A tile is a few batched matrix products; the
query heads of one key head share a matrix. All keys of a slot are in one tile, in the order of their positions: those
of a shared prompt are put before its own, so that its sums are added up in the same order as without sharing. The
backward pass computes the weights again from the log-sum-exp.

In a bfloat16 model the forward pass is in float32 (in bfloat16 tiles where the CPU has them: `products`). The backward
pass has bfloat16 products, twice as fast, that give the logarithm of a weight and the gradient of a score less the
row's mean: what the two are made of is rounded once, at the size of the small result and not of the large terms. On
text, with 135M parameters: the gradient lies 4.61% of its norm from a float32 model's, with a float32 backward pass
4.62%. With and without shared prompts (groups of 8, 256 and 64 tokens) log-probs are the same bits and gradients lie
0.6% apart. When each part of a slot's keys had a softmax of its own, those were averaged in another order than without
sharing; now and then that changes a rounding to bfloat16, and through thirty layers it came to 4.4%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from asyncrl.learner.products import bfloat16_products, with_columns
from asyncrl.packing import AttentionBlock

_TILE_QUERIES = 128  # at most, of a triangle; more waste the part above the diagonal, fewer repeat what a tile costs
_TILE_SCORES = 1 << 17  # at most, of a head: with 9 heads 2.3 MiB in bfloat16, what two cores cache close by
_LEAST_QUERIES = 32  # below that many, products lose more than the cache gives


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

    Where `blocks` hold some of the slots only, there are as many queries and results, in the blocks' order.
    """
    assert attention_mask is None
    assert query.shape[0] == 1
    result: torch.Tensor = _TreeAttention.apply(query, key, value, blocks, scaling)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2), None


class _TreeAttention(torch.autograd.Function):
    """q [1, H, N, D], k and v [1, J, N, D] to [1, H, N, D], whose memory is in the order of [1, N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[AttentionBlock, ...], scale: float
    ) -> torch.Tensor:
        q_J, k_J, v_J = (tensor.to(_wide(q.dtype)) for tensor in (_by_key_head(q, len(k[0])), k[0], v[0]))
        before, after = _scales(scale)
        q_J = q_J * before
        result = q.new_empty(q.shape[2], *q_J.shape[:2], q.shape[3]).permute(1, 2, 0, 3)
        total = q_J.new_empty(q_J.shape[:3])  # log of the sum of exp(score)
        raw, soft = (_Space(blocks, q_J.shape, q_J.dtype, q.device) for _ in range(2))
        for block in blocks:
            block_k, block_v = _gather(k_J, block.keys), _gather(v_J, block.keys)
            for tile in cut(block):
                keys = block_k[:, : tile.num_keys]
                with bfloat16_products(q.dtype):
                    scores = torch.bmm(_rows(q_J, tile.queries), keys.transpose(1, 2), out=raw.of(tile))
                if after != 1.0:
                    scores.mul_(after)
                _hide(scores, tile)
                weights = torch.softmax(scores, -1, out=soft.of(tile))
                # The largest weight is that of the largest score, and their logarithms differ by the log-sum-exp.
                total[:, :, tile.queries] = _of_rows(scores.amax(-1) - weights.amax(-1).log(), tile)
                with bfloat16_products(q.dtype):
                    part = torch.bmm(weights, block_v[:, : tile.num_keys])
                result[:, :, tile.queries] = _of_rows(part, tile)
        whole = result.flatten(0, 1).unsqueeze(0)
        ctx.save_for_backward(q, k, v, whole, total)
        ctx.blocks, ctx.scale = blocks, scale
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """With p = exp(score - total): dv = p^T g, ds = p (g v^T - mean), mean = sum of g * result, dq = ds k scale."""
        q, k, v, result, total = ctx.saved_tensors
        before, after = _scales(ctx.scale)
        k_J, v_J = k[0].contiguous(), v[0].contiguous()
        q_J, grad_J = _by_key_head(q, len(k_J)) * before, _by_key_head(grad, len(k_J))
        mean = (grad_J.to(total.dtype) * _by_key_head(result, len(k_J))).sum(3)
        shifted_q, shifted_grad = with_columns(q_J, total / -after), with_columns(grad_J, -mean)
        shifted_k, shifted_v = with_columns(k_J, None), with_columns(v_J, None)
        grad_q = torch.empty_like(q_J)
        grad_k, grad_v = torch.zeros_like(k_J, dtype=total.dtype), torch.zeros_like(v_J, dtype=total.dtype)
        spaces = [_Space(ctx.blocks, q_J.shape, q.dtype, q.device) for _ in range(2)]
        for block in ctx.blocks:
            block_k, shifted_block_k, shifted_block_v = (_gather(t, block.keys) for t in (k_J, shifted_k, shifted_v))
            for tile in cut(block):
                keys, values = (t[:, : tile.num_keys] for t in (shifted_block_k, shifted_block_v))
                weights, grad_scores = (space.of(tile) for space in spaces)
                torch.bmm(_rows(shifted_q, tile.queries), keys.transpose(1, 2), out=weights)  # their logarithms
                if after != 1.0:
                    weights.mul_(after)
                _hide(weights, tile)
                weights.exp_()
                rows_grad = _rows(grad_J, tile.queries)
                _scatter(grad_v, block.keys, torch.bmm(weights.transpose(1, 2), rows_grad))
                torch.bmm(_rows(shifted_grad, tile.queries), values.transpose(1, 2), out=grad_scores).mul_(weights)
                _scatter(grad_k, block.keys, torch.bmm(grad_scores.transpose(1, 2), _rows(q_J, tile.queries)))
                rows_q = torch.bmm(grad_scores, block_k[:, : tile.num_keys])
                grad_q[:, :, tile.queries] = _of_rows(rows_q, tile)
        grad_q.mul_(before * after)
        grad_k.mul_(after)
        dtype = q.dtype
        return grad_q.view(q.shape), grad_k.to(dtype).unsqueeze(0), grad_v.to(dtype).unsqueeze(0), None, None


class Tile(NamedTuple):
    """Rows of one step's queries, and how many of its block's keys they see; the last of those are their own."""

    queries: slice
    num_keys: int

    @property
    def num_queries(self) -> int:
        """Of one head."""
        return int(self.queries.stop - self.queries.start)


class _Space:
    """Memory for the scores of one tile after the other: new memory for each would be cleared by the system first."""

    def __init__(
        self, blocks: Sequence[AttentionBlock], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._matrices, self._heads = shape[:2]
        scores = max(tile.num_queries * tile.num_keys for block in blocks for tile in cut(block))
        self._flat = torch.empty(self._matrices * self._heads * scores, dtype=dtype, device=device)

    def of(self, tile: Tile) -> torch.Tensor:
        """[J, G * L, K], of the same memory for each tile."""
        size = self._matrices * self._heads * tile.num_queries * tile.num_keys
        return self._flat[:size].view(self._matrices, -1, tile.num_keys)


def cut(block: AttentionBlock) -> list[Tile]:
    """Return tiles that cover the block's rows. Where a run of slots is cut depends on nothing outside of it."""
    tiles = []
    first, end = block.queries.start, block.queries.stop
    num_before = sum(part.stop - part.start for part in block.before)
    while first < end:
        most = max(_LEAST_QUERIES, _TILE_SCORES // (num_before + min(first + _TILE_QUERIES, end) - block.queries.start))
        queries = slice(first, min(first + most, first + _TILE_QUERIES, end))
        rows = slice(queries.start - block.shift, queries.stop - block.shift)
        tiles.append(Tile(rows, num_before + queries.stop - block.queries.start))
        first = queries.stop
    return tiles


def _gather(tensor: torch.Tensor, slots: Sequence[slice]) -> torch.Tensor:
    """[J, N, D] to [J, K, D]; a view where the slots lie together."""
    return torch.cat([tensor[:, part] for part in slots], 1) if len(slots) > 1 else tensor[:, slots[0]]


def _scatter(total: torch.Tensor, slots: Sequence[slice], added: torch.Tensor) -> None:
    """Add [J, K, D] to the first K slots of them in a total [J, N, D]."""
    first = 0
    for part in slots:
        rows = added[:, first : first + part.stop - part.start]
        total[:, part.start : part.start + rows.shape[1]] += rows
        first += part.stop - part.start


def _scales(scale: float) -> tuple[float, float]:
    """Return what queries and what scores are multiplied by.

    A power of two goes to the few queries, because it leaves a bfloat16 number one; anything else to the scores.
    """
    return (scale, 1.0) if math.frexp(scale)[0] == 0.5 else (1.0, scale)


def _by_key_head(tensor: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """[1, H, N, D] to [J, G, N, D]."""
    split: torch.Tensor = tensor[0].unflatten(0, (num_key_heads, -1))
    return split


def _rows(tensor: torch.Tensor, queries: slice) -> torch.Tensor:
    """[J, G, N, D] to [J, G * L, D]."""
    return tensor[:, :, queries].flatten(1, 2)


def _of_rows(rows: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[J, G * L, ...] to [J, G, L, ...]."""
    split: torch.Tensor = rows.unflatten(1, (-1, tile.num_queries))
    return split


def _hide(scores: torch.Tensor, tile: Tile) -> None:
    """Make -inf what lies ahead, in the scores [J, G * L, K]."""
    count = tile.num_queries
    # Adding is several times faster than filling in by a mask that is broadcast.
    ahead = torch.full((count, count), float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
    _of_rows(scores, tile)[..., scores.shape[2] - count :].add_(ahead)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
