"""Run the loop over simulated parts, and say what it came to."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
import trio.testing

from asyncrl.buffers import BufferSettings
from asyncrl.checkpoint import CheckpointStore
from asyncrl.errors import ConfigError
from asyncrl.guards import Alarm
from asyncrl.protocols import StepResult
from asyncrl.run import Limits, Parts, Run
from asyncrl.simulation.faults import Fault
from asyncrl.simulation.parts import SimulatedEngines, SimulatedEnvironment, SimulatedLearner, World
from asyncrl.simulation.rates import SimulationRates
from asyncrl.status import EvaluationResult, RunStatus
from asyncrl.types import Group

_BYTES_PER_TOKEN = 9  # of a segment: an id of 4, a log-prob of 4, a mask of 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run would come to. Shares are of the simulated time, from 0 to 1."""

    steps: int
    seconds: float
    """Simulated."""
    steps_per_hour: float
    tokens_per_second: float
    """Sampled, over all engines."""
    trained_tokens_per_second: float
    staleness_mean: float
    """Optimizer steps, of each trained group's oldest token."""
    staleness_max: int
    staleness_groups: Mapping[int, int]
    """optimizer steps -> groups trained on."""
    learner_idle_share: float
    """Waiting for groups."""
    learner_sync_share: float
    """Waiting for the engines' pull."""
    engine_idle_share: float
    """Of the engines' tokens per second, what was not sampled."""
    rollouts_in_flight: int
    """The most trajectories under way or in the buffer at once."""
    buffer_bytes: int
    """Of their tokens, if each were as long as the mean."""
    groups_dropped: Mapping[str, int]
    steps_skipped: int
    simulation_seconds: float
    """That the simulation itself took."""


def simulate(
    buffer: BufferSettings,
    rates: SimulationRates,
    *,
    steps: int,
    engines: int = 1,
    engine_slots: int = 256,
    seed: int = 0,
    faults: Sequence[Fault] = (),
) -> Forecast:
    """Return what `steps` optimizer steps come to, from a cold start; time is a mock clock's.

    `engine_slots`: requests that one engine samples for at a time. Raises: whatever a real run would raise for the
    faults.
    """
    if not buffer.group_deadline_s and any(fault.kind == "silent_worker" for fault in faults):
        raise ConfigError(
            "silent_worker (--fault) would be waited for for ever: set group_deadline_s, which is 0 ([buffer])"
        )
    world = World(rates, engines=engines, engine_slots=engine_slots, seed=seed, faults=faults)
    engine, learner = SimulatedEngines(world), SimulatedLearner(world)
    counting = _Counting()
    status = RunStatus()
    began = time.perf_counter()

    async def main() -> float:
        run = Run(
            Parts(
                environment=SimulatedEnvironment(world, engine),
                sampler=engine,
                learner=learner,
                engines=engine,
            ),
            buffer,
            Limits(steps=steps),
            recorder=counting,
            checkpoints=CheckpointStore(Path(scratch), keep=1),
            status=status,
            stop=trio.Event(),
            rng=random.Random(seed),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.sharing.serve)
            await run.train()
            nursery.cancel_scope.cancel()
        return run.seconds

    with tempfile.TemporaryDirectory(prefix="asyncrl-simulation-") as scratch:
        seconds = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return _forecast(buffer, world, learner, counting, status, seconds, time.perf_counter() - began)


class _Counting:
    """A `run.Recorder` that keeps a sum only."""

    def __init__(self) -> None:
        self.trained_tokens = 0.0

    def group(self, group: Group) -> None:
        """Nothing is kept of a group."""

    def step(self, record: Mapping[str, float], result: StepResult) -> None:
        """Add a step's tokens."""
        self.trained_tokens += record["tokens_trained"]

    def warm_step(self, record: Mapping[str, float]) -> None:
        """No warm start is simulated."""

    def evaluation(self, result: EvaluationResult) -> None:
        """Nothing is measured."""

    def phase(self) -> None:
        """Nothing is shown."""

    def alarm(self, alarm: Alarm) -> None:
        """Nothing is kept of an alarm."""

    def stalled(self, chain: Sequence[str]) -> None:
        """Nothing is shown: no limit is set."""


def _forecast(
    buffer: BufferSettings,
    world: World,
    learner: SimulatedLearner,
    counting: _Counting,
    status: RunStatus,
    seconds: float,
    simulation_seconds: float,
) -> Forecast:
    seconds = max(seconds, 1e-9)
    trained = sum(learner.staleness.values())
    idle = status.learner_idle_seconds
    in_flight = buffer.num_slots * buffer.group_size
    capacity = world.engines * world.rates.engine_tokens_per_second
    length = world.tokens / max(1, sum(status.trajectories.values()))
    return Forecast(
        steps=status.steps,
        seconds=seconds,
        steps_per_hour=3600.0 * status.steps / seconds,
        tokens_per_second=world.tokens / seconds,
        trained_tokens_per_second=counting.trained_tokens / seconds,
        staleness_mean=sum(s * n for s, n in learner.staleness.items()) / max(1, trained),
        staleness_max=max(learner.staleness, default=0),
        staleness_groups=dict(sorted(learner.staleness.items())),
        learner_idle_share=(idle["groups"] + idle["straggler"]) / seconds,
        learner_sync_share=idle["sync"] / seconds,
        engine_idle_share=max(0.0, 1.0 - world.tokens / (capacity * seconds)),
        rollouts_in_flight=in_flight,
        buffer_bytes=round(in_flight * length * _BYTES_PER_TOKEN),
        groups_dropped=dict(status.groups_dropped),
        steps_skipped=status.steps_skipped,
        simulation_seconds=simulation_seconds,
    )


def as_table(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast in words and figures, for people."""
    f = forecast
    return {
        "steps": f"{f.steps} in {f.seconds / 3600:.2f} h ({f.steps_per_hour:.1f} an hour)",
        "tokens": f"{f.tokens_per_second:,.0f} sampled a second, {f.trained_tokens_per_second:,.0f} trained",
        "staleness": f"mean {f.staleness_mean:.2f}, largest {f.staleness_max} optimizer steps",
        "learner": f"idle {f.learner_idle_share:.1%} (no groups), {f.learner_sync_share:.1%} in weight syncs",
        "engines": f"idle {f.engine_idle_share:.1%} of their tokens per second",
        "under way": f"at most {f.rollouts_in_flight} trajectories, about {f.buffer_bytes / 2**20:.1f} MiB of tokens",
        "dropped": ", ".join(f"{n} groups ({reason})" for reason, n in f.groups_dropped.items()) or "nothing",
    }
