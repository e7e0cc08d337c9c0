"""The order in which tasks are asked, epoch by epoch, also in a run that was interrupted."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.rollout import TaskSource
from asyncrl.types import Task


def source(**more: Any) -> TaskSource:
    return TaskSource(lambda epoch: [Task(task_id=f"{epoch}/{i}", environment="e") for i in range(5)], **more)


def ids(tasks: TaskSource, count: int) -> list[str]:
    return [tasks.next().task_id for _ in range(count)]


def test_each_epoch_asks_every_task_once_in_an_order_of_its_own() -> None:
    order = ids(source(seed=1), 10)
    assert sorted(order[:5]) == [f"0/{i}" for i in range(5)]
    assert sorted(order[5:]) == [f"1/{i}" for i in range(5)]
    assert [i[2:] for i in order[:5]] != [i[2:] for i in order[5:]]
    assert order == ids(source(seed=1), 10)
    assert order != ids(source(seed=2), 10)


def test_tasks_are_used_up_after_the_last_epoch() -> None:
    tasks = source(seed=1, epochs=2)
    ids(tasks, 10)
    for _ in range(2):
        with pytest.raises(StopIteration):
            tasks.next()


@pytest.mark.parametrize("position", range(11))
def test_a_restored_source_goes_on_with_the_same_tasks(position: int) -> None:
    tasks, restored = source(seed=3, epochs=3), source(seed=3, epochs=3)
    ids(tasks, position)
    restored.restore(tasks.state())
    assert ids(restored, 15 - position) == ids(tasks, 15 - position)
    with pytest.raises(StopIteration):
        restored.next()


def test_a_source_that_was_used_up_stays_so_when_restored() -> None:
    tasks, restored = source(seed=3, epochs=1), source(seed=3, epochs=1)
    ids(tasks, 5)
    with pytest.raises(StopIteration):
        tasks.next()
    restored.restore(tasks.state())
    with pytest.raises(StopIteration):
        restored.next()
