"""Coding agents: many turns over one sandbox, tools in it, and a judge outside it.

[environment]
name = "coding_agent"

[environment.options]
tasks = "templates"
calls = "native"

An episode has a sandbox from before its first turn until it is graded, and that is closed on every path. It ends when
the agent submits, when a limit is reached, or when its time is over, and is graded as it stands in each of these cases;
where the sandbox itself fails, it is begun again, and masked if that happens too often.

Of several calls in a reply all are carried out, in order, up to one that submits; each has its answer. A malformed one
is answered by what is wrong with it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence

import trio

from asyncrl.behaviour import KEY as BEHAVIOUR
from asyncrl.coding.bundled import load_task_set
from asyncrl.coding.evidence import KEY as EVIDENCE
from asyncrl.coding.evidence import Trail
from asyncrl.coding.grading import Grader
from asyncrl.coding.native_calls import Malformed
from asyncrl.coding.places import begin_step
from asyncrl.coding.prompts import answered, asked, mistaken, solving
from asyncrl.coding.rewards import Conduct, pay
from asyncrl.coding.shelf import Shelf
from asyncrl.coding.tasks import CodingTask, TaskSet
from asyncrl.coding.tool_use import ToolUser
from asyncrl.coding.tools import CHANGING, CallFormat, ToolCall, describe_tools, read_calls, write_call
from asyncrl.coding.verdict_file import LeavingOut, read_left_out
from asyncrl.coding.work import Work
from asyncrl.environments.coding_settings import CodingAgentSettings
from asyncrl.errors import EnvironmentFault
from asyncrl.protocols import SandboxBackend
from asyncrl.rollout import Episode, Grade, MultiTurnEnvironment, StepOutcome, TaskSource
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task, TrajectoryStatus

# A fix of the same length in the same second has the old one's size and time, and Python would run the old bytecode.
_VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}
_OPENING = {CallFormat.NATIVE: "<tool_call>\n", CallFormat.FENCED: "```"}
_CLOSING = {CallFormat.NATIVE: "</tool_call>", CallFormat.FENCED: "```"}


class CodingAgentEnvironment(MultiTurnEnvironment):
    """Asks for work on a task's files, which an agent does by calling tools. See the module."""

    name = "coding_agent"
    settings_type = CodingAgentSettings

    def __init__(
        self, settings: CodingAgentSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """Raises: ConfigError for a set of tasks, or a template, that cannot be had."""
        self._set = load_task_set(settings.tasks, settings.task_options, seed=seed)
        if settings.leave_out is not None:
            self._set = LeavingOut(self._set, read_left_out(settings.leave_out))
        super().__init__(
            renderer=settings.rendering(renderer),
            tasks=TaskSource(
                lambda epoch: self._named(self._set.training_ids(epoch)), seed=seed, epochs=settings.epochs
            ),
            held_out=self._named(self._set.held_out_ids()),
            settings=settings,
        )
        self.settings = settings
        self._template_tells = settings.tells_tools_by_template(self.renderer)
        if settings.begin_in_call:
            self.reply_prefix = _OPENING[settings.calls]
            self.stop_token_ids = renderer.token_ids_of(_CLOSING[settings.calls])
        self._wall = sandboxes.wall
        self._grader = Grader(sandboxes)
        self._shelf = Shelf(
            self._set,
            sandboxes,
            self._grader,
            max_open=settings.max_open,
            judges_untouched=settings.reward.partial_weight > 0,
        )

    def _named(self, task_ids: Sequence[str]) -> list[Task]:
        return [Task(task_id=task_id, environment=self.name) for task_id in task_ids]

    def all_tasks(self) -> Sequence[Task]:
        """Return every task that can be told beforehand, of both splits."""
        return self._named(self._set.all_ids())

    @property
    def task_set(self) -> TaskSet:
        """The tasks of all splits."""
        return self._set

    async def aclose(self) -> None:
        """Give up what tasks and judges share."""
        await self._shelf.aclose()
        await self._grader.aclose()

    # --- an episode -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def holding(self, episode: Episode) -> AsyncIterator[None]:
        """Hold the sandbox in which the episode's work is done."""
        async with self._shelf.opened(episode.task.task_id) as (task, sandbox, untouched):
            self._check_times(task)
            await begin_step(sandbox, task, task.steps[0])
            trail = Trail(task)
            await trail.begin(task.steps[0], sandbox)
            times = [step.agent_timeout_s for step in task.steps]
            episode.time_limit_s = sum(math.inf if time is None else time for time in times)
            episode.extras["wall"] = self._wall
            user = ToolUser(
                sandbox=sandbox,
                variables={**_VARIABLES, **task.variables},
                shown_characters=self.settings.output_characters,
            )
            episode.notes["work"] = work = Work(
                task=task,
                user=user,
                wall_s=self._command_s(task),
                untouched=untouched,
                began=trio.current_time(),
                trail=trail,
            )
            episode.extras[BEHAVIOUR] = work.behaviour
            yield

    def _command_s(self, task: CodingTask) -> float:
        return min(self.settings.tool_timeout_s, task.limits.wall_s)

    def _check_times(self, task: CodingTask) -> None:
        """Refuse a task whose judge could be cut short, which would mask what it is the judge of."""
        longest = max(getattr(step.checks, "timeout_s", 0.0) for step in task.steps)
        if longest >= self.settings.grading_timeout_s:
            raise EnvironmentFault(
                f"{task.task_id}: its checks may take {longest:g} s, and grading_timeout_s = "
                f"{self.settings.grading_timeout_s:g} must be more ([environment.options])"
            )

    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the prompt: the tools, the limits, the instruction, and what files there are."""
        work = episode.notes.get("work")
        task = work.task if work is not None else self._shelf.task(episode.task.task_id)
        told = self._told(task)
        user = asked(task, shown_characters=self.settings.shown_file_characters)
        if not self.settings.system:
            return [{"role": "user", "content": f"{told}\n\n{user}"}]
        return [
            {"role": "system", "content": f"{self.settings.system}\n\n{told}"},
            {"role": "user", "content": user},
        ]

    def _told(self, task: CodingTask) -> str:
        limits = (
            f"You have {self.limits.max_turns} replies and {self.settings.max_tool_calls} calls. A command may take "
            f"{self._command_s(task):g} s. Of an output of more than {self.settings.output_characters} "
            "characters only the beginning and the end are shown."
        )
        return limits if self._template_tells else f"{describe_tools(self.settings.calls)}\n{limits}"

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Carry out the calls of a reply, and answer each."""
        work: Work = episode.notes["work"]
        answers: list[str] = []
        changed = False
        for call in read_calls(self._said(episode, text), self.settings.calls):
            if isinstance(call, Malformed):
                work.num_malformed += 1
                answers.append(f"error: {call.reason}")
                continue
            if work.num_calls == self.settings.max_tool_calls:
                return StepOutcome(done=True, status=TrajectoryStatus.TRUNCATED_TURNS)
            work.num_calls += 1
            if call.name == "submit":
                return await self._end_step(work, answers)
            result = await work.use(call)
            answers.append(result.shown)
            changed |= result.done and call.name in CHANGING
        if changed and self.settings.check_command:
            answers.append((await work.run(self.settings.check_command)).shown)
        limit = work.step.agent_timeout_s
        if limit is not None and trio.current_time() >= work.began + limit:
            return await self._end_step(work, answers)
        return StepOutcome(done=False, messages=self._answered(answers))

    def _said(self, episode: Episode, text: str) -> str:
        """Return a reply's text; in the model's own format with its special tokens, which calls may be made of."""
        if self.settings.calls is CallFormat.FENCED or not episode.turns:
            return text
        return self.spoken(episode)

    def _answered(self, answers: Sequence[str], *, then: str = "") -> list[Message]:
        return answered(answers, self.settings.calls, by_template=self._template_tells, then=then)

    async def _end_step(self, work: Work, answers: Sequence[str]) -> StepOutcome:
        """End the present step of the task; ask the next one, where there is one and this one came to enough."""
        if work.is_last:
            return StepOutcome(done=True)  # it is judged after the agent's time
        await work.judge(self._grader, retries=self.limits.max_retries)
        if not await work.go_on(trio.current_time()):
            return StepOutcome(done=True)
        return StepOutcome(done=False, messages=self._answered(answers, then=work.step.instruction.strip()))

    async def grade(self, episode: Episode) -> Grade:
        """Judge the step that the agent was at, as it stands, and pay for all of them."""
        work: Work = episode.notes["work"]
        if not work.over:
            await work.judge(self._grader, retries=self.limits.max_retries)
            work.over = True
        conduct = Conduct(
            num_calls=work.num_calls + work.num_malformed,
            num_malformed=work.num_malformed,
            num_turns=len(episode.turns),
            max_turns=self.limits.max_turns,
            num_tokens=sum(len(turn.completion.token_ids) for turn in episode.turns),
            max_tokens=min(self.limits.max_turns * self.limits.max_tokens, self.limits.max_episode_tokens),
        )
        reward, parts = pay(work.task, work.verdicts, work.untouched, conduct, self.settings.reward)
        episode.extras |= {
            "steps": len(work.verdicts),
            "tool_calls": work.num_calls,
            "malformed": work.num_malformed,
            "verdicts": [verdict.detail for verdict in work.verdicts],
            EVIDENCE: work.evidence,
        }
        for name in ("flaky", "refused"):
            if found := [value for verdict in work.verdicts for value in getattr(verdict, name)]:
                episode.extras[name] = found
        return Grade(reward=reward, parts=parts)

    # --- what is told besides ---------------------------------------------------------------------------------

    def teacher_note(self, episode: Episode) -> str:
        """Return the reference of the first step, as a teacher is told it."""
        calls = solving(self._shelf.task(episode.task.task_id).steps[0])
        if not calls:
            raise EnvironmentFault(f"{episode.task.task_id} has no reference that is files, which could be told")
        return "\n".join(["This is correct:", *(write_call(call, self.settings.calls) for call in calls)])

    async def _check_fails(self, work: Work) -> bool:
        if not self.settings.check_command:
            return False
        command = (await work.run(self.settings.check_command)).command
        return command is not None and command.exit_code != 0

    async def demonstrations(self) -> AsyncIterator[Sequence[Message]]:
        """Yield a conversation for each training task that says in files what solves it: written, then submitted.

        Where a check is made after changes, every other one begins with an attempt that fails it, which has no weight:
        what comes after it is shown, and not the mistake. The answers are what the sandbox really says.
        Raises: SandboxError, EnvironmentFault.
        """
        for number, task in enumerate(self._named(self._set.training_ids(0))):
            work_on = self._shelf.task(task.task_id)
            calls = solving(work_on.steps[0])
            if not calls:
                continue
            episode = Episode(trajectory_id="demonstration", task=task)
            async with self.holding(episode):
                errs = number % 2 and await self._check_fails(episode.notes["work"])
                first = mistaken(work_on, calls) if errs else []
                messages = [*self.start(episode)]
                for place, call in enumerate([*first, *calls]):
                    reply: Message = {"role": "assistant", "content": write_call(call, self.settings.calls)}
                    outcome = await self.step(episode, reply["content"])
                    messages += [{**reply, "weight": 0} if place < len(first) else reply, *outcome.messages]
                submit = write_call(ToolCall(name="submit"), self.settings.calls)
                yield [*messages, {"role": "assistant", "content": submit}]
