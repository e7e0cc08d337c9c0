"""Proves, task by task, that an environment's tasks can be trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import trio

from asyncrl.environments.bugfix import shown_call
from asyncrl.errors import ConfigError
from asyncrl.protocols import Environment, SandboxBackend
from asyncrl.rollout import Episode, boundary
from asyncrl.tokens import Message
from asyncrl.types import Task

_CONCURRENT = 4  # tasks in sandboxes at a time; more would only wait for the processor
_REFERENCE_RUNS = 3  # a reference that passes only sometimes is a flaky task


@runtime_checkable
class Checkable(Protocol):
    """What an environment of code tasks must have besides `Environment`."""

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of all splits; `data` holds `source` (unfixed) and `reference`."""
        ...

    async def accepts(self, task: Task, source: str, backend: SandboxBackend) -> bool:
        """Return whether `source` earns the full reward."""
        ...

    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the messages that ask the task."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """What was found out about one task."""

    task_id: str
    held_out: bool
    problems: tuple[str, ...]
    """Why the task must not be trained on; empty for a good one."""
    seconds: float

    @property
    def good(self) -> bool:
        """True where nothing speaks against the task."""
        return not self.problems


async def validate(
    environment: Environment,
    backend: SandboxBackend,
    *,
    report: Callable[[TaskVerdict], None] = lambda verdict: None,
) -> list[TaskVerdict]:
    """Return a verdict on every task of all splits, in the environment's order; `report` gets each as it is known.

    A good task's unfixed code fails, its reference passes every time, its visible tests are not among the hidden ones,
    and its prompt holds neither a hidden call nor the reference. A sandbox that fails is a problem of the task that met
    it. Raises: ConfigError where the environment's tasks have no reference solutions.
    """
    if not isinstance(environment, Checkable):
        raise ConfigError(f"environment {environment.name!r} has no reference solutions: nothing can be validated")
    held_out = {task.data["function"] for task in environment.held_out()}
    checkable: Checkable = environment
    tasks = checkable.all_tasks()
    verdicts: dict[int, TaskVerdict] = {}
    limiter = trio.CapacityLimiter(_CONCURRENT)

    async def check(index: int, task: Task) -> None:
        async with limiter:
            started = trio.current_time()
            problems = _look(checkable, task)
            async with boundary() as caught:
                problems += await _run(checkable, task, backend)
            if caught.status is not None:
                problems.append(f"could not be checked: {caught.detail}")
            verdicts[index] = TaskVerdict(
                task_id=task.task_id,
                held_out=task.data["function"] in held_out,
                problems=tuple(problems),
                seconds=trio.current_time() - started,
            )
            report(verdicts[index])

    async with trio.open_nursery() as nursery:
        for index, task in enumerate(tasks):
            nursery.start_soon(check, index, task)
    return [verdicts[index] for index in range(len(tasks))]


async def _run(environment: Checkable, task: Task, backend: SandboxBackend) -> list[str]:
    problems = []
    if await environment.accepts(task, task.data["source"], backend):
        problems.append("the unfixed code passes")
    passed = [await environment.accepts(task, task.data["reference"], backend) for _ in range(_REFERENCE_RUNS)]
    if not all(passed):
        problems.append(f"the reference passes {sum(passed)} of {_REFERENCE_RUNS} times")
    return problems


def _look(environment: Checkable, task: Task) -> list[str]:
    problems = []
    hidden, visible = task.data.get("hidden", []), task.data.get("visible", [])
    shown = {json.dumps(test["arguments"]) for test in visible}
    if any(json.dumps(test["arguments"]) in shown for test in hidden):
        problems.append("a visible test is among the hidden ones")
    messages = environment.start(Episode(trajectory_id="validate", task=task))
    text = "\n".join(str(message["content"]) for message in messages)
    if any(shown_call(task.data["function"], test) in text for test in hidden):
        problems.append("the prompt holds a hidden call")
    # the unfixed code may begin with the whole reference, where the bug was added to a line's end
    if task.data["reference"].strip() in text.replace(task.data["source"].strip(), ""):
        problems.append("the prompt holds the reference solution")
    return problems
