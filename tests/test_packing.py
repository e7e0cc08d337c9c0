"""Batches and microbatches: what lies where, what is shared, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from synthetic_groups import make_segment, random_groups

from asyncrl.errors import ShapeError, StalenessError
from asyncrl.packing import Batch, Microbatch, check_staleness, lay_out, split, unpack
from asyncrl.types import Logprobs, Segment


def batch_of(segments: Sequence[Segment], groups: Sequence[int] | None = None) -> Batch:
    count = range(len(segments))
    return lay_out(
        segments,
        trajectory_index=list(count),
        group_index=list(groups or [0] * len(segments)),
        advantages=[float(i + 1) for i in count],
        rewards=[0.0 for _ in count],
    )


def random_batch(seed: int, **options: int) -> Batch:
    groups = random_groups(seed, **options)
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    return batch_of(segments, [g for g, group in enumerate(groups) for _ in group.trajectories])


def visible(microbatch: Microbatch) -> torch.Tensor:
    """[N, N]; how often each slot's query sees each slot's key, from the attention blocks."""
    seen = torch.zeros(microbatch.num_slots, microbatch.num_slots, dtype=torch.int64)
    for block in microbatch.blocks:
        seen[block.queries, block.queries] += torch.ones_like(seen[block.queries, block.queries]).tril()
        for part in block.before:
            seen[block.queries, part] += 1
    return seen


def test_a_batch_holds_what_the_segments_hold() -> None:
    segment = make_segment([5, 6], [([7, 8], [9]), ([10], [])], version=3, logprob=-2.0)
    batch = batch_of([segment, make_segment([5], [([6], [])])])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 5, 6]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.observation_mask.int().tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.versions.tolist() == [-1, -1, 3, 3, -1, 3, -1, 0]
    assert batch.advantages.tolist() == [0, 0, 1, 1, 0, 1, 0, 2]
    assert batch.cu_seqlens.tolist() == [0, 6, 8]
    assert batch.num_loss_tokens == 4


def test_the_environments_own_credit_overrides_the_trainers() -> None:
    segment = replace(make_segment([5], [([6, 7], [])]), advantages=Logprobs([9.0, 0.5, -0.5]))
    assert batch_of([segment]).advantages.tolist() == [0.0, 0.5, -0.5]


def test_what_environments_say_of_single_tokens_is_passed_through() -> None:
    weighed = replace(make_segment([5], [([6], [])]), token_fields={"weight": Logprobs([0.0, 2.5])})
    batch = batch_of([make_segment([5], [([6, 7], [])]), weighed])
    assert batch.token_fields["weight"].isnan().tolist() == [True] * 3 + [False] * 2
    assert batch.token_fields["weight"][3:].tolist() == [0.0, 2.5]
    with pytest.raises(ShapeError, match=r"token_fields\['weight'\] has 1 entries for 2 tokens"):
        batch_of([replace(weighed, token_fields={"weight": Logprobs([1.0])})])


def test_a_shared_prompt_has_one_slot_a_token() -> None:
    segments = [make_segment([1, 2, 3], [([4 + i, 9], [])]) for i in range(3)]
    (microbatch,) = split(batch_of(segments), max_tokens=100)
    assert microbatch.num_slots == 3 + 3 * 2
    (apart,) = split(batch_of(segments), max_tokens=100, share_prefixes=False)
    assert apart.num_slots == 3 * 5


def test_equal_completions_are_read_and_predicted_once() -> None:
    (microbatch,) = split(batch_of([make_segment([1, 2], [([3, 4], [])])] * 4), max_tokens=100)
    assert microbatch.num_slots == 4
    assert len(microbatch.predict_slot) == 2
    assert len(microbatch.scored_index) == 8


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_sees_exactly_its_own_past(seed: int, share: bool) -> None:
    batch = random_batch(seed, num_groups=3, prompt_tokens=140 if seed == 3 else 12)
    bounds = batch.cu_seqlens.tolist()
    for microbatch in split(batch, max_tokens=10_000 if seed % 2 else 60, share_prefixes=share):
        seen = visible(microbatch)
        assert seen.max() == 1
        tokens, positions = microbatch.tree_token_ids, microbatch.tree_position_ids
        assert seen.sum(1).tolist() == (positions + 1).tolist()
        slots = torch.arange(microbatch.num_slots)
        assert torch.cat([slots[block.queries] for block in microbatch.blocks]).tolist() == slots.tolist()
        for block in microbatch.blocks:
            keys = torch.cat([slots[part] for part in block.keys])
            assert positions[keys].tolist() == list(range(len(keys)))
        paths = {
            tuple(tokens[seen[slot].bool()][positions[seen[slot].bool()].argsort()].tolist())
            for slot in range(microbatch.num_slots)
        }
        wanted = set()
        for segment in microbatch.segment_index.tolist():
            row = batch.token_ids[bounds[segment] : bounds[segment + 1]].tolist()
            wanted |= {tuple(row[: end + 1]) for end in range(len(row))}
        assert paths == wanted


def test_what_comes_before_a_block_is_the_path_to_it_in_as_few_stretches_as_can_be() -> None:
    prompt = list(range(20, 30))
    answers = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [2], [3, 4], [3, 4]]
    segments = [make_segment(prompt, [(answer, [])]) for answer in answers]
    (microbatch,) = split(batch_of(segments), max_tokens=100)
    # The second answer shares two tokens with the first, the third one, the others none.
    assert [[(part.start, part.stop) for part in block.keys] for block in microbatch.blocks] == [
        [(0, 13)],
        [(0, 12), (13, 14)],
        [(0, 11), (14, 16)],
        [(0, 10), (16, 17)],
        [(0, 10), (17, 19)],
    ]


@pytest.mark.parametrize("observations", [True, False])
def test_each_scored_token_is_predicted_from_the_token_before_it(observations: bool) -> None:
    batch = random_batch(7, num_groups=3)
    scored = 0
    for microbatch in split(batch, max_tokens=50, observations=observations):
        slots, targets = microbatch.predict_slot[microbatch.prediction_index], microbatch.target_ids
        places = microbatch.token_index[microbatch.scored_index]
        assert torch.equal(targets[microbatch.prediction_index], batch.token_ids[places])
        assert torch.equal(microbatch.tree_token_ids[slots], batch.token_ids[places - 1])
        assert torch.equal(microbatch.tree_position_ids[slots], batch.position_ids[places] - 1)
        values = unpack(microbatch, targets.double() + 1.0)
        wanted = batch.loss_mask | batch.observation_mask if observations else batch.loss_mask
        there = wanted[microbatch.token_index]
        assert torch.equal(values[there], batch.token_ids[places].double() + 1.0)
        assert not values[~there].any()
        scored += int(there.sum())
    assert scored == int(batch.loss_mask.sum() + (batch.observation_mask.sum() if observations else 0))


@pytest.mark.parametrize("max_tokens", [1, 40, 90, 10_000])
def test_microbatches_cover_every_segment_once_within_the_budget(max_tokens: int) -> None:
    batch = random_batch(3, num_groups=4)
    microbatches = split(batch, max_tokens=max_tokens)
    members = [s for microbatch in microbatches for s in microbatch.segment_index.tolist()]
    assert sorted(members) == list(range(batch.num_segments))
    assert all(m.num_slots <= max_tokens or len(m.segment_index) == 1 for m in microbatches)


def test_a_token_outside_the_bound_is_refused() -> None:
    batch = batch_of([make_segment([1], [([2], [])], version=3), make_segment([1], [([2], [])], version=5)])
    check_staleness(batch, version=5, max_off_policyness=2)
    with pytest.raises(StalenessError, match="2 steps old"):
        check_staleness(batch, version=5, max_off_policyness=1)
    with pytest.raises(StalenessError, match="claims version 5"):
        check_staleness(batch, version=4, max_off_policyness=9)


def test_arrays_that_disagree_are_refused() -> None:
    good = make_segment([1, 2], [([3], [])])
    with pytest.raises(ShapeError, match="loss_mask has 2"):
        batch_of([replace(good, loss_mask=bytes([0, 0]))])
    with pytest.raises(ShapeError, match="first token"):
        batch_of([replace(good, loss_mask=bytes([1, 0, 1]))])
    with pytest.raises(ShapeError, match="spans"):
        batch_of([replace(good, spans=())])
