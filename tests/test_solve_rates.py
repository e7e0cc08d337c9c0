"""Solve rates against brute force: every subset of the episodes, every interval over simulated tasks."""

from __future__ import annotations

import itertools
import random
from statistics import fmean

import pytest

from asyncrl.solve_rates import difference, interval, pass_at, wilson


@pytest.mark.parametrize(("solved", "number", "k"), [(0, 4, 2), (1, 4, 2), (3, 5, 2), (4, 4, 3), (2, 6, 6), (1, 3, 1)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_episodes_that_hold_a_solution(
    solved: int, number: int, k: int
) -> None:
    episodes = [True] * solved + [False] * (number - solved)
    chosen = [any(some) for some in itertools.combinations(episodes, k)]
    assert pass_at([(solved, number)], k) == pytest.approx(fmean(chosen))


def test_tasks_with_fewer_than_k_episodes_say_nothing_of_k() -> None:
    assert pass_at([(1, 2), (0, 8)], 4) == 0.0
    assert pass_at([(1, 2)], 3) is None


def test_episodes_of_one_task_count_for_less_than_others() -> None:
    """Kills: an interval as of independent episodes."""
    apart, alike = [(2, 4)] * 12, [(4, 4), (0, 4)] * 6
    widths = [high - low for low, high in (interval(apart), interval(alike))]
    independent = wilson(24, 48)
    assert widths[0] == pytest.approx(independent[1] - independent[0])
    assert widths[1] > 1.8 * widths[0]


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    chance = random.Random(0)
    held = 0
    for _ in range(400):
        hardness = [chance.betavariate(0.4, 1.2) for _ in range(30)]  # some tasks easy, most hard; the mean is 0.25
        counts = [(sum(chance.random() < p for _ in range(4)), 4) for p in hardness]
        low, high = interval(counts)
        held += low <= 0.25 <= high
    assert 0.91 <= held / 400 <= 0.985


def test_nothing_and_certainty_have_intervals_too() -> None:
    assert interval([]) == (0.0, 1.0)
    assert interval([(0, 0)]) == (0.0, 1.0)
    low, high = interval([(0, 8)] * 10)
    assert low == pytest.approx(0.0, abs=1e-12)
    assert high == pytest.approx(wilson(0, 10)[1]), "ten tasks, not eighty episodes"


def test_a_paired_difference_does_not_mind_how_hard_tasks_are() -> None:
    hard = [0.05 * n for n in range(16)]
    gain, low, high = difference([rate + 0.1 for rate in hard], hard)
    assert (gain, low, high) == (pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
    assert difference([1.0], [0.5]) == (0.5, -0.5, 1.0)
    assert difference([], []) == (0.0, -1.0, 1.0)
