"""A coding task's steps are graded by their own kind of checks, in a new sandbox, from what the agent left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandboxes import LIMITS, with_backend

from asyncrl.coding.grading import Grader
from asyncrl.coding.places import NoRoomFault, apply_reference, begin_step, open_place, prepare_files
from asyncrl.coding.tasks import CallChecks, Checks, CodingTask, PytestChecks, Reference, ScriptChecks, TaskStep
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import EnvironmentFault
from asyncrl.protocols import Outcome, SandboxBackend
from asyncrl.sandbox import Call

pytestmark = pytest.mark.slow

UNFIXED, FIXED = b"def double(x):\n    return x + 2\n", b"def double(x):\n    return x * 2\n"
CALLS = CallChecks(
    path="double.py", function="double", hidden=(Call(arguments=[2], expected=4), Call(arguments=[5], expected=10))
)
TESTS = PytestChecks(
    tests={"test_double.py": b"from double import double\ndef test_five():\n    assert double(5) == 10\n"},
    expected=("test_double.py::test_five",),
)
SCRIPT = ScriptChecks(
    files={
        "test.sh": b"cd /task && python3 -c 'from double import double; print(float(double(5) == 10))' "
        b"> /logs/verifier/reward.txt\nexit $CODE\n"
    },
    variables={"CODE": "3"},
    timeout_s=20.0,
)
KINDS = {"calls": CALLS, "pytest": TESTS, "script": SCRIPT}


def a_task(checks: Checks, **changes: Any) -> CodingTask:
    step = TaskStep(instruction="Fix it.", checks=checks, reference=Reference(files={"double.py": FIXED}))
    return CodingTask(task_id="double", steps=(replace(step, **changes),), files={"double.py": UNFIXED}, limits=LIMITS)


async def verdict(backend: SandboxBackend, task: CodingTask, left: Mapping[str, bytes]) -> Verdict:
    async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
        for path, data in left.items():
            await sandbox.write(path, data)
        return await grader.grade(task, task.steps[0], sandbox)


@pytest.mark.parametrize("kind", KINDS)
def test_the_unfixed_code_fails_and_the_reference_passes(kind: str, tmp_path: Path) -> None:
    async def use(backend: SandboxBackend) -> tuple[Verdict, Verdict]:
        task = a_task(KINDS[kind])
        async with Grader(backend) as grader:
            async with await open_place(backend, task) as sandbox:
                await begin_step(sandbox, task, task.steps[0])
                before = await grader.grade(task, task.steps[0], sandbox)
            reference = task.steps[0].reference
            assert reference is not None
            async with await apply_reference(backend, task, reference, await open_place(backend, task)) as sandbox:
                return before, await grader.grade(task, task.steps[0], sandbox)

    before, after = with_backend(use, tmp_path)
    assert (before.solved, after.solved) == (False, True)
    assert before.reward < 1.0
    assert after.reward == 1.0


def test_a_reference_may_be_a_script_that_the_agents_sandbox_never_held(tmp_path: Path) -> None:
    script = Reference(files={"solve.sh": b"echo 'def double(x): return x * 2' > double.py\n"}, script="solve.sh")

    async def use(backend: SandboxBackend) -> Verdict:
        task = a_task(CALLS, reference=script)
        async with (
            Grader(backend) as grader,
            await apply_reference(backend, task, script, await open_place(backend, task)) as sandbox,
        ):
            return await grader.grade(task, task.steps[0], sandbox)

    assert with_backend(use, tmp_path).solved


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (b"true\n", "neither reward.json nor reward.txt"),
        (b"echo nan > /logs/verifier/reward.txt\n", "must hold finite numbers, found 'nan"),
        (b'echo \'{"a": "1"}\' > /logs/verifier/reward.json\n', "must hold finite numbers"),
        (b"ln -s /etc/passwd /logs/verifier/reward.txt\n", "cannot be read"),
    ],
)
def test_a_script_that_says_nothing_has_not_judged(script: bytes, says: str, tmp_path: Path) -> None:
    task = a_task(replace(SCRIPT, files={"test.sh": script}))

    async def use(backend: SandboxBackend) -> None:
        with pytest.raises(EnvironmentFault, match=says):
            await verdict(backend, task, {})

    with_backend(use, tmp_path)


def test_several_rewards_are_kept_by_name_and_the_one_called_reward_counts(tmp_path: Path) -> None:
    files = {"test.sh": b'echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json\n'}

    async def use(backend: SandboxBackend) -> Verdict:
        return await verdict(backend, a_task(replace(SCRIPT, files=files)), {})

    found = with_backend(use, tmp_path)
    assert (found.reward, found.solved, found.rewards) == (0.5, False, {"reward": 0.5, "style": 1.0})


def test_what_the_agent_left_running_cannot_write_the_reward(tmp_path: Path) -> None:
    files = {"test.sh": b"sleep 0.3; echo 0 > /logs/verifier/reward.txt\n"}

    async def use(backend: SandboxBackend) -> Verdict:
        task = a_task(replace(SCRIPT, files=files))
        async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
            await sandbox.shell("(while true; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &")
            return await grader.grade(task, task.steps[0], sandbox)

    assert with_backend(use, tmp_path).reward == 0.0


def test_only_the_files_that_were_asked_for_cross(tmp_path: Path) -> None:
    only = replace(SCRIPT, submitted=("double.py",), files={"test.sh": b"ls /task | wc -l > /logs/verifier/reward.txt"})

    async def use(backend: SandboxBackend) -> Verdict:
        return await verdict(backend, a_task(only), {"double.py": FIXED, "other.py": b""})

    assert with_backend(use, tmp_path).reward == 1.0


def test_a_file_that_cannot_be_judged_is_the_agents_doing(tmp_path: Path) -> None:
    async def use(backend: SandboxBackend) -> tuple[Verdict, Verdict]:
        task = a_task(CALLS)
        async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
            await sandbox.shell("ln -sf /etc/passwd double.py")
            linked = await grader.grade(task, task.steps[0], sandbox)
        return linked, await verdict(backend, task, {"double.py": b"\xff\xfe"})

    linked, binary = with_backend(use, tmp_path)
    assert (linked.reward, binary.reward) == (0.0, 0.0)
    assert "double.py" in linked.refused
    assert "not UTF-8" in binary.detail


def with_history(**changes: Any) -> CodingTask:
    task = a_task(CALLS)
    files = {**task.files, ".git/HEAD": b"ref: refs/heads/fixed\n", "lib/.git": b"gitdir: ../.git/modules/lib\n"}
    return replace(task, files=files, **changes)


def test_a_history_that_files_bring_is_not_shown(tmp_path: Path) -> None:
    async def use(backend: SandboxBackend) -> list[str]:
        async with await open_place(backend, with_history()) as sandbox:
            return [entry.path for entry in await sandbox.walk()]

    assert with_backend(use, tmp_path) == ["double.py"]


@pytest.mark.skipif(not Path("/usr/bin/git").exists(), reason="this machine has no git to show")
def test_a_repository_that_is_wanted_has_one_commit_of_the_files_and_no_name_of_the_machine(tmp_path: Path) -> None:
    ask = "git log --all --format='%an %ae %s' && git status --short && git reflog | wc -l && ls -A && ls .git/hooks"

    async def use(backend: SandboxBackend) -> str:
        task = with_history(repository=True)
        async with await prepare_files(backend, task) as files:
            async with await open_place(backend, task, files) as first:
                made = await first.shell("git -c user.name=a -c user.email=a@b commit -qm other --allow-empty")
                assert made.exit_code == 0
            async with await open_place(backend, task, files) as second:
                return (await second.shell(ask)).stdout.decode()

    told = with_backend(use, tmp_path)
    assert told.splitlines() == ["task task@localhost The task's files", "1", ".git", "double.py"]


def test_what_does_not_fit_into_the_judges_sandbox_is_the_agents_doing(tmp_path: Path) -> None:
    small = replace(SCRIPT, limits=replace(LIMITS, max_files=8))
    deep = "/logs/agent/" + "/".join(map(str, range(60)))

    async def use(backend: SandboxBackend) -> Verdict:
        task = replace(a_task(small), places=("/logs/agent",))
        async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
            await sandbox.shell(f"mkdir -p {deep}; touch {deep}/x")
            return await grader.grade(task, task.steps[0], sandbox)

    verdict = with_backend(use, tmp_path)
    assert (verdict.reward, verdict.solved) == (0.0, False)
    assert list(verdict.refused) == [f"{deep}/x"]


@pytest.mark.parametrize("submitted", [None, ("double.py", "/logs/agent")])
@pytest.mark.parametrize("place", ["/task", "/logs/agent"])
def test_an_agent_that_fills_its_disk_does_not_keep_its_judge_from_writing(
    place: str, submitted: tuple[str, ...] | None, tmp_path: Path
) -> None:
    many = f"for n in $(seq 40); do head -c 300000 /dev/zero > {place}/fill$n; done 2>/dev/null"

    async def use(backend: SandboxBackend) -> Verdict:
        task = replace(a_task(replace(SCRIPT, submitted=submitted)), places=("/logs/agent",))
        async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
            await sandbox.write("double.py", FIXED)
            assert (await sandbox.shell(many)).outcome is Outcome.DISK
            return await grader.grade(task, task.steps[0], sandbox)

    assert with_backend(use, tmp_path).reward == 1.0


def test_a_set_up_that_an_agent_made_fail_is_its_own_doing(tmp_path: Path) -> None:
    step = TaskStep(instruction="More.", checks=CALLS, name="second", setup="mkdir notes")

    async def use(backend: SandboxBackend) -> None:
        async with await open_place(backend, a_task(CALLS)) as sandbox:
            await sandbox.shell("touch notes")
            with pytest.raises(NoRoomFault, match="the set-up of step 'second' failed"):
                await begin_step(sandbox, a_task(CALLS), step)

    with_backend(use, tmp_path)
