"""Simulated parts with the same promises as the real ones: they pass the same contract tests.

Time is trio's: under `trio.testing.MockClock(autojump_threshold=0)` hours of training pass in seconds, and the real
loop, gate and buffer are what is exercised.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from asyncrl.errors import EngineError, LearnerError
from asyncrl.guards import Alarm
from asyncrl.protocols import PLAIN_STEP, Sampler, StepOptions, StepResult, SyncReport, Watch
from asyncrl.rollout import collect_episodes
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

_END_TOKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How long things take, in seconds."""

    token_s: float = 0.02
    """Of one token of one request."""
    mean_tokens: float = 60.0
    sigma: float = 0.5
    """Of the lognormal that completion lengths and environment times follow."""
    environment_s: float = 0.1
    """Median of an episode's environment time."""
    step_s: float = 5.0
    sync_s: float = 0.5


async def run_inline(work: Callable[[], Any]) -> Any:
    """Run blocking work where it is asked for: a `buffers.RunBlocking` for a clock that jumps while a thread works."""
    await trio.lowlevel.checkpoint()
    return work()


class FakeEngine:
    """Samples tokens at a steady rate and swaps weights in the middle of requests. A `Sampler` and `WeightPuller`."""

    def __init__(self, rates: Rates, rng: random.Random, *, version: PolicyVersion = 0) -> None:
        self._rates = rates
        self._rng = rng
        self.version = version
        self.dead = False
        self.keeps_weights = False
        """While True it says that it took new weights, and keeps the old ones."""
        self.verifies = True
        """While False its digests disagree with the manifest's."""
        self.tokens_sampled = 0
        """Of completions that were returned."""
        self.pulled: list[PolicyVersion] = []
        """Versions that it took, in order."""
        self.sync_s: Callable[[PolicyVersion], float] = lambda version: rates.sync_s
        """How long the pull of a version takes."""
        self._newest = self._holds = version
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
        """Return random tokens, each labelled with the version that was in place when it was sampled."""
        wanted = max(1, round(self._rng.lognormvariate(0.0, self._rates.sigma) * self._rates.mean_tokens))
        sampled, spans = TokenIds(), list[TokenSpan]()
        started = trio.current_time()
        for position in range(min(wanted, max_tokens)):
            await trio.sleep(self._rates.token_s)
            if self.dead:
                raise EngineError("fake engine: connection reset")
            sampled.append(_END_TOKEN if position + 1 == wanted else self._rng.randrange(2, 100))
            if spans and spans[-1].version == self.version:
                spans[-1] = TokenSpan(start=spans[-1].start, end=position + 1, version=self.version)
            else:
                spans.append(TokenSpan(start=position, end=position + 1, version=self.version))
        self.tokens_sampled += len(sampled)
        return Completion(
            token_ids=sampled,
            behaviour_logprobs=Logprobs([-1.0] * len(sampled)),
            spans=tuple(spans),
            finish_reason=FinishReason.STOP if sampled[-1] == _END_TOKEN else FinishReason.LENGTH,
            seconds=trio.current_time() - started,
            engine="fake",
        )

    async def make_room(self) -> Collection[PolicyVersion]:
        """Return what is being read: there is one engine, so that a version may always be replaced."""
        await trio.lowlevel.checkpoint()
        return [self._newest] if self._pulling.locked() else []

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Take the newest version after its sync time, unless it was taken for an earlier call."""
        self._newest = manifest.version
        async with self._pulling:
            if self._holds < manifest.version:
                newest = self._newest
                await trio.sleep(self.sync_s(newest))
                self._holds = newest
                self.pulled.append(newest)
                if not self.keeps_weights:
                    self.version = newest
        return [
            SyncReport(
                engine="fake",
                version=self._holds,
                verified=self.verifies,
                num_bytes=manifest.num_bytes,
                seconds={"update": self._rates.sync_s},
                stall_seconds=self._rates.sync_s,
            )
        ]


class FakeLearner:
    """Counts steps; its checkpoint is one file. A `Learner`."""

    def __init__(
        self, rates: Rates, *, version: PolicyVersion = 0, run_id: str = "fake", model: Path | None = None
    ) -> None:
        """`model` is what `save` wrote, to go on from it."""
        self._rates = rates
        self._run_id = run_id
        self.version = version
        self.weights: list[str] = json.loads((model / "version").read_text()) if model else []
        """What the weights are made of: the task ids of every step, in order."""
        self.trained: list[Group] = []
        self.demonstrated: list[Segment] = []
        self.dead = False
        self.dies_after: int | None = None
        """Version in which it dies, or None."""

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """Take the step time and advance the version."""
        await trio.sleep(self._rates.step_s)
        if self.dead or self.version == self.dies_after:
            raise LearnerError("fake learner was ended by signal 9")
        self.trained += groups
        self.version += 1
        self.weights += [group.task.task_id for group in groups]
        trained = sum(t.num_sampled_tokens for g in groups for t in g.trajectories if t.reward is not None)
        return StepResult(version=self.version, metrics={"tokens_trained": trained, "importance_ratio_max": 1.0})

    async def supervised_step(self, segments: Sequence[Segment], *, learning_rate: float) -> StepResult:
        """Take the step time and advance the version."""
        loss = await self.supervised_loss(segments)
        await trio.sleep(self._rates.step_s)
        if self.dead or self.version == self.dies_after:
            raise LearnerError("fake learner was ended by signal 9")
        self.demonstrated += segments
        self.version += 1
        trained = sum(sum(segment.loss_mask) for segment in segments)
        metrics = {"loss": loss, "tokens_trained": trained, "grad_norm": 1.0, "learning_rate": learning_rate}
        return StepResult(version=self.version, metrics=metrics)

    async def supervised_loss(self, segments: Sequence[Segment]) -> float:
        """Return a loss that falls with every version."""
        await trio.lowlevel.checkpoint()
        return 5.0 / (1 + self.version)

    async def publish(self, *, keep: Collection[PolicyVersion] = ()) -> WeightManifest:
        """Return a manifest of one small tensor."""
        digest = f"{zlib.crc32(json.dumps([self.version, self.weights]).encode()):08x}"
        entry = TensorEntry(name="weight", dtype="BF16", shape=(2,), offset=0, num_bytes=4, digest=digest)
        return WeightManifest(
            run_id=self._run_id,
            version=self.version,
            transport="fake",
            location="",
            tensors=(entry,),
            digest=entry.digest,
        )

    async def save(self, directory: str) -> Mapping[str, int]:
        """Write what the weights are made of as the model."""
        path = Path(directory) / "model" / "version"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(self.weights))
        return {"model/version": path.stat().st_size}


class FakeEnvironment:
    """Endless, or `num_tasks`, one-turn tasks whose rewards are coin flips. A `ReportsTrajectories`."""

    def __init__(
        self, rates: Rates, rng: random.Random, *, num_tasks: int | None = None, max_tokens: int = 256
    ) -> None:
        self.name = "fake"
        self._rates = rates
        self._rng = rng
        self._max_tokens = max_tokens
        self._num_tasks = num_tasks
        self._next = 0
        self.num_held_out = 3
        self.failing: Callable[[str], bool] = lambda task_id: False
        """Tasks whose episodes fail as if no sandbox could be had."""
        self.hanging: Callable[[str], bool] = lambda trajectory_id: False
        """Trajectories whose episodes never return."""
        self.rewards: Callable[[str], float | None] = lambda task_id: None
        """What every episode of a task earns; None leaves it to the coin."""

    def get_item(self) -> Task:
        """Return the next task."""
        if self._num_tasks is not None and self._next >= self._num_tasks:
            raise StopIteration
        self._next += 1
        return Task(task_id=f"task-{self._next - 1}", environment=self.name)

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on."""
        return [Task(task_id=f"held-out-{i}", environment=self.name) for i in range(self.num_held_out)]

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Run one turn an episode, each with its own environment time."""
        return await collect_episodes(
            lambda trajectory_id: self._episode(task, sampler, trajectory_id),
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory,
        )

    async def _episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        prompt = TokenIds([0, 2, 3])
        completion = await sampler.sample(prompt, max_tokens=self._max_tokens, trajectory_id=trajectory_id)
        await trio.sleep(self._rng.lognormvariate(0.0, self._rates.sigma) * self._rates.environment_s)
        if self.hanging(trajectory_id):
            await trio.sleep_forever()
        segment = Segment(
            token_ids=TokenIds([*prompt, *completion.token_ids]),
            loss_mask=bytes(len(prompt)) + b"\1" * len(completion.token_ids),
            behaviour_logprobs=Logprobs([*[0.0] * len(prompt), *completion.behaviour_logprobs]),
            spans=tuple(
                TokenSpan(start=s.start + len(prompt), end=s.end + len(prompt), version=s.version)
                for s in completion.spans
            ),
        )
        reward, failed = float(self._rng.random() < 0.5), self.failing(task.task_id)
        given = self.rewards(task.task_id)
        reward = reward if given is None else given
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=self.name,
            segments=() if failed else (segment,),
            reward=None if failed else reward,
            status=TrajectoryStatus.FAILED_SANDBOX if failed else TrajectoryStatus.COMPLETED,
            reward_parts={} if failed else {"solved": reward},
            num_turns=1,
            detail="no sandbox" if failed else "",
        )

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self._next = state["next"]

    async def aclose(self) -> None:
        """Release nothing."""


class MemoryRecorder:
    """Keeps everything it is told. A `run.Recorder`."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.steps: list[Mapping[str, float]] = []
        self.warm_steps: list[Mapping[str, float]] = []
        self.evaluations: list[Any] = []
        self.stalls: list[Sequence[str]] = []
        self.alarms: list[Alarm] = []

    def group(self, group: Group) -> None:
        """Keep a finished group."""
        self.groups.append(group)

    def step(self, record: Mapping[str, float], result: StepResult) -> None:
        """Keep a step's record."""
        self.steps.append(record)

    def warm_step(self, record: Mapping[str, float]) -> None:
        """Keep the record of a step on demonstrations."""
        self.warm_steps.append(record)

    def evaluation(self, result: Any) -> None:
        """Keep a measurement."""
        self.evaluations.append(result)

    def phase(self) -> None:
        """Keep nothing."""

    def alarm(self, alarm: Alarm) -> None:
        """Keep what a guard did."""
        self.alarms.append(alarm)

    def stalled(self, chain: Sequence[str]) -> None:
        """Keep who waited for whom."""
        self.stalls.append(chain)
