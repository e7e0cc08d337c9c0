"""The table of task sets, and the bundled templates as coding tasks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sandboxes import with_backend

from asyncrl.coding.bundled import TASK_SETS, load_task_set
from asyncrl.coding.grading import Grader
from asyncrl.coding.places import apply_reference, open_place, with_variables
from asyncrl.coding.tasks import CallChecks
from asyncrl.errors import ConfigError
from asyncrl.protocols import ExecResult, SandboxBackend

CHOSEN = ("templates/add-0-3", "templates/count_each-0-1", "templates/first_word-0-2")


def test_ids_of_the_templates_name_tasks_and_the_splits_do_not_meet() -> None:
    tasks = load_task_set("templates", {}, seed=3)
    training, held_out = tasks.training_ids(0), tasks.held_out_ids()
    functions = [{re.split("[/-]", task_id)[1] for task_id in ids} for ids in (training, held_out)]
    assert functions[0]
    assert functions[1]
    assert not functions[0] & functions[1]
    assert training != tasks.training_ids(1)
    assert len(set(tasks.all_ids())) == len(tasks.all_ids())
    for task_id in (*training[:3], *held_out[:3], *tasks.all_ids()[:3]):
        task = tasks.task(task_id)
        assert task.task_id == task_id
        assert task == tasks.task(task_id)
    assert set(tasks.training_ids(0)) < set(load_task_set("templates", {"hard": True}, seed=3).training_ids(0))


def test_hidden_calls_are_not_in_the_agents_files() -> None:
    tasks = load_task_set("templates", {}, seed=0)
    for task_id in tasks.all_ids():
        task = tasks.task(task_id)
        checks = task.steps[0].checks
        assert isinstance(checks, CallChecks)
        shown = b"\n".join(task.files.values()).decode()
        for call in checks.hidden:
            assert f"{checks.function}({', '.join(map(repr, call.arguments))})" not in shown, task_id


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("template", {}, "did you mean 'templates'"),
        ("nowhere:Class", {}, "No module named"),
        ("asyncrl.coding.bundled:Nothing", {}, "has no class 'Nothing'"),
        ("templates", {"hrad": True}, "did you mean 'hard'"),
        ("templates", {"hard": 3}, "hard = 3"),
    ],
)
def test_what_names_no_task_set_is_refused(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_task_set(name, options, seed=0)


@pytest.mark.parametrize("task_id", ["templates/nothing-0-0", "templates/add-99-0", "add", "templates/add-0-0\n"])
def test_an_id_that_no_template_has_is_refused(task_id: str) -> None:
    with pytest.raises(ConfigError, match="no task"):
        load_task_set("templates", {}, seed=0).task(task_id)


def test_every_named_set_is_there() -> None:
    for name in TASK_SETS:
        assert re.fullmatch(r"[a-z_]+", name)


@pytest.mark.slow
@pytest.mark.parametrize("task_id", CHOSEN)
def test_examples_fail_unfixed_and_pass_with_the_reference_which_solves(task_id: str, tmp_path: Path) -> None:
    task = load_task_set("templates", {}, seed=0).task(task_id)
    reference = task.steps[0].reference
    assert reference is not None

    async def use(backend: SandboxBackend) -> tuple[ExecResult, ExecResult, bool]:
        script = with_variables([*backend.python, "examples.py"], task.variables)
        async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
            before = await sandbox.exec(script)
            fixed = await apply_reference(backend, task, reference, sandbox)
            after = await fixed.exec(script)
            return before, after, (await grader.grade(task, task.steps[0], fixed)).solved

    before, after, solved = with_backend(use, tmp_path)
    assert before.exit_code == 1
    assert b"AssertionError" in before.stderr
    assert (after.exit_code, after.stdout) == (0, b"the examples pass\n"), after.stderr
    assert solved
