"""Tasks that are asked are laid out once, given up when nobody has them, and never more of them opened than may be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from coding_tasks import TASK, TASKS
from sandboxes import with_backend

from asyncrl.coding.grading import Grader
from asyncrl.coding.shelf import Shelf
from asyncrl.coding.tasks import CodingTask
from asyncrl.errors import EnvironmentFault, SandboxError
from asyncrl.protocols import SandboxBackend, Snapshot

pytestmark = pytest.mark.slow

T = TypeVar("T")


class Counting:
    """A backend that counts the snapshots which are there, and fails to prepare as often as it is told."""

    def __init__(self, backend: SandboxBackend, *, failures: int = 0) -> None:
        self._backend = backend
        self.failures = failures
        self.made = 0
        self.snapshots: list[Snapshot] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def prepare(self, *args: Any, **more: Any) -> Snapshot:
        if self.failures:
            self.failures -= 1
            raise SandboxError("nothing can be kept")
        self.made += 1
        made = await self._backend.prepare(*args, **more)
        self.snapshots.append(made)
        closing = made.aclose

        async def aclose() -> None:
            if made in self.snapshots:
                self.snapshots.remove(made)
            await closing()

        made.aclose = aclose  # type: ignore[method-assign]
        return made


class Numbered:
    """As many tasks as there are numbers."""

    def task(self, task_id: str) -> CodingTask:
        return TASKS.get(task_id, TASK)


def with_shelf(
    body: Callable[[Shelf, Counting], Awaitable[T]],
    directory: Path,
    *,
    max_open: int = 4,
    judges_untouched: bool = False,
    failures: int = 0,
) -> T:
    async def use(backend: SandboxBackend) -> T:
        counting = Counting(backend, failures=failures)
        async with Grader(backend) as grader:
            shelf = Shelf(
                Numbered(),  # type: ignore[arg-type]
                counting,  # type: ignore[arg-type]
                grader,
                max_open=max_open,
                judges_untouched=judges_untouched,
            )
            try:
                return await body(shelf, counting)
            finally:
                await shelf.aclose()
                assert counting.snapshots == []
                assert backend.statistics().open == 0

    return with_backend(use, directory)


def test_a_task_is_laid_out_once_for_all_who_have_it_and_they_do_not_meet(tmp_path: Path) -> None:
    async def body(shelf: Shelf, counting: Counting) -> None:
        async with shelf.opened("a") as (_, one, _), shelf.opened("a") as (_, two, _):
            await one.write("double.py", b"changed")
            assert await two.read("double.py") == TASK.files["double.py"]
        async with shelf.opened("a"):
            pass
        assert counting.made == 1

    with_shelf(body, tmp_path)


def test_of_tasks_that_nobody_has_only_the_newest_stay(tmp_path: Path) -> None:
    async def body(shelf: Shelf, counting: Counting) -> None:
        async with shelf.opened("held"):
            for number in range(12):
                async with shelf.opened(str(number)):
                    pass
            assert shelf.statistics() == {"tasks": 9, "open": 1, "waiting": 0}
            assert len(counting.snapshots) == 9
            async with shelf.opened("11"), shelf.opened("held"):
                assert counting.made == 13
            async with shelf.opened("0"):
                assert counting.made == 14

    with_shelf(body, tmp_path)


def test_untouched_files_are_judged_once_at_every_step_and_hold_no_place_of_the_waiting(tmp_path: Path) -> None:
    async def body(shelf: Shelf, counting: Counting) -> None:
        found = []

        async def open_one() -> None:
            async with shelf.opened("steps") as (task, _, untouched):
                assert len(task.steps) == 2
                found.append(untouched)
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(open_one)
        assert [[verdict.reward for verdict in untouched] for untouched in found] == [[0.25, 0.0]] * 5
        assert len({id(untouched) for untouched in found}) == 1

    with_shelf(body, tmp_path, max_open=1, judges_untouched=True)


def test_what_could_not_be_laid_out_is_tried_again_by_the_next(tmp_path: Path) -> None:
    async def body(shelf: Shelf, counting: Counting) -> None:
        with pytest.raises(SandboxError, match="nothing can be kept"):
            async with shelf.opened("a"):
                raise AssertionError
        async with shelf.opened("a") as (_, sandbox, _):
            assert await sandbox.read("double.py") == TASK.files["double.py"]
        with pytest.raises(EnvironmentFault, match="set-up"):
            async with shelf.opened("broken-setup"):
                raise AssertionError

    with_shelf(body, tmp_path, failures=1, judges_untouched=True)
