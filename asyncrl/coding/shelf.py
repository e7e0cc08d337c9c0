"""Coding tasks that are asked now: each built, laid out and judged untouched once, for all of its episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from asyncrl.coding.grading import Grader
from asyncrl.coding.places import begin_step, open_place, prepare_files
from asyncrl.coding.tasks import CodingTask, TaskSet
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import Sandbox, SandboxBackend, Snapshot

_MAX_IDLE = 8  # tasks whose files stay laid out although no episode has them: the next epoch is far, a retry is near
_MAX_JUDGED = 4096  # verdicts on untouched files that are remembered; some hundred bytes each
_CLOSE_GRACE_S = 10.0


@dataclass(slots=True)
class _Entry:
    lock: trio.Lock = field(default_factory=trio.Lock)
    task: CodingTask | None = None
    files: Snapshot | None = None
    num_episodes: int = 0


class Shelf:
    """Opens the places of tasks by their ids. Closed by `aclose`."""

    def __init__(
        self, tasks: TaskSet, backend: SandboxBackend, grader: Grader, *, max_open: int, judges_untouched: bool
    ) -> None:
        """At most `max_open` places are open at a time, the untouched ones that are judged included.

        Grading opens sandboxes besides, so the backend must allow some more: with all of them held by episodes that
        wait to be graded, none would ever end.
        """
        self._tasks = tasks
        self._backend = backend
        self._grader = grader
        self._judges_untouched = judges_untouched
        self._max_open = max_open
        self._open = trio.Semaphore(max_open)  # no limiter: one task may open several
        self._entries: dict[str, _Entry] = {}
        self._untouched: dict[str, tuple[Verdict, ...]] = {}

    def task(self, task_id: str) -> CodingTask:
        """Return a task as it is built anew. Raises: EnvironmentFault where that is not possible any more."""
        try:
            return self._tasks.task(task_id)
        except ConfigError as error:
            raise EnvironmentFault(f"task {task_id!r} cannot be built: {error}") from error

    @asynccontextmanager
    async def opened(self, task_id: str) -> AsyncIterator[tuple[CodingTask, Sandbox, Sequence[Verdict]]]:
        """Yield a task, a new sandbox with its files, and what its untouched files come to at each of its steps.

        The last is empty where they are not judged. Waits while as many places are open as may be.
        Raises: SandboxError, EnvironmentFault.
        """
        entry = self._entries.setdefault(task_id, _Entry())
        entry.num_episodes += 1
        try:
            async with entry.lock:
                if entry.task is None or entry.files is None:
                    entry.task = self.task(task_id)
                    entry.files = await prepare_files(self._backend, entry.task)
                if self._judges_untouched and task_id not in self._untouched:
                    self._remember(task_id, await self._judge_untouched(entry.task, entry.files))
            async with self._open, await open_place(self._backend, entry.task, entry.files) as sandbox:
                yield entry.task, sandbox, self._untouched.get(task_id, ())
        finally:
            entry.num_episodes -= 1
            self._entries[task_id] = self._entries.pop(task_id)  # the last of the idle ones
            await self._tidy()

    async def _judge_untouched(self, task: CodingTask, files: Snapshot) -> tuple[Verdict, ...]:
        async with self._open, await open_place(self._backend, task, files) as sandbox:
            verdicts = []
            for step in task.steps:
                await begin_step(sandbox, task, step)
                verdicts.append(await self._grader.grade(task, step, sandbox))
            return tuple(verdicts)

    def _remember(self, task_id: str, verdicts: tuple[Verdict, ...]) -> None:
        while len(self._untouched) >= _MAX_JUDGED:
            self._untouched.pop(next(iter(self._untouched)))
        self._untouched[task_id] = verdicts

    async def _tidy(self, most: int = _MAX_IDLE) -> None:
        idle = [task_id for task_id, entry in self._entries.items() if entry.num_episodes == 0]
        for task_id in idle[: max(0, len(idle) - most)]:
            files = self._entries.pop(task_id).files
            if files is not None:
                with trio.move_on_after(_CLOSE_GRACE_S, shield=True):
                    await files.aclose()

    def statistics(self) -> Mapping[str, int]:
        """Return how many tasks are laid out, how many places are open, and how many episodes wait for one."""
        laid_out = sum(entry.files is not None for entry in self._entries.values())
        num_open, num_waiting = self._max_open - self._open.value, self._open.statistics().tasks_waiting
        return {"tasks": laid_out, "open": num_open, "waiting": num_waiting}

    async def aclose(self) -> None:
        """Give up the files of all tasks; no episode may be under way."""
        await self._tidy(0)
