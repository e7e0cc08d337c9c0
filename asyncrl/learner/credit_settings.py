"""Settings of who is credited with what. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.errors import ConfigError

LEVELS = ("trajectory", "turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """What is added to a reward before its group's baseline, and which tokens a reward goes to.

    Example:
        >>> CreditSettings(level="turn", turn_discount=0.9).level
        'turn'
    """

    level: str = "trajectory"
    """"trajectory": every sampled token gets its trajectory's reward, less the group's baseline. "turn": the tokens of
    turn k get the discounted sum of the rewards of turns k, k+1, ..., less that of the same turn in its group."""
    turn_discount: float = 1.0
    """What a reward loses by each turn between it and the turn that is credited; from 0 to 1. Level "turn"."""
    turn_potentials: bool = False
    """Turn rewards are a process model's scores of the state after each turn: what is paid is their rise, so that more
    steps do not earn more. Level "turn"."""
    overlong_max_length: int = 0
    """Sampled tokens of a trajectory at which the penalty for length reaches -1; 0 penalises nothing."""
    overlong_buffer_length: int = 0
    """Tokens before `overlong_max_length` over which the penalty grows linearly from 0."""
    overlong_filter: bool = False
    """Train on no token of trajectories that were cut at a limit on tokens; their rewards stay in the baseline. Not
    together with the penalty for length, which already answers for the same trajectories."""
    reward_kl_coef: float = 0.0
    """Reward that a nat of behaviour over reference costs, summed over a trajectory's sampled tokens. Needs the
    reference's log-probs before the first forward pass."""
    whiten: bool = False
    """Bring the advantages to mean 0 and standard deviation 1 over the batch's tokens. Groups without a difference in
    reward keep exactly 0."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        if self.level not in LEVELS:
            raise ConfigError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r} ([learner.credit])")
        if not 0.0 <= self.turn_discount <= 1.0:
            raise ConfigError(f"turn_discount must be from 0 to 1, got {self.turn_discount} ([learner.credit])")
        if not (math.isfinite(self.reward_kl_coef) and self.reward_kl_coef >= 0.0):
            raise ConfigError(f"reward_kl_coef must be >= 0, got {self.reward_kl_coef} ([learner.credit])")
        for name in ("turn_discount", "turn_potentials"):
            value = getattr(self, name)
            if self.level != "turn" and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f'{name} = {value} has an effect at level = "turn" only ([learner.credit])')
        length, buffer = self.overlong_max_length, self.overlong_buffer_length
        if (length or buffer) and not 0 < buffer <= length:
            raise ConfigError(
                f"overlong_buffer_length must be from 1 to overlong_max_length = {length} tokens, got {buffer} "
                "([learner.credit])"
            )
        if self.overlong_filter and length:
            raise ConfigError(
                f"overlong_filter and overlong_max_length = {length} exclude each other: both answer for trajectories "
                "that are too long; use one ([learner.credit])"
            )
