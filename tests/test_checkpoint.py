"""Checkpoints: what is missing from one, or was changed, is named, and the one before it is whole."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loop_simulation import Simulation, simulate

from asyncrl.checkpoint import FORMAT, Checkpoint, CheckpointStore, load_checkpoint
from asyncrl.errors import CheckpointError
from asyncrl.run import Limits


def _store(directory: Path, *versions: int) -> CheckpointStore:
    """Return a store that has these versions, each a model file and a state."""
    store = CheckpointStore(directory, keep=2)
    for version in versions:
        partial = store.begin(version)
        (partial / "model").mkdir()
        (partial / "model" / "weights").write_bytes(b"w" * 10)
        store.commit(partial, version, {"counters": {"steps": version}})
    return store


def _newest(store: CheckpointStore) -> Checkpoint:
    checkpoint = store.newest()
    assert checkpoint is not None
    return checkpoint


def _refused(store: CheckpointStore) -> str:
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    return str(caught.value)


@pytest.mark.parametrize("name", ["model/weights", "orchestrator.json", "manifest.json"])
def test_a_missing_file_is_named_and_so_is_the_checkpoint_before(tmp_path: Path, name: str) -> None:
    store = _store(tmp_path, 1, 2)
    newest = _newest(store).directory
    (newest / name).unlink()
    assert _refused(store) == (
        f"checkpoint {newest}: {name} is missing; move {newest} out of the way to go on from step-1"
    )
    newest.rename(tmp_path / "moved")
    assert _newest(store).state == {"counters": {"steps": 1}}
    shutil.rmtree(tmp_path / "step-1" / "model")
    assert _refused(store) == f"checkpoint {tmp_path / 'step-1'}: model/weights is missing", "there is none before"


def test_a_file_of_another_size_is_named(tmp_path: Path) -> None:
    store = _store(tmp_path, 1)
    (_newest(store).directory / "model" / "weights").write_bytes(b"w" * 9)
    assert _refused(store).endswith("model/weights has 9 bytes, not 10")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", lambda found: {**found, "version": 7}),
        ("manifest.json", lambda found: {**found, "files": {k: v for k, v in found["files"].items() if "m" not in k}}),
        ("manifest.json", lambda found: {**found, "digest": "00000000"}),
        ("orchestrator.json", lambda found: {"counters": {"steps": 2}}),
    ],
)
def test_a_manifest_that_does_not_match_its_digest_is_refused(tmp_path: Path, name: str, change: Any) -> None:
    store = _store(tmp_path, 1)
    path = _newest(store).directory / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))), encoding="utf-8")
    assert "was changed after it was written" in _refused(store)


@pytest.mark.parametrize("found", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_by_number(tmp_path: Path, found: int) -> None:
    path = _newest(_store(tmp_path, 1)).directory
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": found}))
    with pytest.raises(CheckpointError, match=f"has format {found}; this version of asyncrl reads {FORMAT}"):
        load_checkpoint(path)


def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one_and_loses_no_task(tmp_path: Path) -> None:
    limits = Limits(steps=4, checkpoint_every_steps=2)
    first = simulate(Simulation(tmp_path, num_tasks=40, limits=limits))
    newest = _newest(first.checkpoints).directory
    (newest / "model" / "version").unlink()
    assert _refused(first.checkpoints).endswith("out of the way to go on from step-2")
    shutil.rmtree(newest)
    second = simulate(Simulation(tmp_path, num_tasks=40, limits=Limits(steps=100), resume=True))
    assert Counter(second.learner.weights) == Counter(f"task-{i}" for i in range(40))
