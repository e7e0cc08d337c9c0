"""The implementations of attention over a token tree, and which one a learner takes. They compute the same.

Legend: `N` slots, `H` query heads, `J` key heads, `D` the width of a head.

| name | what | where |
|---|---|---|
| flash_attn | variable-length kernels of the package flash-attn | CUDA, 16 bits |
| varlen | variable-length kernels that PyTorch brings along | CUDA, 16 bits |
| flex | PyTorch's flex attention, compiled for the mask of the tree | CUDA |
| tiles | `asyncrl.learner.attention`: tiles of plain matrix products | anywhere; the fastest on a CPU |
| sdpa | scaled_dot_product_attention with the tree's mask [N, N] | anywhere; the plainest |

A microbatch is laid out depth first, so the slots that see a key are those from it up to the end of its branch: one
number a key says all that a mask does. Kernels for runs of variable length know no branches; each run of slots is given
as a sequence of its own, with copies of all keys that it sees. What needs CUDA has not been tried on one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.learner.attention import tree_attention
from asyncrl.learner.context import Tree
from asyncrl.packing import AttentionBlock

_PREFIX = "asyncrl_"
_CUDA_ONLY = ("flash_attn", "varlen", "flex")
_16_BITS_ONLY = ("flash_attn", "varlen")

Attention = Callable[..., tuple[torch.Tensor, None]]
"""As `tree_attention`."""

Kernel = Callable[..., torch.Tensor]
"""From (q [Q, H, D], k [K, J, D], v [K, J, D], edges of the queries' and of the keys' sequences, the longest of each,
scale) to [Q, H, D]. The last query of a sequence sees its last key, the one before it all but that, and so on.
"""


def choose(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the implementation for a setting: "auto" takes the first of the table that runs here.

    Raises: ConfigError for one that does not.
    """
    on_cuda, is_16_bits = device.type == "cuda", dtype in (torch.bfloat16, torch.float16)
    if kind == "auto":
        if not on_cuda:
            return "tiles"
        if not is_16_bits:
            return "flex"
        return "flash_attn" if _has_flash_attn() else "varlen"
    if kind in _CUDA_ONLY and not on_cuda:
        raise ConfigError(f'attention = "{kind}" needs a CUDA device; take "auto", "tiles" or "sdpa" ([learner])')
    if kind in _16_BITS_ONLY and not is_16_bits:
        raise ConfigError(f'attention = "{kind}" needs dtype = "bfloat16" ([learner])')
    if kind == "flash_attn" and not _has_flash_attn():
        raise ConfigError('attention = "flash_attn", but the package flash-attn is not installed ([learner])')
    return kind


def register(name: str, *, compiled: bool = False) -> str:
    """Make the implementation `name` known to transformers, and return what it is called there; may be called again.

    Where layers are `compiled` it is left out of their programs.
    """
    function, called = _of_a_tree(implementation(name)), _PREFIX + name
    if compiled:
        function, called = torch.compiler.disable(function), f"{called}_apart"
    AttentionInterface.register(called, function)
    return called


def implementation(name: str) -> Attention:
    """Return what computes it, called as `tree_attention` is."""
    return _KINDS[name]


def _of_a_tree(function: Attention) -> Attention:
    """Return what transformers calls: with the keys and values of all ranks that read one microbatch between them."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        tree: Tree,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if tree.gather is not None:
            key, value = tree.gather(key, value)
        return function(module, query, key, value, attention_mask, blocks=tree.blocks, **options)

    return attention


def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


# --- by a mask ------------------------------------------------------------------------------------------------


def seen_until(blocks: Sequence[AttentionBlock], num_slots: int, device: torch.device) -> torch.Tensor:
    """Return [N] int64: of each slot as a key the slot after the last that sees it; all from the key up to it do."""
    until = torch.zeros(num_slots, dtype=torch.int64)
    for block in blocks:
        for part in block.keys:
            until[part] = until[part].clamp(min=block.queries.stop)
    return until.to(device)


def slots_of_rows(blocks: Sequence[AttentionBlock], device: torch.device) -> torch.Tensor:
    """Return int64, the slot of each query that there is."""
    return torch.cat([torch.arange(block.queries.start, block.queries.stop) for block in blocks]).to(device)


def masked_attention(
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
    """As `tree_attention`, by scaled_dot_product_attention."""
    until, slot = seen_until(blocks, key.shape[2], query.device), torch.arange(key.shape[2], device=query.device)
    looking = slots_of_rows(blocks, query.device).unsqueeze(1)
    mask = (slot <= looking) & (looking < until)
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return result.transpose(1, 2), None


def flex_tree_attention(
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
    """As `tree_attention`, by flex attention; on a CPU it has no backward pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    until, looking = seen_until(blocks, key.shape[2], query.device), slots_of_rows(blocks, query.device)

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return (slot <= looking[row]) & (looking[row] < until[slot])

    mask = create_block_mask(sees, None, None, len(looking), key.shape[2], device=str(query.device))
    result = _flex(query.is_cuda)(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return result.transpose(1, 2), None


@cache
def _flex(compiled: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Only compiled does it skip what the mask leaves out; of microbatches of other lengths there is one program.
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention  # type: ignore[return-value]


# --- by runs of variable length -------------------------------------------------------------------------------


def by_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[AttentionBlock],
    scale: float,
    kernel: Kernel,
) -> torch.Tensor:
    """Return [1, N, H, D] for query [1, H, N, D], key and value [1, J, N, D]: each run of slots is a sequence."""
    slots = torch.arange(key.shape[2], device=query.device)
    keys = [torch.cat([slots[part] for part in block.keys]) for block in blocks]  # a block's own come last
    index = torch.cat(keys)
    lengths = [[block.num_queries for block in blocks], [len(part) for part in keys]]
    edges = [torch.tensor([0, *n], device=query.device).cumsum(0).int() for n in lengths]
    result = kernel(
        query[0].transpose(0, 1),  # the blocks hold every query once, in order
        key[0].transpose(0, 1)[index],
        value[0].transpose(0, 1)[index],
        *edges,
        *map(max, lengths),
        scale,
    )
    return result.unsqueeze(0)


def _by_runs_of(kernel: Kernel) -> Callable[..., tuple[torch.Tensor, None]]:
    def attention(
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
        return by_runs(query, key, value, blocks, scaling, kernel), None

    return attention


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: Any) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    *edges_and_longest, scale = sizes
    result: torch.Tensor = flash_attn_varlen_func(q, k, v, *edges_and_longest, softmax_scale=scale, causal=True)
    return result


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: Any) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    *edges_and_longest, scale = sizes
    result = varlen_attn(q, k, v, *edges_and_longest, scale=scale, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(result, torch.Tensor)
    return result


_KINDS = MappingProxyType(
    {
        "flash_attn": _by_runs_of(_flash_attn),
        "varlen": _by_runs_of(_varlen),
        "flex": flex_tree_attention,
        "tiles": tree_attention,
        "sdpa": masked_attention,
    }
)
