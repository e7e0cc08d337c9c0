"""The benchmark of Atropos's contract measures a real server, and refuses what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli import main


@pytest.mark.slow
def test_every_figure_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "atropos.json"
    sizes = ["--sequences", "32", "--tokens", "16", "--groups", "5", "--connections", "2", "--rounds", "2"]
    assert main(["bench", "atropos", *sizes, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert len(report["asyncrl"]["groups_per_second"]) == 2
    assert len(report["asyncrl"]["batch_seconds"]) == 5  # two groups each: what one round leaves, the next one takes
    assert min(*report["asyncrl"]["groups_per_second"], *report["asyncrl"]["batch_seconds"]) > 0
    assert report["packed_bytes"] < report["body_bytes"]
    assert "original" not in report
    assert "32 x 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be >= 1, got 0"),
        (["--sequences", "65"], "--sequences must be at most 64"),
        (["--against", "nowhere/python"], "--against: there is no Python nowhere/python"),
        (["--json", "nowhere/x"], "--json: there is no directory nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "atropos", *arguments]) == 2
    assert message in capsys.readouterr().err
