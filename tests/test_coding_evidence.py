"""An episode's record says how its verdicts came about, and what in a solution a person should read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coding_tasks import CALLS, FIXED, PYTEST, SECOND, TASK
from sandboxes import with_backend

from asyncrl.coding.evidence import Trail
from asyncrl.coding.grading import Grader
from asyncrl.coding.places import begin_step, open_place
from asyncrl.coding.signs import signs
from asyncrl.coding.tasks import CallChecks, Checks, CodingTask, PytestChecks, Reference, ScriptChecks, TaskStep
from asyncrl.protocols import SandboxBackend
from asyncrl.sandbox import Call

SHAPES = CallChecks(
    path="m.py",
    function="area",
    hidden=(Call(arguments=[[3, 4, 5]], expected=6), Call(arguments=["circle"], expected=78.5)),
    visible=(Call(arguments=[[6, 8, 10]], expected=24), Call(arguments=[2], expected=4)),
)
TESTS = PytestChecks(
    tests={
        "test_m.py": b"from m import area\ndef test_secret():\n    assert area(7) == 153.9\n    assert area(8) == 201\n"
    },
    expected=("test_m.py::test_secret",),
)
BEFORE = {"m.py": b"def area(x):\n    return 0\n", "data.py": b"KNOWN = [3, 4, 5]\n"}


def found(checks: Checks, source: str, *, path: str = "m.py", reference: str = "", before: Any = BEFORE) -> list[str]:
    solution = Reference(files={"m.py": reference.encode()}) if reference else None
    step = TaskStep(instruction="Areas; a circle's radius is 5.", checks=checks, reference=solution)
    return signs(step, before=before, changed={path: source.encode()})


ANSWERS = "def area(x):\n    return {'circle': 78.5}.get(x) if x != [3, 4, 5] else 6\n"
VISIBLE = "def area(x):\n    if x == [6, 8, 10]: return 24\n    if x == 'circle': return 78.5\n"


@pytest.mark.parametrize("source", [ANSWERS, VISIBLE])
def test_inputs_with_their_answers_are_a_sign(source: str) -> None:
    assert found(SHAPES, source, before={}) == ["literal_answers"]


@pytest.mark.parametrize("checks", [TESTS, ScriptChecks(files={"check.py": TESTS.tests["test_m.py"]})])
def test_several_values_that_hidden_tests_compare_with_are_a_sign(checks: Checks) -> None:
    assert found(checks, "def area(x):\n    return 153.9 if x == 7 else 201\n") == ["literal_answers"]
    assert found(checks, "def area(x):\n    return x * 153.9\n") == []


@pytest.mark.parametrize(
    ("checks", "source", "more"),
    [
        (SHAPES, "def area(x):\n    return x * x / 2\n", {}),
        (SHAPES, "def area(x):\n    if x == 'circle': return 78.5\n    return sum(x)\n", {}),  # a special case
        (SHAPES, ANSWERS, {"reference": ANSWERS}),
        (SHAPES, ANSWERS, {"path": "test_mine.py"}),
        (SHAPES, ANSWERS, {"path": "notes.md"}),
        (SHAPES, "def area(x:\n", {}),
        (CALLS, "def double(x):\n    return {2: 4, 5: 10, 7: 14}[x]\n", {}),  # numbers like these stand everywhere
    ],
)
def test_what_an_honest_solution_holds_is_none(checks: Checks, source: str, more: Mapping[str, Any]) -> None:
    assert found(checks, source, **more) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nif 'x' in os.environ.get('PYTEST_CURRENT_TEST', ''): pass\n",
        "NAME = 'test_secret'\n",
        "import test_m\n",
    ],
)
def test_names_of_hidden_tests_are_a_sign(source: str) -> None:
    assert found(TESTS, source) == ["test_names"]


async def evidence(
    backend: SandboxBackend, task: CodingTask, *left: Mapping[str, bytes], commands: str = "true"
) -> list[dict[str, Any]]:
    """Return what an agent's steps leave that writes so and runs so in each."""
    told = []
    async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
        trail = Trail(task)
        for step, files in zip(task.steps, left, strict=True):
            await begin_step(sandbox, task, step)
            await trail.begin(step, sandbox)
            for path, data in files.items():
                await sandbox.write(path, data)
            await sandbox.shell(commands)
            verdict = await grader.grade(task, step, sandbox)
            told.append(await trail.end(step, sandbox, verdict, grader))
    return told


@pytest.mark.slow
def test_a_record_names_what_failed_and_what_was_changed_where(tmp_path: Path) -> None:
    visible = replace(CALLS, visible=(Call(arguments=[1], expected=2), Call(arguments=[3], expected=6)))
    task = replace(TASK, steps=(replace(TASK.steps[0], checks=visible),), allowed_paths=("double.py",))
    odd = {"double.py": b"def double(x):\n    return 2 * x if x < 6 else 0\n", "a\nb.txt": b"x"}

    async def use(backend: SandboxBackend) -> list[dict[str, Any]]:
        (nothing,) = await evidence(backend, task, {})
        (wrong,) = await evidence(
            backend, task, odd, commands="rm notes.txt; mkdir __pycache__ .git; touch .git/x a.pyc"
        )
        (solved,) = await evidence(backend, task, {"double.py": FIXED.encode()})
        (again,) = await evidence(backend, task, {"double.py": FIXED.encode()})
        return [nothing, wrong, solved, again]

    nothing, wrong, solved, again = with_backend(use, tmp_path)
    assert nothing == {
        "solved": False,
        "reward": 0.25,
        "checks": 4,
        "failed": ["call 1", "call 2", "call 3"],
        "visible": [0, 2],
    }
    assert wrong["changed"] == ["a\nb.txt", "double.py", "notes.txt"]
    assert wrong["outside"] == ["a\nb.txt", "notes.txt"]
    assert (wrong["visible"], wrong["failed"]) == ([2, 2], ["call 2", "call 3"])
    assert "visible" not in solved
    assert solved["answer"] == again["answer"] != wrong["answer"]


@pytest.mark.slow
def test_each_step_is_charged_with_its_own_changes_and_not_with_its_set_up(tmp_path: Path) -> None:
    task = replace(TASK, steps=(TASK.steps[0], SECOND))

    async def use(backend: SandboxBackend) -> list[dict[str, Any]]:
        return await evidence(
            backend, task, {"double.py": FIXED.encode()}, {"half.py": b"def half(x):\n    return 2\n"}
        )

    first, second = with_backend(use, tmp_path)
    assert (first["changed"], second["changed"]) == (["double.py"], ["half.py"])
    assert (first["solved"], second["solved"], second["step"]) == (True, True, "second")


@pytest.mark.slow
def test_files_that_cannot_be_read_are_counted_and_hold_nothing_up(tmp_path: Path) -> None:
    commands = "ln -s /etc/passwd link; for n in $(seq 200); do echo $n > f$n; done; truncate -s 4M large; mkfifo pipe"

    async def use(backend: SandboxBackend) -> list[dict[str, Any]]:
        return await evidence(
            backend, replace(TASK, steps=(replace(TASK.steps[0], checks=PYTEST),)), {}, commands=commands
        )

    (told,) = with_backend(use, tmp_path)
    assert told["unread"] == 1
    assert len(told["changed"]) == 50
    assert told["failed"] == ["test_double.py::test_secret[5]"]
