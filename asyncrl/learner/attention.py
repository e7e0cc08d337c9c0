"""Attention over a microbatch's token tree, as transformers' attention interface calls it.

Legend: `N` slots, `H` query heads, `J` key heads, `G` = H / J, `D` the width of a head, `L` queries and
`K` keys of a tile.

The blocks are walked in tiles, as flash attention does (arXiv:2307.08691). A tile is a few batched matrix products; the
query heads of one key head share a matrix. A slot whose keys lie in several tiles gets a result and a log-sum-exp from
each, which are averaged by their shares. The backward pass computes the weights again from the whole log-sum-exp.

In a bfloat16 model the forward pass is in float32 (in bfloat16 tiles where the CPU has them: `products`). The backward
pass has bfloat16 products, twice as fast, that give the logarithm of a weight and the gradient of a score less the
row's mean: what the two are made of is rounded once, at the size of the small result and not of the large terms. On
text, with 135M parameters: the gradient lies 4.61% of its norm from a float32 model's, with a float32 backward pass
4.62%. How keys are dealt out to blocks changes the last digit of a float32 sum, and so now and then a rounding to
bfloat16; through thirty layers that comes to about as much: gradients with and without shared prompts lie 4.4% apart.
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

    `blocks` reaches this function through the model's keyword arguments.
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
        result = q.new_empty(q.shape[2], *q_J.shape[:2], q.shape[3], dtype=_sum_dtype(q, blocks)).permute(1, 2, 0, 3)
        total = q_J.new_empty(q_J.shape[:3])  # log of the sum of exp(score)
        tiles = cut(blocks)
        raw, soft = (_Space(tiles, q_J.shape, q_J.dtype, q.device) for _ in range(2))
        for tile in tiles:
            queries, keys = tile.queries, tile.keys
            with bfloat16_products(q.dtype):
                scores = torch.bmm(_rows(q_J, queries), k_J[:, keys].transpose(1, 2), out=raw.of(tile))
            if after != 1.0:
                scores.mul_(after)
            if tile.is_causal:
                _hide(scores, tile)
            weights = torch.softmax(scores, -1, out=soft.of(tile))
            # The largest weight is that of the largest score, and their logarithms differ by the log-sum-exp.
            part_total = _of_rows(scores.amax(-1) - weights.amax(-1).log(), tile)
            with bfloat16_products(q.dtype):
                part = _of_rows(torch.bmm(weights, v_J[:, keys]), tile)
            if tile.is_causal:  # nothing came before
                result[:, :, queries], total[:, :, queries] = part, part_total
                continue
            both = torch.logaddexp(total[:, :, queries], part_total)
            result[:, :, queries] *= torch.exp(total[:, :, queries] - both).unsqueeze(3)
            result[:, :, queries] += part * torch.exp(part_total - both).unsqueeze(3)
            total[:, :, queries] = both
        whole = result.to(q.dtype).flatten(0, 1).unsqueeze(0)
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
        grad_q = torch.zeros_like(q_J, dtype=_sum_dtype(q, ctx.blocks))
        grad_k, grad_v = torch.zeros_like(k_J, dtype=total.dtype), torch.zeros_like(v_J, dtype=total.dtype)
        tiles = cut(ctx.blocks)
        spaces = [_Space(tiles, q_J.shape, q.dtype, q.device) for _ in range(2)]
        for tile in tiles:
            queries, keys = tile.queries, tile.keys
            weights, grad_scores = (space.of(tile) for space in spaces)
            torch.bmm(_rows(shifted_q, queries), shifted_k[:, keys].transpose(1, 2), out=weights)  # their logarithms
            if after != 1.0:
                weights.mul_(after)
            if tile.is_causal:
                _hide(weights, tile)
            weights.exp_()
            rows_grad = _rows(grad_J, queries)
            grad_v[:, keys] += torch.bmm(weights.transpose(1, 2), rows_grad)
            torch.bmm(_rows(shifted_grad, queries), shifted_v[:, keys].transpose(1, 2), out=grad_scores).mul_(weights)
            grad_k[:, keys] += torch.bmm(grad_scores.transpose(1, 2), _rows(q_J, queries))
            grad_q[:, :, queries] += _of_rows(torch.bmm(grad_scores, k_J[:, keys]), tile)
        grad_q.mul_(before * after)
        grad_k.mul_(after)
        dtype = q.dtype
        return grad_q.to(dtype).view(q.shape), grad_k.to(dtype).unsqueeze(0), grad_v.to(dtype).unsqueeze(0), None, None


class Tile(NamedTuple):
    """Queries and keys of one step; in a causal one the last keys are the queries themselves."""

    queries: slice
    keys: slice
    is_causal: bool

    @property
    def num_scores(self) -> int:
        """Of one head."""
        return int((self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start))


class _Space:
    """Memory for the scores of one tile after the other: new memory for each would be cleared by the system first."""

    def __init__(self, tiles: Sequence[Tile], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._matrices, self._heads = shape[:2]
        size = self._matrices * self._heads * max(tile.num_scores for tile in tiles)
        self._flat = torch.empty(size, dtype=dtype, device=device)

    def of(self, tile: Tile) -> torch.Tensor:
        """[J, G * L, K], of the same memory for each tile."""
        size = self._matrices * self._heads * tile.num_scores
        return self._flat[:size].view(self._matrices, -1, tile.keys.stop - tile.keys.start)


def cut(blocks: Sequence[AttentionBlock]) -> list[Tile]:
    """Return tiles that cover the blocks. Where a run of slots is cut depends on nothing outside of it."""
    tiles = []
    for block in blocks:
        keys, first = block.keys, block.queries.start
        while first < block.queries.stop:
            if block.is_causal:
                keys = slice(block.keys.start, min(first + _TILE_QUERIES, block.queries.stop))
            last = first + max(_LEAST_QUERIES, _TILE_SCORES // (keys.stop - keys.start))
            queries = slice(first, min(last, keys.stop if block.is_causal else block.queries.stop))
            tiles.append(Tile(queries, slice(keys.start, queries.stop) if block.is_causal else keys, block.is_causal))
            first = queries.stop
    return tiles


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
    split: torch.Tensor = rows.unflatten(1, (-1, tile.queries.stop - tile.queries.start))
    return split


def _hide(scores: torch.Tensor, tile: Tile) -> None:
    """Make -inf what lies ahead, in the scores [J, G * L, K] of a causal tile."""
    count = tile.queries.stop - tile.queries.start
    # Adding is several times faster than filling in by a mask that is broadcast.
    ahead = torch.full((count, count), float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
    _of_rows(scores, tile)[..., scores.shape[2] - count :].add_(ahead)


def _sum_dtype(q: torch.Tensor, blocks: Sequence[AttentionBlock]) -> torch.dtype:
    """Return the dtype to add up blocks in: each slot is in one triangle, so without rectangles nothing is added."""
    return q.dtype if all(block.is_causal for block in blocks) else _wide(q.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
