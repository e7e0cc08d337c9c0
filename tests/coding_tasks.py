"""A set of small coding tasks of every kind, as the tests of coding agents ask them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import test_judge
import test_verifier
from sandboxes import LIMITS

from asyncrl.coding.tasks import CallChecks, CodingTask, PytestChecks, Reference, ScriptChecks, TaskStep
from asyncrl.errors import ConfigError
from asyncrl.sandbox import Call

UNFIXED, FIXED = "def double(x):\n    return x + 2\n", "def double(x):\n    return x * 2\n"

CALLS = CallChecks(
    path="double.py",
    function="double",
    hidden=tuple(Call(arguments=[x], expected=2 * x) for x in (2, 5, 7, 9)),  # the unfixed code passes the first
)
PYTEST = PytestChecks(
    tests={
        "test_double.py": b"import pytest\nfrom double import double\n@pytest.mark.parametrize('x', [2, 5])\n"
        b"def test_secret(x):\n    assert double(x) == 2 * x\n"
    },
    expected=("test_double.py::test_secret[2]", "test_double.py::test_secret[5]"),
)
SCRIPT = ScriptChecks(
    files={
        "test.sh": b"python3 -B -c 'from double import double; print(1.0 if double(5) == 10 else 0.25)' "
        b"> /logs/verifier/reward.txt\n"
    },
    timeout_s=20.0,
)

TASK = CodingTask(
    task_id="calls",
    steps=(
        TaskStep(
            instruction="double(x) is wrong.",
            checks=CALLS,
            reference=Reference(files={"double.py": FIXED.encode()}),
        ),
    ),
    files={"double.py": UNFIXED.encode(), "notes.txt": b"x * 2\n"},
    limits=LIMITS,
    variables={"GREETING": "hello"},
)
SECOND = TaskStep(
    instruction="Now write half.py.",
    name="second",
    checks=CallChecks(path="half.py", function="half", hidden=(Call(arguments=[4], expected=2),)),
    files={"half_notes.txt": b"x // 2\n"},
    setup="echo begun > begun.txt",
)

RETRIES = replace(
    TASK,
    files={"retries.py": test_judge.UNFIXED.encode()},
    limits=replace(LIMITS, wall_s=5.0),  # one of them never ends
    steps=(
        TaskStep(
            instruction="retries is wrong.",
            checks=CallChecks(path="retries.py", function="retries", hidden=test_judge.RETRIES),
        ),
    ),
)
"""What attacks on verifiers are tried at."""

TASKS: Mapping[str, CodingTask] = {
    task.task_id: task
    for task in (
        TASK,
        replace(TASK, task_id="pytest", steps=(replace(TASK.steps[0], checks=PYTEST),)),
        replace(TASK, task_id="script", steps=(replace(TASK.steps[0], checks=SCRIPT),)),
        replace(TASK, task_id="steps", steps=(TASK.steps[0], SECOND)),
        replace(TASK, task_id="gated", steps=(replace(TASK.steps[0], min_reward={"reward": 1.0}), SECOND)),
        replace(TASK, task_id="last", steps=(TASK.steps[0], SECOND), last_step_counts=True),
        replace(TASK, task_id="hurried", steps=(replace(TASK.steps[0], agent_timeout_s=2.0),)),
        replace(TASK, task_id="hurried-steps", steps=(replace(TASK.steps[0], agent_timeout_s=1e-6), SECOND)),
        replace(TASK, task_id="hasty", limits=replace(LIMITS, wall_s=0.3)),
        replace(TASK, task_id="slow-checks", steps=(replace(TASK.steps[0], checks=replace(SCRIPT, timeout_s=5000.0)),)),
        replace(TASK, task_id="blocked", steps=(TASK.steps[0], replace(SECOND, files={"notes.txt/x": b""}))),
        replace(TASK, task_id="broken-setup", steps=(replace(TASK.steps[0], setup="exit 3"),)),
        replace(RETRIES, task_id="retries-calls"),
        replace(
            RETRIES,
            task_id="retries-pytest",
            steps=(
                replace(RETRIES.steps[0], checks=PytestChecks(tests=test_verifier.TESTS, expected=test_verifier.IDS)),
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSettings:
    """See `Kinds`."""

    held_out: str = "pytest"


class Kinds:
    """Every task of `TASKS`, one of them held out."""

    settings_type = KindSettings

    def __init__(self, settings: KindSettings, *, seed: int) -> None:
        self._settings = settings

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return all but one."""
        return [task_id for task_id in TASKS if task_id != self._settings.held_out]

    def held_out_ids(self) -> Sequence[str]:
        """Return one."""
        return [self._settings.held_out]

    def all_ids(self) -> Sequence[str]:
        """Return all."""
        return list(TASKS)

    def task(self, task_id: str) -> CodingTask:
        """Return the task of that name."""
        if task_id not in TASKS:
            raise ConfigError(f"no task {task_id!r}")
        return TASKS[task_id]
