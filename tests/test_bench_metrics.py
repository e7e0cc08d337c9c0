"""`asyncrl bench metrics` on a tiny model: every figure is there, measured, and judged by the promise it is about."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from engine_server import Server
from tiny_model import build_tiny_model
from tiny_run import tiny_server, write_config

from asyncrl.bench.metrics import bench_metrics
from asyncrl.bench.metrics_settings import GOALS, MetricsBench
from asyncrl.bench.watched_runs import Stretch, bench_runs, compare, cpu_seconds
from asyncrl.cli import main
from asyncrl.configs import load_config
from asyncrl.errors import AsyncRLError, ConfigError

_SMALL = {
    "segments": 4,
    "shortest": 20,
    "longest": 40,
    "prompt-tokens": 10,
    "rounds": 1,
    "scrapes": 2,
    "report-steps": 20,
    "environments": 10,
    "pairs": 0,
}


@pytest.mark.slow
def test_every_figure_is_measured_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model")
    out = tmp_path / "metrics.json"
    options = [word for name, value in _SMALL.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "metrics", "--model", str(model), "--json", str(out), *options]) == 0
    report = json.loads(out.read_text())
    without_runs = {goal.name for goal in GOALS} - {"on_of_off"}
    assert set(report["ratios"]) == without_runs == {goal["name"] for goal in report["goals"]}
    assert report["runs"] is None
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
    with pytest.raises(ConfigError, match="--pairs must be >= 0, and times --steps at least 4, got 1 and 3"):
        MetricsBench(model=tmp_path, pairs=1, steps=3)
    with pytest.raises(ConfigError, match="is no model directory"):
        bench_metrics(MetricsBench(model=tmp_path))


# --- everything on against everything off -----------------------------------------------------------------------


def stretch(watched: bool, sampled: float, learned: float, forwarded: float) -> Stretch:
    """Return a step that takes 2 s, and by its work, and half a second where it is watched."""
    cpu = 2.0 + 0.004 * sampled + 0.01 * learned + 0.003 * forwarded + 0.5 * watched
    return Stretch(
        watched=watched, cpu_seconds=cpu, seconds=cpu / 2, sampled=sampled, learned=learned, forwarded=forwarded
    )


def test_what_watching_adds_is_told_from_the_work_of_the_steps() -> None:
    """The steps that are watched have less work here: without taking it out, watching would seem to save time."""
    rng = Random(0)
    work = [(rng.uniform(2000, 4000), rng.uniform(500, 3000), rng.uniform(500, 3000)) for _ in range(24)]
    steps = [
        stretch(number % 2 == 0, *(t * (0.7 if number % 2 == 0 else 1) for t in w)) for number, w in enumerate(work)
    ]
    found = compare(steps)
    off = fmean(step.cpu_seconds for step in steps if not step.watched)
    assert found["cpu_share"] == pytest.approx(0.5 / off)
    assert found["cpu_share_low"] == pytest.approx(found["cpu_share_high"])
    assert found["cpu_seconds_on"] < found["cpu_seconds_off"]
    assert found["seconds_off"] == pytest.approx(off / 2)
    noisy = compare([replace(step, cpu_seconds=step.cpu_seconds + rng.gauss(0, 0.2)) for step in steps])
    assert noisy["cpu_share_low"] < 0.5 / off < noisy["cpu_share_high"]
    with pytest.raises(AsyncRLError, match="5 steps are too few to tell watching from their work"):
        compare(steps[:5])
    with pytest.raises(AsyncRLError, match="24 steps are too few"):
        compare([replace(step, sampled=1000.0 * step.watched) for step in steps])
    none = [stretch(step.watched, step.sampled, step.learned, 0.0) for step in steps]
    share = 0.5 / fmean(step.cpu_seconds for step in none if not step.watched)
    assert compare(none)["cpu_share"] == pytest.approx(share), "a kind of work that is in no step"


def test_processor_time_is_of_a_process_and_of_all_that_came_from_it() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(2, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        assert cpu_seconds(process.pid) >= 0.28, "the child's, which goes on"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "2\n"
        assert cpu_seconds(process.pid) >= 0.28, "the child's, which has ended"
        process.stdin.write("\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tiny_server(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.mark.engine
@pytest.mark.slow
def test_everything_on_is_compared_with_everything_off_in_real_runs(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    path = write_config(tmp_path / "tiny.toml", server.model_directory, {"engine.urls": [server.url]})
    told: list[str] = []
    found = bench_runs(load_config(path), pairs=1, steps=4, on_run=told.append)
    assert [words.split(":")[0] for words in told] == ["everything on", "everything off"]
    assert found["steps"] == 8
    assert found["cpu_seconds_on"] > 0 < found["cpu_seconds_off"]
    assert found["cpu_share_low"] < found["cpu_share"] < found["cpu_share_high"]
    gone = replace(load_config(path).model, path=tmp_path / "gone")
    with pytest.raises(AsyncRLError, match=r"(?s)exited with code 2; its last lines:.*gone"):
        bench_runs(replace(load_config(path), model=gone), pairs=1, steps=4)
