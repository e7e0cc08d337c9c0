"""Pairs of trajectories for a preference loss, from the rewards inside a group.

The better of two trajectories of one task is the chosen one. A trajectory of several segments is one side of its pair:
its margin is the sum over the sampled tokens of all its segments, as the probability of all that the policy did is a
product over them (DPO over whole trajectories; arXiv:2305.18290, and arXiv:2403.02502 for agents).

A batch of pairs holds trajectory 2i, chosen, and 2i + 1, rejected, of pair i; its `group_index` is the pair. The loss
of a pair is no sum over its tokens, so both sides stay in one microbatch, and each pair counts once whatever the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from asyncrl.learner.credit import Selection
from asyncrl.learner.settings import PairSettings
from asyncrl.learner.teacher_rows import take
from asyncrl.packing import Batch, Microbatch, lay_out, split
from asyncrl.types import Group, Segment, Trajectory


def choose_pairs(groups: Sequence[Group], settings: PairSettings) -> Selection:
    """Return the pairs of all groups: the best against the worst, the second best against the second worst, and so on.

    Equal rewards stand in the group's own order, the earlier one nearer to the best. A pair is of one agent, and its
    rewards differ by more than `min_gap`; trajectories without a reward or without a sampled token are in no pair.
    """
    pairs: list[tuple[Trajectory, Trajectory]] = []
    places: list[int] = []
    rewarded: list[tuple[int, Trajectory]] = []
    for place, group in enumerate(groups):
        known = [t for t in group.trajectories if t.reward is not None]
        rewarded += [(place, t) for t in known]
        for agent in sorted({t.agent for t in known}):
            sampled = [t for t in known if t.agent == agent and t.num_sampled_tokens]
            ranked = sorted(sampled, key=lambda t: -_reward(t))
            for rank in range(min(settings.per_group, len(ranked) // 2)):
                best, worst = ranked[rank], ranked[-1 - rank]
                if _reward(best) - _reward(worst) > settings.min_gap:
                    pairs.append((best, worst))
                    places.append(place)
    chosen = [trajectory for pair in pairs for trajectory in pair]
    used = {id(trajectory) for trajectory in chosen}
    left = [(place, t) for place, t in rewarded if id(t) not in used]
    return Selection(
        trajectories=[*chosen, *(t for _, t in left)],
        group_index=[*(place for place in places for _ in range(2)), *(place for place, _ in left)],
        num_failed=sum(len(group.trajectories) for group in groups) - len(rewarded),
        batch=_lay_out_pairs(chosen),
        metrics={
            "num_pairs": len(pairs),
            "num_unpaired_trajectories": len(left),
            "num_groups_without_pair": len(groups) - len(set(places)),
        },
    )


def deal_pairs(batch: Batch, num_ranks: int) -> list[list[int]]:
    """Return the pairs of each rank, ascending: the longest first, each to the rank that has the fewest tokens."""
    lengths = torch.zeros(_num_pairs(batch), dtype=torch.int64)
    lengths = lengths.index_add(0, batch.group_index, batch.cu_seqlens.diff())
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    costs = [0] * num_ranks
    for pair in lengths.argsort(descending=True, stable=True).tolist():
        least = costs.index(min(costs))
        shares[least].append(pair)
        costs[least] += int(lengths[pair])
    return [sorted(share) for share in shares]


def split_pairs(
    batch: Batch, *, max_tokens: int, share_prefixes: bool, pairs: Sequence[int] | None = None
) -> list[Microbatch]:
    """Return microbatches that hold whole pairs, as many as fit into `max_tokens` tokens without sharing.

    A pair that is longer gets a microbatch of its own. `pairs` are those to cover; None is all of them.
    """
    lengths = batch.cu_seqlens.diff().tolist()
    bins: list[list[int]] = []
    used = 0
    for pair in range(_num_pairs(batch)) if pairs is None else pairs:
        segments = (batch.group_index == pair).nonzero().flatten().tolist()
        length = sum(lengths[s] for s in segments)
        if bins and used + length <= max_tokens:
            bins[-1] += segments
            used += length
        else:
            bins.append(segments)
            used = length
    microbatches = []
    for members in bins:
        chosen = torch.tensor(members)
        part, stood = take(batch, chosen)
        (microbatch,) = split(part, max_tokens=max(1, part.num_tokens), share_prefixes=share_prefixes)
        microbatches.append(
            replace(
                microbatch,
                segment_index=chosen[microbatch.segment_index],
                token_index=stood[microbatch.token_index],
            )
        )
    return microbatches


def pair_inputs(batch: Batch, segments: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss inputs of whole pairs' `segments`, ascending, with trajectories as sequences."""
    lengths = batch.cu_seqlens.diff()[segments]
    trajectories, owner = torch.unique(batch.trajectory_index[segments], return_inverse=True)
    totals = lengths.new_zeros(len(trajectories)).index_add(0, owner, lengths)
    return {
        "cu_seqlens": torch.cat([totals.new_zeros(1), totals.cumsum(0)]),
        "pairs": torch.arange(len(trajectories)).reshape(-1, 2),
    }


def _num_pairs(batch: Batch) -> int:
    return len(batch.group_index.unique())


def _lay_out_pairs(trajectories: Sequence[Trajectory]) -> Batch:
    segments: list[Segment] = []
    owners: list[int] = []
    for index, trajectory in enumerate(trajectories):
        # A segment without a token has no slot in a microbatch, and nothing to say about its side.
        kept = [segment for segment in trajectory.segments if len(segment.token_ids)]
        segments += kept
        owners += [index] * len(kept)
    return lay_out(
        segments,
        trajectory_index=owners,
        group_index=[owner // 2 for owner in owners],
        advantages=[0.0] * len(owners),
        rewards=[_reward(trajectories[owner]) for owner in owners],
    )


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward
