"""One microbatch read by several ranks: each has a part of its slots, and no rank its activations whole.

Legend: `N` slots of the microbatch, `n` of them on this rank, `J` key heads, `D` the width of a head, `P` predictions.

In a layer only attention looks from one slot at another. There each rank gathers the keys and values of all slots, and
computes the attention of its own queries; what the others' queries make of its keys comes back, added up, in the
backward pass. Slots are cut into two chunks a rank, of which a rank takes one from the front and one from the back, so
that causal attention is about as much work for each.

PyTorch's own `context_parallel` (2.13) does the same for its attention functions, and cannot do it here: on a CPU it
knows no attention ("does not have a sharding strategy registered"), elsewhere its ring knows plain causal attention
without a mask, and a microbatch is a tree of tokens. The collectives are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed

from asyncrl.packing import AttentionBlock, Microbatch

Gather = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From this rank's keys and values [1, J, n, D] to those of all slots [1, J, N, D], differentiable."""


class Tree:
    """How the slots of a pass see each other, as it goes through a model's layers to the attention.

    An object of no structure that a compiler could look into: its programs are for trees of any shape.
    """

    def __init__(self, blocks: tuple[AttentionBlock, ...], gather: Gather | None = None) -> None:
        """`gather` is given where the slots are those of one rank, of several that read one microbatch."""
        self.blocks = blocks
        self.gather = gather


class Context:
    """The ranks that read one microbatch between them, as one of them sees it. A single one reads it all."""

    def __init__(self, place: int = 0, count: int = 1, group: Any = None) -> None:
        self.place = place
        self.count = count
        self._group = group

    def part_of(self, microbatch: Microbatch) -> Part:
        """Return what this rank reads of `microbatch`, which all of them have whole."""
        return part_of(microbatch, self.place, self.count)

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Gather`. All of them call it at once."""
        whole: torch.Tensor = _Gather.apply(torch.cat([key, value]), self)  # type: ignore[no-untyped-call]
        return whole[:1], whole[1:]

    def predicted(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """Return [P], of all predictions, from those that this rank made; differentiable.

        Each rank goes on from there with the same numbers, so the gradient of one's own is all that goes back.
        """
        whole: torch.Tensor = _Predicted.apply(values, part, self)  # type: ignore[no-untyped-call]
        return whole

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [count, ...] from a tensor of one shape on all of them."""
        found = tensor.new_empty(self.count * len(tensor), *tensor.shape[1:])
        distributed.all_gather_into_tensor(found, tensor.contiguous(), group=self._group)
        return found.view(self.count, *tensor.shape)

    def add_parts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's entry of [count, ...], added up over all of them."""
        found = tensor.new_empty(tensor.shape[1:])
        distributed.reduce_scatter_tensor(found, tensor.flatten(0, 1).contiguous(), group=self._group)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank reads of a microbatch."""

    microbatch: Microbatch
    """Its slots alone, and what is predicted there; what is by segment or token is the whole microbatch's."""
    made_by: torch.Tensor
    """[P] int64; the rank, of those that share the microbatch, that makes each prediction."""
    place: torch.Tensor
    """[P] int64; where it stands among that rank's predictions."""


def part_of(microbatch: Microbatch, place: int, count: int) -> Part:
    """Return what rank `place` of `count` reads; a slot of nothing is put at the end where chunks would be unequal."""
    size = -(-microbatch.num_slots // (2 * count))
    padding = 2 * count * size - microbatch.num_slots
    ends = range(microbatch.num_slots, microbatch.num_slots + padding)
    blocks = (*microbatch.blocks, *(AttentionBlock(queries=slice(slot, slot + 1), before=()) for slot in ends))
    token_ids, positions = (
        torch.cat([values, values.new_zeros(padding)])
        for values in (microbatch.tree_token_ids, microbatch.tree_position_ids)
    )
    slot_P = microbatch.predict_slot.cpu()
    chunk_P = slot_P // size
    made_by = torch.minimum(chunk_P, 2 * count - 1 - chunk_P)
    row_P = torch.where(chunk_P < count, slot_P - chunk_P * size, size + slot_P - chunk_P * size)
    place_P = torch.zeros_like(slot_P)
    for rank in range(count):
        mine = made_by == rank
        place_P[mine] = torch.arange(int(mine.sum()))
    here = made_by == place
    chunks = [slice(chunk * size, (chunk + 1) * size) for chunk in (place, 2 * count - 1 - place)]
    device = token_ids.device
    return Part(
        microbatch=replace(
            microbatch,
            tree_token_ids=torch.cat([token_ids[chunk] for chunk in chunks]),
            tree_position_ids=torch.cat([positions[chunk] for chunk in chunks]),
            blocks=tuple(
                found
                for number, chunk in enumerate(chunks)
                for block in blocks
                if (found := _within(block, chunk, number * size)) is not None
            ),
            predict_slot=row_P[here].to(device),
            target_ids=microbatch.target_ids[here.to(device)],
        ),
        made_by=made_by,
        place=place_P,
    )


def _within(block: AttentionBlock, chunk: slice, first_row: int) -> AttentionBlock | None:
    """Return what of a block's queries lies in a chunk, whose first slot is row `first_row` of the rank's queries."""
    start, stop = max(block.queries.start, chunk.start), min(block.queries.stop, chunk.stop)
    if start >= stop:
        return None
    past = (slice(block.queries.start, start),) if start > block.queries.start else ()
    return AttentionBlock(queries=slice(start, stop), before=(*block.before, *past), shift=chunk.start - first_row)


class _Gather(torch.autograd.Function):
    """[B, J, n, D] of each rank to [B, J, N, D], in the order of slots."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        front, back = context.all_gather(mine).chunk(2, 3)
        return torch.cat([*front, *back.flip(0)], 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        context: Context = ctx.context
        chunks = grad.chunk(2 * context.count, 2)
        pairs = [torch.cat([chunks[rank], chunks[-1 - rank]], 2) for rank in range(context.count)]
        return context.add_parts(torch.stack(pairs)), None


class _Predicted(torch.autograd.Function):
    """[p] of each rank to [P]."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, part: Part, context: Context) -> torch.Tensor:
        ctx.here = (part.made_by == context.place).to(mine.device)
        most = int(part.place.max()) + 1 if len(part.place) else 1
        padded = mine.new_zeros(most)
        padded[: len(mine)] = mine
        found = context.all_gather(padded)
        return found[part.made_by.to(mine.device), part.place.to(mine.device)]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[ctx.here], None, None
