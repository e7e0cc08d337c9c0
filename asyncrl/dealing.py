"""A batch's segments dealt out to ranks, so that each reads about as many tokens and shared prefixes stay together.

All ranks wait for the slowest in every layer, so the largest share is what a step costs. A group whose prompt is read
once is worth keeping on one rank; dealt out over two, the prompt is read twice. Segments are laid in the order in which
`packing.split` shares prefixes and cut into stretches of equal cost; then single segments move, or change places,
from the rank that has most to the one that has least for as long as that brings the two nearer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from asyncrl.packing import Batch, common_prefix

_LARGEST_EXCESS = 0.02  # of the mean share; below, a move costs more shared prefix than it balances
_MOST_MOVES = 50  # a batch needs a handful of them
_MOST_PARTNERS = 3  # ranks with the least, with which the one that has most looks for a change
_LOOKED_AT = 8


def deal(
    batch: Batch,
    num_ranks: int,
    *,
    max_tokens: int,
    share_prefixes: bool = True,
    apart: torch.Tensor | None = None,
) -> list[list[int]]:
    """Return the segments of each rank, ascending; every segment of `batch` is in one share.

    Shares are equal in the slots that `packing.split` makes of them, as far as the lengths allow. Segments marked in
    `apart` [S] bool and those that are not are dealt out one after the other, so that each kind is equal by itself.
    """
    if num_ranks == 1:
        return [list(range(batch.num_segments))]
    tokens, bounds = batch.token_ids.numpy(), batch.cu_seqlens.tolist()
    rows = [tokens[start:end] for start, end in pairwise(bounds)]
    groups = batch.group_index.tolist()
    kinds = [False] * len(rows) if apart is None else apart.tolist()
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for kind in (False, True):
        members = [s for s in range(len(rows)) if kinds[s] == kind]
        order = sorted(members, key=lambda s: (groups[s], rows[s].tolist()))
        dealt = _Dealing(
            [rows[s] for s in order],
            [groups[s] for s in order],
            num_ranks,
            max_tokens=max_tokens,
            share_prefixes=share_prefixes,
        )
        for share, places in zip(shares, dealt.shares, strict=True):
            share += [order[place] for place in places]
    return [sorted(share) for share in shares]


class _Dealing:
    """Shares of `rows`, which stand in the order in which they share prefixes; a share is ascending places in it."""

    def __init__(
        self,
        rows: Sequence[np.ndarray],
        groups: Sequence[int],
        num_ranks: int,
        *,
        max_tokens: int,
        share_prefixes: bool,
    ) -> None:
        self._max_tokens = max_tokens
        self._lengths = [len(row) for row in rows]
        # Of each row with the one before it. Rows are sorted, so what two of them share is the least on the way.
        self._shared = [
            common_prefix(rows[place - 1], rows[place])
            if share_prefixes and place and groups[place - 1] == groups[place]
            else 0
            for place in range(len(rows))
        ]
        self.shares = self._cut(num_ranks)
        self._level()

    def _added(self, before: int, place: int) -> int:
        """Return the slots that a row adds after the one before it; -1 is none."""
        return self._lengths[place] - (0 if before < 0 else min(self._shared[before + 1 : place + 1]))

    def _cost(self, share: Sequence[int]) -> int:
        """Return the slots of a share's microbatches, as `packing.split` fills them."""
        total = used = 0
        for before, place in pairwise([-1, *share]):
            added, alone = self._added(before, place), self._lengths[place]
            if used + added > self._max_tokens:
                used, added = 0, alone
            used += added
            total += added
        return total

    def _saved(self, share: Sequence[int], place: int) -> int:
        """Return the slots that a share loses without one of its rows."""
        return self._between(share, bisect_left(share, place), bisect_right(share, place), place)

    def _brought(self, share: Sequence[int], place: int) -> int:
        """Return the slots that a share gains with one row more."""
        at = bisect_left(share, place)
        return self._between(share, at, at, place)

    def _between(self, share: Sequence[int], start: int, end: int, place: int) -> int:
        before = share[start - 1] if start else -1
        if end == len(share):
            return self._added(before, place)
        after = share[end]
        return self._added(before, place) + self._added(place, after) - self._added(before, after)

    def _cut(self, num_ranks: int) -> list[list[int]]:
        total = self._cost(range(len(self._lengths)))
        shares: list[list[int]] = [[] for _ in range(num_ranks)]
        passed = 0.0
        for place in range(len(self._lengths)):
            added = self._added(place - 1, place)
            middle = passed + added / 2
            shares[min(num_ranks - 1, int(middle * num_ranks / max(1, total)))].append(place)
            passed += added
        return shares

    def _level(self) -> None:
        costs = [self._cost(share) for share in self.shares]
        for _ in range(_MOST_MOVES):
            most, mean = costs.index(max(costs)), sum(costs) / len(costs)
            if costs[most] - mean <= _LARGEST_EXCESS * mean:
                return
            others = sorted(set(range(len(costs))) - {most}, key=costs.__getitem__)[:_MOST_PARTNERS]
            found = [self._better(most, other, costs) for other in others]
            best = min((change for change in found if change is not None), key=lambda change: change[0], default=None)
            if best is None:
                return
            _, other, given, taken = best
            for one, gone, come in ((most, given, taken), (other, taken, given)):
                self.shares[one] = sorted(({*self.shares[one]} | {come}) - {gone, -1})
                costs[one] = self._cost(self.shares[one])

    def _better(self, most: int, other: int, costs: Sequence[int]) -> tuple[int, int, int, int] | None:
        """Return (larger cost after it, other, what is given, what is taken for it) of the best change, if it helps.

        -1 is taken where a row moves and nothing comes back. Changes are weighed as if giving and taking did not touch;
        the likeliest few are then looked at whole.
        """
        larger, smaller = self.shares[most], self.shares[other]
        given = [(a, self._saved(larger, a), self._brought(smaller, a)) for a in larger]
        taken = [(b, self._brought(larger, b), self._saved(smaller, b)) for b in smaller]
        changes = [
            (max(costs[most] - less + back, costs[other] + more - gone), a, b)
            for a, less, more in given
            for b, back, gone in [(-1, 0, 0), *taken]
        ]
        best: tuple[int, int, int, int] | None = None
        for _, a, b in heapq.nsmallest(_LOOKED_AT, changes):
            after = [sorted(({*larger} | {b}) - {a, -1}), sorted(({*smaller} | {a}) - {b})]
            worst = max(self._cost(share) for share in after)
            if worst < (costs[most] if best is None else best[0]):
                best = (worst, other, a, b)
        return best
