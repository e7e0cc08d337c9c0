"""What may be set about coding agents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.coding.bundled import resolve_task_options
from asyncrl.coding.rewards import RewardSettings
from asyncrl.coding.tools import CallFormat, tool_schemas
from asyncrl.environments.chat import read_template
from asyncrl.errors import ConfigError
from asyncrl.rollout import RolloutSettings
from asyncrl.tokens import ChatRenderer

_WHERE = "[environment.options]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgentSettings(RolloutSettings):
    """Which tasks are asked, how the agent calls its tools, within which limits, and how it is paid."""

    tasks: str = "templates"
    """A name of the TASK_SETS table, or "package.module:Class"."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """The set's own settings."""
    leave_out: Path | None = None
    """A file of tasks that are never asked: verdicts of `asyncrl environments validate --keep`, or an id a line."""
    max_turns: int = 12
    max_tokens: int = 512
    max_episode_tokens: int = 4096
    episode_timeout_s: float = 600.0
    grading_timeout_s: float = 900.0
    """Of the judging of one step; more than the task's own checks may take."""
    max_tool_calls: int = 24
    """Of an episode, malformed ones not included; one more ends it, to be graded as it stands."""
    tool_timeout_s: float = 30.0
    """Seconds after which one command is ended, where the task's own limit is not shorter."""
    output_characters: int = 4000
    """That are shown of an output; of a longer one, half of them from either end."""
    calls: CallFormat = CallFormat.NATIVE
    """How tools are called: "native" is JSON between tool_call tags, which the model's template explains where it
    takes tools; "fenced" is blocks between fences, for models that never learnt the other."""
    begin_in_call: bool = False
    """Replies begin behind an opening fence, or tag, that is put there for the model, and end with the closing one
    where that is one of the model's tokens: one call a reply, and no words besides."""
    template: str = ""
    """The chat template, as in [environment.chat]; empty for what is set there, or the model's own."""
    system: str = "You work on code in a sandbox, by calling tools."
    """System message, before the tools and limits; where it is empty, those stand in the user's first message."""
    shown_file_characters: int = 0
    """Of the task's files, in the order of their names, those that fit into so many characters are in the prompt."""
    check_command: str = ""
    """Shell text that shows how far the work is, run after each reply that wrote or edited a file; its answer is added
    to the others. It is the agent's to see, so no hidden check; empty leaves the agent to look for itself."""
    max_open: int = 48
    """Episodes that have a sandbox at a time, others wait; below max_open of [sandbox], since judges need some too."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    """Weights of the reward's parts."""
    epochs: int = 0
    """Times that each training task is asked before the tasks are used up; 0 never ends."""

    @property
    def pays_turns(self) -> bool:
        """Whether single turns have rewards: they have none."""
        return False

    @property
    def sandboxes_held(self) -> int:
        """Sandboxes that episodes hold while they wait for others."""
        return self.max_open

    def rendering(self, renderer: ChatRenderer) -> ChatRenderer:
        """Return the renderer of episodes, and of their demonstrations: with the template and tools as they are set.

        Raises: ConfigError where the template cannot be had, or refuses the tools.
        """
        if self.template:
            renderer = renderer.with_template(read_template(self.template, where=_WHERE))
        if not self.tells_tools_by_template(renderer):
            return renderer
        renderer = renderer.with_tools(tool_schemas())
        try:
            renderer.extend([{"role": "tool", "content": "probe"}], ended=True)
        except ConfigError as error:
            raise ConfigError(f'{error}; set calls = "fenced" ({_WHERE})') from None
        return renderer

    def tells_tools_by_template(self, renderer: ChatRenderer) -> bool:
        """Return whether the template tells the model of its tools, so that the prompt need not."""
        return self.calls is CallFormat.NATIVE and renderer.takes_tools

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        RolloutSettings.__post_init__(self)
        resolve_task_options(self.tasks, self.task_options)
        least = {
            "max_tool_calls": 1,
            "output_characters": 80,  # less shows neither what failed nor where
            "shown_file_characters": 0,
            "max_open": 1,
            "epochs": 0,
        }
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ({_WHERE})")
        if not (math.isfinite(self.tool_timeout_s) and 0 < self.tool_timeout_s <= self.episode_timeout_s):
            raise ConfigError(
                f"tool_timeout_s must be > 0 and at most episode_timeout_s = {self.episode_timeout_s:g}, got "
                f"{self.tool_timeout_s} ({_WHERE})"
            )
