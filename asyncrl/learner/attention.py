"""Attention over a microbatch's token tree, as transformers' attention interface calls it.

Legend: `N` slots, `R` rows of a block, `L` queries of a row, `K` keys of a row, `H` query heads, `J` key heads, `D` the
width of a head.

On a CPU, PyTorch's flash kernel is slow at these lengths: for one prompt of 100 tokens with 8 completions of 62 its
backward took 10 ms, the single operations below timed apart add up to about 3. So each block is three batched matrix
products around a softmax, in float32 whatever the model's dtype. The scores are computed again in the backward pass
instead of being kept.
On a GPU, flash-attn's variable-length kernel takes the same rows; that path has not been tried.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import AttentionInterface

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
        result = torch.empty_like(q, memory_format=torch.contiguous_format)
        flat = result.view(len(q), -1)
        for block in blocks:
            block_q, block_k, block_v = _gather(q, k, v, block)
            weights = _weights(block_q, block_k, block, scale)
            _scatter(flat, torch.bmm(weights, block_v), block, q.shape)
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scale = blocks, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        wide = _wide(q.dtype)
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k = torch.zeros(len(k), k[0].numel(), dtype=wide, device=k.device)
        grad_v = torch.zeros_like(grad_k)
        for block in ctx.blocks:
            block_q, block_k, block_v = _gather(q, k, v, block)
            weights = _weights(block_q, block_k, block, ctx.scale)
            # Padded queries must send nothing back: their rows of the incoming gradient stay zero.
            block_grad = _gather_grad(grad, block)
            _add_keys(grad_v, torch.bmm(weights.transpose(1, 2), block_grad), block)
            grad_weights = torch.bmm(block_grad, block_v.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, wide).mul_(ctx.scale)
            _scatter(grad_q.view(len(q), -1), torch.bmm(grad_scores, block_k), block, q.shape)
            _add_keys(grad_k, torch.bmm(grad_scores.transpose(1, 2), block_q), block)
        return grad_q, grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(flat: torch.Tensor, num_rows: int, num_heads: int) -> torch.Tensor:
    """[R * L, J, H / J, D] to [R * J, (H / J) * L, D] in float32 (or float64).

    The query heads of one key head are stacked.
    """
    _, groups, heads, width = flat.shape
    rows = flat.view(num_rows, -1, groups, heads, width).permute(0, 2, 3, 1, 4).to(_wide(flat.dtype))
    return rows.reshape(num_rows * num_heads, -1, width)


def _gather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = k.shape[1]
    return (
        _rows(q.index_select(0, block.query_index), block.num_rows, heads),
        _rows(k.index_select(0, block.key_index).unsqueeze(2), block.num_rows, heads),
        _rows(v.index_select(0, block.key_index).unsqueeze(2), block.num_rows, heads),
    )


def _gather_grad(grad: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    rows = grad.new_zeros(len(block.query_index), *grad.shape[1:])
    rows.index_copy_(0, block.result_index, grad.index_select(0, block.slot_index))
    return _rows(rows, block.num_rows, grad.shape[1])


def _weights(q: torch.Tensor, k: torch.Tensor, block: AttentionBlock, scale: float) -> torch.Tensor:
    """[R * J, (H / J) * L, K] softmax over the visible keys."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    shape = (block.num_rows, -1, *block.hidden.shape[1:])
    scores.view(shape).masked_fill_(block.hidden.unsqueeze(1), float("-inf"))
    return torch.softmax(scores, -1)


def _scatter(flat: torch.Tensor, rows: torch.Tensor, block: AttentionBlock, shape: torch.Size) -> None:
    """Write [R * J, (H / J) * L, D] into the [N, H * D] slots of the block's real queries."""
    _, groups, heads, width = shape
    back = rows.view(block.num_rows, groups, heads, -1, width).permute(0, 3, 1, 2, 4).to(flat.dtype)
    flat.index_copy_(0, block.slot_index, back.reshape(-1, groups * heads * width).index_select(0, block.result_index))


def _add_keys(total: torch.Tensor, rows: torch.Tensor, block: AttentionBlock) -> None:
    """Add [R * J, K, D] to the [N, J * D] slots of the block's keys (padded ones are exactly zero)."""
    width = rows.shape[-1]
    heads = total.shape[1] // width
    back = rows.view(block.num_rows, heads, -1, width).transpose(1, 2)
    total.index_add_(0, block.key_index, back.reshape(-1, heads * width))


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
