"""What watches a run and acts: it warns, leaves the weights as they are, pauses or stops, each by its setting.

A limit on what a step measures (ratio, ess, entropy) goes with the step to the learner, which leaves the weights as
they are where it is broken and the action is "skip" or more. What is seen between steps (behaviour, sync) holds back
the next one instead. An optional controller answers a falling effective sample size by smaller steps or fresher tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.protocols import StepOptions


class Action(StrEnum):
    """What a guard does, each one in place of the others."""

    OFF = "off"
    WARN = "warn"
    SKIP = "skip"
    """The weights stay as they are; the step counts, and its groups are not trained on again."""
    PAUSE = "pause"
    """As "skip"; then a checkpoint is written and no step is taken before the run gets SIGUSR1."""
    STOP = "stop"
    """As "skip"; then the run writes a checkpoint and ends."""


class Controller(StrEnum):
    """What is lowered while the effective sample size is below `ess_target`, and raised again after.

    In a simulation (tests/test_controller.py) both win back part of what too large a learning rate costs an unclipped
    loss, and none does anything at the right one; with a clipped loss fewer stale tokens cost more than they bring.
    """

    OFF = "off"
    LEARNING_RATE = "learning_rate"
    MAX_OFF_POLICYNESS = "max_off_policyness"
    """The slots of the gate, and with them how stale tokens get; the bound itself stays what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What is watched for, and what is done about it: "off", "warn", "skip", "pause" or "stop"."""

    ratio: Action = Action.WARN
    ratio_max: float = 1000.0
    """Largest token ratio of a step that is in order."""
    ess: Action = Action.WARN
    ess_min: float = 0.2
    """Smallest effective sample size of the token ratios that is in order, as a share of their number."""
    entropy: Action = Action.WARN
    entropy_fall: float = 0.2
    """Smallest entropy that is in order, as a share of that of the run's first step."""
    nonfinite: Action = Action.WARN
    nonfinite_steps: int = 3
    """Steps one after the other whose gradient is not finite, from which on the guard acts; each of them is skipped."""
    behaviour: Action = Action.WARN
    """About signs of a hacked reward: what agents try besides their tasks is rising, by an environment that watches."""
    sync: Action = Action.WARN
    """About an engine that took other weights than were sent to it."""
    controller: Controller = Controller.OFF
    ess_target: float = 0.7
    """Effective sample size that the controller keeps, as a share."""
    least_scale: float = 0.1
    """Share of the learning rate that the controller leaves at least."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for name, low, high in (
            ("ratio_max", 1.0, math.inf),
            ("ess_min", 0.0, 1.0),
            ("entropy_fall", 0.0, 1.0),
            ("nonfinite_steps", 1, math.inf),
            ("ess_target", 0.0, 1.0),
            ("least_scale", 0.0, 1.0),
        ):
            if not low <= getattr(self, name) <= high:  # so that NaN is refused too
                raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {getattr(self, name)} ([guards])")
        if self.least_scale == 0.0:
            raise ConfigError("least_scale must be above 0, or nothing would be learned again ([guards])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What a guard saw, and what it does."""

    guard: str
    action: Action
    value: float
    limit: float
    skipped: bool
    """Whether the weights stayed as they were in the step that it is about."""
    words: str


MEASURED = ("ratio", "ess", "entropy")
"""Guards on what the learner's diagnostics measure in a step."""

_HOLDS_BACK = (Action.SKIP, Action.PAUSE, Action.STOP)
_FALL, _RISE = 0.7, 1.05  # of the controller's scale a step: down fast, since a collapse is faster than a recovery
_BEHAVIOUR = ("behaviour_", "_rising")  # of a step's record, by `asyncrl.behaviour`


class Guards:
    """The guards of one run; asked before a step and told after it.

    Example:
        >>> guards = Guards(GuardSettings(ratio=Action.SKIP, ratio_max=10.0))
        >>> guards.options().limits
        {'importance_ratio_max': (-inf, 10.0)}
        >>> [alarm.words for alarm in guards.check({"importance_ratio_max": 25.0}, stepped=False)]
        ['largest ratio 25 is above ratio_max = 10: the weights stayed as they were']
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._entropy_start: float | None = None
        self._nonfinite = 0
        self._quarantines = 0
        self._held_back: tuple[str, ...] = ()
        self.scale = 1.0
        """Share of the learning rate, or of the gate's slots, that the controller leaves."""

    @property
    def deeds(self) -> list[tuple[str, str]]:
        """(guard, action) of those that are on: what they may be counted doing."""
        return [(guard, action.value) for guard, action in actions(self._settings).items() if action is not Action.OFF]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs (JSON-like)."""
        return {"entropy_start": self._entropy_start, "scale": self.scale}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; from the beginning where it is empty."""
        self._entropy_start, self.scale = state.get("entropy_start"), state.get("scale", 1.0)

    def options(self) -> StepOptions:
        """Return how the next step is to be taken."""
        lowers_rate = self._settings.controller is Controller.LEARNING_RATE
        limits = {
            metric: (least, most)
            for guard, metric, _, least, most, _ in self._measured()
            if getattr(self._settings, guard) in _HOLDS_BACK
        }
        return StepOptions(
            learning_rate_scale=self.scale if lowers_rate else 1.0, update=not self._held_back, limits=limits
        )

    def slots(self, groups_per_step: int, num_slots: int) -> int:
        """Return the slots that the gate is to have, of `num_slots`: a step's groups at least."""
        if self._settings.controller is not Controller.MAX_OFF_POLICYNESS:
            return num_slots
        return max(groups_per_step, min(num_slots, round(self.scale * num_slots)))

    def check(self, record: Mapping[str, float], *, stepped: bool, quarantines: int = 0) -> Sequence[Alarm]:
        """Return the alarms of a step that was taken, whose metrics are `record`.

        `quarantines` are those of all engines since the start.
        """
        alarms = [*self._check_measured(record, stepped), *self._check_nonfinite(record)]
        between = [*self._check_behaviour(record), *self._check_sync(quarantines)]
        self._held_back = tuple(alarm.guard for alarm in between if alarm.action in _HOLDS_BACK)
        if self._entropy_start is None:
            self._entropy_start = record.get("entropy")
        self._control(record.get("ess_token"))
        return [*alarms, *between]

    def _measured(self) -> list[tuple[str, str, str, float, float, str]]:
        """Return (guard, metric, what it is, least, most, setting) of the limits on what a step measures."""
        settings = self._settings
        found = [
            ("ratio", "importance_ratio_max", "largest ratio", -math.inf, settings.ratio_max, "ratio_max"),
            ("ess", "ess_token", "effective sample size", settings.ess_min, math.inf, "ess_min"),
        ]
        if self._entropy_start is not None:
            least = settings.entropy_fall * self._entropy_start
            found.append(("entropy", "entropy", "entropy", least, math.inf, "entropy_fall of the first step's"))
        return found

    def _check_measured(self, record: Mapping[str, float], stepped: bool) -> list[Alarm]:
        alarms = []
        for guard, metric, what, least, most, setting in self._measured():
            value = record.get(metric)
            if value is None or least <= value <= most:
                continue
            side, limit = ("below", least) if value < least else ("above", most)
            words = f"{what} {value:.4g} is {side} {setting} = {limit:.4g}"
            alarms += self._alarm(guard, value, limit, words, skipped=not stepped)
        return alarms

    def _check_nonfinite(self, record: Mapping[str, float]) -> list[Alarm]:
        self._nonfinite = self._nonfinite + 1 if record.get("grad_norm_nonfinite") else 0
        limit = self._settings.nonfinite_steps
        if self._nonfinite < limit:
            return []
        words = (
            f"the gradient was not finite in {self._nonfinite} steps one after the other (nonfinite_steps = {limit})"
        )
        return self._alarm("nonfinite", self._nonfinite, limit, words, skipped=True)

    def _check_behaviour(self, record: Mapping[str, float]) -> list[Alarm]:
        first, last = _BEHAVIOUR
        rising = [key[len(first) : -len(last)] for key, value in record.items()
                  if value and key.startswith(first) and key.endswith(last)]  # fmt: skip
        if not rising:
            return []
        words = f"agents try more and more what is not their task: {', '.join(sorted(rising))}"
        return self._alarm("behaviour", len(rising), 0, words, skipped=False)

    def _check_sync(self, quarantines: int) -> list[Alarm]:
        more, self._quarantines = quarantines - self._quarantines, quarantines
        words = "an engine took other weights than were sent to it"
        return self._alarm("sync", more, 0, words, skipped=False) if more > 0 else []

    def _alarm(self, guard: str, value: float, limit: float, words: str, *, skipped: bool) -> list[Alarm]:
        action: Action = getattr(self._settings, guard)
        if action is Action.OFF:
            return []
        deeds = {
            Action.WARN: "",
            Action.SKIP: "" if skipped else "; the next step leaves the weights as they are",
            Action.PAUSE: "; the run is paused",
            Action.STOP: "; the run is stopped",
        }
        did = ": the weights stayed as they were" if skipped else ""
        alarm = Alarm(
            guard=guard, action=action, value=value, limit=limit, skipped=skipped, words=words + did + deeds[action]
        )
        return [alarm]

    def _control(self, ess: float | None) -> None:
        settings = self._settings
        if ess is None or settings.controller is Controller.OFF:
            return
        factor = _FALL if ess < settings.ess_target else _RISE
        self.scale = min(1.0, max(settings.least_scale, self.scale * factor))


def actions(settings: GuardSettings) -> dict[str, Action]:
    """Return guard -> action."""
    return {f.name: value for f in fields(settings) if isinstance(value := getattr(settings, f.name), Action)}
