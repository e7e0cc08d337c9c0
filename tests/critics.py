"""Learners with each kind of critic on the tiny model, and groups of every shape for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from synthetic_groups import make_group, make_segment
from test_learner_step import job_for

from asyncrl.learner.credit import select
from asyncrl.learner.critic_settings import CriticSettings
from asyncrl.learner.process import Learner
from asyncrl.packing import Batch, split
from asyncrl.types import Group, Logprobs, TrajectoryStatus

ASKS = {"question": "?!", "yes": "Y", "no": "N"}
"""The tiny model's tokens are bytes: its words for yes and no are letters."""
QUESTION = [ord("?"), ord("!")]

CRITICS: dict[str, dict[str, Any]] = {
    "model": {"kind": "model", "learning_rate": 3e-3},
    "head": {"kind": "head", "learning_rate": 3e-2},
    "head_through": {"kind": "head", "learning_rate": 3e-2, "stop_gradient": False, "value_coef": 0.5},
    "yes_no": {"kind": "yes_no", **ASKS, "value_coef": 1.0},
}


def learner_for(model: Path, published: Path, critic: dict[str, Any], **settings: Any) -> Learner:
    resume_from = settings.pop("resume_from", None)
    options = {"loss": "ppo", "critic": CriticSettings(**critic), **settings}
    return Learner(job_for(model, published, resume_from=resume_from, **options))


def mixed_groups(seed: int, *, version: int = 0, silent: bool = False) -> list[Group]:
    """Return groups of one, two and three trajectories with several turns and segments, ended in every way.

    `silent`: the environment's own credit of 0 on every token, so that the policy's loss has no gradient.
    """
    rng = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(250) for _ in range(rng.randint(low, high))]

    statuses = [
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED_TURNS,
        TrajectoryStatus.FAILED_SANDBOX,
        TrajectoryStatus.TIMED_OUT,
        TrajectoryStatus.COMPLETED,
        TrajectoryStatus.TRUNCATED_LENGTH,
    ]
    groups = []
    for group_id, size in enumerate((1, 2, 3)):
        prompt = words(6, 12)
        trajectories = []
        for place in range(size):
            status = statuses[group_id * (group_id + 1) // 2 + place]
            segments = []
            for _ in range(rng.randint(1, 2)):
                turns = [(words(1, 6), words(0, 3)) for _ in range(rng.randint(1, 3))]
                if rng.random() < 0.5:
                    turns[-1] = (turns[-1][0], [])  # the last sampled token ends the segment
                segment = make_segment(prompt, turns, version=version, logprob=-rng.uniform(1, 8))
                credit = Logprobs([0.0] * len(segment.token_ids)) if silent else None
                segments.append(replace(segment, advantages=credit))
            reward = None if status.failed else rng.choice([0.0, 1.0, 0.25])
            group = make_group(group_id, segments[:1], [reward])
            trajectories.append(
                replace(
                    group.trajectories[0],
                    trajectory_id=f"{group_id}/{place}",
                    status=status,
                    segments=tuple(segments),
                )
            )
        groups.append(replace(group, trajectories=tuple(trajectories)))
    return groups


def prepared(learner: Learner, groups: Sequence[Group]) -> tuple[Batch, Any, float]:
    """Return batch, estimate and the policy's loss, with the gradients summed and not applied."""
    stepper = learner._stepper
    settings, critic = learner._job.learner, learner._critic
    assert critic is not None
    selection = select(groups, settings, assign=critic.assign)
    microbatches = split(selection.batch, max_tokens=settings.microbatch_tokens, share_prefixes=settings.share_prefixes)
    loss, _, _ = stepper.accumulate(selection.batch, microbatches)
    return selection.batch, critic.under_way, loss


def give_head_weights(learner: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the value head to something, so that the body behind it matters; return weight [C] and bias []."""
    head = learner._critic._head  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator, dtype=torch.float64) * 0.2)
        head.bias.fill_(0.1)
    return head.weight.detach().clone()[0], head.bias.detach().clone()[0]
