"""`asyncrl bench buffer`: what it measures, and what it refuses. Figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.bench.buffer import make_group


@pytest.mark.slow
def test_every_figure_is_there_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "buffer.json"
    small = ["--trajectories", "64", "1024", "--megabytes", "1", "--always-records", "4", "--steps", "200"]
    small += ["--in-flight", "64", "--episode-seconds", "0.2", "--seconds", "0.5"]
    arguments = ["bench", "buffer", *small, "--directory", str(tmp_path), "--json", str(report)]
    assert cli.main(arguments) == 0
    figures = json.loads(report.read_text())
    assert [cost["trajectories"] for cost in figures["buffer"]] == [64, 1024]
    assert all(cost["insertions_per_second"] > 0 and cost["takes_per_second"] > 0 for cost in figures["buffer"])
    assert [cost["fsync"] for cost in figures["journal"]] == ["always", "group", "never"]
    assert all(cost["ratio"] > 0 for cost in figures["journal"])
    assert figures["resume"]["bytes"] > 10**6
    assert figures["slowest_take_over_fastest"] >= 1
    assert figures["loop"]["in_flight"] > 16
    assert figures["loop"]["cpu_ms_per_trajectory"] > 0
    assert figures["loop"]["lag_p99_ms"] >= figures["loop"]["lag_p50_ms"] > 0
    assert figures["memory"]["trajectories"] >= 200 * 8
    growth = figures["memory"]["kib_per_100_steps"]
    assert growth["low"] <= growth["slope"] <= growth["high"]
    assert list(tmp_path.iterdir()) == [report]
    printed = capsys.readouterr().out
    assert "resuming reads 1 GiB of journal in" in printed
    assert "ms of CPU per finished one" in printed
    assert "memory over 200 steps" in printed


def test_a_group_is_eight_trajectories_of_512_tokens() -> None:
    group = make_group(3)
    assert [len(t.segments[0].token_ids) for t in group.trajectories] == [512] * 8
    assert {t.segments[0].token_ids[0] for t in group.trajectories} == set(range(3, 11)), "arrays of their own"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trajectories", "8"], "--trajectories must be >= 16, got 8"),
        (["--megabytes", "0"], "--megabytes must be >= 1, got 0"),
        (["--in-flight", "7"], "--in-flight must be >= 8, got 7"),
        (["--episode-seconds", "nan"], "--episode-seconds must be >= 0.1, got nan"),
        (["--directory", "/nowhere"], "there is no directory /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "buffer", *arguments]) == 2
    assert words in capsys.readouterr().err
