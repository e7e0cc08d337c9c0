"""Seconds added to episodes, as if their sandboxes took so long: for experiments on what slow environments cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import trio

from asyncrl.collecting import collect_from
from asyncrl.errors import ConfigError
from asyncrl.protocols import Environment, FetchesItems, KeepsTrajectories, LearnsFromGroups, Sampler, Watch
from asyncrl.types import Completion, Task, TokenIds, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """What every episode of a run waits, once, after its first completion ([environment.latency]).

    The shape is the simulation's: a lognormal, and stragglers of one length. For experiments; training gains nothing.

    Example:
        >>> round(LatencySettings(median_s=10.0).seconds(Random(0)), 1)
        18.4
    """

    median_s: float = 0.0
    """Median seconds; 0 adds nothing."""
    sigma: float = 0.8
    """Of the lognormal."""
    straggler_share: float = 0.02
    """Of the episodes: those that wait `straggler_factor` times the median."""
    straggler_factor: float = 4.0

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        for name in ("median_s", "sigma", "straggler_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be >= 0 and finite, got {value} ([environment.latency])")
        if not 0 <= self.straggler_share <= 1:
            raise ConfigError(
                f"straggler_share must be from 0 to 1, got {self.straggler_share} ([environment.latency])"
            )

    @property
    def straggler_s(self) -> float:
        """Seconds that a straggler waits."""
        return self.median_s * self.straggler_factor

    def seconds(self, chance: Random) -> float:
        """Return what one episode waits."""
        if chance.random() < self.straggler_share:
            return self.straggler_s
        return self.median_s * chance.lognormvariate(0.0, self.sigma)


def with_latency(environment: Environment, settings: LatencySettings, *, seed: int) -> Environment:
    """Return the environment, its episodes delayed as `settings` say; the same episode by as much in every run."""
    if not settings.median_s:
        return environment
    return DelayedEnvironment(
        environment, lambda trajectory_id: settings.seconds(Random(f"{seed}/latency/{trajectory_id}"))
    )


class DelayedEnvironment:
    """An environment whose episodes wait. Fulfils `protocols.ReportsTrajectories`."""

    def __init__(self, environment: Environment, seconds: Callable[[str], float]) -> None:
        """`seconds` tells how long the episode of a trajectory id waits."""
        self.name = environment.name
        self._environment = environment
        self._seconds = seconds

    def get_item(self) -> Task:
        """Return the next task to train on. Raises StopIteration when the tasks are used up."""
        return self._environment.get_item()

    async def wait_item(self, count: int = 1) -> None:
        """Wait for tasks, where the environment's take time to come."""
        if isinstance(self._environment, FetchesItems):
            await self._environment.wait_item(count)

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Pass on a finished group, where the environment learns from it."""
        if isinstance(self._environment, LearnsFromGroups):
            self._environment.observe(task, trajectories)

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on."""
        return self._environment.held_out()

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """See `protocols.ReportsTrajectories`."""
        return await collect_from(
            self._environment,
            task,
            _DelayedSampler(sampler, self._seconds),
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory,
        )

    def state(self) -> Mapping[str, Any]:
        """Return the environment's state."""
        return self._environment.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._environment.restore(state)

    async def aclose(self) -> None:
        """Release what the environment holds."""
        await self._environment.aclose()


class _DelayedSampler:
    """The sampler of one group; each episode gets its first completion late. A `Sampler` that `KeepsTrajectories`.

    It stands on the environment's side of what watches requests, so that the wait counts as the environment's.
    """

    def __init__(self, sampler: Sampler, seconds: Callable[[str], float]) -> None:
        self._sampler = sampler
        self._seconds = seconds
        self._delayed: set[str] = set()

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        completion = await self._sampler.sample(
            token_ids, max_tokens=max_tokens, trajectory_id=trajectory_id, stop_token_ids=stop_token_ids, watch=watch
        )
        if trajectory_id not in self._delayed:
            self._delayed.add(trajectory_id)
            await trio.sleep(self._seconds(trajectory_id))
        return completion

    def kept_trajectory(self, trajectory_id: str) -> Trajectory | None:
        return self._sampler.kept_trajectory(trajectory_id) if isinstance(self._sampler, KeepsTrajectories) else None
