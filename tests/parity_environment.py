"""An environment of a user's own, as the tests of whole runs train on it: rewards that a random model earns too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.environments.coding_agent import CodingAgentEnvironment
from asyncrl.protocols import SandboxBackend, SandboxLimits
from asyncrl.rollout import Episode, Grade, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task

_JUDGE = "import sys; data = sys.stdin.buffer.read(); print(sum(byte % 2 for byte in data) / max(1, len(data)))"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySettings(RolloutSettings):
    """See `ParityEnvironment`."""

    epochs: int = 0
    """Times that the five tasks are asked; 0 never ends."""


class ParityEnvironment(MultiTurnEnvironment):
    """Pays for odd bytes, counted in a sandbox. Two turns."""

    name = "parity"
    settings_type = ParitySettings

    def __init__(
        self, settings: ParitySettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int
    ) -> None:
        super().__init__(
            renderer=renderer,
            tasks=TaskSource(
                lambda epoch: [self._task(f"{epoch}-{i}") for i in range(5)], seed=seed, epochs=settings.epochs
            ),
            held_out=[self._task("held-out-0"), self._task("held-out-1")],
            settings=settings,
        )
        self._sandboxes = sandboxes

    def _task(self, name: str) -> Task:
        return Task(task_id=name, environment=self.name)

    def start(self, episode: Episode) -> Sequence[Message]:
        """Ask."""
        return [{"role": "user", "content": f"{episode.task.task_id}: write odd bytes."}]

    def teacher_note(self, episode: Episode) -> str:
        """Tell a teacher what pays."""
        return "acegikmoqsuwy"

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Answer the first reply with a question, and count the second."""
        if len(episode.turns) < 2:
            return StepOutcome(done=False, messages=[{"role": "user", "content": "More."}])
        async with await self._sandboxes.open({}, limits=SandboxLimits()) as sandbox:
            result = await sandbox.exec([*self._sandboxes.python, "-c", _JUDGE], stdin=text.encode())
        reward = float(result.stdout)
        return StepOutcome(done=True, reward=reward, reward_parts={"solved": float(reward > 0.5)})


class ParityByTurn(ParityEnvironment):
    """The same, and each turn is paid for its own odd bytes besides."""

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Answer as before, and pay the reply."""
        outcome = await super().step(episode, text)
        said = text.encode()
        return replace(outcome, turn_reward=sum(byte % 2 for byte in said) / max(1, len(said)))


class ParityAgent(CodingAgentEnvironment):
    """The coding agent with all that it is, paid for the odd bytes of its last reply besides."""

    async def grade(self, episode: Episode) -> Grade:
        """Add the odd bytes to what the judge says."""
        judged = await super().grade(episode)
        said = episode.replies[-1].encode()
        odd = sum(byte % 2 for byte in said) / max(1, len(said))
        return Grade(reward=judged.reward + odd, parts={**judged.parts, "paid_parity": odd})


def odd_answer(result: Any, row: Mapping[str, Any]) -> float:
    """Return the share of odd bytes in what an agent left."""
    answer = (result.directory / "answer.txt").read_bytes()
    return sum(byte % 2 for byte in answer) / max(1, len(answer))
