"""What of the groups is trained on, and with which credit. `T` packed tokens, `N` trajectories, `K` their turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from asyncrl.advantages import (
    group_advantages,
    overlong_filter,
    overlong_penalty,
    override,
    process_rewards,
    reference_kl_rewards,
    spread,
    spread_turns,
    turn_peers,
    turn_returns,
    whiten,
    zero_variance,
)
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.settings import LearnerSettings
from asyncrl.losses.inputs import bad_logprob_kinds
from asyncrl.packing import Batch, lay_out
from asyncrl.types import Group, Trajectory, TrajectoryStatus

Assign = Callable[[Batch, Sequence[Trajectory], torch.Tensor, torch.Tensor], torch.Tensor]
"""From a batch, its trajectories, [N] their rewards and [T] what is added on tokens to the advantages [T], float64."""

Reference = Callable[[Batch], torch.Tensor]
"""From a batch to [T], the log-probs of its trained tokens under the frozen reference, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of the groups that can be trained on."""

    trajectories: Sequence[Trajectory]
    """Those with a reward, in order."""
    group_index: Sequence[int]
    """[N] place of each one's group."""
    num_failed: int
    """Trajectories without a reward: masked, never a reward of 0."""
    batch: Batch
    reference_logprobs: torch.Tensor | None = None
    """[T] nats, where the credit needed them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of what was added to rewards and left out, see `asyncrl.learner.report`."""


def select(
    groups: Sequence[Group],
    settings: LearnerSettings,
    *,
    reference: Reference | None = None,
    assign: Assign | None = None,
) -> Selection:
    """Return the trajectories that have a reward, laid out with their advantages.

    A segment's own per-token advantages override the trainer's where they are numbers. `reference` is asked where
    `reward_kl_coef` is not 0. `assign` is a critic's, in place of the groups' baselines.
    Raises: ShapeError from the segments; EnvironmentFault naming group and trajectory for a reward that is no number;
    ConfigError where an environment gives no reward per turn at level "turn".
    """
    credit = settings.credit
    chosen = [(place, t) for place, group in enumerate(groups) for t in group.trajectories if t.reward is not None]
    for place, trajectory in chosen:
        if trajectory.bad_number is not None:
            name = f"group {groups[place].group_id}, trajectory {trajectory.trajectory_id}"
            raise EnvironmentFault(f"{name} of environment {trajectory.environment!r}: {trajectory.bad_number}")
    trajectories, places = [t for _, t in chosen], [place for place, _ in chosen]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    owners = [index for index, t in enumerate(trajectories) for _ in t.segments]
    batch = lay_out(
        [segment for t in trajectories for segment in t.segments],
        trajectory_index=owners,
        group_index=[places[owner] for owner in owners],
        rewards=[rewards[owner] for owner in owners],
    )
    metrics: dict[str, float] = {}
    reward_N = torch.tensor(rewards, dtype=torch.float64)
    if credit.overlong_max_length:
        penalty_N = _overlong_penalty(trajectories, credit)
        reward_N = reward_N + penalty_N
        metrics |= {"overlong_shaped_share": _mean(penalty_N < 0), "overlong_penalty_mean": _mean(penalty_N)}
    reference_T, penalty_T = None, torch.zeros(batch.num_tokens, dtype=torch.float64)
    if credit.reward_kl_coef:
        assert reference is not None
        reference_T = reference(batch)
        penalty_T = _kl_penalty(batch, reference_T, credit.reward_kl_coef)
        metrics["reward_kl"] = -_mean(penalty_T[batch.loss_mask]) / credit.reward_kl_coef
        metrics["reward_kl_penalty_mean"] = float(penalty_T.sum()) / max(1, len(trajectories))
    if assign is None:
        by_group = _by_trajectory if credit.level == "trajectory" else _by_turn
        group_N = _peers(places, trajectories)
        advantage_T, silent_T = by_group(batch, trajectories, reward_N, group_N, penalty_T, settings)
    else:
        advantage_T = assign(batch, trajectories, reward_N, penalty_T)
        silent_T = torch.zeros_like(batch.loss_mask)
    batch = replace(batch, advantages=override(advantage_T.float(), batch.advantages))
    if credit.overlong_filter:
        cut_N = _cut_at_a_limit(trajectories)
        batch = _without(batch, cut_N[batch.trajectory_index])
        metrics["overlong_filtered_share"] = _mean(cut_N)
    if credit.whiten:
        heard = batch.loss_mask & ~(silent_T & (batch.advantages == 0.0))
        batch = replace(batch, advantages=whiten(batch.advantages, heard))
    return Selection(
        trajectories=trajectories,
        group_index=places,
        num_failed=sum(len(group.trajectories) for group in groups) - len(chosen),
        batch=batch,
        reference_logprobs=reference_T,
        metrics=metrics,
    )


# --- what is added to a reward, and what is left out ----------------------------------------------------------


def _overlong_penalty(trajectories: Sequence[Trajectory], credit: CreditSettings) -> torch.Tensor:
    """Return [N] float64 in [-1, 0], what each trajectory's length costs."""
    lengths = torch.tensor([t.num_sampled_tokens for t in trajectories], dtype=torch.float64)
    longest, buffer = credit.overlong_max_length, credit.overlong_buffer_length
    return overlong_penalty(lengths, max_length=longest, buffer_length=buffer).double()


def _cut_at_a_limit(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return [N] bool, trajectories that a limit on tokens ended or cut."""
    cut = [t.truncated or t.status is TrajectoryStatus.TRUNCATED_LENGTH for t in trajectories]
    return torch.tensor(cut, dtype=torch.bool)


def _kl_penalty(batch: Batch, reference_T: torch.Tensor, coef: float) -> torch.Tensor:
    """Return [T] float64, what each trained token's divergence from the reference is paid.

    A token whose behaviour log-prob cannot be right is not priced: the loss answers for it (`bad_logprobs`).
    """
    bad = torch.stack([*bad_logprob_kinds(batch.behaviour_logprobs).values()]).any(0)
    usable = batch.loss_mask & ~bad
    return reference_kl_rewards(batch.behaviour_logprobs.double(), reference_T.double(), usable, coef=coef)


def _without(batch: Batch, out_S: torch.Tensor) -> Batch:
    """Return the batch with nothing to learn from in the segments of `out_S` [S] bool."""
    mask = overlong_filter(batch.loss_mask, out_S, batch.cu_seqlens)
    return replace(
        batch,
        loss_mask=mask,
        observation_mask=overlong_filter(batch.observation_mask, out_S, batch.cu_seqlens),
        behaviour_logprobs=torch.where(mask, batch.behaviour_logprobs, 0.0),
        advantages=torch.where(mask, batch.advantages, 0.0),
        versions=torch.where(mask, batch.versions, -1),
        num_loss_tokens=int(mask.sum()),
    )


def _mean(values: torch.Tensor) -> float:
    """Return the mean, 0 of nothing."""
    return float(values.double().mean()) if len(values) else 0.0


def _peers(places: Sequence[int], trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return [N] int64, equal for the trajectories of one group and one agent: those that a baseline compares."""
    numbers: dict[tuple[int, str], int] = {}
    keys = [(place, trajectory.agent) for place, trajectory in zip(places, trajectories, strict=True)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


# --- which token is credited ----------------------------------------------------------------------------------


def _by_trajectory(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    reward_N: torch.Tensor,
    group_N: torch.Tensor,
    penalty_T: torch.Tensor,
    settings: LearnerSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([T] each trajectory's advantage on its trained tokens, [T] bool: nothing to be compared with)."""
    owner_T = torch.repeat_interleave(batch.trajectory_index, batch.cu_seqlens.diff())
    reward_N = reward_N.index_add(0, owner_T, penalty_T)
    advantage_N = group_advantages(reward_N, group_N, baseline=settings.baseline, scale=settings.scale)
    advantage_T = spread(advantage_N[batch.trajectory_index], batch.cu_seqlens, batch.loss_mask)
    return advantage_T, _silent(reward_N, group_N, settings)[owner_T]


def _by_turn(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    reward_N: torch.Tensor,
    group_N: torch.Tensor,
    penalty_T: torch.Tensor,
    settings: LearnerSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([T] each turn's advantage on its trained tokens, [T] bool: nothing to be compared with).

    What a trajectory's turns leave of its reward is earned at the last of them.
    """
    _check_turn_rewards(trajectories)
    credit = settings.credit
    turn_T = torch.full((batch.num_tokens,), -1, dtype=torch.int64)
    bounds = iter(batch.cu_seqlens.tolist())
    given: list[float] = []
    offsets = [0]
    for trajectory in trajectories:
        for segment in trajectory.segments:
            first = next(bounds)
            for turn in segment.turns:
                turn_T[first + turn.start : first + turn.end] = len(given)
                given.append(turn.reward or 0.0)
            if sum(segment.loss_mask) and not segment.turns:
                raise EnvironmentFault(f"trajectory {trajectory.trajectory_id}: a segment has tokens and no turns")
        offsets.append(len(given))
    reward_K, offset_N = torch.tensor(given, dtype=torch.float64), torch.tensor(offsets, dtype=torch.int64)
    if credit.turn_potentials:
        reward_K = process_rewards(reward_K, offset_N, torch.arange(len(given)), len(given))
    index_K = torch.repeat_interleave(torch.arange(len(trajectories)), offset_N.diff())
    left_N = reward_N - torch.zeros_like(reward_N).index_add(0, index_K, reward_K)
    some_N = offset_N.diff() > 0
    reward_K = reward_K.index_add(0, offset_N[1:][some_N] - 1, left_N[some_N])
    trained = batch.loss_mask
    reward_K = reward_K.index_add(0, turn_T[trained], penalty_T[trained])
    return_K = turn_returns(reward_K, offset_N, gamma=credit.turn_discount)
    peers_K = turn_peers(offset_N, group_N)
    advantage_K = group_advantages(return_K, peers_K, baseline=settings.baseline, scale=settings.scale)
    silent_K = _silent(return_K, peers_K, settings)
    return spread_turns(advantage_K, turn_T, trained), spread_turns(silent_K.long(), turn_T, trained).bool()


def _check_turn_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Raise ConfigError naming an environment that gives no reward per turn.

    An episode that ended before its environment could answer says nothing about that.
    """
    answered = [t for t in trajectories if t.status is not TrajectoryStatus.TIMED_OUT]
    for name in sorted({t.environment for t in answered}):
        turns = [turn for t in answered if t.environment == name for s in t.segments for turn in s.turns]
        if all(turn.reward is None for turn in turns):
            raise ConfigError(
                f'environment {name!r} gives no reward per turn, which level = "turn" needs; set level = "trajectory" '
                "([learner.credit]), or let its step return a turn_reward"
            )


def _silent(rewards: torch.Tensor, groups: torch.Tensor, settings: LearnerSettings) -> torch.Tensor:
    """Return bool like `rewards`: True where a baseline leaves exactly 0 because nothing in the group differs."""
    if settings.baseline == "none" and settings.scale == "none":
        return torch.zeros_like(rewards, dtype=torch.bool)
    return zero_variance(rewards, groups)
