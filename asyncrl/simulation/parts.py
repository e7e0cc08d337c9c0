"""Simulated engines, learner and environment that cost the simulating machine next to nothing.

A group is one task that waits for its last episode, so that thousands of episodes are under way at a time. Engines
share their tokens per second among all that sample at the moment (`sharing`). Spans and versions are real records that
the real loop checks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from asyncrl.errors import CheckpointError, LearnerError, WeightSyncError
from asyncrl.protocols import PLAIN_STEP, Sampler, StepOptions, StepResult, SyncReport, Watch
from asyncrl.simulation.faults import Fault
from asyncrl.simulation.rates import SimulationRates
from asyncrl.simulation.sharing import SharedEngines
from asyncrl.types import (
    Completion,
    FinishReason,
    Group,
    Logprobs,
    PolicyVersion,
    Segment,
    Task,
    TensorEntry,
    TokenIds,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
    WeightManifest,
)

_SLOW_SYNC = 50.0
_KEPT_TOKENS = 2  # of a simulated segment: enough to carry a span of the first and of the last version


class World:
    """What the simulated parts share: clock rates, who samples now, and the faults that are to come."""

    def __init__(
        self, rates: SimulationRates, *, engines: int, engine_slots: int, seed: int, faults: Sequence[Fault]
    ) -> None:
        self.rates = rates
        self.random = random.Random(seed)
        self.engines = engines
        self.engine_slots = engine_slots
        self.sharing = SharedEngines(self._rate_of)
        self.tokens = 0
        self.learner_version: PolicyVersion = 0
        self._faults = faults
        self._happened: set[Fault] = set()

    def lasts(self, kind: str) -> bool:
        """Return whether a fault that lasts has begun."""
        return any(fault.kind == kind and self.learner_version >= fault.version for fault in self._faults)

    def happens(self, kind: str) -> bool:
        """Return True once when a fault that happens once is due."""
        for fault in self._faults:
            if fault.kind == kind and fault not in self._happened and self.learner_version >= fault.version:
                self._happened.add(fault)
                return True
        return False

    def _rate_of(self, num_sampling: int) -> float:
        """Return the tokens a second of each of so many requests: those beyond the places wait, so all get less."""
        at_once = min(num_sampling, self.engines * self.engine_slots)
        together = min(
            self.engines * self.rates.engine_tokens_per_second, at_once * self.rates.request_tokens_per_second
        )
        return together / num_sampling


class SimulatedEngines:
    """The engines: a `Sampler` for evaluations, and a `WeightPuller`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.version: PolicyVersion = 0
        self._newest = self._holds = self.version
        self._pulling = trio.Lock()

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Return one token: only an evaluation asks."""
        return Completion(
            token_ids=TokenIds([1]),
            behaviour_logprobs=Logprobs([-1.0]),
            spans=(TokenSpan(start=0, end=1, version=self.version),),
            finish_reason=FinishReason.STOP,
            engine="simulated",
        )

    async def make_room(self) -> Collection[PolicyVersion]:
        """Return what is being read: all engines read the same version, so that another may always be replaced."""
        await trio.lowlevel.checkpoint()
        return [self._newest] if self._pulling.locked() else []

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Take the newest version after the sync time, unless it was taken for an earlier call."""
        world, rates = self._world, self._world.rates
        self._newest = manifest.version
        async with self._pulling:
            if self._holds < manifest.version:
                newest = self._newest
                await trio.sleep(rates.sync_s * (_SLOW_SYNC if world.happens("slow_sync") else 1.0))
                if world.happens("failed_sync"):
                    raise WeightSyncError(f"simulated engine 0, update of version {newest}: refused")
                self._holds = newest
                if not world.lasts("stale_engine"):
                    self.version = newest
        verified = not world.happens("unverified_sync")
        return [
            SyncReport(
                engine=f"simulated engine {index}",
                version=self._holds,
                verified=verified,
                num_bytes=manifest.num_bytes,
                seconds={"update": rates.sync_s},
                stall_seconds=rates.sync_stall_s,
            )
            for index in range(world.engines)
        ]


class SimulatedLearner:
    """The learner: a step takes its overhead and its tokens' time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.staleness: dict[int, int] = {}
        """optimizer steps -> groups trained at that staleness of their oldest token."""

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """Take the step's time and advance the version."""
        world, rates = self._world, self._world.rates
        tokens = sum(t.extras["tokens"] for g in groups for t in g.trajectories if t.reward is not None)
        await trio.sleep(rates.step_overhead_s + tokens / rates.learner_tokens_per_second)
        if world.happens("learner_death"):
            raise LearnerError("the learner was ended by signal 9 (simulated)")
        for group in groups:
            if group.oldest_version is not None:
                staleness = world.learner_version - group.oldest_version
                self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        stepped = not world.happens("nan_logprobs")
        world.learner_version += 1
        return StepResult(version=world.learner_version, metrics={"tokens_trained": tokens}, stepped=stepped)

    async def supervised_step(self, segments: Sequence[Segment], *, learning_rate: float) -> StepResult:
        """Take the step's time and advance the version."""
        world, rates = self._world, self._world.rates
        tokens = sum(sum(segment.loss_mask) for segment in segments)
        await trio.sleep(rates.step_overhead_s + tokens / rates.learner_tokens_per_second)
        world.learner_version += 1
        return StepResult(version=world.learner_version, metrics={"tokens_trained": tokens})

    async def supervised_loss(self, segments: Sequence[Segment]) -> float:
        """Return a loss that says nothing."""
        await trio.lowlevel.checkpoint()
        return 1.0

    async def publish(self, *, keep: Collection[PolicyVersion] = ()) -> WeightManifest:
        """Return a manifest of one small tensor."""
        version = self._world.learner_version
        entry = TensorEntry(name="weight", dtype="BF16", shape=(2,), offset=0, num_bytes=4, digest=f"{version:08x}")
        return WeightManifest(
            run_id="simulated",
            version=version,
            transport="simulated",
            location="",
            tensors=(entry,),
            digest=entry.digest,
        )

    async def save(self, directory: str) -> Mapping[str, int]:
        """Write the version as the model."""
        if self._world.happens("full_disk"):
            raise CheckpointError(f"cannot write the checkpoint {directory}: No space left on device (simulated)")
        path = Path(directory) / "model" / "version"
        path.parent.mkdir(parents=True)
        path.write_text(str(self._world.learner_version), encoding="utf-8")
        return {"model/version": path.stat().st_size}


class _Episodes:
    """The episodes of one group: each samples, and is outside of the engines after that."""

    def __init__(self, engines: SharedEngines, lengths: Sequence[int], outside: Sequence[float]) -> None:
        self.ends = [math.inf] * len(lengths)
        """Of each, on trio's clock; not known while it samples."""
        self._engines, self._outside = engines, outside
        self._sampled = trio.Event()
        self._sampling: dict[int, int] = {}  # of an episode, the number of its request
        for index, length in enumerate(lengths):
            self._sampling[index] = engines.sample_nowait(length, partial(self._end_sampling, index))

    def _end_sampling(self, index: int) -> None:
        self.ends[index] = trio.current_time() + self._outside[index]
        del self._sampling[index]
        if not self._sampling:
            self._sampled.set()

    async def wait_ended(self) -> None:
        """Return once the last has ended."""
        await self._sampled.wait()
        await trio.sleep_until(max(self.ends))

    def abort_nowait(self) -> None:
        """End what still samples."""
        if self._sampling:
            self._engines.abort_nowait(set(self._sampling.values()))


class SimulatedEnvironment:
    """Episodes that sample, and then are outside of the engines, for lognormal times; their rewards are coin flips."""

    name = "simulated"

    def __init__(self, world: World, engines: SimulatedEngines) -> None:
        self._world = world
        self._engines = engines
        self._next = 0
        self._prompt = TokenIds([0])

    def get_item(self) -> Task:
        """Return the next task."""
        if self._world.lasts("no_more_tasks"):
            raise StopIteration
        self._next += 1
        return Task(task_id=f"task-{self._next - 1}", environment=self.name)

    def held_out(self) -> Sequence[Task]:
        """Return nothing: there is nothing to learn."""
        return ()

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Return all episodes once the last is done; tell of those done when it is cut short."""
        world, rates, chance = self._world, self._world.rates, self._world.random
        begun, started = self._engines.version, trio.current_time()
        lengths = [
            max(1, round(rates.completion_tokens * chance.lognormvariate(0.0, rates.completion_sigma)))
            for _ in range(group_size)
        ]
        outside = [self._environment_seconds() for _ in lengths]
        if world.happens("silent_worker"):
            outside[-1] = math.inf
        episodes = _Episodes(world.sharing, lengths, outside)

        def ended() -> list[Trajectory]:
            dead, segment = world.lasts("engine_death"), self._segment(begun)
            return [
                self._trajectory(task, f"{group_id}-{index}", segment, length, end - started, dead)
                for index, (length, end) in enumerate(zip(lengths, episodes.ends, strict=True))
                if end <= trio.current_time()
            ]

        found: list[Trajectory] = []
        try:
            await episodes.wait_ended()
        finally:
            episodes.abort_nowait()
            found += ended()
            for trajectory in found:
                if on_trajectory:
                    on_trajectory(trajectory)
        world.tokens += 0 if world.lasts("engine_death") else sum(lengths)
        if world.happens("duplicate_results"):
            found[-1] = found[0]
        if world.happens("short_group"):
            found.pop()
        return found

    def _segment(self, begun: PolicyVersion) -> Segment:
        now = self._engines.version
        return Segment(
            token_ids=TokenIds([0, 2, 1]),
            loss_mask=bytes([0, *[1] * _KEPT_TOKENS]),
            behaviour_logprobs=Logprobs([0.0, -1.0, -1.0]),
            spans=(TokenSpan(start=1, end=2, version=begun), TokenSpan(start=2, end=3, version=now)),
        )

    def _environment_seconds(self) -> float:
        rates, chance = self._world.rates, self._world.random
        if chance.random() < rates.straggler_share:
            return rates.environment_s * rates.straggler_factor
        return rates.environment_s * chance.lognormvariate(0.0, rates.environment_sigma)

    def _trajectory(
        self, task: Task, trajectory_id: str, segment: Segment, num_tokens: int, seconds: float, engine_dead: bool
    ) -> Trajectory:
        failed = engine_dead or self._world.random.random() < self._world.rates.failure_share
        reward = float(self._world.random.random() < self._world.rates.solve_share)
        status = TrajectoryStatus.FAILED_ENGINE if engine_dead else TrajectoryStatus.FAILED_SANDBOX
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=self.name,
            segments=() if failed else (segment,),
            reward=None if failed else reward,
            status=status if failed else TrajectoryStatus.COMPLETED,
            reward_parts={} if failed else {"solved": reward},
            num_turns=1,
            seconds=seconds,
            detail="simulated" if failed else "",
            extras={"tokens": num_tokens},
        )

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self._next = state["next"]

    async def aclose(self) -> None:
        """Release nothing."""
