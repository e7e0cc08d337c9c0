"""`asyncrl bench learner`: what it measures, and what it refuses. Figures are not judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_model import build_tiny_model

from asyncrl import cli
from asyncrl.bench.learner_batches import ragged_lengths

_SMALL = {
    "--threads": 1,
    "--rounds": 2,
    "--microbatch-tokens": 96,
    "--segments": 4,
    "--shortest": 8,
    "--longest": 64,
    "--prompt-tokens": 4,
    "--sequences": 2,
    "--sharing-groups": 1,
    "--sharing-size": 3,
    "--sharing-prompt": 24,
    "--sharing-completion": 8,
    "--step-tokens": 200,
}


@pytest.mark.slow
def test_every_documented_figure_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_model(tmp_path / "model")
    path = tmp_path / "learner.json"
    sizes = [word for option, value in _SMALL.items() for word in (option, str(value))]
    assert cli.main(["bench", "learner", "--model", str(model), *sizes, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    for group, names in (("ragged", ("learner", "padded", "alone")), ("sharing", ("shared", "apart"))):
        for name in names:
            figures = report[group][name]
            assert len(figures["seconds"]) == len(figures["cpu_seconds"]) == 2
            assert figures["tokens_per_second"] > 0
            assert figures["peak_bytes"] >= 0
            assert figures["num_tokens"] == (8 + 26 + 45 + 64 if group == "ragged" else 96)
    assert report["sharing"]["shared"]["tokens_forwarded"] == 48
    assert report["sharing"]["apart"]["tokens_forwarded"] == 96
    assert 0 < report["sharing"]["gradient_relative_difference"] < 0.05
    for field in ("loss", "grad_norm"):  # all three did the same work
        values = [report["ragged"][name][field] for name in ("learner", "padded", "alone")]
        assert values == pytest.approx([values[0]] * 3, rel=0.02)
    assert report["step"]["num_tokens"] >= 200
    assert report["step"]["loss_seconds"] > 0
    assert report["step"]["diagnostics_seconds"] > 0
    assert report["step"]["metrics"]["num_microbatches"] == report["step"]["num_microbatches"]
    numbers = report["numbers"]
    for name in ("logprob_bfloat16_to_float32", "logprob_split", "logprob_order"):
        assert 0 <= numbers[name]["mean"] <= numbers[name]["max"] < 0.2
    assert all(0 <= numbers[f"gradient_{name}"] < 0.05 for name in ("split", "order", "ranks"))
    assert numbers["logprob_bfloat16_to_float32"]["mean"] > 0
    assert all(math.isfinite(value) for value in report["ratios"].values())
    assert [goal["name"] for goal in report["goals"]] == list(report["ratios"])[:5]
    assert report["machine"]["threads"] == 1
    shown = capsys.readouterr()
    assert "peak memory, of padded" in shown.out
    assert "round 2 of 2: padded" in shown.err


def test_lengths_are_spread_evenly_and_reach_what_is_asked() -> None:
    assert sorted(ragged_lengths(5, shortest=64, longest=1024)) == [64, 304, 544, 784, 1024]
    assert ragged_lengths(5, shortest=64, longest=1024) == ragged_lengths(5, shortest=64, longest=1024)
    assert sum(ragged_lengths(0, shortest=64, longest=1024, total=32768)) >= 32768


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["--longest", "10"], "--longest must be >= --shortest (64 tokens), got 10"),
        (["--json", "nowhere/report.json"], "--json: there is no directory nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "learner", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "learner", "--model", str(tmp_path)]) != 0
    assert "has no config.json" in capsys.readouterr().err
