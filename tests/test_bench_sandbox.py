"""The benchmark of sandboxes measures what it says, each beside the plain thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sandboxes import cannot_sandbox, has_groups

from asyncrl.cli import main

WEAK = () if has_groups() else ("--set", "sandbox.allow_weaker=true")


@pytest.mark.slow
def test_every_figure_is_there_and_in_a_believable_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    file = tmp_path / "sandbox.json"
    assert main(["bench", "sandbox", "--rounds", "5", "--together", "4", "--json", str(file), *WEAK]) == 0
    report = json.loads(file.read_text())
    assert report["wall"].startswith("bubblewrap")
    for name in ("true", "python"):
        bare, cold = report["bare"][name], report["cold"][name]
        assert cold["above_bare_ms"] == pytest.approx(cold["median_ms"] - bare["median_ms"])
        assert cold["times_bare"] == pytest.approx(cold["median_ms"] / bare["median_ms"])
        assert cold["times_bare"] > 1
    for found in (report["shell"], report["one_shot"], report["fork"], report["prepared"], report["judge"]):
        assert 0 < found["median_ms"] <= found["p95_ms"]
    assert report["shell"]["median_ms"] < report["one_shot"]["median_ms"]  # which starts a bubblewrap
    assert [start["workers"] for start in report["starts"]] == [1, 2, 8, 32]
    assert all(start["per_second"] > 0 for start in report["starts"])
    assert report["together"]["sandboxes"] == 4
    if has_groups():
        assert 4 * 2**20 < report["together"]["num_bytes"] < 4 * 64 * 2**20
    assert "4 open together" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds must be from 1 to 1000000, got 0"),
        (["--together", "65"], "--together must be from 1 to 64, got 65"),
        (["--json", "nowhere/x"], "--json: there is no directory nowhere"),
        (["--set", "run.seed=1"], "--set takes sandbox.KEY=VALUE here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "sandbox", *arguments]) == 2
    assert message in capsys.readouterr().err
