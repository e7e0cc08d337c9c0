"""The judge tells right answers from wrong ones, and no candidate can talk it into anything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import LIMITS, with_backend

from asyncrl.protocols import ExecResult, Outcome, SandboxBackend
from asyncrl.sandbox import Call, CallResult, run_calls, run_program

pytestmark = pytest.mark.slow

# The lecture's task: zero must disable retrying, no value must mean three.
RETRIES = (
    Call(arguments=({"retries": 0},), expected=0),
    Call(arguments=({"retries": 5},), expected=5),
    Call(arguments=({},), expected=3),
    Call(arguments=({"retries": None},), expected=3),
)
UNFIXED = 'def retries(settings):\n    return settings.get("retries") or 3\n'
FIXED = 'def retries(settings):\n    value = settings.get("retries")\n    return 3 if value is None else value\n'


def judge_all(
    directory: Path, sources: Mapping[str, str], calls: Sequence[Call], entry_point: str = "retries", **more: Any
) -> dict[str, tuple[CallResult, ...]]:
    """Return the results of one verdict per source, by its name."""
    results: dict[str, tuple[CallResult, ...]] = {}

    async def body(backend: SandboxBackend) -> None:
        async def one(name: str) -> None:
            results[name] = await run_calls(backend, sources[name], entry_point, calls, **{"limits": LIMITS, **more})

        async with trio.open_nursery() as nursery:
            for name in sources:
                nursery.start_soon(one, name)

    with_backend(body, directory)
    return results


def judge(
    directory: Path, source: str, calls: Sequence[Call], entry_point: str = "retries", **more: Any
) -> tuple[CallResult, ...]:
    """Return the results of one verdict."""
    return judge_all(directory, {"": source}, calls, entry_point, **more)[""]


def passed(results: Sequence[CallResult]) -> list[bool]:
    return [result.passed for result in results]


def test_the_unfixed_code_passes_three_of_four_and_the_fix_all(tmp_path: Path) -> None:
    results = judge_all(tmp_path, {"unfixed": UNFIXED, "fixed": FIXED}, RETRIES)
    assert passed(results["unfixed"]) == [False, True, True, True]
    assert passed(results["fixed"]) == [True] * 4


# Each is the unfixed code with one of the attacks on verifiers that were seen to work on weaker ones.
ATTACKS = {
    "nothing done": "",
    "tests edited": "def test_retries():\n    assert True\n",
    "hook in conftest.py": """
with open("conftest.py", "w") as file:
    file.write("import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
               "    (yield).get_result().outcome = 'passed'\\n")
""",
    "pytest.ini": 'open("pytest.ini", "w").write("[pytest]\\naddopts = --collect-only\\n")\n',
    "sitecustomize.py": 'open("sitecustomize.py", "w").write("import os; os._exit(0)")\n',
    "exit when called": "import os\ndef retries(settings):\n    os._exit(0)\n",
    "exit when imported": "import os\nos._exit(0)\n",
    "system exit when called": "def retries(settings):\n    raise SystemExit(0)\n",
    "runner shadowed": """
for name in ("pytest.py", "json.py", "os.py", "judge_runner.py"):
    open(name, "w").write("print('passed')")
""",
    "runtest patched": """
import sys, types
pytest = sys.modules["_pytest.python"] = types.ModuleType("pytest")
pytest.Function = type("Function", (), {"runtest": lambda self: None})
""",
    "runner patched": """
import sys
main = sys.modules["__main__"]
main.encode = lambda value, depth: "0"
main.failure = lambda error: '"passed":true'
main.send = lambda descriptor, index, answer: None
""",
    "forged report": """
import os
for descriptor in range(3, 64):
    for index in range(4):
        for forged in ('"passed":true', '"value":{"type":"object"}', '"value":{"type":"tuple"}', '"value":[[[]]'):
            try:
                os.write(descriptor, b'{"index":%d,%s}\\n' % (index, forged.encode()))
            except OSError:
                pass
os._exit(0)
""",
    "always-equal object": """
class Equal:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __repr__ = lambda self: "0"
def retries(settings):
    return Equal()
""",
    "always-equal number": """
class Equal(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
def retries(settings):
    return Equal(3)
""",
    "everything patched at the tripwire": """
import builtins
builtins.AssertionError = type("Passed", (Exception,), {})
builtins.isinstance = lambda value, kind: True
builtins.len = lambda value: 0
""",
    "expected value read off the stack": """
import gc, sys
def retries(settings):
    frame = sys._getframe()
    while frame:
        for name in ("expected", "answer", "call"):
            if name in frame.f_locals:
                return getattr(frame.f_locals[name], "expected", frame.f_locals[name])
        frame = frame.f_back
    return 3
""",
    "every answer sent": """
import os
def retries(settings):
    for descriptor in range(3, 64):
        for index in range(4):
            for guess in (0, 3, 5, 0):
                try:
                    os.write(descriptor, b'{"index":%d,"value":%d}\\n' % (index, guess))
                except OSError:
                    pass
    os._exit(0)
""",
    "alarm disarmed and looping": """
import signal
def retries(settings):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        pass
""",
}


UNINTERRUPTED = (
    "nothing done",
    "tests edited",
    "hook in conftest.py",
    "pytest.ini",
    "sitecustomize.py",
    "runner shadowed",
)
"""The attacks that change nothing at all here: what the unfixed code answers is judged as before."""


def test_an_attack_is_worth_no_more_than_the_answers_it_gives(tmp_path: Path) -> None:
    """The verdict on all four calls together is what is rewarded, and no attack gets it."""
    limits = replace(LIMITS, wall_s=5.0)
    results = judge_all(tmp_path, {name: UNFIXED + attack for name, attack in ATTACKS.items()}, RETRIES, limits=limits)
    assert results.keys() == ATTACKS.keys()
    for name, verdict in results.items():
        assert not verdict[0].passed, name
        if name in UNINTERRUPTED:
            assert passed(verdict) == [False, True, True, True], name


VALUES = (
        ("1", 1, True), ("True", 1, False), ("1", True, False), ("1.0", 1, False), ("1", 1.0, False),
        ("None", None, True), ("None", False, False), ("'a'", "a", True), ("b'a'", "a", False), ("b'a'", b"a", True),
        ("[1, 2]", [1, 2], True), ("(1, 2)", [1, 2], False), ("(1, 2)", (1, 2), True), ("[1, 2]", [1, 3], False),
        ("[1, [True]]", [1, [1]], False), ("{1, 2}", {2, 1}, True), ("{1, True}", {1}, True), ("{1}", {True}, False),
        ("frozenset({1})", {1}, False), ("frozenset({(1, 2)})", frozenset({(1, 2)}), True), ("set()", set(), True),
        ("{'a': 1, 2: [3]}", {2: [3], "a": 1}, True), ("{'a': 1}", {"a": 1.0}, False), ("{'1': 1}", {1: 1}, False),
        ("__import__('collections').Counter('aa')", {"a": 2}, True), ("float('nan')", math.nan, True),
        ("float('-inf')", -math.inf, True), ("0.1 + 0.2", 0.3, False), ("1e400", math.inf, True),
        ("[float('nan')]", [0.0], False), ("1 + 2j", 1 + 2j, True), ("10 ** 100", 10**100, True),
        (r"'\ud800\U0001f600\n\x00'", "\ud800\U0001f600\n\x00", True), ("object()", None, False),
        ("{}", {}, True), ("[]", {}, False), ("[]", (), False), ("''", None, False),
)  # fmt: skip


def test_type_and_value_must_be_equal_at_every_depth(tmp_path: Path) -> None:
    calls = [Call(arguments=(expression,), expected=expected) for expression, expected, _ in VALUES]
    results = judge(tmp_path, "answer = eval", calls, "answer")
    verdicts = [(*row[:2], result.passed) for row, result in zip(VALUES, results, strict=True)]
    assert verdicts == list(VALUES)


def test_a_tolerance_holds_for_floats_and_only_for_them(tmp_path: Path) -> None:
    calls = [
        Call(arguments=("[0.1 + 0.2]",), expected=[0.3], tolerance=1e-9),
        Call(arguments=("1.1",), expected=1.0, tolerance=1e-9),
        Call(arguments=("1",), expected=1.0, tolerance=1e-9),
        Call(arguments=("float('nan')",), expected=1.0, tolerance=1e9),
    ]
    assert passed(judge(tmp_path, "answer = eval", calls, "answer")) == [True, False, False, False]


def test_an_error_passes_where_it_is_expected_by_name_or_by_a_built_in_ancestor(tmp_path: Path) -> None:
    source = """
class OwnError(Exception):
    pass
def answer(number):
    return [int, lambda: {}[1], lambda: 1 / 0, lambda: exec("raise OwnError(7)", globals())][number]()
"""
    calls = [
        Call(arguments=(1,), expected_error="KeyError"),
        Call(arguments=(1,), expected_error="LookupError"),
        Call(arguments=(1,), expected_error="ValueError"),
        Call(arguments=(2,), expected_error="ArithmeticError"),
        Call(arguments=(3,), expected_error="OwnError"),
        Call(arguments=(0,), expected_error="KeyError"),
        Call(arguments=(2,), expected=None),
    ]
    results = judge(tmp_path, source, calls, "answer")
    assert passed(results) == [True, True, False, True, True, False, False]
    assert results[4].error == "OwnError: 7"
    assert results[6].error == "ZeroDivisionError: division by zero"


def test_arguments_of_every_plain_type_arrive_as_they_are(tmp_path: Path) -> None:
    plain = (None, True, 1, -0.5, math.inf, "\u00e9\n'", b"\xff", [1, (2,)], {3}, frozenset(), {"a": {4: 5j}})
    calls = [Call(arguments=plain, keyword_arguments={"last": plain}, expected=(plain, plain))]
    (result,) = judge(tmp_path, "def answer(*first, last):\n    return first, last", calls, "answer")
    assert result.passed, result


def test_arguments_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    async def body(backend: SandboxBackend) -> None:
        for argument in (object(), [True, {1: len}], Outcome.OK):
            with pytest.raises(ValueError, match="arguments must be plain data, got"):
                await run_calls(backend, "", "answer", [Call(arguments=(argument,))], limits=LIMITS)

    with_backend(body, tmp_path)


def test_one_endless_call_fails_alone(tmp_path: Path) -> None:
    source = "def answer(number):\n    while number == 1:\n        pass\n    return number\n"
    calls = [Call(arguments=(number,), expected=number) for number in range(4)]
    results = judge(tmp_path, source, calls, "answer", call_timeout_s=0.1)
    assert passed(results) == [True, False, True, True]
    assert results[1].outcome is Outcome.WALL


def test_a_call_that_cannot_be_interrupted_ends_those_after_it(tmp_path: Path) -> None:
    source = "def answer(number):\n    return number if number == 0 else len(set(range(10 ** 12)))\n"
    calls = [Call(arguments=(number,), expected=number) for number in range(3)]
    results = judge(tmp_path, source, calls, "answer", call_timeout_s=20.0)
    assert passed(results) == [True, False, False]
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.MEMORY, Outcome.MEMORY]


def test_a_candidate_that_cannot_be_called_fails_with_the_reason(tmp_path: Path) -> None:
    reasons = {
        "def answer(:": "SyntaxError",
        "1 / 0": "ZeroDivisionError: division by zero",
        "": "AttributeError",
        "answer = 3": "TypeError: 'int' object is not callable",
        "def answer():\n    return 1": "TypeError",
        "import os\nos._exit(0)": "the program ended without one answer to this call",
        "def answer(x):\n    a = []\n    a.append(a)\n    return a": "ValueError: the answer is nested",
    }
    results = judge_all(tmp_path, {source: source for source in reasons}, [Call(arguments=(1,), expected=1)], "answer")
    for source, (result,) in results.items():
        assert not result.passed
        assert result.error.startswith(reasons[source])


def test_what_was_got_is_shown_as_python_shows_it_and_shortened(tmp_path: Path) -> None:
    calls = [
        Call(arguments=("(1,), {2}, {'a': [None]}, b'x', set(), frozenset({True})",)),
        Call(arguments=("'x' * 10 ** 5",)),
        Call(arguments=("type('Odd', (), {})()",)),
        Call(arguments=("print('noise') or 1",), expected=1),
    ]
    results = judge(tmp_path, "answer = eval", calls, "answer")
    assert results[0].got == "((1,), {2}, {'a': [None]}, b'x', set(), frozenset({True}))"
    assert len(results[1].got) == 200
    assert results[2].got == "<an object of type Odd>"
    assert results[3].passed


def test_a_program_passes_only_at_its_last_statement(tmp_path: Path) -> None:
    programs = {
        "assert 1 + 1 == 2": (Outcome.OK, 0),
        "print('noise')\nassert True": (Outcome.OK, 0),
        "assert False, 'noise'": (Outcome.OK, 1),
        "import sys\nsys.exit(0)\nassert False": (Outcome.OK, 1),
        "import os\nos._exit(0)\nassert False": (Outcome.OK, 1),
        "import os\nos.write(3, b'0' * 32)\nos._exit(0)": (Outcome.OK, 1),
        "while True: pass": (Outcome.WALL, None),
        "def f(:": (Outcome.OK, 1),
    }
    results: dict[str, ExecResult] = {}

    async def body(backend: SandboxBackend) -> None:
        async def one(program: str) -> None:
            results[program] = await run_program(backend, program, limits=replace(LIMITS, wall_s=5.0))

        async with trio.open_nursery() as nursery:
            for program in programs:
                nursery.start_soon(one, program)

    with_backend(body, tmp_path)
    assert {program: (result.outcome, result.exit_code) for program, result in results.items()} == programs
    for program, result in results.items():
        assert result.stdout == b""
        assert (b"noise" in result.stderr) == ("noise" in program)
