"""Episodes of coding agents in which a script says what the model says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import trio
from coding_tasks import FIXED
from sandboxes import with_backend
from scripted import Reply, ScriptedSampler

from asyncrl.environments import EnvironmentSettings, load_environment
from asyncrl.environments.coding_agent import CodingAgentEnvironment
from asyncrl.protocols import Sandbox, SandboxBackend
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory

T = TypeVar("T")
SUBMIT = "```submit\n```"
FIX = f"```write double.py\n{FIXED}```"
HALF = "```write half.py\ndef half(x):\n    return x // 2\n```"
WRONG = "```write double.py\ndef double(x):\n    return 2 * x if x < 7 else 0\n```"


def run(command: str) -> str:
    return f"```run\n{command}\n```"


def environment_of(backend: SandboxBackend, renderer: ChatRenderer, **options: Any) -> CodingAgentEnvironment:
    options = {"tasks": "coding_tasks:Kinds", "calls": "fenced", "max_episode_tokens": 100_000, **options}
    settings = EnvironmentSettings(name="coding_agent", options={"max_tokens": 8000, **options})
    found = load_environment(settings, renderer=renderer, sandboxes=backend, seed=0)
    assert isinstance(found, CodingAgentEnvironment)
    return found


class Recording:
    """A backend that remembers the sandboxes which it opened."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self.opened: list[Sandbox] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def open(self, *args: Any, **more: Any) -> Sandbox:
        self.opened.append(await self._backend.open(*args, **more))
        return self.opened[-1]


class Played:
    """An episode that was played, and what the agent was asked and answered."""

    def __init__(self, trajectory: Trajectory, renderer: ChatRenderer) -> None:
        self.trajectory = trajectory
        self.text = "".join(renderer.decode(s.token_ids, keep_special=True) for s in trajectory.segments)
        self.parts = trajectory.reward_parts
        self.extras = trajectory.extras

    @property
    def answers(self) -> list[str]:
        """What the agent read after each reply but the last."""
        return [part.partition("</s>")[0] for part in self.text.split("<|user|>")[2:]]


def play(
    renderer: ChatRenderer,
    directory: Path,
    script: Sequence[Reply] | Callable[[str, int], Reply],
    *,
    task: str = "calls",
    group_size: int = 1,
    beside: Callable[[Recording], Awaitable[None]] | None = None,
    recording: type[Recording] | None = None,
    sandboxes: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Played]:
    """Return episodes in which the model says what `script` says, while `beside` does what it does."""

    def reply(trajectory_id: str, turn: int) -> Reply:
        return script(trajectory_id, turn) if callable(script) else script[turn % len(script)]

    async def use(backend: SandboxBackend) -> list[Played]:
        recorded = (recording or Recording)(backend)
        environment = environment_of(recorded, renderer, **options)
        try:
            async with trio.open_nursery() as nursery:
                if beside is not None:
                    nursery.start_soon(beside, recorded)
                trajectories = await environment.collect_trajectories(
                    Task(task_id=task, environment="coding_agent"),
                    ScriptedSampler(renderer, reply),
                    group_id="7",
                    group_size=group_size,
                )
        finally:
            await environment.aclose()
        assert backend.statistics().open == 0, "every sandbox is closed"
        return [Played(trajectory, renderer) for trajectory in trajectories]

    return with_backend(use, directory, **(sandboxes or {}))
