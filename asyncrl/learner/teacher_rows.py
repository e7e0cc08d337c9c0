"""What a teacher reads, and where each of the policy's tokens stands in it.

Legend: `T` tokens and `S` segments of the policy's batch, `W` tokens of the teacher's rows.

A teacher that was told the answer reads it in a longer prompt of its own, and then exactly the tokens that the policy
sampled and was answered. So a token stands at another position in the teacher's row than in the policy's: `place` is
the one translation, and nothing else may compute an offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from asyncrl.packing import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRows:
    """The teacher's rows, as a batch of the same segments in the same order."""

    rows: Batch
    """Its `loss_mask` marks the policy's trained tokens where they stand here; log-probs and credit are not set."""
    place: torch.Tensor
    """[T] int64; where the token of the policy's batch stands in the W tokens, -1 for those that a prompt replaces."""


def teacher_rows(batch: Batch) -> TeacherRows:
    """Return what a teacher reads for `batch`: the batch itself where no segment has a prompt for teachers."""
    prompts = batch.teacher_prompts
    if prompts is None:
        return TeacherRows(rows=batch, place=torch.arange(batch.num_tokens))
    kept = batch.cu_seqlens.diff() - prompts.replaced
    lengths = prompts.cu_seqlens.diff() + kept
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    token_ids = torch.empty(int(cu_seqlens[-1]), dtype=torch.int64)
    position_ids = torch.empty_like(token_ids)
    place = torch.full((batch.num_tokens,), -1, dtype=torch.int64)
    bounds = zip(pairwise(batch.cu_seqlens.tolist()), pairwise(cu_seqlens.tolist()), strict=True)
    told = pairwise(prompts.cu_seqlens.tolist())
    for ((start, end), (first, last)), (a, b), skipped in zip(bounds, told, prompts.replaced.tolist(), strict=True):
        prompt = prompts.token_ids[a:b]
        token_ids[first:last] = torch.cat([prompt, batch.token_ids[start + skipped : end]])
        position_ids[first:last] = torch.arange(last - first)
        place[start + skipped : end] = torch.arange(first + len(prompt), last)
    assert bool((place[batch.loss_mask] >= 0).all()), "a trained token stands inside a prompt"
    loss_mask = torch.zeros(len(token_ids), dtype=torch.bool)
    loss_mask[place[batch.loss_mask]] = True
    unset = torch.zeros(len(token_ids))
    rows = replace(
        batch,
        token_ids=token_ids,
        position_ids=position_ids,
        loss_mask=loss_mask,
        observation_mask=torch.zeros_like(loss_mask),
        behaviour_logprobs=unset,
        advantages=unset,
        versions=torch.full((len(token_ids),), -1, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        teacher_prompts=None,
    )
    return TeacherRows(rows=rows, place=place)


def take(batch: Batch, segments: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """Return the batch of the given segments alone ([n] int64, in that order), and [T'] where its tokens stood.

    What belongs to the whole batch (teacher prompts, and credit that others keep) is left out.
    """
    bounds = batch.cu_seqlens.tolist()
    where = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in segments.tolist()] or [segments.new_zeros(0)])
    lengths = batch.cu_seqlens.diff()[segments]
    loss_mask = batch.loss_mask[where]
    part = Batch(
        token_ids=batch.token_ids[where],
        position_ids=batch.position_ids[where],
        loss_mask=loss_mask,
        observation_mask=batch.observation_mask[where],
        behaviour_logprobs=batch.behaviour_logprobs[where],
        advantages=batch.advantages[where],
        versions=batch.versions[where],
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        trajectory_index=batch.trajectory_index[segments],
        group_index=batch.group_index[segments],
        rewards=batch.rewards[segments],
        num_loss_tokens=int(loss_mask.sum()),
    )
    return part, where
