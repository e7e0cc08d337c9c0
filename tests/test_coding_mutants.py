"""One-edit mutants of a function: which there are, always alike, and all else of the source left as it is."""

from __future__ import annotations

import ast

import pytest

from asyncrl.coding.sets.mutants import find_function, functions_of, mutants
from asyncrl.coding.sets.tested import calls_of_check
from asyncrl.sandbox.judge import Call

KINDS = {
    "comparison": ("return a < b", {"return a <= b", "return a > b"}),
    "arithmetic": ("return a - b", {"return a + b"}),
    "boolean": ("return a and b", {"return a or b"}),
    "constant": ("return f(3, True, 'ab')", {"f(4, T", "f(2, T", "f(3, False, 'ab')", "f(3, True, 'a')"}),
    "off by one": ("return range(a)", {"return range(a - 1)", "return range(a + 1)"}),
    "swapped arguments": ("return f(a, b, 1)", {"return f(b, a, 1)"}),
    "wrong call": ("return min(a)", {"return max(a)"}),
    "wrong variable": ("return a", {"return b"}),
    "return": ("return a", {"return\n"}),
    "condition": ("if a:\n        b = 1\n    return b", {"if not (a):"}),
    "loop": ("for x in a:\n        break", {"continue"}),
    "dropped statement": ("a.sort()\n    return a", {"pass\n    return a"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_mistake_is_made(kind: str) -> None:
    body, expected = KINDS[kind]
    found = [mutant.source for mutant in mutants(f"def f(a, b):\n    {body}\n", "f") if mutant.kind == kind]
    for text in expected:
        assert any(text in source for source in found), found


SOURCE = '''"""A module."""

import math


def other(x):
    return x + 1


class Circle:
    """Round."""

    def area(self, radius):  # keeps its comment \u00e4\u00f6\u00fc
        """Return the area, 3 < 4."""
        text = f"{radius + 1}"  # what stands in f-strings is left alone
        return math.pi * radius ** 2 if text else None


def last(items):
    return items[len(items) - 1]
'''


def test_only_the_named_function_is_edited_and_all_else_stays() -> None:
    found = mutants(SOURCE, "Circle.area")
    assert len(found) > 5
    lines = SOURCE.splitlines()
    for mutant in found:
        changed = [
            number for number, (a, b) in enumerate(zip(lines, mutant.source.splitlines(), strict=True), 1) if a != b
        ]
        assert changed == [mutant.line]
        assert mutant.line in (15, 16)
        assert 'f"{radius + 1}"' in mutant.source or mutant.kind == "dropped statement"
        ast.parse(mutant.source)


def test_mutants_are_always_alike_each_once_and_the_first_ones_differ_in_kind() -> None:
    found = mutants(SOURCE, "last")
    assert found == mutants(SOURCE, "last")
    assert len({mutant.source for mutant in found} | {SOURCE}) == len(found) + 1
    kinds = [mutant.kind for mutant in found]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))


def test_functions_are_found_by_name() -> None:
    assert functions_of(SOURCE) == ["other", "Circle.area", "last"]
    assert find_function(SOURCE, "last").lineno == 19
    with pytest.raises(ValueError, match="there is no function 'nothing'"):
        mutants(SOURCE, "nothing")
    with pytest.raises(ValueError, match="line 1"):
        functions_of("def f(:\n")


def test_asserts_that_are_calls_with_plain_data_are_judged_outside() -> None:
    text = (
        "METADATA = {}\ndef check(candidate):\n\n    assert candidate([1.5], 'a') == {'x': (1,)}, 'why'\n"
        "    assert abs(candidate(-2) - 0.5) < 1e-6\n    assert True, 'printed'\n"
    )
    assert calls_of_check(text) == [
        Call(arguments=[[1.5], "a"], expected={"x": (1,)}),
        Call(arguments=[-2], expected=0.5, tolerance=1e-6),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "assert candidate(f(1)) == 2",
        "assert not candidate(1)",
        "assert candidate(1) is None",
        "assert candidate(x=1) == 2",
        "assert other(1) == 2",
        "assert candidate(1) == candidate(2)",
        "for i in range(3): assert candidate(i) == i",
        "x = 1",
    ],
)
def test_any_other_statement_makes_all_of_it_pytests(line: str) -> None:
    assert calls_of_check(f"def check(candidate):\n    assert candidate(1) == 2\n    {line}\n") == []
