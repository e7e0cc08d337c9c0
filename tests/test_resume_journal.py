"""What a resumed run makes of its journal: one that is damaged, has a hole or is gone costs work, and no task."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from killed_runs import BUFFERS, FAILING, NUM_TASKS, RATES, Killed, check_end, kill_after, opened, run_until_killed
from loop_simulation import Scrape, Simulation, simulate

from asyncrl.buffers import Journal, Record, read_journal
from asyncrl.buffers.journal import list_files
from asyncrl.checkpoint import Checkpoint, CheckpointStore
from asyncrl.resume_plan import plan_resumption
from asyncrl.run import Limits
from asyncrl.run_history import read_history
from asyncrl.run_journal import Kind
from asyncrl.testing import Rates


def _damage(directory: Path, rng: random.Random) -> None:
    """Flip bits in the record of an admission and in two other places of one file."""
    path = rng.choice([path for path in list_files(directory) if path.stat().st_size > 1000])
    admissions = [
        item.payload
        for item in read_journal(directory, run_id="test", from_position=int(path.stem))
        if isinstance(item, Record) and item.kind == Kind.GROUP_ADMITTED
    ]
    data = bytearray(path.read_bytes())
    place = max(0, data.find(rng.choice(admissions)))
    for offset in (place, rng.randrange(len(data)), rng.randrange(len(data))):
        data[offset] ^= 16
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_journal_costs_work_and_no_task(tmp_path: Path) -> None:
    rng, hidden = random.Random(3), 0
    for number in range(12):
        with opened(tmp_path, seed=number) as simulation:
            hidden += any("have no record that can be read" in note for note in simulation.run.notes)
            if not kill_after(simulation, rng.uniform(2, 14)):
                break
        _damage(tmp_path / "journal", rng)
    assert hidden, "some damage hit a draw"
    with opened(tmp_path, seed=99) as simulation:
        simulate(simulation)
    trained = Counter(simulation.learner.weights)
    assert {*trained, *FAILING} == {f"task-{i}" for i in range(NUM_TASKS)}
    assert max(trained.values()) == 1


@pytest.mark.slow
def test_a_hole_in_the_journal_is_said_and_costs_work_and_no_task(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", run_id="test", file_bytes=4000) as journal:
        simulation = Simulation(
            tmp_path / "checkpoints", rates=RATES, num_tasks=NUM_TASKS, journal=journal, limits=Limits(steps=100)
        )
        assert kill_after(simulation, 20.0)
    files = list_files(tmp_path / "journal")
    assert len(files) > 4
    files[2].unlink()
    gone = int(files[3].stem) - int(files[2].stem)
    with opened(tmp_path, failing=frozenset(), seed=1) as resumed:
        words = f"{gone} records from position {int(files[2].stem)} on are lost, which stood before this place"
        assert any(note.endswith(words) for note in resumed.run.notes)
        simulate(resumed)
    trained = Counter(resumed.learner.weights)
    assert {*trained} == {f"task-{i}" for i in range(NUM_TASKS)}
    assert max(trained.values()) == 1


def test_the_journal_is_freed_of_what_no_checkpoint_needs(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", run_id="test", file_bytes=8000) as journal:
        simulation = Simulation(
            tmp_path / "checkpoints",
            limits=Limits(steps=20, checkpoint_every_steps=2),
            rates=Rates(mean_tokens=10),
            journal=journal,
        )
        simulate(simulation)
        written = journal.statistics()
        scraped = Scrape(simulation.run)
        assert scraped("asyncrl_journal_bytes") == written.num_bytes
        assert scraped("asyncrl_journal_syncs_total") == written.num_syncs > 20
        assert written.num_bytes == sum(path.stat().st_size for path in list_files(tmp_path / "journal"))
    assert written.num_files < 20, "two checkpoints of two steps each, and what is under way"
    assert int(list_files(tmp_path / "journal")[0].stem) > written.next_position / 2
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    history = read_history(tmp_path / "journal", run_id="test", state=checkpoint.state)
    assert history.damage == []
    assert len(plan_resumption(checkpoint.state, 20, history, settings=BUFFERS["n=1"]).kept) > 0


class _KilledAfterSaving(CheckpointStore):
    def commit(self, partial: Path, version: int, state: Mapping[str, Any]) -> Checkpoint:
        super().commit(partial, version, state)
        raise Killed


def test_all_that_a_checkpoint_knows_of_is_on_disk_before_it(tmp_path: Path) -> None:
    """Kills: a checkpoint that is written while records wait for the disk."""
    store = _KilledAfterSaving(tmp_path / "checkpoints", keep=2)
    for number in range(3):
        with opened(tmp_path, seed=number, checkpoints=store, checkpoint_every_steps=1) as simulation:
            assert not any("it ends before position" in note for note in simulation.run.notes)
            with pytest.raises(BaseExceptionGroup):
                simulate(simulation)
    checkpoint = store.newest()
    assert checkpoint is not None
    assert checkpoint.version == 3
    history = read_history(tmp_path / "journal", run_id="test", state=checkpoint.state)
    assert history.damage == []


def test_a_journal_that_is_gone_is_said_and_its_tasks_are_drawn_again(tmp_path: Path) -> None:
    assert run_until_killed(tmp_path, 25.0)
    for path in list_files(tmp_path / "journal"):
        path.unlink()
    with opened(tmp_path, seed=1) as simulation:
        assert any("the checkpoint knows of all before" in note for note in simulation.run.notes)
        assert kill_after(simulation, 12.0)
    with opened(tmp_path, seed=2) as simulation:
        simulate(simulation)
        check_end(simulation)
