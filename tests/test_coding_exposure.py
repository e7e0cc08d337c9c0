"""What of hidden checks and references an agent could read is found, and what only looks like it is not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from asyncrl.coding.exposure import exposed
from asyncrl.coding.keys import known_secrets, secrets_in
from asyncrl.coding.tasks import CallChecks, Checks, PytestChecks, Reference, ScriptChecks, TaskStep
from asyncrl.sandbox import Call

CALLS = CallChecks(
    path="m.py",
    function="area",
    hidden=(Call(arguments=[3, 4], expected=12), Call(arguments=[], expected_error="TypeError")),
    visible=(Call(arguments=[1, 2], expected=2),),
)
HIDDEN_TEST = b"from m import area\n\ndef test_area():\n    assert area(3, 4) == 12  # what is hidden\n"
TESTS = PytestChecks(tests={"test_m.py": HIDDEN_TEST}, expected=("test_m.py::test_area",))
SCRIPT = ScriptChecks(files={"test.sh": b"cd /task && python3 -m pytest hidden_tests --quiet --color=no\n"})
UNFIXED = {"m.py": b"def area(a, b):\n    return a + b\n"}
REFERENCE = Reference(files={"m.py": b"def area(a, b):\n    return a * b if a and b else 0\n"})


def found(checks: Checks, files: Mapping[str, bytes], *, instruction: str = "Correct area in m.py.") -> list[str]:
    return list(exposed(TaskStep(instruction=instruction, checks=checks, reference=REFERENCE), {**UNFIXED, **files}))


@pytest.mark.parametrize(
    ("checks", "files", "says"),
    [
        (CALLS, {"t.py": b"assert area(3, 4) == 12\n"}, "t.py holds a hidden call with its answer"),
        (CALLS, {"README": b">>> area(3, 4)\n12\n"}, "README holds a hidden call with its answer"),
        (CALLS, {"t.py": b"area(3, 4)\narea(3, 4) # 12\n"}, "t.py holds a hidden call with its answer"),
        (TESTS, {"old/test_m.py": HIDDEN_TEST}, "old/test_m.py holds the hidden test file test_m.py"),
        (
            TESTS,
            {"t.py": b"def test_other_name():\n  assert (area(3,4)) == 12\n"},
            "t.py holds the hidden test test_area",
        ),
        (TESTS, {"ci.txt": b"run test_m.py::test_area first"}, "ci.txt names the hidden test test_m.py::test_area"),
        (TESTS, {"__pycache__/test_m.cpython-311.pyc": b"\0"}, "__pycache__/test_m.cpython-311.pyc is a hidden test"),
        (SCRIPT, {"run.sh": b"#!/bin/sh\n" + SCRIPT.files["test.sh"]}, "run.sh holds the hidden file test.sh"),
        (SCRIPT, {"m_fixed.py": REFERENCE.files["m.py"]}, "m_fixed.py holds the reference solution"),
    ],
)
def test_what_an_agent_could_read_is_found(checks: Checks, files: Mapping[str, bytes], says: str) -> None:
    assert [one for one in found(checks, files) if says in one], found(checks, files)


@pytest.mark.parametrize(
    ("instruction", "says"),
    [
        ("area(3, 4) is wrong.", "the instruction holds a hidden call"),
        ("Write def area(a, b):\n    return a * b if a and b else 0\n", "the instruction holds the reference solution"),
    ],
)
def test_what_the_instruction_gives_away_is_found(instruction: str, says: str) -> None:
    assert says in found(CALLS, {}, instruction=instruction)


@pytest.mark.parametrize(
    ("checks", "files"),
    [
        (CALLS, {"t.py": b"assert area(1, 2) == 2\nprint(area(3, 4))\n" + b"#" * 40 + b"12\n"}),
        (TESTS, {"test_m.py": b"from m import area\n\ndef test_area():\n    assert area(1, 2) == 2\n"}),
        (TESTS, {"broken.py": b"def test_area(:\n", "data.bin": bytes(range(256))}),
        (SCRIPT, {"test.sh": b"echo hidden_tests\n"}),
        (CALLS, {"b.py": b"def area(a, b):\n    return a * b\n"}),
    ],
)
def test_what_only_looks_like_it_is_left_alone(checks: Checks, files: Mapping[str, bytes]) -> None:
    assert found(checks, files) == []


def test_the_instruction_may_show_unfixed_code_that_begins_with_the_reference() -> None:
    unfixed = {"m.py": REFERENCE.files["m.py"].rstrip() + b" + 1\n"}
    step = TaskStep(
        instruction="Correct:\n" + unfixed["m.py"].decode(), checks=CALLS, reference=Reference(files=REFERENCE.files)
    )
    assert list(exposed(step, unfixed)) == []


def test_a_visible_call_that_is_hidden_too_is_found() -> None:
    checks = CallChecks(
        path="m.py", function="area", hidden=CALLS.hidden, visible=(Call(arguments=[3, 4], expected=12),)
    )
    assert found(checks, {}) == ["a visible call is among the hidden ones"]


KEYS = {
    "an AWS access key": "AKIA" + "Q3EGRIVLBT7XHZ5N",
    "a GitHub token": "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2,
    "a model provider's key": "sk-proj-" + "a1B2c3D4e5F6g7H8i9J0" * 2,
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ" * 2,
    "a Hugging Face token": "hf_" + "aBcDeFgHiJ" * 4,
}


@pytest.mark.parametrize("what", KEYS)
def test_keys_are_told_by_their_format(what: str) -> None:
    assert secrets_in(f"x = '{KEYS[what]}'\n".encode(), {}) == [what]


@pytest.mark.parametrize(
    "text",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "x" * 40,
        "sk-learn-is-a-library-of-many-nice-and-useful-parts",
        "-----BEGIN PRIVATE KEY-----\n...\n",
        "task-force risk-averse-" + "a" * 40,
    ],
)
def test_what_stands_for_a_key_or_reads_like_one_is_none(text: str) -> None:
    assert secrets_in(text.encode(), {}) == []


def test_this_machines_own_secrets_are_told_by_name_or_look_and_never_repeated() -> None:
    variables = {
        "SERVICE_TOKEN": "correct-horse",
        "SESSION": "q8Zt3LwX0bVn7RkYp2Ms",
        "LANG": "en_US.UTF-8",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/tmp/ssh-agent.socket",
        "USE_TOKENS": "true",
        "PATH": "/usr/local/bin:/usr/bin",
        "NAME": "a-long-name-of-words-without-numbers",
    }
    known = known_secrets(variables)
    assert set(known.values()) == {"SERVICE_TOKEN", "SESSION"}
    told = secrets_in(b"password = 'correct-horse'", known)
    assert told == ["the value of this machine's SERVICE_TOKEN"]
