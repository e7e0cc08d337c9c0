"""A run's metrics in other programs: each step once, in order, only numbers, through the libraries themselves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.export import WRITERS, export, open_writer
from asyncrl.run_directory import RunDirectory


class Kept:
    """A `Writer` that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write(self, version: int, values: Mapping[str, float], *, date: float) -> None:
        """Keep."""
        self.lines.append((version, dict(values)))

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.write_text("[run]\nsteps = 5\n")
    return directory


def _line(version: int, **changed: Any) -> str:
    line = {"phase": "rollouts", "step": version, "version": version, "time": 1.7e9 + version, "loss": version / 10}
    return json.dumps(line | changed) + "\n"


def test_every_step_is_written_once_and_only_its_numbers(directory: RunDirectory) -> None:
    text = _line(1, phase="warm_start") + _line(2, loss=math.nan, note="words", flag=True) + "\0\0\n" + _line(3) + "{"
    directory.metrics.write_text(text)
    result = {"version": 2, "solve_rate": 0.25, "mean_reward": 0.5}
    directory.status.write_text(json.dumps({"counters": {"evaluations": [result, {**result, "version": 9}]}}))
    kept = Kept()
    assert export(directory, kept, wait=None) == 3
    assert kept.lines == [
        (1, {"warm_start/step": 1.0, "warm_start/version": 1.0, "warm_start/loss": 0.1}),
        (2, {"train/step": 2.0, "train/version": 2.0}),
        (3, {"train/step": 3.0, "train/version": 3.0, "train/loss": 0.3}),
        (2, {"evaluation/solve_rate": 0.25, "evaluation/reward": 0.5}),
    ]


def test_a_run_is_followed_over_a_resume_until_it_ends(directory: RunDirectory) -> None:
    kept, locked = Kept(), directory.locked()
    locked.__enter__()
    directory.metrics.write_text(_line(1) + _line(2)[:20])

    def cut_back() -> None:
        partial = directory.metrics.with_suffix(".tmp")
        partial.write_text(_line(1))
        partial.replace(directory.metrics)

    def append(text: str) -> None:
        with directory.metrics.open("a") as file:
            file.write(text)

    moments = iter(
        (
            lambda: append(_line(2)[20:]),
            lambda: append(_line(3)),
            cut_back,  # resumed from version 1
            lambda: append(_line(2, loss=9.0) + _line(3, loss=9.0) + _line(4)),
            lambda: (append(_line(5)), locked.__exit__(None, None, None)),
        )
    )
    assert export(directory, kept, wait=lambda: next(moments)()) == 5
    assert [(version, values["train/loss"]) for version, values in kept.lines] == [(n, n / 10) for n in range(1, 6)]
    assert next(moments, None) is None


def test_a_library_that_is_not_there_is_named(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRITERS, "nobody", ("asyncrl_nobody", None))  # type: ignore[misc, arg-type]
    with pytest.raises(ConfigError, match=r"asyncrl_nobody is not installed: pip install asyncrl\[nobody\]"):
        open_writer("nobody", directory, project="p", out=None)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path), "--to", "tensorboard"]) == 2
    assert "is no run directory" in capsys.readouterr().err


def _export(directory: RunDirectory, name: str, **environment: str) -> None:
    """Run the command in a process of its own: the libraries start threads and processes, and say a lot."""
    directory.metrics.write_text(_line(1) + _line(2) + _line(3))
    argv = [sys.executable, "-m", "asyncrl", "export", str(directory.path), "--to", name]
    path = {"PATH": "/usr/bin:/bin", "HOME": str(directory.path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=path | environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"3 steps written for {name}" in done.stdout


@pytest.mark.slow
def test_tensorboard_reads_what_was_written(directory: RunDirectory) -> None:
    pytest.importorskip("tensorboard", reason="needs asyncrl[tensorboard]")
    _export(directory, "tensorboard")
    code = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1])\n"
        "found.Reload()\n"
        "print(json.dumps([[e.step, e.value, e.wall_time] for e in found.Scalars('train/loss')]))\n"
    )
    argv = [sys.executable, "-c", code, str(directory.path / "tensorboard")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[n, pytest.approx(n / 10), 1.7e9 + n] for n in (1, 2, 3)]


@pytest.mark.slow
def test_wandb_keeps_a_run_without_a_network(directory: RunDirectory) -> None:
    pytest.importorskip("wandb", reason="needs asyncrl[wandb]")
    _export(directory, "wandb", WANDB_MODE="offline")
    (kept,) = (directory.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert directory.run_id in kept.name
    assert b"train/loss" in kept.read_bytes()


@pytest.mark.slow
def test_trackio_keeps_a_run_on_this_machine(directory: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs asyncrl[trackio]")
    place = tmp_path / "trackio"
    _export(directory, "trackio", TRACKIO_DIR=str(place))
    assert any(path.suffix == ".db" for path in place.rglob("*"))
    assert any(b"train/loss" in path.read_bytes() for path in place.rglob("*.db*"))
