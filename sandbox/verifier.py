"""Hidden tests in the form of pytest files, run where the agent never was.

Weaker than `judge.run_calls`, which compares outside: here the tests import the candidate's code into their own
process. Kept out are the candidate's conftest.py, pytest.ini, sitecustomize.py, test files and modules named like the
runner's, by taking only the files that were asked for and running isolated; an early exit, by asking for exact test
ids; patched or forged reports, by a test of a random name that must fail. What remains possible is in WALLS.md.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import trio

from asyncrl.errors import ConfigError, SandboxError, UnsafeFilesError
from asyncrl.protocols import ExecResult, Outcome, SandboxBackend, SandboxLimits, Snapshot

_RUNNER = Path(__file__).with_name("pytest_report.py")
_PACKAGES, _TESTS, _REPORT = "/judge", "/tests", "/reward"
_PACKAGE_LIMITS = SandboxLimits(wall_s=120.0, cpu_s=60.0, memory_bytes=512 * 2**20, max_files=8192)
_MAX_REPORT_BYTES = 4 * 2**20
_WARM_UP = {"test_warm_up.py": b"def test_warm_up():\n    assert 'a' * 2 == 'aa'\n"}


class TestOutcome(StrEnum):
    """How one test came out over all runs."""

    __test__ = False  # its name is like those that pytest collects

    PASSED = "passed"
    FAILED = "failed"
    MISSING = "missing"
    """It was not reported: not collected, or the program ended before."""
    FLAKY = "flaky"
    """It passed in some runs and not in others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestVerdict:
    """What the hidden tests say of a candidate."""

    outcomes: Mapping[str, TestOutcome]
    """By the ids that were asked for, and no others."""
    tampered: bool
    """Whether the test that must fail was seen to do anything else, or one id came twice: nothing passes then."""
    runs: Sequence[ExecResult]

    @property
    def passed(self) -> bool:
        """Whether every test passed in every run."""
        return not self.tampered and all(outcome is TestOutcome.PASSED for outcome in self.outcomes.values())


class PytestVerifier:
    """Runs hidden tests against candidates, each time in a new sandbox; brings pytest along. Closed by `async with`."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self._packages: Snapshot | None = None
        self._lock = trio.Lock()

    async def run(
        self,
        files: Mapping[str, bytes],
        tests: Mapping[str, bytes],
        expected: Collection[str],
        *,
        limits: SandboxLimits,
        runs: int = 1,
    ) -> PytestVerdict:
        """Return the verdict of `tests` (path -> content) on a candidate's `files`.

        Args: `expected` are the ids that count, such as "test_add.py::test_zero"; more than one of `runs` tell flaky
        from failed.
        Raises: SandboxError when a sandbox, not the candidate, failed; ValueError where nothing would be tested.
        """
        if not expected or runs < 1:
            raise ValueError(f"there must be tests and runs, got {len(expected)} ids and {runs} runs")
        packages = await self.packages()
        results: list[ExecResult] = []
        seen: list[dict[str, bool]] = []
        tampered = False
        for _ in range(runs):
            result, reported = await self._run_once(packages, files, tests, limits)
            results.append(result)
            seen.append({} if reported is None else reported)
            tampered |= reported is None
        outcomes = {test: _over_all([one.get(test) for one in seen]) for test in expected}
        return PytestVerdict(outcomes=outcomes, tampered=tampered, runs=results)

    async def discover(
        self, files: Mapping[str, bytes], tests: Mapping[str, bytes], *, limits: SandboxLimits
    ) -> tuple[Mapping[str, bool], ExecResult]:
        """Return every id that `tests` report and whether it passed, and how the program ended; for trusted `files`.

        Raises: SandboxError when a sandbox failed.
        """
        result, reported = await self._run_once(await self.packages(), files, tests, limits)
        return reported or {}, result

    async def _run_once(
        self, packages: Snapshot, files: Mapping[str, bytes], tests: Mapping[str, bytes], limits: SandboxLimits
    ) -> tuple[ExecResult, dict[str, bool] | None]:
        """Return how the program ended, and whether each test passed; None for a report that cannot be true."""
        name = f"test_{secrets.token_hex(8)}"
        left, right = secrets.randbelow(10**9), secrets.randbelow(10**9) + 10**9
        tripwire = f"def {name}():\n    assert {left} == {right}\n".encode()
        async with (
            await self._backend.prepare({**tests, f"{name}.py": tripwire}) as hidden,
            await self._backend.open(
                files, limits=limits, places={_PACKAGES: packages, _TESTS: hidden, _REPORT: None}
            ) as sandbox,
        ):
            result = await sandbox.exec(_command(self._backend))
            if result.outcome is Outcome.INFRASTRUCTURE:
                raise SandboxError(f"the verifier's sandbox failed: {result.detail}")
            await sandbox.kill()
            try:
                report = await sandbox.read(f"{_REPORT}/report.jsonl", max_bytes=_MAX_REPORT_BYTES)
            except (FileNotFoundError, UnsafeFilesError):
                return result, {}
        reported = _read(report)
        wire = None if reported is None else reported.pop(f"{name}.py::{name}", None)
        if reported is None or wire:
            return result, None
        return result, {} if wire is None else reported  # without it the run ended early, and what it says is half

    async def packages(self) -> Snapshot:
        """Return pytest's packages as a layer, with what Python compiles of them; this object's own, and closed by it.

        Raises: ConfigError where pytest is not installed beside asyncrl, SandboxError where it does not run.
        """
        async with self._lock:
            if self._packages is None:
                files = await trio.to_thread.run_sync(_pytest_files)
                places: dict[str, Snapshot | None] = {_REPORT: None}
                async with (
                    await self._backend.prepare(_WARM_UP) as tests,
                    await self._backend.open(
                        files, limits=_PACKAGE_LIMITS, work=_PACKAGES, places={**places, _TESTS: tests}
                    ) as sandbox,
                ):
                    done = await sandbox.exec(_command(self._backend, warm_up=True))
                    if done.outcome is not Outcome.OK or done.exit_code != 0:
                        said = (done.stdout + done.stderr).decode(errors="replace").strip()[-300:]
                        raise SandboxError(f"pytest does not run in the sandbox: {done.outcome} {done.detail} {said}")
                    self._packages = await sandbox.snapshot()
            return self._packages

    async def aclose(self) -> None:
        """Give up pytest's files."""
        if self._packages is not None:
            await self._packages.aclose()
            self._packages = None

    async def __aenter__(self) -> PytestVerifier:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


def _command(backend: SandboxBackend, *, warm_up: bool = False) -> list[str]:
    flags = ["-I"] if warm_up else ["-I", "-B"]
    places = _PACKAGES, _TESTS, "/task", f"{_REPORT}/report.jsonl"
    return [*backend.python, *flags, "-c", _RUNNER.read_text("utf-8"), *places]


def _pytest_files() -> dict[str, bytes]:
    """Return the source files of pytest and of what it needs. Raises ConfigError where it is not installed."""
    files: dict[str, bytes] = {}
    left, done = ["pytest"], set[str]()
    while left:
        name = left.pop()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ConfigError(
                f"tests in the form of pytest files need {name} beside asyncrl: pip install pytest"
            ) from None
        for path in distribution.files or ():
            # pytest's header asks for the versions of what it needs
            if (path.suffix == ".py" or path.name == "METADATA") and ".." not in path.parts:
                files[path.as_posix()] = Path(str(distribution.locate_file(path))).read_bytes()
        plain = [text for text in distribution.requires or () if ";" not in text]  # markers: other systems, extras
        left += [match[0] for text in plain if (match := re.match(r"[\w.-]+", text))]
    return files


def _read(report: bytes) -> dict[str, bool] | None:
    """Return whether each test passed; None where an id came twice, which no honest run reports."""
    passed: dict[str, bool] = {}
    for line in report.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if type(entry) is not dict or type(entry.get("id")) is not str or entry["id"] in passed:
            return None
        passed[entry["id"]] = entry.get("outcome") == "passed"
    return passed


def _over_all(runs: Sequence[bool | None]) -> TestOutcome:
    counts = Counter(runs)
    if counts[True] == len(runs):
        return TestOutcome.PASSED
    if counts[True]:
        return TestOutcome.FLAKY
    return TestOutcome.FAILED if counts[False] else TestOutcome.MISSING
