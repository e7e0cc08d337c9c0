"""Which groups make a batch: full where that can be, never without the oldest, and always once enough wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.atropos.packing import Waiting, choose_batch


def waiting(*sizes: int, env_id: int | None = 0) -> list[Waiting]:
    return [Waiting(env_id=env_id, size=size) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ((3,), None),
        ((4,), [0]),
        ((2, 2, 4), [0, 1]),
        ((3, 3, 1), [0, 2]),
        ((3, 2, 2), [0]),  # the two would fill it, and the first would wait for ever
        ((2, 3, 1, 1), [0, 2, 3]),
        ((3, 3), [0]),
    ],
)
def test_a_batch_of_four(sizes: Sequence[int], chosen: list[int] | None) -> None:
    assert choose_batch(waiting(*sizes), 4) == chosen


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(12, 24))
def test_a_queue_of_any_sizes_is_emptied_in_batches_that_fit(sizes: list[int], batch_size: int) -> None:
    left = waiting(*sizes)
    while (chosen := choose_batch(left, batch_size)) is not None:
        assert chosen[0] == 0
        assert sum(left[place].size for place in chosen) <= batch_size
        left = [group for place, group in enumerate(left) if place not in chosen]
    assert sum(group.size for group in left) < batch_size


def test_minima_come_first_and_wait_for_whoever_has_nothing() -> None:
    groups = [*waiting(2, 2, 2, 2, env_id=0), *waiting(2, 2, env_id=1), *waiting(2, env_id=None)]
    assert choose_batch(groups, 8, {0: 0.25, 1: 0.5}) == [0, 1, 4, 5]
    assert choose_batch(groups, 8, {0: 0.25, 1: 0.5, 2: 0.25}) is None
    assert choose_batch(groups, 8, {0: 1.0, 1: 1.0}) == [0, 1, 4, 5]  # more than there is: in proportion
    assert choose_batch(groups, 8, {2: 0.01}) == [0, 1, 2, 3]  # less than a sequence is nothing
