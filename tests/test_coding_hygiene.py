"""A task holds where it can fail, can be solved and gives nothing away; others are named, kept and left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sandboxes import with_backend
from test_coding_grading import CALLS, FIXED, KINDS, SCRIPT, UNFIXED, a_task

from asyncrl.coding.grading import Grader
from asyncrl.coding.hygiene import Fault, TaskVerdict, digest, examine
from asyncrl.coding.tasks import CodingTask, Reference, TaskStep
from asyncrl.coding.verdict_file import LeavingOut, VerdictFile, read_left_out
from asyncrl.coding.verdicts import Verdict
from asyncrl.environments.validate import validate
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import ExecResult, Sandbox, SandboxBackend

pytestmark = pytest.mark.slow

WORSE = Reference(files={"double.py": b"def double(x):\n    return 4\n"})


def examined(tmp_path: Path, *tasks: CodingTask, variables: Mapping[str, str] | None = None) -> list[TaskVerdict]:
    async def use(backend: SandboxBackend) -> list[TaskVerdict]:
        async with Grader(backend) as grader:
            return [await examine(task, backend, grader, variables=variables or {}) for task in tasks]

    return with_backend(use, tmp_path)


def told(verdict: TaskVerdict) -> list[tuple[Fault, str]]:
    return [(problem.fault, str(problem)) for problem in verdict.problems]


def test_tasks_of_every_kind_hold(tmp_path: Path) -> None:
    script = Reference(files={"solve.sh": b"echo 'def double(x): return x * 2' > double.py\n"}, script="solve.sh")
    tasks = [*map(a_task, KINDS.values()), a_task(CALLS, reference=script), replace(a_task(CALLS), repository=True)]
    verdicts = examined(tmp_path, *tasks)
    assert [told(verdict) for verdict in verdicts] == [[]] * len(tasks)
    assert [verdict.unproven for verdict in verdicts] == [()] * len(tasks)


def test_code_that_passes_unfixed_and_references_that_fail_are_told_apart(tmp_path: Path) -> None:
    passing = replace(a_task(CALLS), files={"double.py": FIXED})
    failing = a_task(CALLS, reference=WORSE)
    assert [told(verdict) for verdict in examined(tmp_path, passing, failing)] == [
        [(Fault.UNFIXED_PASSES, "the unfixed code passes")],
        [(Fault.REFERENCE_FAILS, "the reference passes 0 of 3 times")],
    ]


class Scripted(Grader):
    """Says in turn what it was told to say."""

    def __init__(self, backend: SandboxBackend, said: Sequence[Verdict]) -> None:
        super().__init__(backend)
        self._said = list(said)

    async def grade(self, task: CodingTask, step: TaskStep, sandbox: Sandbox) -> Verdict:
        return self._said.pop(0)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (Verdict(reward=0.0, solved=False), ["the reference passes 2 of 3 times"]),
        (
            Verdict(reward=0.5, solved=False, flaky=("t",)),
            ["the reference passes 2 of 3 times", "checks that pass in some runs and not in others: t"],
        ),
    ],
)
def test_a_reference_that_passes_sometimes_is_flaky(last: Verdict, says: list[str], tmp_path: Path) -> None:
    solved = Verdict(reward=1.0, solved=True)

    async def use(backend: SandboxBackend) -> TaskVerdict:
        async with Scripted(backend, [Verdict(reward=0.0, solved=False), solved, solved, last]) as grader:
            return await examine(a_task(CALLS), backend, grader, variables={})

    assert told(with_backend(use, tmp_path)) == [(Fault.FLAKY, text) for text in says]


@pytest.mark.parametrize(
    ("setup", "repository", "says"),
    [
        ("mkdir -p lib/.git", False, "'lib/.git' holds a history"),
        ("touch .hg", False, "'.hg' holds a history"),
        ("mkdir -p store/objects store/refs; touch store/HEAD", False, "'store/' is a git repository of another name"),
        (
            "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m more",
            True,
            "the repository has more than its one commit",
        ),
        ("echo secret | git hash-object -w --stdin", True, "the repository has more than its one commit"),
    ],
)
def test_a_history_is_found_however_it_came(setup: str, repository: bool, says: str, tmp_path: Path) -> None:
    if repository and not Path("/usr/bin/git").exists():
        pytest.skip("this machine has no git to show")
    (verdict,) = examined(tmp_path, replace(a_task(CALLS, setup=setup), repository=repository))
    assert [problem.fault for problem in verdict.problems] == [Fault.HISTORY]
    assert says in str(verdict.problems[0])


def test_secrets_in_files_variables_and_the_instruction_are_found(tmp_path: Path) -> None:
    key = "AKIA" + "Q3EGRIVLBT7XHZ5N"
    task = a_task(CALLS, instruction=f"Use {key}.", setup="echo hunter2-hunter2 > made.txt")
    task = replace(task, variables={"NAME": key}, files={**task.files, "conf.ini": key.encode()})
    (verdict,) = examined(tmp_path, task, variables={"DATABASE_PASSWORD": "hunter2-hunter2"})
    assert {text for _, text in told(verdict)} == {
        "conf.ini holds an AWS access key",
        "made.txt holds the value of this machine's DATABASE_PASSWORD",
        "the instruction holds an AWS access key",
        "the environment variables hold an AWS access key",
    }
    assert {fault for fault, _ in told(verdict)} == {Fault.SECRET}


def test_what_the_set_up_lays_open_is_found(tmp_path: Path) -> None:
    (verdict,) = examined(tmp_path, a_task(CALLS, setup="echo 'assert double(5) == 10' > mine.py"))
    assert told(verdict) == [(Fault.EXPOSED, "mine.py holds a hidden call with its answer")]


class Altered:
    """A backend whose sandboxes answer the commands that are looked for in another way."""

    def __init__(self, backend: SandboxBackend, words: str, answer: ExecResult | Exception) -> None:
        self._backend, self._words, self._answer = backend, words, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def open(self, *arguments: Any, **more: Any) -> Any:
        return AlteredSandbox(await self._backend.open(*arguments, **more), self._words, self._answer)


class AlteredSandbox:
    def __init__(self, sandbox: Sandbox, words: str, answer: ExecResult | Exception) -> None:
        self._sandbox, self._words, self._answer = sandbox, words, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(self, argv: Sequence[str], **more: Any) -> ExecResult:
        result = await self._sandbox.exec(argv, **more)
        if not any(self._words in word for word in argv):
            return result
        if isinstance(self._answer, Exception):
            raise self._answer
        return replace(self._answer, stdout=self._answer.stdout.replace(b"MARK", argv[-1].encode() + b"\n"))

    async def __aenter__(self) -> AlteredSandbox:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._sandbox.aclose()


def altered(tmp_path: Path, answer: bytes | Exception) -> TaskVerdict:
    given = answer if isinstance(answer, Exception) else _ok(answer)

    async def use(backend: SandboxBackend) -> TaskVerdict:
        changed: Any = Altered(backend, "/proc/net/dev", given)
        async with Grader(backend) as grader:
            return await examine(a_task(CALLS), changed, grader, variables={})

    return with_backend(use, tmp_path)


def _ok(stdout: bytes) -> ExecResult:
    from asyncrl.protocols import Outcome

    return ExecResult(outcome=Outcome.OK, exit_code=0, stdout=stdout, stderr=b"")


def test_a_network_is_found_by_its_devices_or_by_being_this_machines(tmp_path: Path) -> None:
    devices = altered(tmp_path, b"  lo: 1 2\n eth0: 3 4\nMARKnet:[1]\nMARKMARKA=b\0")
    assert told(devices) == [(Fault.NETWORK, "there are network devices: eth0")]
    own = Path("/proc/self/ns/net").readlink()
    shared = altered(tmp_path, f"  lo: 1 2\nMARK{own}\nMARK/tests\nMARKA=b\0".encode())
    assert told(shared) == [
        (Fault.NETWORK, "the network is this machine's own"),
        (Fault.EXPOSED, "/tests is there before the judge brings it"),
    ]


def test_a_sandbox_that_fails_leaves_a_task_unchecked_and_a_set_up_that_fails_breaks_it(tmp_path: Path) -> None:
    assert [p.fault for p in altered(tmp_path, SandboxError("gone")).problems] == [Fault.UNCHECKED]
    (verdict,) = examined(tmp_path, a_task(CALLS, setup="exit 3"))
    assert [p.fault for p in verdict.problems] == [Fault.BROKEN]
    assert "the set-up of step '' failed" in str(verdict.problems[0])


def test_each_step_is_looked_at_where_the_references_before_it_have_led(tmp_path: Path) -> None:
    more = replace(CALLS, function="quadruple", hidden=(replace(CALLS.hidden[0], expected=8),))
    both = FIXED + b"def quadruple(x):\n    return double(double(x))\n"
    second = TaskStep(
        instruction="Add quadruple.", checks=more, name="second", reference=Reference(files={"double.py": both})
    )
    only_after = replace(second, setup="grep -q 'x \\* 2' double.py")
    unknown = TaskStep(instruction="More.", checks=CALLS, name="third")
    first = a_task(CALLS).steps[0]
    verdicts = examined(
        tmp_path,
        replace(a_task(CALLS), steps=(first, only_after)),
        replace(a_task(CALLS), steps=(first, replace(second, reference=WORSE), unknown)),
    )
    assert told(verdicts[0]) == []
    assert told(verdicts[1]) == [
        (Fault.REFERENCE_FAILS, "step second: the reference passes 0 of 3 times"),
    ]
    assert verdicts[1].unproven == ("third",)


def test_a_digest_changes_with_the_content_and_with_nothing_else() -> None:
    task = a_task(CALLS)
    other_order = replace(task, files=dict(reversed([*task.files.items(), ("a", b"")])))
    assert digest(replace(task, files={**task.files, "a": b""})) == digest(other_order)
    changed = [
        replace(task, files={"double.py": UNFIXED + b" "}),
        replace(task, files={"double.pyd": UNFIXED}),
        replace(task, repository=True),
        a_task(CALLS, instruction="Fix that."),
        a_task(replace(CALLS, hidden=(replace(CALLS.hidden[0], expected=4.0), CALLS.hidden[1]))),
        a_task(SCRIPT),
    ]
    assert len({digest(task), *map(digest, changed)}) == 1 + len(changed)


class Tasks:
    """A set of a few tasks, and the environment that brings it."""

    name = "few"

    def __init__(self, **tasks: CodingTask) -> None:
        self.tasks = {name: replace(task, task_id=name) for name, task in tasks.items()}
        self.task_set = self

    def training_ids(self, epoch: int) -> Sequence[str]:
        return [name for name in self.tasks if name != "held"]

    def held_out_ids(self) -> Sequence[str]:
        return ["held"]

    def all_ids(self) -> Sequence[str]:
        return list(self.tasks)

    def task(self, task_id: str) -> CodingTask:
        if task_id == "odd":
            raise ConfigError("it has no tests")
        return self.tasks[task_id]


def test_an_interrupted_validation_goes_on_where_it_was_and_its_file_says_what_to_leave_out(tmp_path: Path) -> None:
    kept = tmp_path / "verdicts.jsonl"
    tasks = Tasks(good=a_task(CALLS), bad=a_task(CALLS, reference=WORSE), held=a_task(CALLS), odd=a_task(CALLS))

    async def use(backend: SandboxBackend) -> list[int]:
        opened, environment = [backend.statistics().opened], any_environment(tasks)
        for change in (lambda: None, lambda: None, spoil, change_good):
            change()
            await validate(environment, backend, kept=VerdictFile(kept))
            opened.append(backend.statistics().opened)
        return [after - before for before, after in pairwise(opened)]

    def spoil() -> None:  # as a kill leaves it, and a sandbox that failed
        lines = kept.read_text().splitlines()
        unchecked = json.loads(lines[0]) | {"problems": [{"fault": "unchecked", "detail": "", "step": ""}]}
        kept.write_text("\n".join([*lines[1:], json.dumps(unchecked), lines[0][:50]]))

    def change_good() -> None:
        tasks.tasks["good"] = replace(tasks.tasks["good"], files={"double.py": FIXED})

    first, second, third, fourth = with_backend(use, tmp_path)
    assert first == 3 * third > 0
    assert (second, fourth) == (0, third)
    assert read_left_out(kept) == {"bad", "good"}
    assert VerdictFile(kept).verdicts["held"].held_out
    with pytest.raises(ConfigError, match=r"leave tasks to train on, and names all 3"):
        LeavingOut(any_set(tasks), read_left_out(kept) | {"odd"})
    del tasks.tasks["odd"]
    tasks.tasks["fine"] = a_task(CALLS)
    left = LeavingOut(any_set(tasks), read_left_out(kept))
    assert (left.training_ids(0), left.held_out_ids(), left.all_ids()) == (["fine"], ["held"], list(tasks.tasks))


def any_environment(tasks: Tasks) -> Any:
    return tasks


def any_set(tasks: Tasks) -> Any:
    return tasks


def test_what_is_left_out_may_be_a_list_of_ids_and_what_is_none_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("# why\n\n a/1 \nb\n")
    assert read_left_out(path) == {"a/1", "b"}
    with pytest.raises(ConfigError, match=r"must name tasks of this environment, found 'a/1' and 1 more"):
        LeavingOut(any_set(Tasks(good=a_task(CALLS))), read_left_out(path))
    path.write_text('ok\n{"task_id": 3}\n')
    with pytest.raises(ConfigError, match=r"out.txt, line 2 is no verdict"):
        read_left_out(path)
    with pytest.raises(ConfigError, match=r"out.txt, line 1 is no verdict"):
        VerdictFile(path)
    with pytest.raises(ConfigError, match=r"missing.txt cannot be read"):
        read_left_out(tmp_path / "missing.txt")
