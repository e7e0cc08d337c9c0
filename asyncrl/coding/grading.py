"""Grading a step of a coding task: the agent's processes end first, its files cross, and a new sandbox judges them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from asyncrl.coding.crossing import cross
from asyncrl.coding.places import with_variables
from asyncrl.coding.stand_ins import MISSING, stand_in_command, stand_in_files
from asyncrl.coding.stand_ins import PLACE as STAND_INS
from asyncrl.coding.tasks import CallChecks, CodingTask, PytestChecks, ScriptChecks, TaskStep
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import EnvironmentFault, SandboxError, UnsafeFilesError
from asyncrl.protocols import ExecResult, Outcome, Sandbox, SandboxBackend, Snapshot
from asyncrl.sandbox.collecting import Collected, collect
from asyncrl.sandbox.judge import Call, CallResult, run_calls
from asyncrl.sandbox.verifier import PytestVerifier, TestOutcome

_TESTS, _LOGS, _PACKAGES = "/tests", "/logs/verifier", "/judge"
_MAX_REWARD_BYTES = 64 * 2**10
_SHOWN_CHARACTERS = 400


class Grader:
    """Judges what agents left behind, each time in a new sandbox. Closed by `async with`."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self._pytest = PytestVerifier(backend)

    async def grade(self, task: CodingTask, step: TaskStep, sandbox: Sandbox) -> Verdict:
        """Return the verdict on a sandbox's files as they are now; ends everything that runs in it.

        Raises: SandboxError when a sandbox failed, EnvironmentFault when the checks did: neither is the agent's doing.
        """
        match step.checks:
            case CallChecks() as checks:
                return await self._grade_calls(task, checks, await collect(sandbox, [checks.path]))
            case PytestChecks() as checks:
                return await self._grade_pytest(task, checks, await collect(sandbox, checks.submitted))
            case ScriptChecks() as checks:
                return await self._grade_script(task, checks, sandbox)

    async def visible(self, task: CodingTask, step: TaskStep, sandbox: Sandbox) -> tuple[int, int] | None:
        """Return how many of the visible calls pass, and how many there are; None for steps without any.

        Raises: SandboxError when a sandbox failed.
        """
        checks = step.checks
        if not isinstance(checks, CallChecks) or not checks.visible:
            return None
        source = (await collect(sandbox, [checks.path])).files.get(checks.path, b"")
        results = await self._run_calls(task, checks, source.decode(errors="replace"), checks.visible)
        return sum(result.passed for result in results), len(results)

    async def _run_calls(
        self, task: CodingTask, checks: CallChecks, text: str, calls: Sequence[Call]
    ) -> Sequence[CallResult]:
        limits, timeout_s = task.limits, checks.call_timeout_s
        return await run_calls(self._backend, text, checks.function, calls, limits=limits, call_timeout_s=timeout_s)

    async def _grade_calls(self, task: CodingTask, checks: CallChecks, collected: Collected) -> Verdict:
        source = collected.files.get(checks.path)
        if source is None:
            return Verdict(reward=0.0, solved=False, refused=collected.refused, detail="the file did not cross")
        try:
            text = source.decode()
        except UnicodeDecodeError as error:
            return Verdict(reward=0.0, solved=False, detail=f"{checks.path} is not UTF-8: {error.reason}")
        results = await self._run_calls(task, checks, text, checks.hidden)
        passed = {f"call {number}": result.passed for number, result in enumerate(results)}
        errors = [result.error or f"answered {result.got}" for result in results if not result.passed]
        return _from_checks(passed, detail="; ".join(errors))

    async def _grade_pytest(self, task: CodingTask, checks: PytestChecks, collected: Collected) -> Verdict:
        verdict = await self._pytest.run(
            collected.files, checks.tests, checks.expected, limits=task.limits, runs=checks.runs
        )
        passed = {test: outcome is TestOutcome.PASSED for test, outcome in verdict.outcomes.items()}
        flaky = tuple(test for test, outcome in verdict.outcomes.items() if outcome is TestOutcome.FLAKY)
        judged = _from_checks(passed, detail=_said(verdict.runs[-1]))
        if verdict.tampered:
            judged = replace(judged, reward=0.0, solved=False, detail="a report that no honest run makes")
        return replace(judged, flaky=flaky, tampered=verdict.tampered, refused=collected.refused)

    async def _grade_script(self, task: CodingTask, checks: ScriptChecks, sandbox: Sandbox) -> Verdict:
        await sandbox.kill()
        for command in checks.collect:
            _require_working(await sandbox.exec(with_variables(["bash", "-c", command], task.variables)))
        limits = replace(checks.limits or task.limits, wall_s=checks.timeout_s)
        try:
            crossing = await cross(self._backend, task, checks, sandbox)
        except UnsafeFilesError as error:  # the agent's doing, and so no reason to mask its work
            return Verdict(reward=0.0, solved=False, refused={task.work: str(error)}, detail="the files did not cross")
        async with (
            crossing.work as files,
            await self._backend.prepare(checks.files, executable=list(checks.files)) as tests,
            AsyncExitStack() as stack,
        ):
            places: dict[str, Snapshot | None] = {**dict.fromkeys(task.places), _TESTS: tests, _LOGS: None}
            places |= await self._stand_ins(checks, stack)
            judge = await stack.enter_async_context(
                await self._backend.open(
                    files, limits=crossing.beside(limits), work=task.work, places=places, image=task.image
                )
            )
            for path, data in crossing.places.items():
                try:
                    await judge.write(path, data)
                except OSError as error:  # a full disk: the agent's doing
                    return Verdict(reward=0.0, solved=False, refused={path: str(error)}, detail="no room for a file")
            script = f"{_TESTS}/{checks.script}"
            argv = stand_in_command(script, _PACKAGES) if checks.provided else ["bash", script]
            result = _require_working(await judge.exec(with_variables(argv, {**task.variables, **checks.variables})))
            await judge.kill()
            if result.outcome is not Outcome.OK:
                raise EnvironmentFault(
                    f"{task.task_id}: the tests' script was ended by its limit on {result.outcome}; {_said(result)}"
                )
            rewards = await _read_rewards(judge, task.task_id, result)
        reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
        return Verdict(
            reward=reward, solved=reward == 1.0, rewards=rewards, refused=crossing.refused, detail=_said(result)
        )

    async def _stand_ins(self, checks: ScriptChecks, stack: AsyncExitStack) -> dict[str, Snapshot]:
        """Return the places of what stands in for what the script would install; none where it installs nothing."""
        if not checks.provided:
            return {}
        files = stand_in_files(self._backend.python, checks.provided, _LOGS)
        programs = await stack.enter_async_context(await self._backend.prepare(files, executable=list(files)))
        return {STAND_INS: programs, _PACKAGES: await self._pytest.packages()}

    async def aclose(self) -> None:
        """Give up what the judges share."""
        await self._pytest.aclose()

    async def __aenter__(self) -> Grader:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


def _from_checks(passed: Mapping[str, bool], *, detail: str) -> Verdict:
    share = sum(passed.values()) / len(passed)
    return Verdict(reward=share, solved=share == 1.0, passed=passed, detail=detail[:_SHOWN_CHARACTERS])


def _require_working(result: ExecResult) -> ExecResult:
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise SandboxError(f"a sandbox failed while a task was judged: {result.detail}")
    return result


async def _read_rewards(judge: Sandbox, task_id: str, result: ExecResult) -> dict[str, float]:
    """Return what the script wrote, reward.json before reward.txt. Raises: EnvironmentFault where it wrote no numbers.

    A script that writes nothing has failed to judge, which says nothing of the agent.
    """
    with suppress(FileNotFoundError, UnsafeFilesError):
        missing = (
            (await judge.read(f"{_LOGS}/{MISSING}", max_bytes=_MAX_REWARD_BYTES)).decode(errors="replace").split("\n")
        )
        raise EnvironmentFault(
            f"{task_id}: its tests want {', '.join(filter(None, missing))} installed, which is not among what "
            "tests_provided says is here"
        )
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await judge.read(f"{_LOGS}/{name}", max_bytes=_MAX_REWARD_BYTES)).decode()
        except FileNotFoundError:
            continue
        except (UnsafeFilesError, UnicodeDecodeError) as error:
            raise EnvironmentFault(f"{task_id}: {name} cannot be read: {error}") from error
        rewards = _numbers(text, name)
        if rewards is None:
            raise EnvironmentFault(f"{task_id}: {name} must hold finite numbers, found {text[:60]!r}")
        return rewards
    raise EnvironmentFault(f"{task_id}: the tests' script wrote neither reward.json nor reward.txt; {_said(result)}")


def _numbers(text: str, name: str) -> dict[str, float] | None:
    try:
        value = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value:
        return None
    numbers = {str(key): number for key, number in value.items() if isinstance(number, int | float)}
    if len(numbers) < len(value) or not all(map(math.isfinite, numbers.values())):
        return None
    return {key: float(number) for key, number in numbers.items()}


def _said(result: ExecResult) -> str:
    return (result.stdout + result.stderr).decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
