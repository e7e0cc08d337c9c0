"""Finds out in sandboxes which mutants are bugs that tests see, and keeps what was found by the content's hash."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from asyncrl.coding.sets.mutants import RULES, Mutant, mutants
from asyncrl.coding.sets.tested import TestedFunction
from asyncrl.errors import ConfigError
from asyncrl.protocols import Outcome, SandboxBackend, SandboxLimits
from asyncrl.sandbox.judge import run_calls
from asyncrl.sandbox.verifier import PytestVerifier, TestOutcome

LIMITS = SandboxLimits(wall_s=20.0, cpu_s=10.0, memory_bytes=256 * 2**20, max_pids=32, disk_bytes=32 * 2**20)
CALL_TIMEOUT_S = 1.0
_CONCURRENT = 4  # functions in sandboxes at a time; more would only wait for the processor
_TRIES = 4  # candidates looked at for each that is wanted; most of the others change nothing that a test sees
_PASSES = 2  # of the reference: one that passes only sometimes says nothing of a mutant that fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What is known of one function's mutants."""

    name: str
    by_calls: bool = False
    """Whether its calls judge it; else `expected` of its tests do."""
    expected: tuple[str, ...] = ()
    mutants: Mapping[str, int] = field(default_factory=dict)
    """Number among the function's mutants, as text -> how many checks fail; none for a function that is of no use."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> mutants that were looked at and not kept, or "its own tests fail" -> 1."""


async def prove_all(
    functions: Sequence[TestedFunction],
    backend: SandboxBackend,
    *,
    most: int,
    report: Callable[[Proven], None] = lambda proven: None,
) -> list[Proven]:
    """Return what is known of each function, at most `most` mutants kept; `report` gets each as it is known.

    Raises: SandboxError.
    """
    found: dict[int, Proven] = {}
    limiter = trio.CapacityLimiter(_CONCURRENT)

    async def one(index: int, function: TestedFunction, verifier: PytestVerifier) -> None:
        async with limiter:
            found[index] = await prove(function, backend, verifier, most=most)
        report(found[index])

    async with PytestVerifier(backend) as verifier, trio.open_nursery() as nursery:
        for index, function in enumerate(functions):
            nursery.start_soon(one, index, function, verifier)
    return [found[index] for index in range(len(functions))]


async def prove(function: TestedFunction, backend: SandboxBackend, verifier: PytestVerifier, *, most: int) -> Proven:
    """Return which mutants of a function end within the limits and fail at least one check that the function passes.

    Raises: SandboxError.
    """
    by_calls = bool(function.calls) and await _calls_fail(function, function.source, backend) == 0
    expected: tuple[str, ...] = ()
    if not by_calls:
        expected = await _passing_tests(function, verifier)
        if not expected:
            return Proven(name=function.name, dropped={"its own tests fail": 1})
    kept: dict[str, int] = {}
    dropped: Counter[str] = Counter()
    for number, mutant in enumerate(mutants(function.source, function.function)[: most * _TRIES]):
        if len(kept) == most:
            break
        outcome: int | str
        if by_calls:
            outcome = await _calls_fail(function, mutant.source, backend)
        else:
            outcome = await _tests_fail(function, mutant, expected, verifier)
        if outcome == 0:
            outcome = "no check fails"
        if isinstance(outcome, int):
            kept[str(number)] = outcome
        else:
            dropped[outcome] += 1
    return Proven(name=function.name, by_calls=by_calls, expected=expected, mutants=kept, dropped=dict(dropped))


async def _calls_fail(function: TestedFunction, source: str, backend: SandboxBackend) -> int | str:
    """Return how many calls fail, or why that cannot be told."""
    results = await run_calls(
        backend, source, function.function, function.calls, limits=LIMITS, call_timeout_s=CALL_TIMEOUT_S
    )
    if any(result.outcome is not Outcome.OK for result in results):
        return "does not end"
    return sum(not result.passed for result in results)


async def _passing_tests(function: TestedFunction, verifier: PytestVerifier) -> tuple[str, ...]:
    """Return the ids of the tests that the function passes, each time."""
    runs = [(await verifier.discover(function.files, function.tests, limits=LIMITS))[0] for _ in range(_PASSES)]
    return tuple(sorted(test for test in runs[0] if all(run.get(test) for run in runs)))


async def _tests_fail(
    function: TestedFunction, mutant: Mutant, expected: Sequence[str], verifier: PytestVerifier
) -> int | str:
    """Return how many tests fail, or why that cannot be told."""
    files = {**function.files, function.path: mutant.source.encode()}
    verdict = await verifier.run(files, function.tests, expected, limits=LIMITS)
    if verdict.runs[-1].outcome is not Outcome.OK:
        return "does not end"
    if any(outcome is TestOutcome.MISSING for outcome in verdict.outcomes.values()):
        return "the tests do not run"
    return sum(outcome is not TestOutcome.PASSED for outcome in verdict.outcomes.values())


# --- what is kept ---------------------------------------------------------------------------------------------


def proven_path(directory: Path, functions: Sequence[TestedFunction], *, most: int) -> Path:
    """Return the file in which it is kept what is known of these functions, and of no others."""
    digest = hashlib.sha256(repr((RULES, most, LIMITS, CALL_TIMEOUT_S)).encode())
    for one in functions:
        digest.update(repr((one.name, one.path, one.function, one.calls, sorted(one.tests.items()))).encode())
        digest.update(repr(sorted(one.files.items())).encode())
    return directory / f"{digest.hexdigest()[:24]}.jsonl"


def write_proven(path: Path, proven: Sequence[Proven]) -> None:
    """Write what was found, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(asdict(one)) + "\n" for one in proven), encoding="ascii")
    unfinished.replace(path)


def read_proven(path: Path) -> list[Proven]:
    """Return what was found. Raises: FileNotFoundError, ConfigError where the file is broken."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            found.append(Proven(**{**row, "expected": tuple(row["expected"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}, line {number}, is broken ({error}): remove the file, and make it anew"
            ) from None
    return found
