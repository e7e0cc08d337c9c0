"""Distances between what was generated and what was trained on, against the definition of Kolmogorov and Smirnov."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from loop_simulation import Scrape, Simulation, simulate

from asyncrl.buffers.selection import (
    Distribution,
    EpisodeFigures,
    SelectionStatistics,
    Stage,
    ks_distance,
)
from asyncrl.run import Limits


def _exact(a: Sequence[float], b: Sequence[float]) -> float:
    """Return sup |F_a - F_b|: both are steps, so the supremum is at a value of one of them."""
    return max(abs(sum(v <= x for v in a) / len(a) - sum(v <= x for v in b) / len(b)) for x in {*a, *b})


def _of(values: Sequence[float]) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


def _bounds(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    found = ks_distance(_of(a), _of(b))
    assert found is not None
    return found.distance, found.at_most


def _numbers(draw: Callable[[random.Random], float], seed: int) -> list[float]:
    rng = random.Random(seed)
    return [draw(rng) for _ in range(rng.randrange(1, 150))]


_DRAWS: dict[str, Callable[[random.Random], float]] = {
    "durations": lambda rng: rng.lognormvariate(1.0, 1.0),
    "narrow": lambda rng: rng.uniform(99.0, 101.0),
    "around zero": lambda rng: rng.gauss(0.0, 1.0),
    "long": lambda rng: rng.randrange(1, 30_000),
    "tiny and huge": lambda rng: rng.choice([0.0, 1e-7, -1e-7, 1e10, -1e12]),
}


@pytest.mark.parametrize("name", _DRAWS)
def test_the_exact_distance_lies_between_the_two_that_are_given(name: str) -> None:
    for seed in range(30):
        a, b = _numbers(_DRAWS[name], seed), _numbers(_DRAWS[name], seed + 1000)
        least, most = _bounds(a, b)
        assert least - 1e-9 <= _exact(a, b) <= most + 1e-9, seed


@pytest.mark.parametrize("values", [[0.0, 1.0], [-0.5, 0.0, 0.2, 1.0], list(range(101))])
def test_small_integers_and_few_rewards_are_exact(values: Sequence[float]) -> None:
    for seed in range(30):
        a = _numbers(lambda rng: rng.choice(values), seed)
        b = _numbers(lambda rng: rng.choice(values) ** 2 if rng.random() < 0.3 else values[0], seed + 1000)
        b = [v for v in b if v in values]
        if b:
            assert _bounds(a, b) == pytest.approx((_exact(a, b), _exact(a, b)))


@pytest.mark.slow
def test_the_gap_between_the_bounds_is_small_on_a_long_stream() -> None:
    rng = random.Random(0)
    a, b = [[rng.lognormvariate(0.0, sigma) for _ in range(4000)] for sigma in (1.0, 1.2)]
    least, most = _bounds(a, b)
    assert most - least < 0.01
    assert least <= _exact(a[:1000], b[:1000]) + 0.1


def test_an_endless_stream_takes_bounded_memory() -> None:
    rng = random.Random(0)
    distribution = _of([math.exp(rng.uniform(-30, 30)) * rng.choice([-1, 1]) for _ in range(20_000)])
    assert len(distribution.state()) <= 6943 + 1
    assert distribution.count == 20_000


def test_quantiles_and_means() -> None:
    distribution = _of(range(1, 101))
    assert distribution.mean == 50.5
    assert [distribution.quantile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert Distribution().mean is None
    assert Distribution().quantile(0.5) is None


def _figures(tokens: float, reward: float | None = 1.0) -> EpisodeFigures:
    return EpisodeFigures(tokens=tokens, reward=reward, staleness=1, seconds=tokens / 10)


def test_dropping_the_long_ones_shows_and_dropping_nothing_does_not() -> None:
    fair, biased = SelectionStatistics(), SelectionStatistics()
    for tokens in range(1, 101):
        for statistics in (fair, biased):
            statistics.count("demo", Stage.GENERATED, _figures(tokens))
        fair.count("demo", Stage.TRAINED, _figures(tokens))
        biased.count("demo", Stage.DROPPED if tokens > 80 else Stage.TRAINED, _figures(tokens))
    assert all(found.distance == 0 for found in fair.distances().values())
    distances = biased.distances()
    assert distances["demo", "tokens", Stage.TRAINED].distance == pytest.approx(0.2)
    assert distances["demo", "tokens", Stage.DROPPED].distance == pytest.approx(0.8)
    assert distances["demo", "reward", Stage.TRAINED].distance == 0
    assert biased.report()["demo"]["tokens"]["trained"]["median"] == 40


def test_environments_are_apart_failed_episodes_have_no_reward_and_state_survives_json() -> None:
    statistics = SelectionStatistics()
    statistics.count("a", Stage.GENERATED, _figures(5))
    statistics.count("b", Stage.GENERATED, _figures(7, reward=None))
    statistics.count("b", Stage.DROPPED, _figures(7, reward=None))
    report = statistics.report()
    assert "trained" not in report["a"]["tokens"]
    assert "reward" not in report["b"]
    restored = SelectionStatistics()
    restored.restore(json.loads(json.dumps(statistics.state())))
    assert restored.report() == report
    restored.count("b", Stage.GENERATED, _figures(70))
    assert restored.distances()["b", "tokens", Stage.DROPPED].distance == 0.5


def test_a_run_counts_what_it_generates_trains_on_and_drops_and_goes_on_counting(tmp_path: Path) -> None:
    """`seconds` is known of every episode, failed ones too."""

    def counts(simulation: Simulation) -> dict[str, int]:
        report = simulation.status.selection.report()["fake"]["seconds"]
        return {stage: figures["count"] for stage, figures in report.items()}

    first = Simulation(tmp_path, limits=Limits(steps=3))
    first.environment.failing = {"task-1"}.__contains__
    simulate(first)
    assert counts(first) == {
        "generated": sum(first.status.trajectories.values()),
        "trained": 3 * 4 * 4,
        "dropped": 4,
    }
    assert first.status.selection.distances()["fake", "reward", Stage.TRAINED].distance < 0.5
    second = simulate(Simulation(tmp_path, limits=Limits(steps=5), resume=True))
    assert counts(second)["trained"] == 5 * 4 * 4
    scraped = Scrape(second.run)
    labels = {"environment": "fake", "quantity": "tokens", "stage": "trained"}
    distance = second.status.selection.distances()["fake", "tokens", Stage.TRAINED].distance
    assert scraped("asyncrl_selection_distance_ratio", labels) == distance
