"""The states of a batch whose value a critic is asked for, and the rows of tokens that end in them.

Legend: `T` tokens of the batch, `W` tokens of the rows, `K` states in which the policy chose, `Q` all states, `N`
trajectories.

A state is what was read before a token was chosen. The states of a trajectory are those of its segments, one segment
after the other, since segments follow each other in time; tokens that the environment wrote are no states. Where a
trajectory goes on after its last sampled token (it was cut off), the state right after that token is asked for too,
and never trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from asyncrl.learner.critic_settings import Question
from asyncrl.packing import Batch

_ANY_TOKEN = 0  # stands after a state at the end of a row, so that something is predicted there; it is never scored


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The first K of the Q states are those in which the policy chose, by trajectory and in time; then the ends."""

    rows: Batch
    """What is forwarded. Its `loss_mask` marks the tokens that stand right after a state."""
    place: torch.Tensor
    """[Q] int64; where in W the token after each state stands. No two are equal."""
    token: torch.Tensor
    """[K] int64; where in T the token stands that was chosen there."""
    state_of_token: torch.Tensor
    """[T] int64 in K; the latest state at or before each trained token. 0 elsewhere, not to be read."""
    cu_seqlens: torch.Tensor
    """[N + 1] int64 over K."""
    end_of: torch.Tensor
    """[Q - K] int64; the trajectory that each of the ends belongs to."""


def token_states(batch: Batch, goes_on: torch.Tensor) -> States:
    """Return a state for every trained token. `goes_on` [N] bool: trajectories whose end is asked for."""
    segment_T = _segment_of_token(batch)
    token_K = batch.loss_mask.nonzero()[:, 0]
    end_of, last = _ends(batch, goes_on)
    lengthened = torch.zeros(batch.num_segments, dtype=torch.int64)
    lengthened[segment_T[last]] = (last + 1 == batch.cu_seqlens[1:][segment_T[last]]).long()
    before = torch.cat([lengthened.new_zeros(1), lengthened.cumsum(0)])
    extra = torch.tensor([_ANY_TOKEN])
    pieces = []
    for (start, end), more in zip(pairwise(batch.cu_seqlens.tolist()), lengthened.tolist(), strict=True):
        pieces.append(torch.cat([batch.token_ids[start:end], extra]) if more else batch.token_ids[start:end])
    place = torch.cat([token_K + before[segment_T[token_K]], last + 1 + before[segment_T[last]]])
    number_T = batch.loss_mask.long().cumsum(0) - 1
    return States(
        rows=_as_batch(pieces, place, group_index=batch.group_index, trajectory_index=batch.trajectory_index),
        place=place,
        token=token_K,
        state_of_token=torch.where(batch.loss_mask, number_T, 0),
        cu_seqlens=_per_trajectory(batch, token_K, len(goes_on)),
        end_of=end_of,
    )


def question_states(batch: Batch, goes_on: torch.Tensor, question: Question, *, every: int) -> States:
    """Return a state at the start of each turn (run of trained tokens), and after `every` more of its tokens.

    Each is a row of its own: what was read before, the question, and the place of the answer. Rows that begin with the
    same tokens share them in the forward pass. `every` 0 asks at the start only.
    """
    segment_T = _segment_of_token(batch)
    mask = batch.loss_mask
    begins = mask.clone()
    begins[1:] &= ~mask[:-1] | (segment_T[1:] != segment_T[:-1])
    place_T = torch.arange(batch.num_tokens)
    start_T = torch.where(begins, place_T, 0).cummax(0).values if batch.num_tokens else place_T
    asked = mask & ((place_T - start_T) % every == 0) if every else begins
    token_K = asked.nonzero()[:, 0]
    end_of, last = _ends(batch, goes_on)
    asks = torch.tensor([*question.token_ids, question.yes])
    segments = torch.cat([segment_T[token_K], segment_T[last]])
    stops = torch.cat([token_K, last + 1]).tolist()
    starts = batch.cu_seqlens[segments].tolist()
    pieces = [torch.cat([batch.token_ids[a:b], asks]) for a, b in zip(starts, stops, strict=True)]
    lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
    place = lengths.cumsum(0) - 1
    return States(
        rows=_as_batch(
            pieces,
            place,
            group_index=batch.group_index[segments],
            trajectory_index=batch.trajectory_index[segments],
        ),
        place=place,
        token=token_K,
        state_of_token=torch.where(mask, asked.long().cumsum(0) - 1, 0),
        cu_seqlens=_per_trajectory(batch, token_K, len(goes_on)),
        end_of=end_of,
    )


def trajectory_of_token(batch: Batch) -> torch.Tensor:
    """Return [T] int64."""
    return torch.repeat_interleave(batch.trajectory_index, batch.cu_seqlens.diff())


def last_actions(batch: Batch, num_trajectories: int) -> torch.Tensor:
    """Return [N] int64, where in T the last trained token of each trajectory stands; -1 where it has none."""
    token = batch.loss_mask.nonzero()[:, 0]
    nothing = torch.full((num_trajectories,), -1, dtype=torch.int64)
    return nothing.scatter_reduce(0, trajectory_of_token(batch)[token], token, "amax")


def _ends(batch: Batch, goes_on: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the trajectories whose end is asked for, and where in T their last trained token stands."""
    last = last_actions(batch, len(goes_on))
    end_of = (goes_on & (last >= 0)).nonzero()[:, 0]
    return end_of, last[end_of]


def _segment_of_token(batch: Batch) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(batch.num_segments), batch.cu_seqlens.diff())


def _per_trajectory(batch: Batch, token_K: torch.Tensor, num_trajectories: int) -> torch.Tensor:
    assert bool((batch.trajectory_index.diff() >= 0).all()), "segments of a trajectory must follow each other"
    number = torch.bincount(trajectory_of_token(batch)[token_K], minlength=num_trajectories)
    return torch.cat([number.new_zeros(1), number.cumsum(0)])


def _as_batch(
    pieces: Sequence[torch.Tensor], place: torch.Tensor, *, group_index: torch.Tensor, trajectory_index: torch.Tensor
) -> Batch:
    """Return rows of tokens as a batch for `packing.split`; what a loss would read is left empty."""
    lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    mask = torch.zeros(total, dtype=torch.bool)
    mask[place] = True
    return Batch(
        token_ids=torch.cat(list(pieces)),
        position_ids=torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], lengths),
        loss_mask=mask,
        observation_mask=torch.zeros_like(mask),
        behaviour_logprobs=torch.zeros(total),
        advantages=torch.zeros(total),
        versions=torch.full((total,), -1, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        trajectory_index=trajectory_index,
        group_index=group_index,
        rewards=torch.zeros(len(pieces)),
        num_loss_tokens=len(place),
    )
