"""Simulated runs over a real journal and real checkpoints, killed after any time and gone on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from loop_simulation import Simulation, simulate

from asyncrl.buffers import Amount, BufferSettings, JournalSettings, LostLine
from asyncrl.checkpoint import CheckpointStore
from asyncrl.errors import leaves
from asyncrl.run import Limits
from asyncrl.run_history import opened_journal
from asyncrl.testing import Rates

FAILING = frozenset({"task-7", "task-31"})
NUM_TASKS = 48
RATES = Rates(mean_tokens=10, sigma=1.0)
BUFFERS = {
    "n=1": BufferSettings(max_off_policyness=1, groups_per_step=4, group_size=3),
    "n=3": BufferSettings(max_off_policyness=3, groups_per_step=2, group_size=3),
    "n=0": BufferSettings(max_off_policyness=0, groups_per_step=3, group_size=3),
}


class Killed(BaseException):
    """What stands for SIGKILL in one process: nothing of asyncrl catches it."""


@contextmanager
def opened(
    directory: Path,
    *,
    buffer: BufferSettings = BUFFERS["n=1"],
    lost_line: LostLine = LostLine.REDRAW,
    checkpoint_every_steps: int = 3,
    steps: int = 10**6,
    failing: frozenset[str] = FAILING,
    rates: Rates = RATES,
    **more: Any,
) -> Iterator[Simulation]:
    """Yield a simulation that goes on from whatever `directory` holds, with a real journal and real checkpoints."""
    checkpoint = CheckpointStore(directory / "checkpoints", keep=2).newest()
    state = checkpoint.state if checkpoint else {}
    with opened_journal(directory / "journal", JournalSettings(), run_id="test", state=state) as (journal, history):
        simulation = Simulation(
            directory / "checkpoints",
            buffer=buffer,
            limits=Limits(steps=steps, checkpoint_every_steps=checkpoint_every_steps),
            rates=rates,
            num_tasks=NUM_TASKS,
            resume=True,
            journal=journal,
            history=history,
            lost_line=lost_line,
            **more,
        )
        simulation.environment.failing = failing.__contains__
        yield simulation


def kill_after(simulation: Simulation, seconds: float, *, version: int = 0) -> bool:
    """Run for so many simulated seconds after a version, or to the end; return whether it was killed."""

    async def kill() -> None:
        while simulation.engine.version < version:  # noqa: ASYNC110 - simulated time, and no event tells
            await trio.sleep(0.5)
        await trio.sleep(seconds)
        raise Killed

    try:
        simulate(simulation, kill)
    except BaseExceptionGroup as group:
        if {type(error) for error in leaves(group)} != {Killed}:
            raise
        return True
    return False


def run_until_killed(directory: Path, seconds: float, **more: Any) -> bool:
    """Go on for so many simulated seconds, or to the end; return whether it was killed."""
    with opened(directory, **more) as simulation:
        return kill_after(simulation, seconds)


def check_end(simulation: Simulation) -> None:
    """Every task was trained on once, or dropped because all of its episodes failed, and the books say the same."""
    trained = Counter(simulation.learner.weights)
    assert trained == Counter(f"task-{i}" for i in range(NUM_TASKS) if f"task-{i}" not in FAILING)
    assert simulation.status.groups_dropped["all_failed"] == len(FAILING)
    assert simulation.status.groups_trained == NUM_TASKS - len(FAILING)
    statement = simulation.run.ledger.statement()
    assert statement.difference == Amount()
    assert statement.trained.groups == NUM_TASKS - len(FAILING)
    assert (statement.in_buffer, statement.in_flight) == (Amount(), Amount())
