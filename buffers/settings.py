"""Settings of the gate and the buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.buffers.ordering import Order
from asyncrl.errors import ConfigError
from asyncrl.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """How much work is under way, in which order it is trained on, and how old it may be then."""

    max_off_policyness: int = 1
    """Optimizer steps, >= 0: no token sampled more than this many steps before the weights being updated is ever
    trained on. 0 is synchronous, on-policy training."""
    groups_per_step: int = 4
    """Groups that one optimizer step eats."""
    group_size: int = 8
    """Trajectories of one group."""
    order: Order = Order.WINDOWED_FIFO
    """Which finished groups a step prefers: "windowed_fifo" the oldest, "freshest" the last admitted, "uniform" any,
    drawn with the run's seed. The bound comes first in all of them."""
    slots: int = 0
    """Groups that may be admitted and not yet pulled, from groups_per_step to (max_off_policyness + 1) *
    groups_per_step. The most keeps the engines busiest and leaves no choice: in the long run every group is due when
    the learner comes to it, whatever the order, and a straggler is waited for. Fewer leave places that the order gives
    as it likes, and time in which engines may run dry. 0 chooses: about half a step's groups less than the most, and
    where groups are used again, so many that there are places for it."""
    window: int = 0
    """Of windowed_fifo, in groups: a step takes none that was admitted so many, or more, after one that it leaves
    behind; 1 is strict order. Small windows keep long episodes from being put off. 0 chooses: what `slots` leaves
    room for, or, where `slots`, `oversample` or `max_uses` is given, no limit besides the bound."""
    oversample: int = 0
    """Groups that are under way beyond the groups_per_step that a step needs, when the learner comes for them: the
    step takes the first that are ready, and the others go on to the next ones. A way to say `slots` for runs that are
    to be nearly on-policy and yet wait for no straggler; as many as groups_per_step keep the engines busy while the
    learner steps, too. 0 leaves it to `slots`."""
    max_uses: int = 1
    """Optimizer steps that may train on a group, as long as the bound allows. A reuse only fills a place for which no
    group that was never trained on is ready: the learner waits less, and learns from older tokens. A group keeps its
    slot until it is used up."""
    replace_zero_advantage: bool = False
    """Drop a finished group whose rewards are all equal, which would teach nothing, and start another in its place
    (DAPO's dynamic sampling). Costs the tokens of what is dropped, and selects tasks of middling difficulty."""
    max_replacements: int = 16
    """Groups that are replaced at most between two optimizer steps; those beyond are kept and trained on as they
    are, so that a step always comes."""
    group_deadline_s: float = 0.0
    """Seconds from a group's admission after which episodes that still run have failed: they are masked, and the group
    goes on with the others, if at least two have a reward (one of a group of one). 0 sets no deadline. For
    environments that keep none of their own, or hang; at least what an episode may take by its environment's own
    deadlines. Evaluations keep it too."""
    retries: int = 0
    """How often the failed episodes of a group are started again, whatever the environment, before they are masked.
    Environments that start single episodes again by themselves (`max_retries`) need none."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        _at_least("max_off_policyness", self.max_off_policyness, 0, "optimizer steps")
        _at_least("groups_per_step", self.groups_per_step, 1, "groups")
        _at_least("group_size", self.group_size, 1, "trajectories")
        _at_least("slots", self.slots, 0, "groups")
        _at_least("window", self.window, 0, "groups")
        _at_least("max_replacements", self.max_replacements, 1, "groups")
        _at_least("retries", self.retries, 0, "attempts")
        if not (math.isfinite(self.group_deadline_s) and self.group_deadline_s >= 0):
            raise ConfigError(f"group_deadline_s must be >= 0 seconds, got {self.group_deadline_s} ([buffer])")
        if self.replace_zero_advantage and self.group_size == 1:
            raise ConfigError(
                "replace_zero_advantage = true needs group_size >= 2: the rewards of a group of one are always equal, "
                "and all would be replaced ([buffer])"
            )
        if self.window and self.order is not Order.WINDOWED_FIFO:
            raise ConfigError(
                f'window = {self.window} is for order = "windowed_fifo", and order is "{self.order}": leave it out; '
                f"what may be passed over is set by slots ([buffer])"
            )
        if self.slots and not self.groups_per_step <= self.slots <= self.most_slots:
            raise ConfigError(
                f"slots must be 0, or between groups_per_step = {self.groups_per_step} and (max_off_policyness + 1) * "
                f"groups_per_step = {self.most_slots} groups, got {self.slots} ([buffer])"
            )
        _at_least("oversample", self.oversample, 0, "groups")
        _at_least("max_uses", self.max_uses, 1, "optimizer steps")
        if self.oversample and self.slots:
            raise ConfigError(f"slots = {self.slots} and oversample = {self.oversample}: give one of them ([buffer])")
        if self.num_slots > self.most_slots:
            raise ConfigError(
                f"oversample must be at most max_off_policyness * groups_per_step = "
                f"{self.most_slots - self.groups_per_step} groups, or what is left over would get too old, got "
                f"{self.oversample} ([buffer])"
            )
        if self.max_uses > 1 and self.max_off_policyness == 0:
            raise ConfigError(
                f"max_uses = {self.max_uses} needs max_off_policyness >= 1: a second use is off-policy ([buffer])"
            )
        if self.num_slots < self.groups_per_step:
            raise ConfigError(
                f"the gate has (max_off_policyness + 1) * groups_per_step - window + 1 = {self.num_slots} slots, "
                f"but one step needs {self.groups_per_step} groups: lower window from {self.window} "
                f"to at most {self.max_off_policyness * self.groups_per_step + 1}, raise max_off_policyness "
                f"from {self.max_off_policyness}, or give slots ([buffer])"
            )

    def group_size_of(self, task: Task) -> int:
        """Return how many trajectories a task's group will have; 0 where that shows when they have come."""
        return self.group_size if task.group_size is None else task.group_size

    @property
    def most_slots(self) -> int:
        """The slots with which the bound still holds (STALENESS.md)."""
        return (self.max_off_policyness + 1) * self.groups_per_step

    @property
    def num_slots(self) -> int:
        """The slots in use."""
        if self.slots:
            return self.slots
        if self.oversample:
            return self.groups_per_step + self.oversample
        room = self.groups_per_step // 2 if self.max_off_policyness else 0
        if self.order is Order.WINDOWED_FIFO:
            room = (self.window or self._usual_window) - 1
        if self.max_uses == 1:
            return self.most_slots - room
        # the steps that may use a group have most_slots places; more groups than that by max_uses leave none for reuse
        return min(self.most_slots - room, max(self.groups_per_step, -(-self.most_slots // self.max_uses)))

    @property
    def effective_window(self) -> int | None:
        """The window in use, in groups; None where only the bound limits."""
        if self.order is not Order.WINDOWED_FIFO:
            return None
        if self.window:
            return self.window
        return None if self.slots or self.oversample or self.max_uses > 1 else self._usual_window

    @property
    def _usual_window(self) -> int:
        return 1 if self.max_off_policyness == 0 else max(1, self.groups_per_step // 2)


def _at_least(name: str, value: int, least: int, unit: str) -> None:
    if value < least:
        raise ConfigError(f"{name} must be >= {least} {unit}, got {value} ([buffer])")
