"""Engines pull while the learner goes on: steps do not wait for pulls, and the bound, the books and a resume hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from loop_simulation import Simulation, audited, simulate

from asyncrl.buffers import BufferSettings, Journal
from asyncrl.errors import WeightSyncError, leaves
from asyncrl.protocols import PLAIN_STEP, StepOptions, SyncReport
from asyncrl.run import Limits
from asyncrl.run_history import read_history
from asyncrl.run_journal import Kind
from asyncrl.status import RunStatus
from asyncrl.testing import Rates
from asyncrl.types import Completion, TokenIds

_BUFFER = BufferSettings(max_off_policyness=3, groups_per_step=2, group_size=2, slots=8)
_SLOW = Rates(token_s=0.01, mean_tokens=10, environment_s=0.1, step_s=5.0, sync_s=12.0)


def _slow(directory: Path, **changes: Any) -> Simulation:
    """A run whose pulls take more than two steps."""
    return Simulation(directory, **{"buffer": _BUFFER, "rates": _SLOW, "limits": Limits(steps=12), **changes})


def test_steps_do_not_wait_for_pulls_as_far_as_slots_allow(tmp_path: Path) -> None:
    """Eight slots let the learner step three versions ahead. Kills: waiting for the pull of every version."""
    simulation = audited(_slow(tmp_path))
    ahead = [record["versions_ahead"] for record in simulation.recorder.steps]
    assert max(ahead) == 4, "the step that began three versions ahead"
    assert simulation.status.max_staleness_trained <= 3
    one_after_the_other = 12 * (_SLOW.step_s + _SLOW.sync_s)
    assert simulation.run.seconds < 0.6 * one_after_the_other


def test_a_version_that_is_overtaken_is_skipped_and_counted(tmp_path: Path) -> None:
    simulation = simulate(_slow(tmp_path))
    pulled, status = simulation.engine.pulled, simulation.status
    assert pulled[-1] == 12, "the last one is waited for"
    assert status.weight_syncs == status.weight_syncs_verified == len(pulled) < 12
    assert status.versions_superseded == 12 - len(pulled) > 0


def test_without_staleness_every_version_is_pulled_before_the_next_step(tmp_path: Path) -> None:
    buffer = BufferSettings(max_off_policyness=0, groups_per_step=2, group_size=2)
    simulation = audited(Simulation(tmp_path, buffer=buffer, rates=_SLOW, limits=Limits(steps=6)))
    assert simulation.engine.pulled == [1, 2, 3, 4, 5, 6]
    assert simulation.status.versions_superseded == 0
    assert simulation.status.learner_idle_seconds["sync"] == pytest.approx(6 * _SLOW.sync_s)


def test_groups_that_are_used_again_wait_for_the_pull_between_two_uses(tmp_path: Path) -> None:
    buffer = BufferSettings(max_off_policyness=3, groups_per_step=2, group_size=2, slots=6, max_uses=3)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_SLOW, limits=Limits(steps=12))
    held: list[tuple[list[int], int]] = []
    step = simulation.learner.step

    async def watched(groups: Sequence[Any], options: StepOptions = PLAIN_STEP) -> Any:
        held.append(([group.group_id for group in groups], simulation.run.buffer.version))
        return await step(groups, options)

    simulation.learner.step = watched  # type: ignore[method-assign]
    audited(simulation)
    assert simulation.status.groups_reused > 0
    for version, (groups, _) in enumerate(held):
        for later in range(version + 1, 12):
            if set(groups) & set(held[later][0]):
                assert held[later][1] > version, "the weights of its first use had not been pulled"


def test_an_evaluation_waits_for_the_version_that_it_measures(tmp_path: Path) -> None:
    limits = Limits(steps=6, evaluation_samples=2, evaluate_before=False, evaluate_every_steps=4)
    simulation = _slow(tmp_path, limits=limits)
    measured: set[tuple[str, int]] = set()
    sample = simulation.engine.sample

    async def watched(token_ids: TokenIds, *, trajectory_id: str, **options: Any) -> Completion:
        completion = await sample(token_ids, trajectory_id=trajectory_id, **options)
        if trajectory_id.startswith("evaluation"):
            measured.update((trajectory_id.split("-")[1], span.version) for span in completion.spans)
        return completion

    simulation.engine.sample = watched  # type: ignore[method-assign]
    simulate(simulation)
    assert measured == {("4", 4), ("6", 6)}


def test_a_run_that_is_interrupted_with_versions_under_way_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The checkpoint does not wait for the engines: a resumed run starts them with its weights."""
    with Journal(tmp_path / "journal", run_id="r") as journal:
        first = _slow(tmp_path, journal=journal, limits=Limits(steps=8, checkpoint_every_steps=4))
        killed: list[int] = []

        async def kill() -> None:
            while first.checkpoints.newest() is None:  # noqa: ASYNC110 - only a test waits for a file
                await trio.sleep(0.1)
            killed.append(first.status.version - first.run.buffer.version)
            raise KeyboardInterrupt

        with pytest.raises(BaseExceptionGroup):
            simulate(first, kill)
    assert killed[0] > 1, "the engines were behind when the checkpoint was written"
    checkpoint = first.checkpoints.newest()
    assert checkpoint is not None
    history = read_history(tmp_path / "journal", run_id="r", state=checkpoint.state)
    with Journal(tmp_path / "journal", run_id="r") as journal:
        second = _slow(tmp_path, journal=journal, history=history, resume=True)
        simulate(second)
    assert second.status.steps == second.status.version == 12
    assert second.status.max_staleness_trained <= 3
    before = {group.task.task_id for group in first.learner.trained[:8]}
    after = [group.task.task_id for group in second.learner.trained]
    assert len(set(after)) == len(after) == 8 * 2
    assert not before & set(after)


def test_what_was_trained_on_is_in_the_journal_before_its_weights_are_sampled_from(tmp_path: Path) -> None:
    simulation = _slow(tmp_path, limits=Limits(steps=4))
    order: list[tuple[str, int]] = []
    append = simulation.run.journal.append_nowait

    def noted(kind: Kind, record: Any, **options: Any) -> int:
        if kind is Kind.GROUPS_TRAINED:
            order.append(("trained", record.version))
            assert record.weights
        return append(kind, record, **options)

    pull = simulation.engine.pull_all

    async def pulled(manifest: Any) -> Any:
        assert simulation.run.journal.weights[manifest.version] == manifest.digest
        reports = await pull(manifest)
        order.append(("pulled", manifest.version))
        return reports

    simulation.run.journal.append_nowait = noted  # type: ignore[method-assign]
    simulation.engine.pull_all = pulled  # type: ignore[method-assign]
    simulate(simulation)
    for version in range(1, 5):
        assert order.index(("trained", version)) < order.index(("pulled", version))


def test_a_stop_ends_the_run_with_the_last_version_in_the_engines(tmp_path: Path) -> None:
    simulation = _slow(tmp_path, limits=Limits(steps=1000))

    async def stop() -> None:
        await trio.sleep(33)
        simulation.stop.set()

    simulate(simulation, stop)
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.version == simulation.status.version == simulation.engine.version > 0


def test_a_pull_that_fails_ends_the_step_that_goes_on_beside_it(tmp_path: Path) -> None:
    simulation = _slow(tmp_path)

    async def refused(manifest: Any) -> Any:
        await trio.sleep(3)  # in the middle of the next step
        raise WeightSyncError("engine 0 refused it")

    simulation.engine.pull_all = refused  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(simulation)
    assert [str(error) for error in leaves(caught.value)] == ["engine 0 refused it"]
    assert simulation.status.steps == 1


def test_a_wait_for_nothing_but_the_engines_is_said_and_counted_as_that(tmp_path: Path) -> None:
    simulation = _slow(tmp_path, rates=Rates(token_s=0.01, mean_tokens=10, step_s=5.0, sync_s=1000.0))
    seen: list[str] = []

    async def look() -> None:
        await trio.sleep(500)
        simulation.run.flush_idle()
        seen.extend(simulation.run.explain())
        seen.append(str(round(simulation.status.learner_idle_seconds["sync"], -1)))
        simulation.stop.set()

    simulate(simulation, look)
    assert seen[0].startswith("learner: syncing for "), seen
    assert "version 4" in seen[0]
    assert seen[-1] == "480.0"


def test_a_line_of_metrics_holds_the_syncs_that_ended_before_it(tmp_path: Path) -> None:
    simulation = simulate(_slow(tmp_path))
    steps = simulation.recorder.steps
    assert "sync_seconds" not in steps[0]
    assert all(("sync_seconds" in record) == (record["syncs"] > 0) for record in steps)
    recorded = sum(record["syncs"] for record in steps)
    assert recorded < simulation.status.weight_syncs == recorded + simulation.run.syncs.lap()["syncs"]
    assert all(record["sync_seconds"] > _SLOW.sync_s - 1e-6 for record in steps if record["syncs"])


def test_bytes_are_counted_by_encoding_and_whole_reads_by_their_reason_across_a_resume() -> None:
    def report(num_bytes: int, encoding: str = "delta", chain_break: str = "") -> SyncReport:
        return SyncReport(
            engine="engine 0",
            version=1,
            verified=True,
            num_bytes=num_bytes,
            seconds={},
            stall_seconds=0.0,
            encoding=encoding,
            chain_break=chain_break,
        )

    status = RunStatus()
    status.count_sync([report(700, "full", "no_copy"), report(700, "full", "no_copy")])
    status.count_sync([report(10), report(700, "full", "other_base")])
    resumed = RunStatus()
    resumed.restore(status.counters())
    resumed.count_sync([report(30)])
    assert resumed.weight_sync_bytes == {"full": 2100, "delta": 40}
    assert resumed.weight_sync_chain_breaks == {"no_copy": 2, "other_base": 1}
