"""Settings of the gate and the buffer."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """How much work is under way, and how old it may be when it is trained on."""

    max_off_policyness: int = 1
    """Optimizer steps, >= 0: no token sampled more than this many steps before the weights being updated is ever
    trained on. 0 is synchronous, on-policy training."""
    groups_per_step: int = 4
    """Groups that one optimizer step eats."""
    group_size: int = 8
    """Trajectories of one group."""
    window: int = 0
    """How many of the oldest admitted groups the learner may choose from; 1 is strict order, larger lets finished
    groups pass a straggler and costs as many slots. 0 chooses: 1 when on-policy, else half a step's groups."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        _at_least("max_off_policyness", self.max_off_policyness, 0, "optimizer steps")
        _at_least("groups_per_step", self.groups_per_step, 1, "groups")
        _at_least("group_size", self.group_size, 1, "trajectories")
        _at_least("window", self.window, 0, "groups")
        if self.num_slots < self.groups_per_step:
            raise ConfigError(
                f"the gate has (max_off_policyness + 1) * groups_per_step - window + 1 = {self.num_slots} slots, "
                f"but one step needs {self.groups_per_step} groups: lower window from {self.effective_window} "
                f"to at most {self.max_off_policyness * self.groups_per_step + 1}, or raise max_off_policyness "
                f"from {self.max_off_policyness} ([buffer])"
            )

    @property
    def effective_window(self) -> int:
        """The window in use, in groups."""
        if self.window:
            return self.window
        return 1 if self.max_off_policyness == 0 else max(1, self.groups_per_step // 2)

    @property
    def num_slots(self) -> int:
        """Groups that may be admitted and not yet pulled: the most for which the bound holds (STALENESS.md)."""
        return (self.max_off_policyness + 1) * self.groups_per_step - self.effective_window + 1


def _at_least(name: str, value: int, least: int, unit: str) -> None:
    if value < least:
        raise ConfigError(f"{name} must be >= {least} {unit}, got {value} ([buffer])")
