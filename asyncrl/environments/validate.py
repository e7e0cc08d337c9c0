"""Proves, task by task, that an environment's tasks can be trained on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import trio

from asyncrl.coding.grading import Grader
from asyncrl.coding.hygiene import Fault, Problem, TaskVerdict, digest, examine
from asyncrl.coding.tasks import BringsCodingTasks, TaskSet
from asyncrl.coding.verdict_file import VerdictFile
from asyncrl.errors import ConfigError
from asyncrl.protocols import Environment, SandboxBackend

_CONCURRENT = 4  # tasks in sandboxes at a time; more would only wait for the processor


def task_set_of(environment: Environment) -> TaskSet:
    """Return an environment's coding tasks. Raises: ConfigError where it has none."""
    if not isinstance(environment, BringsCodingTasks):
        raise ConfigError(f"environment {environment.name!r} has no task_set of coding tasks: nothing can be validated")
    return environment.task_set


async def validate(
    environment: Environment,
    backend: SandboxBackend,
    *,
    report: Callable[[TaskVerdict], None] = lambda verdict: None,
    kept: VerdictFile | None = None,
    variables: Mapping[str, str] = os.environ,
) -> list[TaskVerdict]:
    """Return a verdict on every task of all splits, in the environment's order; `report` gets each as it is known.

    A good task's unfixed code fails, its reference passes every time, and the agent finds no hidden check, reference,
    history, secret or network. What `kept` holds of a task that has not changed is not found out again, and what is
    found out is added there. Raises: ConfigError where the environment has no coding tasks.
    """
    tasks = task_set_of(environment)
    ids, held_out = tasks.all_ids(), set(tasks.held_out_ids())
    verdicts: dict[str, TaskVerdict] = {}
    limiter = trio.CapacityLimiter(_CONCURRENT)

    async def check(task_id: str, grader: Grader) -> None:
        async with limiter:
            verdict = await _verdict(tasks, task_id, backend, grader, kept, task_id in held_out, variables)
        verdicts[task_id] = verdict
        report(verdict)

    async with Grader(backend) as grader, trio.open_nursery() as nursery:
        for task_id in ids:
            nursery.start_soon(check, task_id, grader)
    return [verdicts[task_id] for task_id in ids]


async def _verdict(
    tasks: TaskSet,
    task_id: str,
    backend: SandboxBackend,
    grader: Grader,
    file: VerdictFile | None,
    held_out: bool,
    variables: Mapping[str, str],
) -> TaskVerdict:
    try:
        task = tasks.task(task_id)
    except ConfigError as error:
        return TaskVerdict(
            task_id=task_id, held_out=held_out, problems=(Problem(fault=Fault.BROKEN, detail=str(error)),)
        )
    if file is not None and (known := file.known(task_id, digest(task))) is not None:
        return known
    verdict = await examine(task, backend, grader, held_out=held_out, variables=variables)
    if file is not None:
        file.add(verdict)
    return verdict
