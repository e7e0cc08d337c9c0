"""Seeded bug-fix tasks from the templates: which function, which bug, which inputs.

A task's data is JSON-like and holds all that is needed to ask it and to grade it:
`function, instruction, source` (with the bug), `reference, visible` and `hidden` (lists of `{arguments, expected}`),
`base_passed` (hidden tests that `source` passes), `bug` (its number).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from asyncrl.environments import templates_choices, templates_lists, templates_numbers, templates_text
from asyncrl.environments.templates import Arguments, Template
from asyncrl.types import Task

TEMPLATES: Mapping[str, Template] = {
    template.name: template
    for part in (templates_numbers, templates_lists, templates_text, templates_choices)
    for template in part.TEMPLATES
}

HELD_OUT: tuple[str, ...] = (
    "is_anagram",
    "next_number",
    "first",
    "sum_of_three",
    "best",
    "drop_zeros",
    "mean",
    "fahrenheit",
    "evens",
    "lengths",
    "contains",
    "can_vote",
    "first_word",
    "larger",
    "is_sorted",
    "has_prefix",
    "remove_spaces",
    "perimeter",
    "half",
    "midpoint",
    "every_other",
    "dot",
    "speed",
    "is_longer",
)
"""Functions that are never trained on, chosen by hand: no renamed copy of another, about as hard as the others."""

HARD: tuple[str, ...] = (
    "count_each",
    "running_totals",
    "flatten",
    "unique",
    "fibonacci",
    "is_leap_year",
    "sign",
    "divide",
    "max_or_zero",
    "is_valid_index",
    "without_vowels",
    "short_words",
    "is_square",
    "fee",
    "middle_letter",
    "first_or_none",
    "second_largest",
    "has_duplicates",
    "clamp",
    "extension",
)
"""Functions that a model of 135M parameters hardly ever repairs: asked only where `hard` is set, since a group without
a success teaches nothing."""

NUM_HIDDEN = 6  # more would cost time in the judge; fewer would let a constant pass a predicate by luck
NUM_VISIBLE = 2  # each costs about 12 tokens of prompt
_MAX_DRAWS = 400  # a template that cannot give enough different inputs in these is broken

# What a bug may raise when it is run on the template's own inputs; anything else is a mistake in the template.
_BUG_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


def build_task(template: Template, bug: int, *, seed: int, environment: str = "bugfix") -> Task:
    """Return the task of one bug of one template, with inputs drawn from `seed`.

    At least one hidden test fails on the unfixed code and hidden tests have at least two different answers; a visible
    example fails too wherever the template's inputs allow it.
    """
    random = Random(f"{seed}/{template.name}/{bug}")
    source = template.buggy(bug)
    reference, unfixed = _function(template.code, template.name), _function(source, template.name)

    def passes(arguments: Arguments) -> bool:
        try:
            return _same(unfixed(*_copy(arguments)), reference(*_copy(arguments)))
        except _BUG_ERRORS:
            return False

    seen: set[str] = set()
    if template.hidden:
        hidden = list(_fresh(template.hidden, seen))
        visible = list(_draw(template, random, seen, NUM_VISIBLE))
    else:
        hidden = list(_fresh(template.edges, seen))
        pool = list(_draw(template, random, seen, NUM_VISIBLE + 3 * NUM_HIDDEN))
        failing: list[Arguments] = []
        passing: list[Arguments] = []
        for arguments in pool:
            (passing if passes(arguments) else failing).append(arguments)
        if len(failing) + sum(not passes(arguments) for arguments in hidden) > 1 and failing:
            visible = [failing.pop(0)]
            visible += [(passing or failing).pop(0)]
        else:
            visible = [passing.pop(0) for _ in range(NUM_VISIBLE)]
        hidden = _hidden(hidden, failing, passing, lambda arguments: reference(*_copy(arguments)))
    base_passed = sum(passes(arguments) for arguments in hidden)
    assert base_passed < len(hidden), f"{template.name}: no hidden test fails on bug {bug}"

    def tests(inputs: Sequence[Arguments]) -> list[dict[str, Any]]:
        return [{"arguments": list(a), "expected": reference(*_copy(a))} for a in inputs]

    return Task(
        task_id=f"{environment}/{template.name}-{bug}-{seed}",
        environment=environment,
        data={
            "function": template.name,
            "instruction": template.says,
            "source": source,
            "reference": template.code,
            "visible": tests(visible),
            "hidden": tests(hidden),
            "base_passed": base_passed,
            "bug": bug,
        },
    )


def _hidden(edges: list[Arguments], failing: list[Arguments], passing: list[Arguments], answer: Any) -> list[Arguments]:
    # Half of the hidden tests fail on the unfixed code where inputs allow, so that partial credit has steps.
    missing = max(0, NUM_HIDDEN - len(edges))
    chosen = [*edges, *failing[: (missing + 1) // 2]]
    rest = [*passing, *failing[(missing + 1) // 2 :]]
    if len({repr(answer(a)) for a in [*chosen, *rest[: NUM_HIDDEN - len(chosen)]]}) < 2:
        rest.sort(key=lambda a: repr(answer(a)) == repr(answer(chosen[0])))
    return chosen + rest[: max(0, NUM_HIDDEN - len(chosen))]


def _draw(template: Template, random: Random, seen: set[str], count: int) -> Iterator[Arguments]:
    # Ends early where the template has fewer different inputs; `build_task` needs NUM_VISIBLE + NUM_HIDDEN of them.
    found = 0
    for _ in range(_MAX_DRAWS):
        for arguments in _fresh([template.draw(random)], seen):
            found += 1
            yield arguments
        if found == count:
            return


def _fresh(candidates: Sequence[Arguments], seen: set[str]) -> Iterator[Arguments]:
    for arguments in candidates:
        key = json.dumps(arguments)
        if key not in seen:
            seen.add(key)
            yield arguments


def _function(source: str, name: str) -> Any:
    # Only the project's own templates are run in this process; what an agent wrote runs in a sandbox.
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    return namespace[name]


def _copy(arguments: Arguments) -> Any:
    return json.loads(json.dumps(arguments))


def _same(got: Any, expected: Any) -> bool:
    return type(got) is type(expected) and bool(got == expected)
