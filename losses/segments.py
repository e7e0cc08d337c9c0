"""Sums over the sequences of a packed batch. `T` packed tokens, `S` sequences.

Sums never cross a sequence and never subtract a running total, so that the result for one sequence does not depend on
what is packed before it, and the first token's prefix sum is exactly its own value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.errors import ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the sequences of a packed batch lie."""

    cu_seqlens: torch.Tensor
    """[S+1] int64; sequence i is the tokens cu_seqlens[i] up to cu_seqlens[i+1]."""
    index: torch.Tensor
    """[T] int64; the sequence of each token."""

    @property
    def num_sequences(self) -> int:
        """S, empty sequences included."""
        return self.cu_seqlens.numel() - 1

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [S], the sum over each sequence; 0 for an empty one. Differentiable."""
        return values_T.new_zeros(self.num_sequences).index_add(0, self.index, values_T)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return [T], each token's sequence's value. Differentiable."""
        return values_S[self.index]


def segments_of(cu_seqlens: torch.Tensor, num_tokens: int) -> Segments:
    """Return the layout of `num_tokens` packed tokens.

    `cu_seqlens` [S+1], integer: starts at 0, never decreases, ends at `num_tokens`.
    Raises: ShapeError when it does not.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ShapeError(f"cu_seqlens must be integers [S+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    cu = cu_seqlens.detach().to(torch.int64)
    lengths = cu.diff()
    first, last, shortest = torch.stack([cu[0], cu[-1], lengths.min() if len(lengths) else cu[0]]).tolist()
    if first != 0 or last != num_tokens or shortest < 0:
        raise ShapeError(
            f"cu_seqlens must start at 0, never decrease and end at T={num_tokens}; it starts at {first}, "
            f"ends at {last}, shortest sequence {shortest}"
        )
    index = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths, output_size=num_tokens)
    return Segments(cu_seqlens=cu, index=index)


def prefix_sum(values_T: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return [T], the sum of each sequence's values up to and including token t. Not differentiable.

    By doubling, O(T log L) for a longest sequence of L tokens.
    """
    return _scan(values_T, segments, 1.0, forward=True)


def discounted_suffix_sum(values_T: torch.Tensor, segments: Segments, discount: float) -> torch.Tensor:
    """Return [T], sum over s >= t of discount^(s-t) values[s] inside token t's sequence. Not differentiable."""
    return _scan(values_T, segments, discount, forward=False)


def _scan(values_T: torch.Tensor, segments: Segments, factor: float, *, forward: bool) -> torch.Tensor:
    total = values_T.detach().clone()
    num_tokens = total.numel()
    if num_tokens == 0:
        return total
    longest = int(segments.cu_seqlens.diff().max())
    shift = 1
    while shift < longest and factor != 0.0:
        same = segments.index[shift:] == segments.index[:-shift]
        if forward:
            total[shift:] += torch.where(same, total[:-shift], 0.0) * factor
        else:
            total[:-shift] += torch.where(same, total[shift:], 0.0) * factor
        factor *= factor
        shift *= 2
    return total
