"""Credit: from rewards to advantages per sequence and per token. `T` packed tokens, `S` sequences.

Advantages carry the unit of the reward, unless divided by a standard deviation. Nothing here is differentiable.
"""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.presets import BASELINES, SCALES
from asyncrl.losses.ratios import MAX_LOG_RATIO
from asyncrl.losses.reduction import ZERO_VARIANCE
from asyncrl.losses.segments import Segments, discounted_suffix_sum, segments_of

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

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 4, 9])).tolist()
        [0.5, -0.5, 0.0]
    """
    _check_choice("baseline", baseline, BASELINES)
    _check_choice("scale", scale, SCALES)
    if rewards.dim() != 1 or group_index.shape != rewards.shape:
        raise ShapeError(
            f"rewards and group_index must be [S], got {list(rewards.shape)} and {list(group_index.shape)}"
        )
    if valid is not None and valid.shape != rewards.shape:
        raise ShapeError(f"valid must be [S] = {list(rewards.shape)}, got {list(valid.shape)}")
    if group_index.numel() and group_index.is_floating_point():
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


# --- per token ------------------------------------------------------------------------------------------------


def spread(sequence_advantages: torch.Tensor, cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return [T], each sequence's advantage [S] on its active tokens, 0 elsewhere.

    `cu_seqlens` [S+1], `loss_mask` [T] bool.
    Raises: ShapeError.
    """
    segments = _layout(cu_seqlens, loss_mask)
    _check_length("sequence_advantages", sequence_advantages, segments.num_sequences, "S")
    return torch.where(loss_mask.bool(), segments.spread(sequence_advantages.detach()), 0.0)


def override(advantages: torch.Tensor, per_token: torch.Tensor) -> torch.Tensor:
    """Return [T], `per_token` where it is a number and `advantages` where it is NaN.

    So an environment gives its own credit to some tokens and leaves the rest to the trainer.
    Raises: ShapeError; ConfigError for an infinite credit.
    """
    if advantages.shape != per_token.shape:
        raise ShapeError(f"per_token must be [T] = {list(advantages.shape)}, got {list(per_token.shape)}")
    if bool(per_token.isinf().any()):
        raise ConfigError(f"per-token credit must be finite or NaN: token {int(per_token.isinf().nonzero()[0])} is not")
    return torch.where(per_token.isnan(), advantages, per_token.to(advantages.dtype)).detach()


def whiten(advantages: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return [T], advantages with mean 0 and unbiased standard deviation 1 over the active tokens, 0 elsewhere.

    With fewer than two active tokens they are returned as they are.
    """
    mask = loss_mask.bool()
    active = advantages.detach()[mask].double()
    if active.numel() < 2:
        return torch.where(mask, advantages.detach(), 0.0)
    white = (advantages.detach().double() - active.mean()) / (active.std() + _STD_EPSILON)
    return torch.where(mask, white, 0.0).to(advantages.dtype)


# --- over time ------------------------------------------------------------------------------------------------


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages [T] and the returns (advantage + value) [T] over action tokens; 0 elsewhere.

    `rewards` [T], `values` [T] (value of the state in which token t was chosen), `loss_mask` [T] bool, `cu_seqlens`
    [S+1]. Observation tokens are no time steps: they have no value and no discount, and a reward on one belongs to the
    last action before it (before the first action: to none). `bootstrap_values` [S]: value of the state after a
    truncated episode's last action; 0 where the episode ended. `values` are not read where the mask is False, and a NaN
    reward there is no reward. `lam` 1 is Monte Carlo minus value, 0 the one-step error.
    Source: arXiv:1506.02438.
    Raises: ShapeError; ConfigError for gamma or lam outside [0, 1], or for rewards or values that are not finite.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ConfigError(f"{name} must be in [0, 1], got {number}")
    segments = _layout(cu_seqlens, loss_mask)
    mask = loss_mask.bool()
    for name, tensor in (("rewards", rewards), ("values", values)):
        _check_length(name, tensor, mask.numel(), "T")
    actions, reward = _action_rewards(rewards, mask, segments)
    value = values.detach().double()[mask]
    _check_finite("values", value)
    last = _lasts(actions)
    following = torch.zeros_like(value)
    following[:-1] = torch.where(last[:-1], 0.0, value[1:])
    if bootstrap_values is not None:
        _check_length("bootstrap_values", bootstrap_values, segments.num_sequences, "S")
        after = bootstrap_values.detach().double()[actions.index]
        _check_finite("bootstrap_values", after)
        following = torch.where(last, after, following)
    delta = reward + gamma * following - value
    advantage = discounted_suffix_sum(delta, actions, gamma * lam)
    dtype = values.dtype

    def placed(compressed: torch.Tensor) -> torch.Tensor:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_scatter(mask, compressed.to(dtype))

    return placed(advantage), placed(advantage + value)


def reward_to_go(
    rewards: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """Return [T], sum over later action tokens s >= t of gamma^(s-t) times the reward on s; 0 off the mask.

    Time counts action tokens, and a reward on an observation belongs to the last action before it, as in `gae`.
    Raises: as `gae`.
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, loss_mask, cu_seqlens, gamma=gamma)[0]


def turn_returns(turn_rewards: torch.Tensor, turn_offsets: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """Return [K], G_k = sum over turns j >= k of the same sequence of gamma^(j-k) r_j.

    `turn_rewards` [K], all sequences' turns after each other; `turn_offsets` [S+1], as `cu_seqlens` but over turns. No
    discount applies inside a turn.
    Source: turn-level credit, arXiv:2505.11821.
    Raises: ShapeError; ConfigError for gamma outside [0, 1] or rewards that are not finite.
    """
    every = torch.ones_like(turn_rewards, dtype=torch.bool)
    return reward_to_go(turn_rewards, every, turn_offsets, gamma=gamma)


def turn_advantages(
    turn_rewards: torch.Tensor,
    turn_offsets: torch.Tensor,
    group_index: torch.Tensor,
    *,
    gamma: float = 1.0,
    baseline: str = "mean",
    scale: str = "none",
) -> torch.Tensor:
    """Return [K], each turn's return relative to the same turn of the other trajectories of its group.

    `group_index` [S]. A turn that only one trajectory of the group reached has nothing to be compared with and gets 0.
    Raises: as `turn_returns` and `group_advantages`.
    """
    returns = turn_returns(turn_rewards, turn_offsets, gamma=gamma)
    return group_advantages(returns, turn_peers(turn_offsets, group_index), baseline=baseline, scale=scale)


def turn_peers(turn_offsets: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
    """Return [K] int64, equal for the same turn (first, second, ...) of the trajectories of one group.

    `turn_offsets` [S+1], `group_index` [S] int64. Raises: ShapeError.
    """
    segments = segments_of(turn_offsets, int(turn_offsets[-1]))
    _check_length("group_index", group_index, segments.num_sequences, "S")
    turn = torch.arange(len(segments.index), device=segments.index.device) - segments.spread(segments.cu_seqlens[:-1])
    groups, group = torch.unique(group_index, return_inverse=True)
    return turn * len(groups) + segments.spread(group)


def spread_turns(turn_values: torch.Tensor, turn_index: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return [T], `turn_values` [K] on the active tokens of each turn, 0 elsewhere.

    `turn_index` [T]: which of the K turns a token belongs to; not read where `loss_mask` [T] is False.
    Raises: ShapeError for an index out of range.
    """
    mask = loss_mask.bool()
    _check_length("turn_index", turn_index, mask.numel(), "T")
    index = torch.where(mask, turn_index.long(), 0)
    if bool(mask.any()) and not (int(index.min()) >= 0 and int(index.max()) < len(turn_values)):
        raise ShapeError(f"turn_index must be in [0, {len(turn_values)}), got {int(index.min())}..{int(index.max())}")
    if not len(turn_values):
        return torch.zeros(mask.shape, dtype=turn_values.dtype, device=mask.device)
    return torch.where(mask, turn_values.detach()[index], 0.0)


# --- what is added to a reward --------------------------------------------------------------------------------


def process_rewards(
    potentials: torch.Tensor,
    step_offsets: torch.Tensor,
    step_ends: torch.Tensor,
    num_tokens: int,
    *,
    initial: float = 0.0,
) -> torch.Tensor:
    """Return [T] rewards, the potential's rise Phi_k - Phi_(k-1) on the last token of each step, 0 elsewhere.

    `potentials` [K], a process reward model's score after each step, all sequences' steps after each other;
    `step_offsets` [S+1] over steps; `step_ends` [K] the index in T of each step's last token; `initial` the potential
    before the first step. They add up to the last potential minus `initial`: more steps earn nothing, which summed raw
    scores would pay for.
    Source: potential-based shaping; process scores as in arXiv:2312.08935.
    Raises: ShapeError; ConfigError for a potential that is not finite.
    """
    segments = segments_of(step_offsets, len(potentials))
    _check_length("step_ends", step_ends, len(potentials), "K")
    potential = potentials.detach().double()
    _check_finite("potentials", potential)
    if len(step_ends) and not (int(step_ends.min()) >= 0 and int(step_ends.max()) < num_tokens):
        raise ShapeError(f"step_ends must be in [0, {num_tokens}), got {int(step_ends.min())}..{int(step_ends.max())}")
    before = torch.full_like(potential, initial)
    before[1:] = torch.where(segments.index[1:] == segments.index[:-1], potential[:-1], initial)
    rewards = potential.new_zeros(num_tokens).index_add(0, step_ends.long(), potential - before)
    return rewards.to(potentials.dtype)


def reference_kl_rewards(
    behaviour_logprobs: torch.Tensor, reference_logprobs: torch.Tensor, loss_mask: torch.Tensor, *, coef: float
) -> torch.Tensor:
    """Return [T] rewards, -coef (behaviour - reference) on active tokens: the KL penalty in the reward (k1).

    Log-probs [T] in nats; the difference is clamped to 20. Of the sampling policy, without a gradient. Add it to the
    reward before a group baseline is taken. Source: arXiv:2512.21852 (unbiased in the reward).
    Raises: ConfigError for coef < 0.
    """
    if not coef >= 0:
        raise ConfigError(f"coef must be >= 0, got {coef}")
    mask = loss_mask.bool()
    zero = behaviour_logprobs.new_zeros(())
    difference = torch.where(mask, behaviour_logprobs.detach(), zero) - torch.where(
        mask, reference_logprobs.detach(), zero
    )
    return -coef * difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def overlong_penalty(lengths: torch.Tensor, *, max_length: int, buffer_length: int) -> torch.Tensor:
    """Return [S], what is added to the reward of a completion of `lengths` [S] tokens, in [-1, 0].

    0 up to max_length - buffer_length, then falling linearly to -1 at max_length, -1 beyond. Do not use it with
    `overlong_filter`, which takes the same completions out. Source: DAPO, arXiv:2503.14476, equation 13.
    Raises: ConfigError unless 0 < buffer_length <= max_length.
    """
    if not 0 < buffer_length <= max_length:
        raise ConfigError(f"buffer_length must be in (0, max_length {max_length}] tokens, got {buffer_length}")
    return ((max_length - buffer_length - lengths.double()) / buffer_length).clamp(-1.0, 0.0).float()


def overlong_filter(loss_mask: torch.Tensor, truncated: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the loss mask [T] without the sequences that were `truncated` [S] bool.

    Raises: ShapeError.
    """
    segments = _layout(cu_seqlens, loss_mask)
    _check_length("truncated", truncated, segments.num_sequences, "S")
    return loss_mask.bool() & ~segments.spread(truncated.bool())


def _action_rewards(rewards: torch.Tensor, mask: torch.Tensor, segments: Segments) -> tuple[Segments, torch.Tensor]:
    """Return the layout of the action tokens alone, and the reward of each of them in float64."""
    reward = rewards.detach().double()
    reward = torch.where(~mask & reward.isnan(), 0.0, reward)
    _check_finite("rewards", reward)
    number = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.long().cumsum(0)])
    actions = segments_of(number[segments.cu_seqlens], int(number[-1]))
    owner = number[1:] - 1  # the last action at or before each token, counted over the whole batch
    owned = owner >= segments.spread(actions.cu_seqlens[:-1])
    return actions, reward.new_zeros(int(number[-1])).index_add(0, owner[owned], reward[owned])


def _lasts(segments: Segments) -> torch.Tensor:
    """Return [T] bool, True on the last token of each sequence."""
    last = torch.ones_like(segments.index, dtype=torch.bool)
    last[:-1] = segments.index[1:] != segments.index[:-1]
    return last


def _layout(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> Segments:
    if loss_mask.dim() != 1:
        raise ShapeError(f"loss_mask must be [T], got {list(loss_mask.shape)}")
    return segments_of(cu_seqlens, loss_mask.numel())


def _check_length(name: str, tensor: torch.Tensor, size: int, axis: str) -> None:
    if tuple(tensor.shape) != (size,):
        raise ShapeError(f"{name} must be [{axis}] = [{size}], got {list(tensor.shape)}")


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ConfigError(f"{name} must be finite, {int((~tensor.isfinite()).sum())} of {tensor.numel()} are not")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
