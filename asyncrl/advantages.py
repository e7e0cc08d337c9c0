"""Credit: from rewards to advantages per sequence and per token. `T` packed tokens, `S` sequences.

Advantages carry the unit of the reward, unless divided by a standard deviation. Nothing here is differentiable.
"""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.presets import BASELINES, SCALES
from asyncrl.losses.reduction import ZERO_VARIANCE

_STD_EPSILON = 1e-6  # keeps the quotient finite; groups without spread never get here, they are exactly 0


def group_advantages(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    *,
    baseline: str = "mean",
    scale: str = "none",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [S], each reward relative to its group.

    `rewards` [S], `group_index` [S] int64, equal for the trajectories of one task, in any order. `valid` [S] bool
    leaves failed trajectories out of every statistic; their advantage is 0 and their reward is not read.
    Baselines: "mean"; "leave_one_out" (mean of the others); "none". Scales: "none"; "group_std", "batch_std"
    (unbiased, plus 1e-6); "group_mean" (maximum likelihood: rewards must be >= 0).
    A group whose rewards differ by at most 1e-6, or with one trajectory, gets exactly 0 (except with "none" and "none",
    which returns the rewards).
    Source: GRPO arXiv:2402.03300 (mean, group_std); Dr. GRPO arXiv:2503.20783 (mean, none); RLOO arXiv:2402.14740
    (leave_one_out); maximum likelihood arXiv:2602.02710 (mean, group_mean).
    Raises: ShapeError; ConfigError for an unknown name, a reward not finite, or negative with "group_mean".
    """
    _check_choice("baseline", baseline, BASELINES)
    _check_choice("scale", scale, SCALES)
    if rewards.dim() != 1 or group_index.shape != rewards.shape:
        raise ShapeError(
            f"rewards and group_index must be [S], got {list(rewards.shape)} and {list(group_index.shape)}"
        )
    if valid is not None and valid.shape != rewards.shape:
        raise ShapeError(f"valid must be [S] = {list(rewards.shape)}, got {list(valid.shape)}")
    if group_index.is_floating_point():
        raise ConfigError(f"group_index must be integers, got {group_index.dtype}")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    used = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    reward = torch.where(used, rewards.detach().double(), 0.0)
    if not bool(reward.isfinite().all()):
        first = int((~reward.isfinite()).nonzero()[0])
        raise ConfigError(
            f"rewards must be finite: sequence {first} of group {int(group_index[first])} has {float(reward[first])}; "
            "mark failed trajectories in valid"
        )
    if baseline == "none" and scale == "none":
        return reward.to(dtype)
    groups, group = torch.unique(group_index, return_inverse=True)

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(groups)).index_add(0, group, values)[group]

    number = total(used.double())
    mean = total(reward) / number.clamp(min=1.0)
    centred = torch.where(used, reward - mean, 0.0)
    advantage = reward if baseline == "none" else centred
    if baseline == "leave_one_out":
        advantage = centred * number / (number - 1.0).clamp(min=1.0)
    if scale == "group_std":
        advantage = advantage / ((total(centred.square()) / (number - 1.0).clamp(min=1.0)).sqrt() + _STD_EPSILON)
    elif scale == "batch_std":
        spread = reward[used].std() if int(used.sum()) > 1 else reward.new_zeros(())
        advantage = advantage / (spread + _STD_EPSILON)
    elif scale == "group_mean":
        if bool((reward < 0).any()):
            raise ConfigError(f"scale 'group_mean' needs rewards >= 0, got {float(reward.min()):g}")
        advantage = advantage / torch.where(mean > 0, mean, 1.0)
    return torch.where(used & ~zero_variance(rewards, group_index, valid=valid), advantage, 0.0).to(dtype)


def zero_variance(
    rewards: torch.Tensor, group_index: torch.Tensor, *, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [S] bool, True in groups whose rewards differ by at most 1e-6; one trajectory alone is such a group.

    Such groups carry no signal; dynamic sampling (DAPO, arXiv:2503.14476) leaves them out of the batch.
    """
    used = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    groups, group = torch.unique(group_index, return_inverse=True)
    high = torch.full((len(groups),), -torch.inf, dtype=torch.float64, device=rewards.device)
    reward = rewards.detach().double()
    top = high.scatter_reduce(0, group, torch.where(used, reward, -torch.inf), "amax")
    bottom = (-high).scatter_reduce(0, group, torch.where(used, reward, torch.inf), "amin")
    return ~(top - bottom > ZERO_VARIANCE)[group]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
