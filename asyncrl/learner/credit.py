"""What of the groups is trained on, and with which credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.advantages import group_advantages
from asyncrl.packing import Batch, lay_out
from asyncrl.types import Group, Segment, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of the groups that can be trained on."""

    trajectories: Sequence[Trajectory]
    """Those with a reward, in order."""
    group_index: Sequence[int]
    """[len(trajectories)] place of each one's group."""
    num_failed: int
    """Trajectories without a reward: masked, never a reward of 0."""
    batch: Batch


def select(groups: Sequence[Group], *, baseline: str, scale: str) -> Selection:
    """Return the trajectories that have a reward, laid out with their advantages.

    A trajectory's advantage goes to every trained token of all its segments; a segment's own per-token advantages
    override it. Raises: ShapeError, ConfigError from the segments and rewards.
    """
    chosen = [(place, t) for place, group in enumerate(groups) for t in group.trajectories if t.reward is not None]
    rewards = [float(t.reward) for _, t in chosen if t.reward is not None]
    places = [place for place, _ in chosen]
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(places, dtype=torch.int64),
        baseline=baseline,
        scale=scale,
    ).tolist()
    segments: list[Segment] = []
    owners: list[int] = []
    for index, (_, trajectory) in enumerate(chosen):
        segments.extend(trajectory.segments)
        owners.extend([index] * len(trajectory.segments))
    batch = lay_out(
        segments,
        trajectory_index=owners,
        group_index=[places[owner] for owner in owners],
        advantages=[advantages[owner] for owner in owners],
        rewards=[rewards[owner] for owner in owners],
    )
    return Selection(
        trajectories=[t for _, t in chosen],
        group_index=places,
        num_failed=sum(len(group.trajectories) for group in groups) - len(chosen),
        batch=batch,
    )
