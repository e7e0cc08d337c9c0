"""The gateway's benchmark measures what it says, at a small size; what it finds is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.bench.gateway import GOALS, GatewayBench, table
from asyncrl.cli import main

SIZES = {"--sessions": 3, "--turns": 2, "--engine-ms": 20, "--together": 12}


@pytest.mark.slow
def test_it_asks_through_the_gateway_and_directly_and_counts_what_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    arguments = [str(word) for pair in SIZES.items() for word in pair]
    assert main(["bench", "gateway", *arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["together"]["answered"], report["together"]["in_flight"]) == (12, 12)
    assert report["latency"]["requests"] == 3 * 2 * 3
    for name in ("direct", "gateway"):
        assert report["latency"][name]["p99_ms"] >= report["latency"][name]["median_ms"] >= 20
    assert report["throughput"]["requests"] == 6
    assert {goal["name"] for goal in report["goals"]} == {goal.name for goal in GOALS} == set(report["ratios"])
    assert table(report).row_count == 10


@pytest.mark.parametrize("wrong", [["--together", "0"], ["--sessions", "5000"], ["--json", "nowhere/gateway.json"]])
def test_sizes_that_cannot_be_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gateway", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_the_sizes_are_those_that_the_goals_are_for() -> None:
    assert (GatewayBench().sessions, GatewayBench().together) == (64, 2000)
