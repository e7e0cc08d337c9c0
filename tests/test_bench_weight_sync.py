"""`asyncrl bench weight-sync`: what it measures, and what it refuses. Figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from tiny_model import build_tiny_model

from asyncrl import cli

_SMALL = ("--engines", "1", "--rounds", "1", "--seconds", "1", "--requests", "2", "--tokens", "24", "--threads", "1")


@pytest.mark.engine
def test_every_documented_figure_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Takes what one start of a server takes."""
    model = build_tiny_model(tmp_path / "model", tied=True)
    path = tmp_path / "sync.json"
    options = ("--learning-rate", "1e-4", "--json", str(path))
    assert cli.main(["bench", "weight-sync", "--model", str(model), *_SMALL, *options]) == 0
    report = json.loads(path.read_text())
    num_bytes = report["num_bytes"]
    windows = report["engines"]["1"]
    assert not windows["none"]["syncs"]
    for kind in ("none", "full", "delta"):
        assert windows[kind]["tokens_per_second"][0] > 0
        assert windows[kind]["gap_seconds"]
        for sync in windows[kind]["syncs"]:
            assert 0 < sync["pause_seconds"] < sync["pull_seconds"]
            assert sync["publish_seconds"] > 0
            assert 0 < sync["load_cpu_seconds"] < sync["pull_seconds"]
            assert {"update", "pause", "finish", "resume", "update.load"} <= sync["phase_seconds"].keys()
            assert "gap_seconds" in sync
            assert sync["changed_share"] > 0.9, "every float32 weight of this model moves by far more than its rounding"
        assert len(windows[kind]["syncs"]) <= windows[kind]["seconds"][0], "no more than one a second"
    assert {sync["num_bytes"] for sync in windows["full"]["syncs"]} == {num_bytes}
    assert len(report["copy_seconds"]) == 1
    canary, ratios = report["canary"], report["ratios"]
    assert len(canary["seconds"]) == len(canary["gap_seconds"]) == 5
    assert ratios["canary_over_step"] == median(canary["gap_seconds"]) / canary["step_seconds"]
    for windows, layout in ((report["engines"]["1"], ""), (report["apart"], "_apart")):
        for kind in (f"full{layout}", f"delta{layout}"):
            window = windows[kind.removesuffix(layout)]
            kept = 1 - ratios[f"lost_seconds_{kind}"] * len(window["syncs"]) / window["seconds"][0]
            assert kept == pytest.approx(ratios[f"throughput_{kind}"])
            assert 0.05 * ratios[f"interval_{kind}"] == pytest.approx(ratios[f"lost_seconds_{kind}"])
            assert ratios[f"syncs_per_second_{kind}"] == len(window["syncs"]) / window["seconds"][0]
    reload = report["reload"]
    assert reload["seconds"] >= reload["drain_seconds"] + reload["load_seconds"] > 0
    assert {goal["name"] for goal in report["goals"]} <= report["ratios"].keys()
    shown = capsys.readouterr().out
    assert "time without a token" in shown
    assert not list(Path("/dev/shm").glob("asyncrl-bench-*"))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--rounds", "0", "--rounds must be >= 1, got 0"),
        ("--engines", "0", "--engines must be different numbers >= 1, got [0]"),
        ("--learning-rate", "-1", "--learning-rate must be > 0, got -1.0"),
        ("--model", "nowhere", "--model: there is no *.safetensors in nowhere"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    model = build_tiny_model(tmp_path / "model")
    assert cli.main(["bench", "weight-sync", "--model", str(model), option, value]) == 2
    assert words in capsys.readouterr().err
