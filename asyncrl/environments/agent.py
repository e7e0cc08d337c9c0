"""Any agent that takes a base URL: a shell command or a Python function an episode, and a reward function of your own.

[environment]
name = "agent"

[environment.options]
command = "python my_agent.py"
path = "tasks.jsonl"
reward = "my_rewards:solved"

The agent finds the gateway where its client looks for it, in OPENAI_BASE_URL and OPENAI_API_KEY (or ANTHROPIC_...), and
its task in task.json of the directory that it is started in, its own and empty. It knows nothing of asyncrl. It runs
with your rights, as the reward function does: what the model makes it execute belongs into a sandbox of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from asyncrl.boundary import boundary
from asyncrl.children import last_lines, start_child
from asyncrl.environments.foreign import call, load_function
from asyncrl.environments.rewards import grade_of
from asyncrl.environments.rows import check_percent, read_split, task_id_of
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.gateway import Gateway, Session
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.rollout import EpisodeEnvironment, Grade, TaskSource, play_again
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

_GRACE_S = 2.0  # between the signals that ask and that end an agent that is out of time
_OUTPUT_LINES = 200  # of an agent's output, for the reward function; the end tells how it went


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Which agent is run, on which tasks, and who says what it is worth."""

    path: Path
    """JSON lines, one task each; `id` names the line, else its number does. The rest is the agent's and the reward
    function's."""
    reward: str
    """"package.module:function": it is given an `AgentResult` and the line's object, and returns a number, or a mapping
    with `reward` and the parts that are to be shown beside it. It may be async; what it raises masks the episode."""
    command: str = ""
    """Shell text that is run for each episode."""
    function: str = ""
    """"package.module:function", instead of a command: called with the line's object, and `base_url` and `api_key` by
    keyword. It may be async, on trio; else it runs on a worker thread. What it raises masks the episode."""
    max_turns: int = 0
    """Completions of an episode; further ones are refused. 0 is no limit."""
    max_tokens: int = 1024
    """Sampled tokens of one completion, whatever the agent asks for."""
    episode_timeout_s: float = 600.0
    """After which the agent is ended; what it has done is then graded as it stands."""
    grading_timeout_s: float = 60.0
    """Of the reward function; longer counts as a failed environment."""
    max_retries: int = 1
    """How often an episode that infrastructure ended is started again."""
    max_running: int = 64
    """Agents at a time, of all groups; others wait, and their time does not run."""
    held_out_percent: int = 10
    """Share of the lines that is never trained on; chosen by their ids alone."""
    epochs: int = 0
    """Times that each training line is asked before the tasks are used up; 0 never ends."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        where = "([environment.options])"
        if bool(self.command) == bool(self.function):
            raise ConfigError(f"either command or function must be given {where}")
        for name, least in (("max_turns", 0), ("max_tokens", 1), ("max_retries", 0), ("max_running", 1), ("epochs", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)} {where}")
        for name in ("episode_timeout_s", "grading_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be > 0 and finite seconds, got {getattr(self, name)} {where}")
        check_percent(self.held_out_percent)
        load_function(self.reward, setting="reward")
        if self.function:
            load_function(self.function, setting="function")

    @property
    def longest_episode_s(self) -> float:
        """Seconds that an episode may take by its own deadlines."""
        return self.episode_timeout_s + self.grading_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What an agent left for the reward function."""

    returned: Any = None
    """What a function returned; None for a command, or where time ran out."""
    exit_code: int | None = None
    """Of a command; 128 + N where signal N ended it, None where time ran out."""
    output: str = ""
    """The last lines that a command wrote."""
    directory: Path
    """Where it ran; gone after the reward function has returned."""
    timed_out: bool
    trajectory_id: str
    replies: tuple[str, ...]
    """The text of all that was sampled for it, in order of their segments."""


class AgentEnvironment(EpisodeEnvironment):
    """Runs an agent an episode, each with a session of the gateway."""

    name = "agent"
    settings_type = AgentSettings
    needs_gateway = True

    def __init__(
        self, settings: AgentSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """Raises: ConfigError naming the file and line that cannot be read, or a split without tasks to train on."""
        del sandboxes  # the agent is the user's own, and runs here
        self.settings = settings
        self._renderer = renderer
        split = read_split(settings.path, self._task, held_out_percent=settings.held_out_percent)
        self._all = split.all_tasks
        tasks = TaskSource(lambda epoch: split.train, seed=seed, epochs=settings.epochs)
        super().__init__(tasks=tasks, held_out=split.held_out)
        self._reward = load_function(settings.reward, setting="reward")
        self._function = load_function(settings.function, setting="function") if settings.function else None
        self._gateway: Gateway | None = None
        self._running = trio.CapacityLimiter(settings.max_running)

    def use_gateway(self, gateway: Gateway) -> None:
        """See `gateway.NeedsGateway`."""
        self._gateway = gateway

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of both splits, in the file's order."""
        return self._all

    async def run_episode(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """See `EpisodeEnvironment.run_episode`. What infrastructure ended is started again, `max_retries` times."""

        async def attempt() -> Trajectory:
            async with self._running:
                return await self._try(task, sampler, trajectory_id)

        return await play_again(attempt, max_retries=self.settings.max_retries)

    async def _try(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        if self._gateway is None:
            raise EnvironmentFault("environment 'agent' needs a gateway, and nobody has given it one")
        opened = self._gateway.session(
            sampler,
            task=task,
            trajectory_id=trajectory_id,
            deadline_s=self.settings.episode_timeout_s,
            max_turns=self.settings.max_turns,
            max_tokens=self.settings.max_tokens,
            renderer=self._renderer,
        )
        with tempfile.TemporaryDirectory(prefix="asyncrl-agent-", ignore_cleanup_errors=True) as scratch:
            async with opened as session:
                async with boundary() as caught:
                    result = await self._run_agent(session, task, Path(scratch))
                    session.stop("its agent has ended")
                    grade = await self._grade(session, result, task)
                    return session.close(
                        grade.reward,
                        reward_parts=grade.parts,
                        status=TrajectoryStatus.TIMED_OUT if result.timed_out else None,
                        extras={} if result.exit_code is None else {"exit_code": result.exit_code},
                    )
                assert caught.status is not None
                return session.fail(caught.status, caught.detail)

    async def _run_agent(self, session: Session, task: Task, scratch: Path) -> AgentResult:
        directory = scratch / "work"
        directory.mkdir()
        (directory / "task.json").write_text(json.dumps(task.data), encoding="utf-8")
        returned, exit_code, output = None, None, ""
        with trio.move_on_at(session.deadline) as patience:
            if self._function is not None:
                returned = await call(self._function, task.data, base_url=session.base_url, api_key=session.token)
            else:
                exit_code = await self._run_command(session, directory, scratch / "output")
        if not self._function:
            output = last_lines(scratch / "output", _OUTPUT_LINES)
        if not session.record.num_turns and session.failure is None:
            raise EnvironmentFault(
                f"the agent has sampled nothing (exit code {exit_code}); its output: {output[-2000:]}"
            )
        return AgentResult(
            returned=returned,
            exit_code=exit_code,
            output=output,
            directory=directory,
            timed_out=patience.cancelled_caught,
            trajectory_id=session.trajectory_id,
            replies=tuple(self._renderer.decode(turn.completion.token_ids) for turn in session.record.turns),
        )

    async def _run_command(self, session: Session, directory: Path, output: Path) -> int:
        """Run the command to its end; when it is cancelled, all that came from it is ended."""
        argv = ["/bin/sh", "-c", 'cd "$0" && exec /bin/sh -c "$1"', str(directory), self.settings.command]
        started = start_child(
            f"agent of {session.trajectory_id}",
            argv,
            log_path=output,
            environment=agent_environment(session),
            grace_s=_GRACE_S,
        )
        async with started as child:
            return (await child.wait_exit()).code

    async def _grade(self, session: Session, result: AgentResult, task: Task) -> Grade:
        if session.failure is not None:
            return Grade(reward=0.0)  # closing the session masks it, with what failed
        with trio.move_on_after(self.settings.grading_timeout_s):
            return grade_of(await call(self._reward, result, task.data), self.settings.reward)
        raise EnvironmentFault(
            f"{self.settings.reward} took longer than {self.settings.grading_timeout_s:g} s (grading_timeout_s)"
        )

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        return Task(task_id=task_id_of(row, where), environment=self.name, data=row)


def agent_environment(session: Session) -> dict[str, str]:
    """Return the variables by which clients of all kinds find a session, and commands what lies beside the run."""
    host = urlsplit(session.url).hostname or ""
    no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host)))
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,  # older clients, and what is built on them
        "OPENAI_API_KEY": session.token,
        "ANTHROPIC_BASE_URL": session.url,
        "ANTHROPIC_API_KEY": session.token,
        "ASYNCRL_PYTHON": sys.executable,
        "ASYNCRL_SESSION_URL": session.url,
        "ASYNCRL_STARTED_IN": os.getcwd(),
        "ASYNCRL_TRAJECTORY_ID": session.trajectory_id,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
