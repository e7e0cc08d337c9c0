"""HumanEvalFix: functions with a bug from a JSONL file in the form of HumanEvalPack, graded by the file's own asserts.

The asserts run in one process with the agent's code, so this grading is weaker than the bundled tasks' (see
`asyncrl.sandbox.judge.run_program`). Source: OctoPack, arXiv:2308.07124, the variant that gives the docstring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.coding.tasks import CodingTask, PytestChecks, Reference, TaskSet, TaskStep
from asyncrl.coding.verdict_file import check_left_out, read_left_out
from asyncrl.environments.as_coding_tasks import AsCodingTasks
from asyncrl.environments.replies import extract_code, fenced, solution_note
from asyncrl.environments.rows import check_percent, is_held_out, read_rows
from asyncrl.errors import ConfigError
from asyncrl.protocols import ExecResult, Outcome, SandboxBackend, SandboxLimits
from asyncrl.rollout import Episode, Grade, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.sandbox.judge import run_program
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task, TrajectoryStatus

_REQUIRED = ("task_id", "declaration", "canonical_solution", "buggy_solution", "entry_point", "test")
_LIMITS = SandboxLimits(wall_s=10.0, cpu_s=10.0)
_SHOWN = 200  # characters of an error in the feedback
_TEST = """
import pathlib, solution
def test_asserts():
    text = pathlib.Path(__file__).with_name("asserts.txt").read_text("utf-8")
    exec(compile(text, "asserts", "exec"), dict(vars(solution)))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanEvalFixSettings(RolloutSettings):
    """Which file is read, and how it is split."""

    path: Path
    """JSONL with the fields task_id, declaration, canonical_solution, buggy_solution, entry_point, test."""
    max_tokens: int = 384
    max_episode_tokens: int = 2048
    held_out_percent: int = 20
    """Share of the tasks that is never trained on; chosen by the tasks' ids alone."""
    leave_out: Path | None = None
    """Tasks that are never asked: what `asyncrl environments validate --keep FILE` wrote, or ids, one a line."""
    epochs: int = 0
    """Times that each training task is asked before the tasks are used up; 0 never ends."""

    @property
    def command_s(self) -> float:
        """See `RolloutSettings.command_s`."""
        return _LIMITS.wall_s

    @property
    def pays_turns(self) -> bool:
        """Whether single turns have rewards: they have none."""
        return False

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        RolloutSettings.__post_init__(self)
        check_percent(self.held_out_percent)
        if self.epochs < 0:
            raise ConfigError(f"epochs must be >= 0, got {self.epochs} ([environment.options])")


class HumanEvalFixEnvironment(MultiTurnEnvironment):
    """Asks for the fix of a function; 1 where all of the file's asserts pass, else 0."""

    name = "humanevalfix"
    settings_type = HumanEvalFixSettings

    def __init__(
        self, settings: HumanEvalFixSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """Raises: ConfigError naming the file and line that cannot be read, or where every task is left out."""
        self._all = read_tasks(settings.path)
        percent = settings.held_out_percent
        held_out = [task for task in self._all if is_held_out(task.task_id, percent)]
        train = [task for task in self._all if not is_held_out(task.task_id, percent)]
        if settings.leave_out is not None:
            out = read_left_out(settings.leave_out)
            check_left_out(out, all_ids=[t.task_id for t in self._all], training_ids=[t.task_id for t in train])
            held_out, train = ([t for t in tasks if t.task_id not in out] for tasks in (held_out, train))
        self._train = train
        super().__init__(
            renderer=renderer,
            tasks=TaskSource(lambda epoch: train, seed=seed, epochs=settings.epochs),
            held_out=held_out,
            settings=settings,
        )
        self.reply_prefix = "```python\n"
        self.stop_token_ids = renderer.token_ids_of("```")
        self._sandboxes = sandboxes

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of both splits, in the file's order."""
        return self._all

    @property
    def task_set(self) -> TaskSet:
        """The same tasks as coding tasks."""
        return AsCodingTasks(self._all, {task.task_id for task in self.held_out()}, coding_task)

    def demonstrations(self) -> Iterator[Sequence[Message]]:
        """Yield a conversation for every training task, with the canonical solution as the reply."""
        for task in self._train:
            asked = self.start(Episode(trajectory_id="demonstration", task=task))
            yield [*asked, {"role": "assistant", "content": fenced(task.data["reference"])}]

    async def accepts(self, task: Task, source: str, backend: SandboxBackend) -> bool:
        """Return whether `source` passes the file's asserts in a sandbox of `backend`."""
        result = await run_program(backend, _program(task.data, source, "test"), limits=_LIMITS)
        return _passed(result)

    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the prompt: what the function should do, and the code."""
        episode.extras["wall"] = self._sandboxes.wall
        return [{"role": "user", "content": asked(episode.task.data)}]

    def teacher_note(self, episode: Episode) -> str:
        """Return the file's canonical solution, as a teacher is told it."""
        return solution_note(episode.task.data["reference"])

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Run the docstring's examples, and answer with the error that they raise."""
        data = episode.task.data
        code = extract_code(text, data["function"])
        episode.notes["code"] = code
        if code is None:
            episode.extras["malformed"] = episode.extras.get("malformed", 0) + 1
        if len(episode.turns) == self.limits.max_turns:
            grade = await self.grade(episode)
            status = None if grade.reward else TrajectoryStatus.TRUNCATED_TURNS
            return StepOutcome(done=True, reward=grade.reward, reward_parts=grade.parts, status=status)
        if code is None:
            return _answer(f"There is no complete function {data['function']} in a python block.")
        if not data["example_test"]:
            return StepOutcome(done=True)
        result = await run_program(self._sandboxes, _program(data, code, "example_test"), limits=_LIMITS)
        return StepOutcome(done=True) if _passed(result) else _answer(_feedback(result))

    async def grade(self, episode: Episode) -> Grade:
        """Return 1 where the last attempt passes the asserts, else 0."""
        code = episode.notes.get("code")
        solved = float(code is not None and await self.accepts(episode.task, code, self._sandboxes))
        malformed = float(episode.extras.get("malformed", 0))
        return Grade(reward=solved, parts={"solved": solved, "malformed": malformed})


def coding_task(task: Task) -> CodingTask:
    """Return a task as a coding task: the same asserts, as a hidden test."""
    data = task.data
    checks = PytestChecks(
        tests={"test_asserts.py": _TEST.encode(), "asserts.txt": data["test"].encode()},
        expected=("test_asserts.py::test_asserts",),
        submitted=("solution.py",),
    )
    return CodingTask(
        task_id=task.task_id,
        steps=(
            TaskStep(
                instruction=asked(data),
                checks=checks,
                reference=Reference(files={"solution.py": _solution(data, data["reference"])}),
            ),
        ),
        files={"solution.py": _solution(data, data["source"])},
        limits=_LIMITS,
        origin=task.task_id,
    )


def _solution(data: Mapping[str, Any], code: str) -> bytes:
    return f"{data['preamble']}\n{code}\n".encode()


def asked(data: Mapping[str, Any]) -> str:
    """Return what the agent is asked."""
    return f"Fix the bug in {data['function']}. {data['instruction']}\n```python\n{data['source'].strip()}\n```"


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks of a HumanEvalPack file. Raises ConfigError naming the file and the line that is broken."""
    return read_rows(path, _read_task)


def _read_task(record: Mapping[str, Any], where: str) -> Task:
    for name in _REQUIRED:
        if not isinstance(record.get(name), str):
            raise ConfigError(f"{where}: {name} must be text, found {record.get(name)!r}")
    if f"def {record['entry_point']}" not in record["declaration"]:
        raise ConfigError(f"{where}: declaration does not define {record['entry_point']!r}")
    return Task(
        task_id=f"humanevalfix/{record['task_id']}",
        environment="humanevalfix",
        data={
            "function": record["entry_point"],
            "instruction": record.get("docstring") or "",
            "source": record["declaration"] + record["buggy_solution"],
            "reference": record["declaration"] + record["canonical_solution"],
            # imports and other functions that stand before the function itself; a reply need not repeat them
            "preamble": record["declaration"].rpartition(f"def {record['entry_point']}")[0],
            "test": record["test"],
            "example_test": record.get("example_test") or "",
        },
    )


def _program(data: Mapping[str, Any], code: str, test: str) -> str:
    return f"{data['preamble']}\n{code}\n{data[test]}\n"


def _passed(result: ExecResult) -> bool:
    return result.outcome is Outcome.OK and result.exit_code == 0


def _feedback(result: ExecResult) -> str:
    if result.outcome is not Outcome.OK:
        return f"The code was ended by the limit on {result.outcome}. Try again."
    lines = [line for line in result.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"The examples fail: {lines[-1].strip()[:_SHOWN] if lines else 'no output'}. Try again."


def _answer(text: str) -> StepOutcome:
    return StepOutcome(done=False, messages=[{"role": "user", "content": text}])
