"""One agent's work on one task: what it has called, what it was seen trying, and what its steps came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.boundary import boundary
from asyncrl.coding.evidence import Trail
from asyncrl.coding.grading import Grader
from asyncrl.coding.monitor import observe
from asyncrl.coding.places import NoRoomFault, begin_step
from asyncrl.coding.playing import lets_go_on
from asyncrl.coding.tasks import CodingTask, TaskStep
from asyncrl.coding.tool_use import ToolResult, ToolUser
from asyncrl.coding.tools import ToolCall
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import SandboxError


@dataclass(slots=True, kw_only=True)
class Work:
    """What an agent has to do in its sandbox, and has done."""

    task: CodingTask
    user: ToolUser
    wall_s: float
    """Of one command."""
    untouched: Sequence[Verdict]
    """On each step, were nothing done; empty where that was not asked."""
    began: float
    """On trio's clock, the present step."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Of the steps that are over, in order."""
    over: bool = False
    """Whether nothing is left to be judged."""
    num_calls: int = 0
    """Carried out, or refused by their tool."""
    num_malformed: int = 0
    behaviour: dict[str, int] = field(default_factory=dict)
    """What the agent was seen trying besides -> how often."""
    trail: Trail
    evidence: list[dict[str, Any]] = field(default_factory=list)
    """Of the steps in `verdicts`."""

    @property
    def step(self) -> TaskStep:
        """What is asked for now."""
        return self.task.steps[len(self.verdicts)]

    @property
    def is_last(self) -> bool:
        """Whether the task has no further step."""
        return len(self.verdicts) + 1 == len(self.task.steps)

    async def use(self, call: ToolCall) -> ToolResult:
        """Carry out a call of the agent's. Raises: SandboxError."""
        result = await self.user.use(call, wall_s=self.wall_s)
        for seen in observe(call, result.shown):
            self.behaviour[seen.value] = self.behaviour.get(seen.value, 0) + 1
        return result

    async def run(self, command: str) -> ToolResult:
        """Run a command that is not the agent's own, as one of its own would be. Raises: SandboxError."""
        call = ToolCall(name="run", arguments={"command": command})
        return await self.user.use(call, wall_s=self.wall_s)

    async def judge(self, grader: Grader, *, retries: int) -> None:
        """Add the verdict on the present step; a judge's sandbox that failed is replaced `retries` times.

        Raises: SandboxError, EnvironmentFault.
        """
        for _ in range(retries):
            async with boundary(SandboxError):
                return await self._judge_once(grader)
        return await self._judge_once(grader)

    async def _judge_once(self, grader: Grader) -> None:
        step, sandbox = self.step, self.user.sandbox
        verdict = await grader.grade(self.task, step, sandbox)
        self.evidence.append(await self.trail.end(step, sandbox, verdict, grader))
        self.verdicts.append(verdict)

    async def go_on(self, now: float) -> bool:
        """Begin the next step, behind the one that was just judged; False where that one came to too little.

        Nor is there a next step where the agent left no room for its files, which is the agent's doing.
        Raises: SandboxError, EnvironmentFault.
        """
        done, verdict = self.task.steps[len(self.verdicts) - 1], self.verdicts[-1]
        self.over = verdict.tampered or not lets_go_on(done, verdict)
        if not self.over:
            try:
                await begin_step(self.user.sandbox, self.task, self.step)
                await self.trail.begin(self.step, self.user.sandbox)
            except NoRoomFault:
                self.over = True
        self.began = now
        return not self.over
