"""Names that hidden tests ask for and nobody told the agent: tests of names instead of behaviour."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping

from asyncrl.coding.tasks import CallChecks, CodingTask, PytestChecks, ScriptChecks, TaskStep


def untold_names(task: CodingTask, step: TaskStep) -> dict[str, list[str]]:
    """Return hidden test -> names that it takes from the solution and that stand in no file of the task's, nor in the
    step's instruction; only tests with such names. A function that is called by its name is a test by itself.
    """
    told = _words(step.instruction)
    for data in [*task.files.values(), *step.files.values()]:
        told |= _words(data.decode(errors="replace"))
    match step.checks:
        case CallChecks() as checks:
            asked = {checks.function: set(checks.function.split("."))}
        case PytestChecks() as checks:
            asked = _by_test(checks.tests, {test.partition("[")[0]: test for test in checks.expected})
        case ScriptChecks() as checks:
            asked = _by_test(checks.files, None)
    return {test: left for test, names in asked.items() if (left := sorted(names - told))}


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _by_test(files: Mapping[str, bytes], expected: Mapping[str, str] | None) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path, data in files.items():
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for test, names in _of_tree(tree, {name.rpartition("/")[2].removesuffix(".py") for name in files}):
            name = f"{path}::{test}"
            if expected is None or name in expected or any(one.startswith(name + "::") for one in expected):
                found.setdefault(name, set()).update(names)
    return found


def _of_tree(tree: ast.Module, own_modules: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield each test with the names that it takes from modules which are neither Python's nor the tests' own."""
    modules: dict[str, set[str]] = {}  # name in the file -> names told by importing it
    imported: dict[str, str] = {}  # name in the file -> name in the solution
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_the_solutions(node.module, own_modules):
            imported |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_the_solutions(alias.name, own_modules):
                    modules[alias.asname or alias.name.partition(".")[0]] = set(alias.name.split("."))
    for name, function in _tests(tree):
        used: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in imported:
                used.add(imported[node.id])
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                used.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKS_BY_NAME:
                used |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
        yield name, {word for name in used for word in name.split(".")}


_ASKS_BY_NAME = ("hasattr", "getattr")
_NOT_THE_SOLUTIONS = frozenset({"pytest", "hypothesis", "numpy", "_pytest", "unittest", "__future__"})


def _is_the_solutions(module: str, own_modules: set[str]) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in _NOT_THE_SOLUTIONS and top not in own_modules


def _tests(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test"):
                    yield f"{node.name}::{inner.name}", inner
