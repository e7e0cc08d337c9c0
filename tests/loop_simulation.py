"""The real loop over fakes, under a mock clock: what the tests of the loop share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import trio
import trio.testing
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from asyncrl.buffers import Amount, BufferSettings, GroupCommit, Journal, LostLine
from asyncrl.checkpoint import CheckpointStore
from asyncrl.guards import Guards
from asyncrl.metrics import Source, collector
from asyncrl.resume_plan import plan_resumption
from asyncrl.run import Limits, Parts, Recorder, Run
from asyncrl.run_history import RunHistory
from asyncrl.run_journal import RunJournal
from asyncrl.status import RunStatus
from asyncrl.testing import FakeEngine, FakeEnvironment, FakeLearner, MemoryRecorder, Rates, run_inline


class Simulation:
    """One run over fakes; attributes are open for faults to be injected."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        buffer: BufferSettings | None = None,
        limits: Limits | None = None,
        rates: Rates | None = None,
        num_tasks: int | None = None,
        resume: bool = False,
        environment: FakeEnvironment | None = None,
        journal: Journal | None = None,
        history: RunHistory | None = None,
        lost_line: LostLine = LostLine.REDRAW,
        checkpoints: CheckpointStore | None = None,
        recorder: Recorder | None = None,
        guards: Guards | None = None,
        watch: Callable[[Parts], Parts] = lambda parts: parts,
    ) -> None:
        rates = rates or Rates()
        buffer = buffer or BufferSettings(max_off_policyness=1, groups_per_step=4, group_size=4)
        self.checkpoints = checkpoints or CheckpointStore(directory, keep=2)
        checkpoint = self.checkpoints.newest() if resume else None
        state, version = (checkpoint.state, checkpoint.version) if checkpoint else ({}, 0)
        self.engine = FakeEngine(rates, random.Random(seed), version=version)
        model = checkpoint.model_directory if checkpoint else None
        self.learner = FakeLearner(rates, version=version, model=model)
        self.environment = environment or FakeEnvironment(rates, random.Random(seed + 1), num_tasks=num_tasks)
        self.recorder = MemoryRecorder()
        self.stop = trio.Event()
        self.run = Run(
            watch(Parts(environment=self.environment, sampler=self.engine, learner=self.learner, engines=self.engine)),
            buffer,
            limits or Limits(steps=12),
            recorder=recorder or self.recorder,
            checkpoints=self.checkpoints,
            status=RunStatus(),
            stop=self.stop,
            guards=guards,
            resume_from=checkpoint,
            journal=RunJournal(GroupCommit(journal, run_blocking=run_inline)) if journal else None,
            resumption=plan_resumption(state, version, history, settings=buffer, lost_line=lost_line)
            if history
            else None,
            rng=random.Random(seed),
        )

    @property
    def status(self) -> RunStatus:
        """The run's."""
        return self.run.status


def simulate(
    simulation: Simulation,
    beside: Callable[[], Awaitable[None]] | None = None,
    *,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> Simulation:
    """Run it to its end under a mock clock, with a task beside it; return it."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if beside:
                nursery.start_soon(beside)
            await simulation.run.train()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=instruments)
    return simulation


class Audit(trio.abc.Instrument):
    """Closes the books after every step of every task, and keeps what was wrong."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.num_audits = 0
        self.faults: list[str] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Look once; an instrument must not raise."""
        run, statement = self.simulation.run, self.simulation.run.ledger.statement()
        buffer = run.buffer.statistics()
        self.num_audits += 1
        seen = {
            "difference": (statement.difference, Amount()),
            "groups in flight": (statement.in_flight.groups, buffer.num_running),
            "tokens": (statement.generated.tokens, self.simulation.engine.tokens_sampled),
            "slots": (statement.in_flight.groups + statement.in_buffer.groups <= run.gate.statistics().held, True),
        }
        self.faults += [
            f"{name}: {found} is not {expected}" for name, (found, expected) in seen.items() if found != expected
        ]


def audited(simulation: Simulation) -> Simulation:
    """Run it to its end with the books closed at every moment; return it."""
    audit = Audit(simulation)
    simulate(simulation, instruments=[audit])
    assert not audit.faults, audit.faults[:3]
    assert audit.num_audits > 300
    return simulation


class Scrape:
    """What a scrape of a run that has ended shows."""

    def __init__(self, run: Run) -> None:
        registry = CollectorRegistry()
        registry.register(collector(Source(run=run)))

        async def read() -> list[Metric]:
            return list(registry.collect())

        metrics = trio.run(read, clock=trio.testing.MockClock())
        self._values = {(s.name, *sorted(s.labels.items())): s.value for metric in metrics for s in metric.samples}

    def __call__(self, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> float | None:
        """Return a sample's value, None where it is absent."""
        return self._values.get((name, *sorted(labels.items())))
