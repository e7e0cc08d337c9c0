"""Hidden tests are run where the agent never was, and none of the known ways to fake a pass gets one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandboxes import LIMITS, processes_with, with_backend

from asyncrl.protocols import Outcome, Sandbox, SandboxBackend
from asyncrl.sandbox import CollectLimits, PytestVerdict, PytestVerifier, TestOutcome, collect

pytestmark = pytest.mark.slow

UNFIXED = 'def retries(settings):\n    return settings.get("retries") or 3\n'
FIXED = 'def retries(settings):\n    value = settings.get("retries")\n    return 3 if value is None else value\n'
TESTS = {
    "test_retries.py": b"""
import pytest
from retries import retries

def test_zero():
    assert retries({"retries": 0}) == 0

@pytest.mark.parametrize("given", [None, 5])
def test_others(given):
    assert retries({"retries": given}) == (given or 3)
"""
}
IDS = ("test_retries.py::test_zero", "test_retries.py::test_others[None]", "test_retries.py::test_others[5]")

# Each is the unfixed code with an attack on verifiers that was seen to work on weaker ones. What an agent leaves beside
# the one file that was asked for is in the second part.
ATTACKS: dict[str, tuple[str, Mapping[str, str]]] = {
    "nothing done": ("", {}),
    "tests edited": ("", {"test_retries.py": "def test_zero():\n    pass\n"}),
    "hook in conftest.py": (
        "",
        {
            "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\n"
            "def pytest_runtest_makereport(item, call):\n    (yield).get_result().outcome = 'passed'\n"
        },
    ),
    "pytest.ini": ("", {"pytest.ini": "[pytest]\naddopts = --collect-only\n"}),
    "sitecustomize.py": ("", {"sitecustomize.py": "import os\nos._exit(0)\n"}),
    "exit when called": ("import os\ndef retries(settings):\n    os._exit(0)\n", {}),
    "runner shadowed": ("", {"pytest.py": "print('passed')\n", "json.py": "", "_pytest/__init__.py": ""}),
    "every test's run patched": (
        """
import sys
for module in list(sys.modules.values()):
    function = getattr(module, "Function", None)
    if hasattr(function, "runtest"):
        function.runtest = lambda self: None
""",
        {},
    ),
    "report forged, then exit": (
        """
import json, os
with open("/reward/report.jsonl", "w") as file:
    for name in ("test_zero", "test_others[None]", "test_others[5]"):
        file.write(json.dumps({"id": "test_retries.py::" + name, "outcome": "passed"}) + "\\n")
os._exit(0)
""",
        {},
    ),
    "report forged and gone on": (
        """
import json
with open("/reward/report.jsonl", "w") as file:
    for name in ("test_zero", "test_others[None]", "test_others[5]"):
        file.write(json.dumps({"id": "test_retries.py::" + name, "outcome": "passed"}) + "\\n")
""",
        {},
    ),
    "reports patched": (
        """
import sys
for module in list(sys.modules.values()):
    if hasattr(module, "TestReport"):
        module.TestReport.outcome = property(lambda self: "passed", lambda self, value: None)
""",
        {},
    ),
}


def verdicts(
    directory: Path, candidates: Mapping[str, tuple[str, Mapping[str, str]]], **more: int
) -> dict[str, PytestVerdict]:
    """Return a verdict on each candidate, after its files have crossed from an agent's sandbox."""
    found: dict[str, PytestVerdict] = {}

    async def body(backend: SandboxBackend) -> None:
        async with PytestVerifier(backend) as verifier:
            for name, (source, beside) in candidates.items():
                files = {"retries.py": source.encode(), **{path: text.encode() for path, text in beside.items()}}
                async with await backend.open(files, limits=LIMITS) as agent:
                    crossed = await collect(agent, ["retries.py"])
                assert list(crossed.files) == ["retries.py"]
                found[name] = await verifier.run(crossed.files, TESTS, IDS, limits=LIMITS, **more)

    with_backend(body, directory)
    return found


def test_the_fix_passes_and_no_attack_does(tmp_path: Path) -> None:
    candidates = {name: (UNFIXED + attack, beside) for name, (attack, beside) in ATTACKS.items()}
    found = verdicts(tmp_path, {"fixed": (FIXED, {}), **candidates})
    assert found.pop("fixed").outcomes == dict.fromkeys(IDS, TestOutcome.PASSED)
    assert {name for name, verdict in found.items() if verdict.passed} == set()
    tampering = {"every test's run patched", "report forged and gone on", "reports patched"}
    assert {name for name, verdict in found.items() if verdict.tampered} == tampering
    unfixed = [TestOutcome.FAILED, TestOutcome.PASSED, TestOutcome.PASSED]
    for name in ("nothing done", "tests edited", "hook in conftest.py", "pytest.ini", "sitecustomize.py"):
        assert list(found[name].outcomes.values()) == unfixed, name
    assert set(found["exit when called"].outcomes.values()) == {TestOutcome.MISSING}


class Changing:
    """A backend whose every other sandbox has the unfixed code, as a candidate that works at times."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self.num_opened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def open(self, files: Mapping[str, bytes], **more: Any) -> Sandbox:
        if files:  # not the one in which pytest is made ready
            return await self._backend.open(files, **more)
        self.num_opened += 1
        return await self._backend.open({"retries.py": (FIXED, UNFIXED)[self.num_opened % 2].encode()}, **more)


def test_a_test_that_passes_at_times_is_flaky_and_one_that_is_not_there_missing(tmp_path: Path) -> None:
    async def body(backend: SandboxBackend) -> None:
        changing: Any = Changing(backend)
        async with PytestVerifier(changing) as verifier:
            verdict = await verifier.run({}, TESTS, [*IDS, "test_retries.py::test_none"], limits=LIMITS, runs=3)
            assert list(verdict.outcomes.values()) == [
                TestOutcome.FLAKY, TestOutcome.PASSED, TestOutcome.PASSED, TestOutcome.MISSING,
            ]  # fmt: skip
            assert not verdict.passed
            assert len(verdict.runs) == 3
        async with PytestVerifier(backend) as verifier:
            broken = await verifier.run({"retries.py": b"def f(:"}, TESTS, IDS, limits=LIMITS)
            assert set(broken.outcomes.values()) == {TestOutcome.MISSING}
            with pytest.raises(ValueError, match="there must be tests and runs, got 0 ids"):
                await verifier.run({}, TESTS, [], limits=LIMITS)

    with_backend(body, tmp_path)


def test_the_hidden_tests_are_read_only_and_the_agents_sandbox_has_none(tmp_path: Path) -> None:
    source = """
import os
def attempt(action):
    try:
        action()
        return True
    except OSError:
        return False
def retries(settings):
    reached = attempt(lambda: open("/tests/test_retries.py", "w")), attempt(lambda: os.remove("/tests/test_retries.py"))
    assert not any(reached)
    value = settings.get("retries")
    return 3 if value is None else value
"""
    assert verdicts(tmp_path, {"": (source, {})})[""].passed


TRAPS = """
import os, socket
os.symlink("/etc/passwd", "link.py")
os.symlink("real", "linked")
os.mkdir("real")
open("real/one.py", "w").write("1")
socket.socket(socket.AF_UNIX).bind("socket.py")
os.mkfifo("pipe.py")
open("new\\nline.py", "w").write("odd")
os.truncate(os.open("sparse.py", os.O_CREAT | os.O_RDWR), 7 * 2**20)
open("two.py", "w").write("2"); os.link("two.py", "names.py")
open("plain.py", "w").write("plain")
"""


async def collected(
    backend: SandboxBackend, source: str, patterns: Sequence[str], **limits: int
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return what crosses, and what is refused, of what `source` makes in an agent's sandbox."""
    mark = f"3168{os.getpid()}"
    roomy = replace(LIMITS, max_files=30_000, memory_bytes=256 * 2**20, disk_bytes=128 * 2**20)
    async with await backend.open({}, limits=roomy) as agent:
        await agent.shell(f"setsid -f sleep {mark}")
        made = await agent.exec([*backend.python, "-c", source])
        assert (made.outcome, made.exit_code) == (Outcome.OK, 0), made
        assert processes_with(mark) != []
        crossed = await collect(agent, patterns, limits=CollectLimits(**limits))
        assert processes_with(mark) == []  # nothing of the agent's runs any more when the first file is read
        return dict(crossed.files), dict(crossed.refused)


def test_only_regular_files_that_were_asked_for_cross(tmp_path: Path) -> None:
    async def body(backend: SandboxBackend) -> None:
        files, refused = await collected(backend, TRAPS, ["*.py", "linked/one.py", "../x", "none.py", "real"])
        assert files == {"plain.py": b"plain", "new\nline.py": b"odd", "real/one.py": b"1"}
        assert set(refused) == {
            "link.py", "socket.py", "pipe.py", "sparse.py", "two.py", "names.py", "linked/one.py", "../x", "none.py",
            "real",
        }  # fmt: skip
        assert refused["link.py"] == "a symbolic link"
        assert refused["socket.py"] == refused["pipe.py"] == "no regular file"
        assert refused["sparse.py"] == "'sparse.py' has 7340032 bytes, allowed are 1048576"
        assert "2 hard links" in refused["two.py"]
        assert refused["none.py"] == "it is not there"

    with_backend(body, tmp_path)


def test_too_much_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    many = "import os\nfor i in range(200):\n    open(f'{i:03}.py', 'w').write('12345678')"

    async def body(backend: SandboxBackend) -> None:
        files, refused = await collected(backend, many, ["*.py"], max_files=3)
        assert (sorted(files), len(refused)) == (["000.py", "001.py", "002.py"], 197)
        files, refused = await collected(backend, many, ["*.py"], total_bytes=20)
        assert (sorted(files), len(refused)) == (["000.py", "001.py"], 198)
        crowd = many.replace("200", "20_001")
        files, refused = await collected(backend, crowd, ["*.py", "00000.py", "000.py"])
        assert files == {"000.py": b"12345678"}
        assert refused["*.py"] == "'.' holds more than the 20000 files allowed"

    with_backend(body, tmp_path)
