"""Pairs from groups, and DPO on them against transformers' own model, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from synthetic_groups import make_group, make_segment, random_groups
from test_learner_teachers import _CPU, assert_same, found_by_the_learner, load, next_tokens, plain

from asyncrl.learner.preferences import choose_pairs, split_pairs
from asyncrl.learner.replicas import Replica
from asyncrl.learner.settings import LearnerSettings, PairSettings
from asyncrl.learner.teachers import Teachers
from asyncrl.types import Group, Trajectory


def group_of(rewards: Sequence[float | None], group_id: int = 0) -> Group:
    segments = [make_segment([1, 2, group_id], [([10 + i], [])]) for i in range(len(rewards))]
    return make_group(group_id, segments, rewards)


def names(trajectories: Sequence[Trajectory]) -> list[int]:
    return [int(t.trajectory_id.rpartition("/")[2]) for t in trajectories]


@pytest.mark.parametrize(
    ("rewards", "settings", "wanted"),
    [
        ([0.0, 1.0, 0.5], {}, [1, 0]),
        ([1.0, 1.0, 0.0, 0.0], {}, [0, 3]),  # ties: the first of the best, the last of the worst
        ([0.5, 0.5, 0.5], {}, []),
        ([0.0, 0.3], {"min_gap": 0.3}, []),
        ([0.0, 0.31], {"min_gap": 0.3}, [1, 0]),
        ([None, 1.0, None, 0.0], {}, [1, 3]),
        ([None, 1.0], {}, []),
        ([0.1, 0.9, 0.5, 0.4, 0.5], {"per_group": 9}, [1, 0, 2, 3]),
        ([0.1, 0.9, 0.5, 0.5], {"per_group": 9}, [1, 0]),
    ],
)
def test_the_best_are_paired_with_the_worst(
    rewards: list[float | None], settings: dict[str, Any], wanted: list[int]
) -> None:
    selection = choose_pairs([group_of(rewards)], PairSettings(**settings))
    assert names(selection.trajectories[: len(wanted)]) == wanted
    assert selection.batch.trajectory_index.tolist() == list(range(len(wanted)))
    assert selection.batch.group_index.tolist() == [i // 2 for i in range(len(wanted))]
    rewarded = [r for r in rewards if r is not None]
    assert len(selection.trajectories) == len(rewarded), "the mean reward is that of all"
    assert selection.num_failed == len(rewards) - len(rewarded)
    assert selection.metrics == {
        "num_pairs": len(wanted) // 2,
        "num_unpaired_trajectories": len(rewarded) - len(wanted),
        "num_groups_without_pair": int(not wanted),
    }


def several_segments(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with a second segment for every other trajectory, under a prompt of its own."""
    changed = []
    for group in groups:
        trajectories = list(group.trajectories)
        for place in range(0, len(trajectories), 2):
            more = make_segment([50, 51 + place], [([60, 61, place], [5]), ([62], [])])
            trajectories[place] = replace(trajectories[place], segments=(*trajectories[place].segments, more))
        changed.append(replace(group, trajectories=tuple(trajectories)))
    return changed


def settings_for(**changes: Any) -> LearnerSettings:
    options: dict[str, Any] = {"microbatch_tokens": 10_000, "pairs": PairSettings(per_group=2), **changes}
    return LearnerSettings(loss="dpo", dtype="float64", loss_settings={"dpo_beta": 0.5}, **options)


def teachers_for(settings: LearnerSettings) -> Teachers:
    reference = Replica(load("teacher"), _CPU, max_tokens=50, share_prefixes=True)
    return Teachers(settings.resolved_loss, load("student"), _CPU, reference=reference)


def written_out(pairs: Sequence[tuple[Trajectory, Trajectory]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean of -log sigmoid(0.5 margin) over the pairs, and its gradient, from the definition."""
    student, reference = plain("student"), plain("teacher")

    def margin(trajectory: Trajectory) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for segment in trajectory.segments:
            tokens = torch.tensor(segment.token_ids)
            trained = torch.tensor(list(segment.loss_mask)).bool()[1:]
            difference = next_tokens(student, tokens) - next_tokens(reference, tokens).detach()
            total = total + difference.gather(1, tokens[1:, None])[:, 0][trained].sum()
        return total

    losses = [-torch.nn.functional.logsigmoid(0.5 * (margin(best) - margin(worst))) for best, worst in pairs]
    total = torch.stack(losses).mean()
    total.backward()
    return total.item(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_dpo_is_its_definition_over_whole_trajectories_whatever_the_split() -> None:
    groups = several_segments(random_groups(3, num_groups=3))
    settings = settings_for()
    chosen = choose_pairs(groups, settings.pairs)
    paired = chosen.trajectories[: 2 * int(chosen.metrics["num_pairs"])]
    assert len(paired) >= 6
    wanted = written_out(list(zip(paired[::2], paired[1::2], strict=True)))
    for variant in ({}, {"microbatch_tokens": 1}, {"microbatch_tokens": 150}, {"share_prefixes": False}):
        varied = settings_for(**variant)
        assert_same(found_by_the_learner(groups, varied, teachers_for(varied)), wanted)


def test_both_sides_of_a_pair_share_a_microbatch() -> None:
    batch = choose_pairs(several_segments(random_groups(4, num_groups=4)), PairSettings(per_group=2)).batch
    microbatches = split_pairs(batch, max_tokens=120, share_prefixes=True)
    assert len(microbatches) > 1
    seen = [set(batch.group_index[m.segment_index].tolist()) for m in microbatches]
    assert any(len(pairs) > 1 for pairs in seen)
    assert sum(map(len, seen)) == len(set.union(*seen)) == int(batch.group_index.max()) + 1
    for m in microbatches:
        assert torch.equal(batch.token_ids[m.token_index[m.scored_index]], m.target_ids[m.prediction_index])
    covered = torch.cat([m.token_index for m in microbatches]).sort().values
    assert torch.equal(covered, torch.arange(batch.num_tokens))


@pytest.mark.slow
def test_at_the_reference_every_pair_costs_log_two() -> None:
    settings = settings_for()
    student = load("student")
    reference = Replica(student, _CPU, max_tokens=50, share_prefixes=True)
    teachers = Teachers(settings.resolved_loss, student, _CPU, reference=reference)
    loss, gradients = found_by_the_learner(random_groups(5), settings, teachers)
    assert loss == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-6)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-6
