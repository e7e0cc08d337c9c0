"""Families of functions, and packages, as coding tasks: each bug is told from the reference, for every seed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sandboxes import with_backend

from asyncrl.coding.bundled import load_task_set
from asyncrl.coding.grading import Grader
from asyncrl.coding.playing import play
from asyncrl.coding.sets.families import HELD_OUT_FAMILIES, families, family_of
from asyncrl.coding.sets.families_packages import PACKAGES
from asyncrl.coding.tasks import CallChecks, PytestChecks
from asyncrl.environments.bugfix_tasks import TEMPLATES, build_task
from asyncrl.protocols import SandboxBackend

ALL = {template.name: template for templates in families().values() for template in templates}
ALL |= {name: package.template for name, package in PACKAGES.items()}


def test_there_are_several_hundred_functions_and_no_two_are_alike() -> None:
    assert len(family_of()) + len(TEMPLATES) > 450
    assert not set(ALL) & set(TEMPLATES)
    assert len(ALL) == sum(len(templates) for templates in families().values()) + len(PACKAGES)

    def shape(code: str) -> str:
        """Return the code with every name and text replaced: copies with other names have one shape."""
        tree = ast.parse(code)
        for node in ast.walk(tree):
            for field in ("id", "name", "arg", "attr"):
                if isinstance(getattr(node, field, None), str):
                    setattr(node, field, "x")
        return ast.dump(tree)

    shapes = [shape(template.code) for template in ALL.values()]
    assert len(set(shapes)) > 0.9 * len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_hidden_calls_tell_every_bug_from_the_reference_and_are_not_shown(seed: int) -> None:
    for name, template in ALL.items():
        assert len(template.bugs) >= 1
        for bug in range(len(template.bugs)):
            data = build_task(template, bug, seed=seed).data  # fails where no hidden call does
            assert data["base_passed"] < len(data["hidden"]), (name, bug)
            shown = [test["arguments"] for test in data["visible"]]
            assert not [test for test in data["hidden"] if test["arguments"] in shown], (name, bug)


def test_whole_families_are_held_out() -> None:
    assert set(families()) | set(PACKAGES) > HELD_OUT_FAMILIES
    tasks = load_task_set("templates", {"hard": True}, seed=5)
    held_out = {task_id.split("/")[1].rpartition("-")[0].rpartition("-")[0] for task_id in tasks.held_out_ids()}
    trained = {task_id.split("/")[1].rpartition("-")[0].rpartition("-")[0] for task_id in tasks.training_ids(0)}
    assert held_out.isdisjoint(trained)
    for family, templates in families().items():
        names = {template.name for template in templates}
        assert names <= (held_out if family in HELD_OUT_FAMILIES else trained), family
    share = sum(name in held_out for name in family_of()) / len(family_of())
    assert 0.15 < share < 0.35
    assert tasks.training_ids(0) != tasks.training_ids(1)
    assert len(tasks.all_ids()) > 1000


def test_what_a_very_small_model_cannot_do_is_asked_only_where_that_is_wanted() -> None:
    basic = load_task_set("templates", {}, seed=0)
    assert not set(basic.training_ids(0)) & {f"templates/{name}" for name in family_of()}
    assert len(basic.all_ids()) == sum(len(template.bugs) for template in TEMPLATES.values())


def test_a_package_is_several_files_with_the_bug_in_one() -> None:
    for name, package in PACKAGES.items():
        for bug in range(len(package.template.bugs)):
            buggy = package.buggy(bug)
            assert sum(buggy[path] != text for path, text in package.files.items()) == 1, (name, bug)
    task = load_task_set("templates", {}, seed=0).task("templates/shop-0-1")
    assert set(task.files) >= {"shop/__init__.py", "shop/catalogue.py", "shop/checkout.py", "examples.py"}
    assert isinstance(task.steps[0].checks, PytestChecks)
    assert task.allowed_paths == ("shop/*",)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["use_cache", "tree_levels", "intervals_gaps", "shop", "routes"])
def test_a_familys_task_fails_unfixed_and_passes_with_its_reference(name: str, tmp_path: Path) -> None:
    task = load_task_set("templates", {}, seed=0).task(f"templates/{name}-1-7")
    assert isinstance(task.steps[0].checks, PytestChecks if name in PACKAGES else CallChecks)

    async def use(backend: SandboxBackend) -> list[bool]:
        async with Grader(backend) as grader:
            return [(await play(backend, grader, task, solution=solution)).solved for solution in (False, True)]

    assert with_backend(use, tmp_path) == [False, True]
