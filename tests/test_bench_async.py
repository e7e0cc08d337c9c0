"""`asyncrl bench async`: two real runs of the tiny model, and what their steps come to. Figures are not judged here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import Server
from tiny_run import tiny_server, write_config

from asyncrl import cli
from asyncrl.bench.bounds import measure
from asyncrl.errors import AsyncRLError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tiny_server(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.mark.engine
@pytest.mark.slow
def test_both_bounds_are_run_and_compared(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings = {"engine.urls": [server.url], "buffer.group_size": 2}
    config = write_config(tmp_path / "async.toml", server.model_directory, settings)
    report = tmp_path / "async.json"
    arguments = ["bench", "async", "--config", str(config), "--minutes", "0.5", "--json", str(report), "--bounds"]
    assert cli.main([*arguments, "0", "2", "--set", "environment.latency.median_s=0.3"]) == 0
    figures = json.loads(report.read_text())
    assert [run["max_off_policyness"] for run in figures["runs"]] == [0, 2]
    assert figures["latency"]["median_s"] == 0.3
    synchronous, asynchronous = figures["runs"]
    assert synchronous["staleness_max"] == 0
    assert asynchronous["staleness_max"] <= 2
    assert figures["ratio"] == asynchronous["steps_per_hour"] / synchronous["steps_per_hour"]
    assert all(0 <= run["learner_idle_share"] <= 1 and 0 <= run["engine_idle_share"] <= 1 for run in figures["runs"])
    printed = capsys.readouterr().out
    assert (
        printed.index("max_off_policyness = 0:") < printed.index("max_off_policyness = 2:") < printed.index("2 takes")
    )


def _step(seconds: float, *, waited: float = 0.0) -> dict[str, float]:
    return {
        "seconds": seconds,
        "staleness_max": 1.0,
        "learner_idle_straggler_seconds": waited / 2,
        "learner_idle_groups_seconds": waited / 2,
        "engine_idle_no_slot_seconds": 1.0,
        "engine_idle_sync_seconds": 0.5,
    }


def test_what_began_together_at_the_start_is_left_out() -> None:
    records = [_step(seconds, waited=6.0) for seconds in (100.0, 101.0, 120.0, 140.0, 160.0)]
    rate = measure(records, 1, minutes=9)
    assert (rate.steps, rate.seconds, rate.steps_per_hour) == (3, 59.0, pytest.approx(3 * 3600 / 59))
    assert rate.learner_idle_share == pytest.approx(18 / 59)
    assert rate.engine_idle_share == pytest.approx(4.5 / 59)
    with pytest.raises(AsyncRLError, match="5 steps in 9 minutes with max_off_policyness = 3, and at least 6 are"):
        measure(records, 3, minutes=9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--minutes", "0"], "--minutes must be > 0, got 0"),
        (["--bounds", "3"], "--bounds must be at least two different ones, got [3]"),
        (["--set", "buffer.max_off_policyness=2"], "what is compared is given by --bounds"),
        (["--set", "environment.latency.median_s=500"], "median_s * straggler_factor = 2000 s"),
        (["--bounds", "0", "-1"], "max_off_policyness must be >= 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "async", *arguments]) == 2
    assert words in capsys.readouterr().err
