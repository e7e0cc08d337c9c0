"""`asyncrl bench metrics` on a tiny model: every figure is there, measured, and judged by the promise it is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import build_tiny_model

from asyncrl.bench.metrics import bench_metrics
from asyncrl.bench.metrics_settings import GOALS, MetricsBench
from asyncrl.cli import main
from asyncrl.errors import ConfigError

_SMALL = {
    "segments": 4,
    "shortest": 20,
    "longest": 40,
    "prompt-tokens": 10,
    "rounds": 1,
    "scrapes": 2,
    "report-steps": 20,
    "environments": 10,
}


@pytest.mark.slow
def test_every_figure_is_measured_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model")
    out = tmp_path / "metrics.json"
    options = [word for name, value in _SMALL.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "metrics", "--model", str(model), "--json", str(out), *options]) == 0
    report = json.loads(out.read_text())
    assert set(report["ratios"]) == {goal.name for goal in GOALS} == {goal["name"] for goal in report["goals"]}
    assert all(value > 0 for value in report["ratios"].values())
    assert report["step"]["num_tokens"] == 20 + 26 + 33 + 40
    assert report["step"]["watching_seconds"] < report["step"]["seconds"]
    assert report["loop"]["updates"] == 9 * 4
    assert 300 < report["scrape"]["series"] < 1500
    assert report["spikes"]["bytes"] < 1e6, "spikes.jsonl of 100 steps stays below 1 MB, whatever the step"
    assert report["report"]["steps"] == 20
    assert "a scrape, ms" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rounds must be >= 1, got 0"):
        MetricsBench(model=tmp_path, rounds=0)
    with pytest.raises(ConfigError, match="--prompt-tokens must be below --shortest"):
        MetricsBench(model=tmp_path, shortest=10, prompt_tokens=10)
    with pytest.raises(ConfigError, match="is no model directory"):
        bench_metrics(MetricsBench(model=tmp_path))
