"""Where the policy's tokens stand in what a teacher with a longer prompt of its own reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups

from asyncrl.errors import ShapeError
from asyncrl.learner.credit import select
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.teacher_rows import take, teacher_rows
from asyncrl.packing import Batch
from asyncrl.types import Group, Segment, TokenIds


def batch_of(*segments: Segment) -> Batch:
    return select([make_group(0, segments, [1.0, *[0.0] * (len(segments) - 1)])], LearnerSettings()).batch


def row(batch: Batch, index: int) -> list[int]:
    bounds = batch.cu_seqlens.tolist()
    return batch.token_ids[bounds[index] : bounds[index + 1]].tolist()


TOLD = make_segment([1, 2], [([10, 11], [3]), ([12], [4])], teacher_prompt=[7, 8, 9])
UNTOLD = make_segment([1, 2], [([20], [])])


def test_the_teacher_reads_its_own_prompt_and_then_what_the_policy_read() -> None:
    read = teacher_rows(batch_of(TOLD, UNTOLD))
    assert row(read.rows, 0) == [7, 8, 9, 10, 11, 3, 12, 4]  # the answers and later turns of the segment too
    assert row(read.rows, 1) == [1, 2, 20]
    assert read.place.tolist() == [-1, -1, 3, 4, 5, 6, 7, -1, -1, 10]
    assert read.rows.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    assert read.rows.loss_mask.nonzero().flatten().tolist() == [3, 4, 6, 10]


def test_every_trained_token_stands_where_the_teacher_reads_it() -> None:
    groups = [told(group) for group in random_groups(3, num_groups=3)]
    batch = select(groups, LearnerSettings()).batch
    read = teacher_rows(batch)
    assert torch.equal(read.rows.token_ids[read.place[batch.loss_mask]], batch.token_ids[batch.loss_mask])
    before = read.place[batch.loss_mask.nonzero().flatten()] - 1
    assert torch.equal(read.rows.position_ids[before] + 1, read.rows.position_ids[read.place[batch.loss_mask]])
    assert int(read.rows.loss_mask.sum()) == batch.num_loss_tokens


def told(group: Group) -> Group:
    """Return the group with a teacher's prompt of another length for every second trajectory."""
    trajectories = []
    for place, trajectory in enumerate(group.trajectories):
        (segment,) = trajectory.segments
        prompt = [*segment.token_ids[: segment.loss_mask.find(1)], *range(90, 93 + place)]
        changed = replace(segment, teacher_prompt_token_ids=TokenIds(prompt) if place % 2 else None)
        trajectories.append(replace(trajectory, segments=(changed,)))
    return replace(group, trajectories=tuple(trajectories))


def test_without_a_prompt_for_teachers_the_batch_is_read_as_it_is() -> None:
    batch = batch_of(UNTOLD)
    read = teacher_rows(batch)
    assert read.rows is batch
    assert read.place.tolist() == [0, 1, 2]


def test_a_mask_that_was_narrowed_later_does_not_move_the_prompts_end() -> None:
    batch = batch_of(TOLD, UNTOLD)
    narrowed = replace(batch, loss_mask=batch.loss_mask & (batch.token_ids != 10))
    assert torch.equal(teacher_rows(narrowed).place, teacher_rows(batch).place)


def test_segments_can_be_taken_out_of_a_batch() -> None:
    batch = select(random_groups(4), LearnerSettings()).batch
    part, where = take(batch, torch.tensor([5, 2]))
    assert [row(part, 0), row(part, 1)] == [row(batch, 5), row(batch, 2)]
    assert torch.equal(batch.token_ids[where], part.token_ids)
    assert torch.equal(batch.behaviour_logprobs[where], part.behaviour_logprobs)
    assert part.rewards.tolist() == batch.rewards[[5, 2]].tolist()
    assert part.num_loss_tokens == int(part.loss_mask.sum())


def test_an_empty_prompt_for_a_teacher_is_refused() -> None:
    with pytest.raises(ShapeError, match="its teacher's prompt is empty"):
        batch_of(make_segment([1], [([2], [])], teacher_prompt=[]))
