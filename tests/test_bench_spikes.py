"""`asyncrl bench spikes`: real runs of the tiny model, and what their spikes come to. Figures are not judged here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import Server
from tiny_run import tiny_server, write_config

from asyncrl import cli
from asyncrl.bench.spikes import growth, measure
from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tiny_server(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.mark.engine
@pytest.mark.slow
def test_each_bound_and_loss_is_run_kept_and_drawn(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings = {"engine.urls": [server.url], "evaluation.samples": 0}
    config = write_config(tmp_path / "spikes.toml", server.model_directory, settings)
    report, runs = tmp_path / "spikes.json", tmp_path / "runs"
    picture = tmp_path / "spikes.svg"
    arguments = ["bench", "spikes", "--config", str(config), "--steps", "3", "--directory", str(runs)]
    arguments += ["--bounds", "1", "3", "--losses", "importance_sampling"]
    assert cli.main([*arguments, "--json", str(report), "--picture", str(picture)]) == 0
    found = json.loads(report.read_text())["runs"]
    assert [(run["loss"], run["max_off_policyness"], run["steps"]) for run in found] == [
        ("importance_sampling", 1, 3),
        ("importance_sampling", 3, 3),
    ]
    for run in found:
        steps = read_metrics(RunDirectory(Path(run["directory"])))
        assert run["ratio_max"] == max(step["importance_ratio_max"] for step in steps) >= 1
        assert run["grad_norm_max"] > 0
        assert sum(run["causes"].values()) == 3
        assert (Path(run["directory"]) / "spikes.jsonl").is_file(), "the runs are kept"
    assert "<svg" in picture.read_text()
    printed = capsys.readouterr().out
    assert "importance_sampling, max_off_policyness = 3, 3 steps: largest ratio" in printed
    assert cli.main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_run_is_told_by_the_largest_ratios_of_its_steps() -> None:
    largest = [1.0, 1.5, 2.5, 6.0, math.nan]
    steps = [
        {"importance_ratio_max": ratio, "grad_norm": ratio / 2, "solve_rate": 0.1 * n}
        for n, ratio in enumerate(largest)
    ]
    tokens = [{"by": {"ratio": 1}, "cause": "old_version"}, {"by": {"ratio": 2}, "cause": "noise"}]
    found = measure(steps, [{"tokens": tokens}, {"tokens": [{"by": {"influence": 1}, "cause": "advantage"}]}])
    assert (found["steps"], found["ratio_max"], found["ratio_max_median"], found["ratio_max_p90"]) == (5, 6.0, 2.0, 6.0)
    assert (found["steps_above_2"], found["steps_above_5"]) == (2, 1)
    assert found["grad_norm_median"] == 1.0
    assert found["causes"] == {"old_version": 1}
    assert found["solve_rate_last"] == pytest.approx(0.4)
    assert found["seq_ess_min"] is None


def test_growth_is_of_the_distance_from_one() -> None:
    def run(loss: str, bound: int, ratio: float | None) -> dict[str, object]:
        return {"loss": loss, "max_off_policyness": bound, "ratio_max_median": ratio}

    runs = [run("a", 3, 2.0), run("a", 1, 1.25), run("b", 1, 1.5), run("c", 1, None), run("c", 2, 3.0)]
    assert growth(runs) == {"a": 4.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps must be >= 1, got 0"),
        (["--bounds", "1", "1"], "--bounds must differ"),
        (["--losses", "nothing"], "nothing"),
        (["--set", "learner.loss='grpo'"], "--set learner.loss is what this benchmark sets by itself"),
        (["--picture", "spikes.txt"], "must end in .svg, .png or .pdf"),
        (["--json", "nowhere/spikes.json"], "there is no directory nowhere"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_started(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert cli.main(["bench", "spikes", "--directory", str(runs), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not runs.exists()
