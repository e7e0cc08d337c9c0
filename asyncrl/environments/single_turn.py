"""Prompts from a file, one reply each, and a reward function of your own.

[environment]
name = "single_turn"

[environment.options]
path = "questions.jsonl"
reward = "my_rewards:number_is_right"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.foreign import call, load_function
from asyncrl.environments.rewards import grade_of
from asyncrl.environments.rows import check_percent, read_split, task_id_of
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxBackend
from asyncrl.rollout import Episode, Grade, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnSettings(RolloutSettings):
    """Which file is asked, and who says what a reply is worth."""

    path: Path
    """JSON lines. `prompt` is text, or `messages` a list of {"role", "content"}; `id` names the line, else its number
    does. The rest is the reward function's."""
    reward: str
    """"package.module:function": it is given the reply and the line's object, and returns a number, or a mapping with
    `reward` and the parts that are to be shown beside it. It may be async; what it raises masks the episode."""
    max_turns: int = 1
    max_tokens: int = 256
    max_episode_tokens: int = 2048
    held_out_percent: int = 10
    """Share of the lines that is never trained on; chosen by their ids alone."""
    system: str = ""
    """System message before a `prompt`; empty leaves it to the model's template."""
    reply_prefix: str = ""
    """How each reply begins: put into the model's mouth, given to the reward function, never trained on."""
    epochs: int = 0
    """Times that each training line is asked before the tasks are used up; 0 never ends."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        RolloutSettings.__post_init__(self)
        if self.max_turns != 1:
            raise ConfigError(f"max_turns must be 1 here, got {self.max_turns} ([environment.options])")
        check_percent(self.held_out_percent)
        if self.epochs < 0:
            raise ConfigError(f"epochs must be >= 0, got {self.epochs} ([environment.options])")
        load_function(self.reward, setting="reward")


class SingleTurnEnvironment(MultiTurnEnvironment):
    """Asks the lines of a file, and pays what a function of your own says of the reply."""

    name = "single_turn"
    settings_type = SingleTurnSettings

    def __init__(
        self, settings: SingleTurnSettings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int = 0
    ) -> None:
        """Raises: ConfigError naming the file and line that cannot be read, or a split without tasks to train on."""
        del sandboxes  # a reward function is the user's own, and runs here
        split = read_split(settings.path, self._task, held_out_percent=settings.held_out_percent)
        self._all = split.all_tasks
        super().__init__(
            renderer=renderer,
            tasks=TaskSource(lambda epoch: split.train, seed=seed, epochs=settings.epochs),
            held_out=split.held_out,
            settings=settings,
        )
        self.settings = settings
        self.reply_prefix = settings.reply_prefix
        self._reward = load_function(settings.reward, setting="reward")

    def all_tasks(self) -> Sequence[Task]:
        """Return the tasks of both splits, in the file's order."""
        return self._all

    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the line's messages."""
        row = episode.task.data
        if "messages" in row:
            return row["messages"]  # type: ignore[no-any-return]
        asked: Message = {"role": "user", "content": row["prompt"]}
        return [{"role": "system", "content": self.settings.system}, asked] if self.settings.system else [asked]

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Take the reply as it is."""
        return StepOutcome(done=True)

    async def grade(self, episode: Episode) -> Grade:
        """Return what the reward function says of the reply.

        Raises: EnvironmentFault where it raised, or returned no number.
        """
        said = await call(self._reward, episode.replies[-1], episode.task.data)
        return grade_of(said, self.settings.reward)

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        messages = row.get("messages")
        if messages is None and not isinstance(row.get("prompt"), str):
            raise ConfigError(f"{where}: prompt must be text, or messages a list, found {row.get('prompt')!r}")
        if messages is not None and not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
            raise ConfigError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
        return Task(task_id=task_id_of(row, where), environment=self.name, data=row)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
