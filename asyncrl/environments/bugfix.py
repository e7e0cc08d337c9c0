"""Bug-fix tasks of our own making: a small function with a bug, two examples, and hidden tests for the reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from asyncrl.coding.tasks import CallChecks, CodingTask, Reference, TaskSet, TaskStep
from asyncrl.environments.as_coding_tasks import AsCodingTasks
from asyncrl.environments.bugfix_tasks import HARD, HELD_OUT, TEMPLATES, build_task
from asyncrl.environments.replies import extract_code, fenced, solution_note
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxBackend, SandboxLimits
from asyncrl.rollout import Episode, Grade, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.sandbox.judge import Call, CallResult, run_calls
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import FinishReason, Task, TrajectoryStatus

_LIMITS = SandboxLimits(wall_s=4.0, cpu_s=2.0, memory_bytes=128 * 2**20, max_pids=16)
_CALL_TIMEOUT_S = 0.5  # the functions take microseconds; what takes longer does not end
_TOLERANCE = 1e-9  # of floats: another order of operations is no mistake
_SHOWN = 60  # characters of a value or error in the feedback; longer costs tokens and says no more


@dataclass(frozen=True, slots=True, kw_only=True)
class BugFixSettings(RolloutSettings):
    """What is asked, and how a reply is paid.

    reward = solved * retried * (1 - rambling_penalty * rambling) + (1 - solved) * partial_weight * partial,
    from 0 to 1; retried is 1 for a solution at the first turn and retry_weight for a later one.
    """

    max_tokens: int = 40
    """The longest reference has 33 tokens of a byte-pair vocabulary; what is longer is hardly ever right."""
    partial_weight: float = 0.2
    """Paid for all hidden tests that the unfixed code fails, where some still fail; 0 pays for solutions only."""
    retry_weight: float = 1.0
    """Paid for a solution that needed more than one turn; below 1, the tokens of failed first tries earn less."""
    rambling_penalty: float = 0.0
    """Taken from a solution whose reply did not end by itself within `max_tokens`."""
    turn_weight: float = 0.0
    """Paid at each turn for the share of visible examples that it passes beyond the turns before it, on top of
    `reward`; 0 says nothing of single turns."""
    system: str = "You fix bugs in Python code."
    """System message; empty leaves it to the model's template."""
    begin_in_code: bool = True
    """Replies begin behind an opening fence that is put there for the model; otherwise it answers as it likes."""
    stop_at_fence: bool = True
    """Replies end with the closing fence, so that no tokens are sampled after the code; needs begin_in_code."""
    hard: bool = False
    """Whether the functions are asked too that a very small model hardly ever repairs."""
    epochs: int = 0
    """Times that each training function is asked before the tasks are used up; 0 never ends."""

    @property
    def command_s(self) -> float:
        """See `RolloutSettings.command_s`."""
        return _LIMITS.wall_s

    @property
    def pays_turns(self) -> bool:
        """Whether single turns have rewards."""
        return self.turn_weight > 0

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        RolloutSettings.__post_init__(self)
        for name in ("partial_weight", "rambling_penalty"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value < 1):
                raise ConfigError(f"{name} must be from 0 to below 1, got {value} ([environment.options])")
        if not (math.isfinite(self.turn_weight) and self.turn_weight >= 0):
            raise ConfigError(f"turn_weight must be >= 0, got {self.turn_weight} ([environment.options])")
        if self.stop_at_fence and not self.begin_in_code:
            raise ConfigError(
                "stop_at_fence needs begin_in_code: a reply would end at its opening fence; set both to false "
                "([environment.options])"
            )
        if not 0 < self.retry_weight <= 1:
            raise ConfigError(
                f"retry_weight must be above 0 and at most 1, got {self.retry_weight} ([environment.options])"
            )
        if self.epochs < 0:
            raise ConfigError(f"epochs must be >= 0, got {self.epochs} ([environment.options])")


class BugFixEnvironment(MultiTurnEnvironment):
    """Asks for the fix of a small function, shows failing examples, and pays for hidden tests.

    The agent's code runs only in sandboxes, a new one for each grading. An attempt that passes the visible examples is
    taken as the answer; one that fails them is answered with what came back, while turns are left.
    """

    name = "bugfix"
    settings_type = BugFixSettings

    def __init__(
        self, settings: BugFixSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """`seed` gives the order of the functions, their bugs and their inputs; the split does not depend on it."""
        super().__init__(
            renderer=renderer,
            tasks=TaskSource(
                lambda epoch: train_tasks(seed, epoch, hard=settings.hard), seed=seed, epochs=settings.epochs
            ),
            held_out=held_out_tasks(seed),
            settings=settings,
        )
        self.settings = settings
        self._seed = seed
        self.reply_prefix = "```python\n" if settings.begin_in_code else ""
        if settings.stop_at_fence:
            self.stop_token_ids = renderer.token_ids_of("```")
        self._sandboxes = sandboxes

    def all_tasks(self) -> Sequence[Task]:
        """Return every function with every bug, of both splits."""
        seed = self._seed
        return [build_task(t, bug, seed=seed) for t in TEMPLATES.values() for bug in range(len(t.bugs))]

    @property
    def task_set(self) -> TaskSet:
        """The same tasks as coding tasks."""
        tasks = self.all_tasks()
        return AsCodingTasks(tasks, {t.task_id for t in tasks if t.data["function"] in HELD_OUT}, coding_task)

    def demonstrations(self) -> Iterator[Sequence[Message]]:
        """Yield a conversation for every bug of every training function, with the reference solution as the reply."""
        for name in train_functions(hard=self.settings.hard):
            for bug in range(len(TEMPLATES[name].bugs)):
                task = build_task(TEMPLATES[name], bug, seed=self._seed)
                asked = self.start(Episode(trajectory_id="demonstration", task=task))
                yield [*asked, {"role": "assistant", "content": fenced(task.data["reference"])}]

    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the prompt: what the function should do, two examples, and the code."""
        episode.extras["wall"] = self._sandboxes.wall
        user: Message = {"role": "user", "content": prompt(episode.task.data)}
        return [{"role": "system", "content": self.settings.system}, user] if self.settings.system else [user]

    def teacher_note(self, episode: Episode) -> str:
        """Return the reference solution, as a teacher is told it."""
        return solution_note(episode.task.data["reference"])

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Run the visible examples, and answer with the first that fails."""
        data = episode.task.data
        code = extract_code(text, data["function"])
        episode.notes["code"] = code
        if code is None:
            episode.extras["malformed"] = episode.extras.get("malformed", 0) + 1
        is_last = len(episode.turns) == self.limits.max_turns
        results: Sequence[CallResult] = ()
        if code is not None and (self.settings.turn_weight or not is_last):
            results = await run_tests(self._sandboxes, code, data, "visible")
        earned = self._turn_reward(episode, results)
        if is_last:
            grade = await self.grade(episode)
            status = None if grade.parts["solved"] else TrajectoryStatus.TRUNCATED_TURNS
            return StepOutcome(
                done=True, reward=grade.reward, turn_reward=earned, reward_parts=grade.parts, status=status
            )
        if code is None:
            return _answer(f"There is no complete function {data['function']} in a python block.", earned)
        for test, result in zip(data["visible"], results, strict=True):
            if not result.passed:
                return _answer(feedback(data["function"], test, result), earned)
        return StepOutcome(done=True, turn_reward=earned)

    def _turn_reward(self, episode: Episode, results: Sequence[CallResult]) -> float | None:
        """Return what the visible examples that pass now, and did not before, are paid; None where nothing is."""
        if not self.settings.turn_weight:
            return None
        before: int = episode.notes.get("visible", 0)
        passed = max(before, sum(result.passed for result in results))
        episode.notes["visible"] = passed
        return self.settings.turn_weight * (passed - before) / len(episode.task.data["visible"])

    async def accepts(self, task: Task, source: str, backend: SandboxBackend) -> bool:
        """Return whether `source` passes all hidden tests in a sandbox of `backend`."""
        return all(result.passed for result in await run_tests(backend, source, task.data, "hidden"))

    async def grade(self, episode: Episode) -> Grade:
        """Return the reward of the last attempt, from the hidden tests."""
        data = episode.task.data
        code = episode.notes.get("code")
        passed = 0
        if code is not None:
            passed = sum(result.passed for result in await run_tests(self._sandboxes, code, data, "hidden"))
        total, base = len(data["hidden"]), data["base_passed"]
        solved = float(passed == total)
        partial = max(0.0, (passed - base) / (total - base))
        rambling = float(episode.turns[-1].completion.finish_reason is FinishReason.LENGTH)
        retried = 1.0 if len(episode.turns) == 1 else self.settings.retry_weight
        reward = solved * retried * (1 - self.settings.rambling_penalty * rambling)
        reward += (1 - solved) * self.settings.partial_weight * partial
        parts = {"solved": solved, "partial": partial, "rambling": rambling}
        parts["malformed"] = float(episode.extras.get("malformed", 0))
        return Grade(reward=reward, parts=parts)


def coding_task(task: Task) -> CodingTask:
    """Return a task as a coding task: the agent's reply is the one file."""
    data = task.data
    checks = CallChecks(
        path="solution.py",
        function=data["function"],
        hidden=tuple(_call(test) for test in data["hidden"]),
        visible=tuple(_call(test) for test in data["visible"]),
        call_timeout_s=_CALL_TIMEOUT_S,
    )
    reference = Reference(files={"solution.py": data["reference"].encode()})
    return CodingTask(
        task_id=task.task_id,
        steps=(TaskStep(instruction=prompt(data), checks=checks, reference=reference),),
        files={"solution.py": data["source"].encode()},
        limits=_LIMITS,
        origin=f"template {data['function']}, bug {data['bug']}",
    )


def _call(test: Mapping[str, Any]) -> Call:
    return Call(arguments=test["arguments"], expected=test["expected"], tolerance=_TOLERANCE)


async def run_tests(backend: SandboxBackend, code: str, data: Mapping[str, Any], which: str) -> Sequence[CallResult]:
    """Return a result per test of `data[which]`, "visible" or "hidden", from a new sandbox."""
    calls = [_call(test) for test in data[which]]
    return await run_calls(backend, code, data["function"], calls, limits=_LIMITS, call_timeout_s=_CALL_TIMEOUT_S)


def train_tasks(seed: int, epoch: int, *, hard: bool = False) -> list[Task]:
    """Return one task of each training function; bug and inputs differ from epoch to epoch."""
    return [_pick(name, f"{seed}/{epoch}", seed * 1000 + epoch) for name in train_functions(hard=hard)]


def train_functions(*, hard: bool = False) -> list[str]:
    """Return the functions that are trained on, by name."""
    left_out = {*HELD_OUT} if hard else {*HELD_OUT, *HARD}
    return [name for name in TEMPLATES if name not in left_out]


def held_out_tasks(seed: int) -> list[Task]:
    """Return one task of each held-out function; they do not depend on the seed, so that runs compare."""
    del seed
    return [build_task(TEMPLATES[name], 0, seed=0) for name in HELD_OUT]


def _pick(name: str, key: str, seed: int) -> Task:
    template = TEMPLATES[name]
    return build_task(template, Random(f"{key}/{name}").randrange(len(template.bugs)), seed=seed)


def prompt(data: Mapping[str, Any]) -> str:
    """Return what the agent is asked."""
    examples = "\n".join(f"{shown_call(data['function'], t)} == {t['expected']!r}" for t in data["visible"])
    says = data["instruction"].replace("`", "")
    return f"{says}\n{examples}\nThis is wrong:\n```python\n{data['source']}```\nCorrect it."


def shown_call(function: str, test: Mapping[str, Any]) -> str:
    """Return the Python text of a test's call."""
    return f"{function}({', '.join(map(repr, test['arguments']))})"


def feedback(function: str, test: Mapping[str, Any], result: CallResult) -> str:
    """Return what the agent is told about a failed example."""
    got = result.got or result.error
    verb = "returned" if result.got else "failed:"
    return f"{shown_call(function, test)} {verb} {got[:_SHOWN]}, expected {test['expected']!r}. Try again."


def _answer(text: str, earned: float | None) -> StepOutcome:
    return StepOutcome(done=False, turn_reward=earned, messages=[{"role": "user", "content": text}])
