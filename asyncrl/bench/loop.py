"""What the orchestrator costs: CPU per finished trajectory, how late its event loop is, and whether its memory grows.

The loop, gate, buffer, books, journal (on disk), recorder and checkpoints are the real ones. Engines, learner and
environment are stand-ins that wait and then hand out records that were made before: 64 prompt tokens, 448 sampled ones,
one turn an episode. In the figures is thus all that the orchestrator does per request, episode, group and step, the
msgpack frame of each step, and the trio tasks of the episodes. Not in them are HTTP to the engines, the frame's way
through the socket, chat templates and tokenisers, sandboxes, and decoding for the trajectory files.

CPU and lag are of the real clock with thousands of episodes under way, memory is of simulated time.
"""

from __future__ import annotations

import gc
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, TextIO

import trio
import trio.testing
from rich.console import Console

from asyncrl import wire
from asyncrl.bench.buffer import PROMPT_TOKENS, TOKENS, make_segment, resident_bytes
from asyncrl.bench.trend import Trend, trend
from asyncrl.buffers import BufferSettings, GroupCommit, Journal
from asyncrl.buffers.group_commit import RunBlocking
from asyncrl.checkpoint import CheckpointStore
from asyncrl.progress import Progress
from asyncrl.protocols import PLAIN_STEP, Sampler, StepOptions, StepResult, Watch
from asyncrl.recording import RunRecorder
from asyncrl.run import Limits, Parts, Run
from asyncrl.run_directory import RunDirectory
from asyncrl.run_journal import RunJournal
from asyncrl.simulation.parts import SimulatedEngines, SimulatedLearner, World
from asyncrl.simulation.rates import SimulationRates
from asyncrl.status import RunStatus
from asyncrl.testing import FakeEnvironment, Rates, run_inline
from asyncrl.types import (
    Completion,
    FinishReason,
    Group,
    Logprobs,
    Task,
    TokenIds,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
)

_GROUP_SIZE = 8
_TICK_S = 0.005  # between two looks at how late the loop is; a longer one sees fewer of the short blocks
_WARM_UP = 2.5  # median episodes, until they no longer end in the waves in which they began
_SAMPLES_EVERY = 20  # steps between two looks at the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCost:
    """The orchestrator with so many episodes under way."""

    in_flight: float
    """Episodes, on average."""
    trajectories_per_second: float
    cpu_ms_per_trajectory: float
    """Of the whole process, the journal's thread and the stand-ins included."""
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    """How much later than asked a task was woken. What else runs on the machine adds to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """The orchestrator's memory over simulated steps, the first fifth left out."""

    steps: int
    trajectories: int
    resident_mib: float
    """At the end."""
    kib_per_100_steps: Trend


def bench_loop(directory: Path, *, in_flight: int, episode_s: float, seconds: float, steps: int) -> dict[str, Any]:
    """Return all figures; what is written goes below `directory` and is removed.

    `in_flight` episodes of a median of `episode_s` are measured for `seconds`, and memory over `steps`.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=directory) as scratch:
        growth = _memory_growth(Path(scratch) / "memory", steps)  # first, on a heap that nothing has stretched
        cost = _loop_cost(Path(scratch) / "cost", in_flight, episode_s, seconds)
    return {"loop": asdict(cost), "memory": asdict(growth) | {"is_flat": growth.kib_per_100_steps.is_flat}}


# --- stand-ins ------------------------------------------------------------------------------------------------


class _Engines(SimulatedEngines):
    """Wait, and hand out the same 448 tokens each time, under the versions that passed meanwhile."""

    def __init__(self, world: World, seconds: Callable[[], float]) -> None:
        super().__init__(world)
        self._seconds = seconds
        segment = make_segment(0)
        self._token_ids = TokenIds(segment.token_ids[PROMPT_TOKENS:])
        self._logprobs = Logprobs(segment.behaviour_logprobs[PROMPT_TOKENS:])

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        begun, middle, end = self.version, len(self._token_ids) // 2, len(self._token_ids)
        await trio.sleep(self._seconds())
        parts = [(0, end, begun)] if begun == self.version else [(0, middle, begun), (middle, end, self.version)]
        return Completion(
            token_ids=self._token_ids,
            behaviour_logprobs=self._logprobs,
            spans=tuple(TokenSpan(start=start, end=stop, version=version) for start, stop, version in parts),
            finish_reason=FinishReason.STOP,
            engine="stand-in",
        )


class _Learner(SimulatedLearner):
    """Packs the frame of every step, as it would be sent."""

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        assert wire.encode(wire.StepRequest(groups=list(groups)))
        return await super().step(groups)


class _Environment(FakeEnvironment):
    """One turn, then a wait, then a coin flip."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__(Rates(), random.Random(1))
        self._seconds = seconds
        self._segment_of_all = make_segment(0)

    async def _episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        began = trio.current_time()
        prompt = TokenIds(self._segment_of_all.token_ids[:PROMPT_TOKENS])
        completion = await sampler.sample(prompt, max_tokens=TOKENS, trajectory_id=trajectory_id)
        await trio.sleep(self._seconds())
        spans = (replace(s, start=s.start + PROMPT_TOKENS, end=s.end + PROMPT_TOKENS) for s in completion.spans)
        reward = float(self._rng.random() < 0.5)
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=self.name,
            segments=(replace(self._segment_of_all, spans=tuple(spans)),),
            reward=reward,
            status=TrajectoryStatus.COMPLETED,
            reward_parts={"solved": reward},
            num_turns=1,
            seconds=trio.current_time() - began,
            extras={"tokens": len(completion.token_ids)},
        )


class LoopBench:
    """The real loop over the stand-ins, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        buffer: BufferSettings,
        limits: Limits,
        nowhere: TextIO,
        *,
        episode_s: float = 6.0,
        run_blocking: RunBlocking | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`on_step` is told of every step after it was recorded; `episode_s` is the median of an episode's seconds."""
        chance = random.Random(0)

        def seconds() -> float:
            return episode_s / 2 * chance.lognormvariate(0.0, 0.5)

        rates = SimulationRates(
            learner_tokens_per_second=1e9, step_overhead_s=episode_s / 30, sync_s=episode_s / 60, sync_stall_s=0.0
        )
        world = World(rates, engines=1, engine_slots=1, seed=0, faults=())
        engines = _Engines(world, seconds)
        environment = _Environment(seconds)
        self.stop = trio.Event()
        files = RunDirectory(directory)
        files.trajectories.mkdir(parents=True)
        progress = Progress(Console(file=nowhere), title="bench", max_steps=limits.steps)
        self._recorder = _Recorder(files, progress, on_step)
        self.run = Run(
            Parts(environment=environment, sampler=engines, learner=_Learner(world), engines=engines),
            buffer,
            limits,
            recorder=self._recorder,
            checkpoints=CheckpointStore(files.checkpoints, keep=2),
            status=RunStatus(),
            stop=self.stop,
            journal=RunJournal(GroupCommit(journal, run_blocking=run_blocking)),
        )

    async def train(self) -> None:
        """Run to the end."""
        self._recorder.watch(self.run)
        await self.run.train()


class _Recorder(RunRecorder):
    """Writes as ever, and tells of each step."""

    def __init__(self, directory: RunDirectory, progress: Progress, on_step: Callable[[int], None]) -> None:
        super().__init__(directory, progress, lambda token_ids: "", version=0)
        self._on_step = on_step

    def step(self, record: Mapping[str, float], result: StepResult) -> None:
        super().step(record, result)
        self._on_step(int(record["step"]))


# --- CPU and lag ----------------------------------------------------------------------------------------------


def _loop_cost(directory: Path, in_flight: int, episode_s: float, seconds: float) -> LoopCost:
    groups = math.ceil(in_flight / _GROUP_SIZE)
    per_step = max(1, groups // 8)
    # so loose a bound that no step waits for a straggler; more slots than episodes under way, by what waits for the
    # learner, is trained on, or waits for the pull meanwhile
    buffer = BufferSettings(
        max_off_policyness=31, groups_per_step=per_step, group_size=_GROUP_SIZE, slots=groups + 3 * per_step // 2
    )
    limits = Limits(steps=10**9, checkpoint_every_steps=8)
    with Journal(directory / "journal", run_id="bench") as journal, Path(os.devnull).open("w") as nowhere:
        bench = LoopBench(directory, journal, buffer, limits, nowhere, episode_s=episode_s)
        return trio.run(_measure, bench, _WARM_UP * episode_s, seconds)


async def _measure(bench: LoopBench, warm_up_s: float, seconds: float) -> LoopCost:
    lags: list[float] = []
    under_way: list[int] = []
    run = bench.run

    def finished() -> int:
        return sum(run.status.trajectories.values())

    gc.freeze()  # as `asyncrl train` does
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.train)
        await trio.sleep(warm_up_s)
        cpu, before, began = time.process_time(), finished(), trio.current_time()
        while trio.current_time() < began + seconds:
            if len(lags) % 100 == 0:
                under_way.append(run.ledger.statement().in_flight.trajectories)
            due = trio.current_time() + _TICK_S
            await trio.sleep_until(due)
            lags.append(trio.current_time() - due)
        passed, done = trio.current_time() - began, finished() - before
        cpu = time.process_time() - cpu
        nursery.cancel_scope.cancel()
    gc.unfreeze()
    percentiles = quantiles(lags, n=100)
    return LoopCost(
        in_flight=fmean(under_way),
        trajectories_per_second=done / passed,
        cpu_ms_per_trajectory=1000 * cpu / max(1, done),
        lag_p50_ms=1000 * percentiles[49],
        lag_p99_ms=1000 * percentiles[98],
        lag_max_ms=1000 * max(lags),
    )


# --- memory ---------------------------------------------------------------------------------------------------


def _memory_growth(directory: Path, steps: int) -> MemoryGrowth:
    found: list[tuple[int, float]] = []

    def look(step: int) -> None:
        if step % _SAMPLES_EVERY == 0 and step > steps // 5:
            gc.collect()  # so that what is looked at does not depend on when the collector last came by
            found.append((step, resident_bytes() / 1024))

    buffer = BufferSettings(max_off_policyness=3, groups_per_step=2, group_size=4)
    limits = Limits(steps=steps, checkpoint_every_steps=50)
    with (
        Journal(directory / "journal", run_id="bench", file_bytes=2**20) as journal,
        Path(os.devnull).open("w") as nowhere,
    ):
        bench = LoopBench(directory, journal, buffer, limits, nowhere, run_blocking=run_inline, on_step=look)
        trio.run(bench.train, clock=trio.testing.MockClock(autojump_threshold=0))
    line = trend([step for step, _ in found], [kib for _, kib in found])
    return MemoryGrowth(
        steps=steps,
        trajectories=sum(bench.run.status.trajectories.values()),
        resident_mib=found[-1][1] / 1024,
        kib_per_100_steps=Trend(slope=100 * line.slope, low=100 * line.low, high=100 * line.high),
    )
