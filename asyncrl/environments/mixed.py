"""Several environments in one run, mixed by weight, none below a minimum share.

[environment]
name = "mixed"

[environment.options]
minimum_share = 0.1
parts = [
    { label = "own", name = "bugfix", weight = 2.0 },
    { label = "files", name = "humanevalfix", weight = 1.0, options = { path = "my_tasks.jsonl" } },
]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import trio

from asyncrl.collecting import collect_from
from asyncrl.environments.chat import ChatSettings
from asyncrl.environments.loading import EnvironmentSettings, load_environment, resolve_options
from asyncrl.errors import ConfigError
from asyncrl.evaluation import is_solved
from asyncrl.gateway import Gateway, NeedsGateway
from asyncrl.protocols import (
    Environment,
    FetchesItems,
    LearnsFromGroups,
    RunsAlongside,
    Sampler,
    SandboxBackend,
)
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory

_WHERE = "[environment.options]"
_MEMORY = 0.95  # of a group, in an environment's share of groups that teach: about the last twenty count


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPart:
    """One environment of the mixture."""

    label: str
    """What its tasks, episodes and figures are counted under."""
    name: str
    """As in [environment]."""
    weight: float = 1.0
    """Above 0: its share of the groups, relative to the others' weights."""
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: ChatSettings = field(default_factory=ChatSettings)
    """How its messages become tokens, as in [environment.chat]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSettings:
    """Which environments are mixed, and how."""

    parts: tuple[MixedPart, ...]
    minimum_share: float = 0.0
    """From 0 to 1 / number of parts: the share of the groups that each part gets at least."""
    follow_signal: bool = False
    """Multiply each weight with the part's share of recent groups in which some episodes succeeded and some failed:
    an environment that is solved, or hopeless, then makes room for the others, down to `minimum_share`."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for parts that cannot be mixed."""
        labels = [part.label for part in self.parts]
        if len(labels) < 2 or len({*labels}) < len(labels):
            raise ConfigError(f"parts needs at least two environments with different labels, got {labels} ({_WHERE})")
        for part in self.parts:
            if not (math.isfinite(part.weight) and part.weight > 0):
                raise ConfigError(f"weight of part {part.label!r} must be above 0, got {part.weight} ({_WHERE})")
            if part.name == "mixed":
                raise ConfigError(f"part {part.label!r} is a mixture itself: list its parts here instead ({_WHERE})")
        if not 0 <= self.minimum_share <= 1 / len(labels):
            raise ConfigError(
                f"minimum_share must be from 0 to 1 / {len(labels)} with {len(labels)} parts, got "
                f"{self.minimum_share} ({_WHERE})"
            )

    @property
    def slowest_part(self) -> str:
        """The label of the part whose episodes may take longest."""
        return max(self.parts, key=_longest_episode_s).label

    @property
    def longest_episode_s(self) -> float:
        """Of the part whose episodes may take longest."""
        return max(map(_longest_episode_s, self.parts))

    @property
    def max_episode_tokens(self) -> int:
        """Of the part with the longest episodes."""
        found = (getattr(resolve_options(settings_of(part)), "max_episode_tokens", 0) for part in self.parts)
        return max(found)

    @property
    def sandboxes_held(self) -> int:
        """Of all parts together."""
        return sum(getattr(resolve_options(settings_of(part)), "sandboxes_held", 0) for part in self.parts)


def _longest_episode_s(part: MixedPart) -> float:
    return float(getattr(resolve_options(settings_of(part)), "longest_episode_s", 0.0))


def settings_of(part: MixedPart) -> EnvironmentSettings:
    """Return a part's settings as its own [environment] would have them."""
    return EnvironmentSettings(name=part.name, options=part.options, chat=part.chat)


def shares(weights: Mapping[str, float], minimum: float) -> dict[str, float]:
    """Return shares in proportion to the weights that sum to 1, none below `minimum`.

    What the raised ones gain, the others give in proportion.

    Example:
        >>> shares({"a": 3.0, "b": 1.0, "c": 0.0}, 0.25)
        {'a': 0.5, 'b': 0.25, 'c': 0.25}
    """
    raised: set[str] = set()
    while True:
        free = 1 - minimum * len(raised)
        total = sum(weight for label, weight in weights.items() if label not in raised)
        found = {
            label: minimum
            if label in raised
            else free * (weight / total if total else 1 / (len(weights) - len(raised)))
            for label, weight in weights.items()
        }
        below = {label for label, share in found.items() if share < minimum and label not in raised}
        if not below:
            return found
        raised |= below


class MixedEnvironment:
    """Draws each task from one of its parts. Fulfils `protocols.ReportsTrajectories`."""

    name = "mixed"
    settings_type = MixedSettings

    def __init__(
        self, settings: MixedSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        self.settings = settings
        self.parts: dict[str, Environment] = {
            part.label: load_environment(settings_of(part), renderer=renderer, sandboxes=sandboxes, seed=seed)
            for part in settings.parts
        }
        self._seed = seed
        self._num_drawn = 0
        self._signal = dict.fromkeys(self.parts, 1.0)
        self._ended: set[str] = set()

    def shares(self) -> dict[str, float]:
        """Return label -> the chance that the next task is its; parts whose tasks are used up have none."""
        weights = {
            part.label: part.weight * (self._signal[part.label] if self.settings.follow_signal else 1.0)
            for part in self.settings.parts
            if part.label not in self._ended
        }
        return shares(weights, self.settings.minimum_share)

    def get_item(self) -> Task:
        """Return the next task of some part. Raises StopIteration when the tasks of all are used up."""
        random = Random(f"{self._seed}/mixed/{self._num_drawn}")
        while len(self._ended) < len(self.parts):
            chances = self.shares()
            (label,) = random.choices(list(chances), list(chances.values()))
            try:
                task = self.parts[label].get_item()
            except StopIteration:
                self._ended.add(label)
                continue
            self._num_drawn += 1
            return replace(task, environment=label)
        raise StopIteration

    async def serve(self, directory: Path, *, task_status: trio.TaskStatus[None]) -> None:
        """Let the parts that have business of their own go about it."""
        async with trio.open_nursery() as nursery:
            for part in self.parts.values():
                if isinstance(part, RunsAlongside):
                    await nursery.start(part.serve, directory)
            task_status.started()

    async def wait_item(self, count: int = 1) -> None:
        """Wait for tasks of every part whose tasks take time to come: all may be of any of them."""
        for part in self.parts.values():
            if isinstance(part, FetchesItems):
                await part.wait_item(count)

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Learn from a finished group of a task whether its part still teaches."""
        label = task.environment
        outcomes = {is_solved(t) for t in trajectories if t.reward is not None}
        if outcomes:
            self._signal[label] = _MEMORY * self._signal[label] + (1 - _MEMORY) * (len(outcomes) == 2)
        part = self.parts[label]
        if isinstance(part, LearnsFromGroups):
            part.observe(replace(task, environment=part.name), trajectories)

    def held_out(self) -> Sequence[Task]:
        """Return the held-out tasks of all parts."""
        return [replace(task, environment=label) for label, part in self.parts.items() for task in part.held_out()]

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Let the task's part run it; its episodes are counted under the part's label."""
        part = self.parts[task.environment]

        def named(trajectory: Trajectory) -> Trajectory:
            return replace(trajectory, environment=task.environment)

        trajectories = await collect_from(
            part,
            replace(task, environment=part.name),
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory and (lambda trajectory: on_trajectory(named(trajectory))),
        )
        return [named(trajectory) for trajectory in trajectories]

    @property
    def needs_gateway(self) -> bool:
        """Whether a part needs the run's gateway."""
        return any(isinstance(part, NeedsGateway) and part.needs_gateway for part in self.parts.values())

    def use_gateway(self, gateway: Gateway) -> None:
        """Hand the gateway to the parts that need it."""
        for part in self.parts.values():
            if isinstance(part, NeedsGateway):
                part.use_gateway(gateway)

    def state(self) -> Mapping[str, Any]:
        """Return the parts' states and the mixture's."""
        return {
            "parts": {label: part.state() for label, part in self.parts.items()},
            "drawn": self._num_drawn,
            "signal": dict(self._signal),
            "ended": sorted(self._ended),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        for label, part in self.parts.items():
            part.restore(state["parts"][label])
        self._num_drawn, self._signal = state["drawn"], dict(state["signal"])
        self._ended = set(state["ended"])

    async def aclose(self) -> None:
        """Release what the parts hold."""
        for part in self.parts.values():
            await part.aclose()
