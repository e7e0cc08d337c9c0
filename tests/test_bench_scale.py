"""`asyncrl bench scale`: every figure is there and hangs together. Figures of speed are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.bench.scale_settings import GOALS

_SMALL = {
    "frames": 500,
    "megabytes": 2,
    "rounds": 1,
    "groups": 2,
    "parameters": 1,
    "steps": 1,
    "rollouts": 800,
    "requests": 64,
}


@pytest.mark.slow
def test_every_documented_figure_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scale.json"
    sizes = [word for name, size in _SMALL.items() for word in (f"--{name}", str(size))]
    assert cli.main(["bench", "scale", *sizes, "--directory", str(tmp_path), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    for name in ("messages", "frames", "batches", "records"):
        found = report["wire"][name]
        (ours,) = [value for key, value in found.items() if key.endswith("per_second") and not key.startswith("plain")]
        (plain,) = [value for key, value in found.items() if key.startswith("plain_")]
        assert found["ratio"] == pytest.approx(ours / plain)
    assert {goal["name"] for goal in report["goals"]} == {goal.name for goal in GOALS} == set(report["ratios"])
    flight = report["in_flight"]
    assert flight["in_flight"] == 800
    assert flight["kib_per_rollout"] == pytest.approx(flight["kib_per_rollout_with_tokens"] - flight["kib_of_tokens"])
    assert 2 < flight["kib_of_tokens"] < 3
    assert 1 < flight["kib_per_task"] < flight["kib_per_rollout"] < 16, "a rollout is more than a task"
    assert report["requests"]["requests"] == 64
    assert report["hand_over"]["tokens"] == 2 * 8 * 512
    learner = report["learner"]
    for side in ("one_process", "ranks"):
        assert learner[side]["num_bytes"] > 4 * 4 * 1e6, "float32 weights, masters and two moments"
        assert learner["save_seconds_per_gb"][side] > 0 < learner["resume_seconds_per_gb"][side]
    assert learner["overhead"] == pytest.approx(
        learner["ranks"]["step_seconds"] / learner["one_process"]["step_seconds"] - 1
    )
    shown = capsys.readouterr().out
    assert "KiB of a rollout under way besides its tokens" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"], "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rollouts", "7"], "--rollouts must be >= 8, got 7"),
        (["--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["--groups", "1"], "--groups must be >= 2, got 1"),
        (["--parameters", "-1"], "--parameters must be >= 0, got -1"),
        (["--directory", "nowhere"], "--directory: there is no directory nowhere"),
        (["--json", "nowhere/x.json"], "--json: there is no directory nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "scale", *arguments]) == 2
    assert words in capsys.readouterr().err
