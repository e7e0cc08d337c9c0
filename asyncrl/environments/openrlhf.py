"""Agents in the form of OpenRLHF's: `reset` says what is observed, `step` answers an action, both in plain text.

[environment]
name = "openrlhf"

[environment.options]
path = "prompts.jsonl"
agent = "my_agent:AgentInstance"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from asyncrl.environments.file_tasks import FileTaskEnvironment, FileTaskSettings
from asyncrl.environments.foreign import call, load_function
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import Sampler, SandboxBackend
from asyncrl.tokens import ChatRenderer, build_segments
from asyncrl.types import FinishReason, Task, TokenIds, Trajectory, TrajectoryStatus, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRLHFSettings(FileTaskSettings):
    """Which agent plays, and how it is told its task."""

    agent: str
    """"package.module:Class", made anew for each episode. `await reset({"observation", "label"})` returns a mapping
    with the `observation` that the model reads first; `await step({"observation_text", "action_text", "label"})` one
    with `rewards`, `environment_feedback` and `done`, and `scores` and `extra_logs` where it likes. They run on trio,
    not on asyncio; where they are not async, on a worker thread."""
    input_key: str = "prompt"
    """Of a line: text, or a list of messages."""
    label_key: str = "label"
    """Of a line; what a step is told as `label`, None where the line has none."""
    apply_chat_template: bool = True
    """Render the input with the model's chat template, as the user's message where it is text; else it is read as it
    is."""
    max_turns: int = 16
    """Actions of an episode; it then ends with what it has earned."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        FileTaskSettings.__post_init__(self)
        if self.max_turns < 1:
            raise ConfigError(f"max_turns must be >= 1, got {self.max_turns} ([environment.options])")
        load_function(self.agent, setting="agent")


class OpenRLHFEnvironment(FileTaskEnvironment):
    """Plays an agent of OpenRLHF's form. What is observed is appended as text that is tokenised once; no id changes."""

    name = "openrlhf"
    settings_type = OpenRLHFSettings

    def __init__(
        self, settings: OpenRLHFSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        self.settings = settings
        super().__init__(settings, renderer=renderer, sandboxes=sandboxes, seed=seed)
        self._agent = load_function(settings.agent, setting="agent")
        if settings.apply_chat_template:
            renderer.require_template()

    async def play(self, task: Task, sampler: Sampler, trajectory_id: str) -> Trajectory:
        """See `FileTaskEnvironment.play`."""
        started, label = trio.current_time(), task.data.get(self.settings.label_key)
        agent = await call(self._agent)
        reset = await call(agent.reset, {"observation": self._asked(task), "label": label})
        observed = read = _text(reset, "observation", "reset")
        history, turns, parts = TokenIds(), list[Turn](), dict[str, float]()
        status: TrajectoryStatus | None = TrajectoryStatus.TRUNCATED_TURNS
        for _ in range(self.settings.max_turns):
            context = self.renderer.encode(read)
            room = self.settings.max_episode_tokens - len(history) - len(context)
            if room < 1:
                status = TrajectoryStatus.TRUNCATED_LENGTH
                break
            prompt, limit = TokenIds(history + context), min(room, self.settings.max_tokens)
            completion = await sampler.sample(
                prompt,
                max_tokens=limit,
                trajectory_id=trajectory_id,
                stop_token_ids=self.renderer.stop_token_ids,
            )
            history = TokenIds(prompt + completion.token_ids)
            action = self.renderer.decode(completion.token_ids, keep_special=True)
            said = await call(agent.step, {"observation_text": observed, "action_text": action, "label": label})
            turns.append(Turn(context_token_ids=context, completion=completion, reward=_number(said, "rewards")))
            parts |= {name: _number(said["extra_logs"], name) for name in said.get("extra_logs") or ()}
            if "scores" in said:
                parts["scores"] = _number(said, "scores")
            if said.get("done"):
                status = None
                break
            read = _text(said, "environment_feedback", "step")
            observed += action + read
        if not turns:
            raise EnvironmentFault(
                f"an observation of {len(context)} tokens leaves no room for an action below "
                f"{self.settings.max_episode_tokens} (max_episode_tokens)"
            )
        return self._trajectory(task, trajectory_id, turns, parts, status, trio.current_time() - started)

    def _trajectory(
        self,
        task: Task,
        trajectory_id: str,
        turns: Sequence[Turn],
        parts: Mapping[str, float],
        status: TrajectoryStatus | None,
        seconds: float,
    ) -> Trajectory:
        reasons = [turn.completion.finish_reason for turn in turns]
        if status is None:
            cut = reasons[-1] is FinishReason.LENGTH
            status = TrajectoryStatus.TRUNCATED_LENGTH if cut else TrajectoryStatus.COMPLETED
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            environment=task.environment,
            segments=build_segments(
                turns, end_token_ids=self.renderer.end_token_ids, vocab_size=self.renderer.vocab_size
            ),
            reward=float(sum(turn.reward or 0.0 for turn in turns)),
            reward_parts=parts,
            status=status,
            num_turns=len(turns),
            seconds=seconds,
            truncated=FinishReason.LENGTH in reasons,
        )

    def _asked(self, task: Task) -> str:
        found: Any = task.data[self.settings.input_key]
        if isinstance(found, str) and not self.settings.apply_chat_template:
            return found
        messages = [{"role": "user", "content": found}] if isinstance(found, str) else found
        return self.renderer.decode(self.renderer.start(messages), keep_special=True)

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        key = self.settings.input_key
        if not isinstance(row.get(key), (str, list)):
            raise ConfigError(f"{where}: {key} must be text or a list of messages, found {row.get(key)!r}")
        return super()._task(row, where)


def _text(said: Any, name: str, function: str) -> str:
    if not isinstance(said, Mapping) or not isinstance(said.get(name), str):
        raise EnvironmentFault(f"{function} must return a mapping with the text {name!r}, got {said!r}")
    return str(said[name])


def _number(said: Any, name: str) -> float:
    """Return a number, which may come as a tensor or a list of one."""
    if not isinstance(said, Mapping):
        raise EnvironmentFault(f"step must return a mapping, got {said!r}")
    value = said.get(name)
    value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"step returned {value!r} for {name!r}, no number") from error
    if not math.isfinite(number):
        raise EnvironmentFault(f"step returned {number} for {name!r}, which must be finite")
    return number
