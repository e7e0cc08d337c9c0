"""Tools as typed Python functions: the model is shown what their annotations and docstrings say, and calls them.

Annotations become a JSON schema, and a call's arguments are checked against them, both by msgspec, which the rest of
asyncrl reads JSON with.
"""

from __future__ import annotations

import abc
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.coding.native_calls import MAX_CALLS, TOO_MANY, Malformed, native_calls, write_native
from asyncrl.coding.prompts import answered
from asyncrl.coding.tool_use import shorten
from asyncrl.coding.tools import CallFormat
from asyncrl.environments.foreign import call
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.rollout import Episode, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task, TrajectoryStatus

Function = Callable[..., Any]


class ToolRefusal(AsyncRLError):  # noqa: N818 - it is no error of the environment
    """Raised by a tool for what the model asked wrong: its text is the answer, and the episode goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that a model may call.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     "Returns the sum."
        ...     return a + b
        >>> tool = Tool.of(add)
        >>> tool.schema["function"]["parameters"]["required"]
        ['a']
        >>> tool.check({"a": "two"})
        Malformed(reason='add: Expected `int`, got `str` - at `$.a`')
    """

    function: Function
    arguments: type[msgspec.Struct]
    """What the model gives."""
    schema: Mapping[str, Any]
    """As OpenAI's function calling describes it."""
    episode_name: str = ""
    """The parameter that is given the episode, which the model knows nothing of; "" without one."""

    @property
    def name(self) -> str:
        """As the model calls it."""
        return self.function.__name__

    @classmethod
    def of(cls, function: Function) -> Tool:
        """Return the tool that a function is.

        Each parameter has an annotation that JSON can say, and may have a default; one that is annotated `Episode` is
        given the episode. `Annotated[int, msgspec.Meta(description="...", ge=0)]` says more of a parameter.
        Raises: ConfigError naming what the model could not be told.
        """
        name = function.__name__
        hints = typing.get_type_hints(function, include_extras=True)
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        episode_name = ""
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"tool {name}: {parameter} cannot be given by name")
            if parameter.name not in hints:
                raise ConfigError(f"tool {name}: {parameter.name} has no annotation")
            hint = hints[parameter.name]
            if hint is Episode:
                episode_name = parameter.name
            elif parameter.default is parameter.empty:
                fields.append((parameter.name, hint))
            else:
                fields.append((parameter.name, hint, parameter.default))
        says = inspect.getdoc(function)
        if not says:
            raise ConfigError(f"tool {name} has no docstring: it is what the model is told of it")
        try:
            arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
            (_,), kinds = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tool {name}: {error}") from error
        parameters = {key: value for key, value in kinds.pop(name).items() if key != "title"}
        described = {"name": name, "description": says, "parameters": parameters | ({"$defs": kinds} if kinds else {})}
        return cls(
            function=function,
            arguments=arguments,
            schema={"type": "function", "function": described},
            episode_name=episode_name,
        )

    def check(self, arguments: Mapping[str, Any]) -> Wanted | Malformed:
        """Return the call that these arguments make, or what is wrong with them."""
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
            given = msgspec.convert(arguments, self.arguments)
        except UnicodeEncodeError:
            return Malformed(reason=f"{self.name}: an argument holds half a character (a lone surrogate)")
        except msgspec.ValidationError as error:
            return Malformed(reason=f"{self.name}: {error}")
        return Wanted(tool=self, given=msgspec.structs.asdict(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A call that can be carried out."""

    tool: Tool
    given: Mapping[str, Any]

    async def answer(self, episode: Episode) -> str:
        """Return what the function says, as text. Raises: ToolRefusal; EnvironmentFault for all else that it raises."""
        own = {self.tool.episode_name: episode} if self.tool.episode_name else {}
        said = await call(self.tool.function, **self.given, **own)
        if isinstance(said, str):
            return said
        return "done" if said is None else msgspec.json.encode(said).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings(RolloutSettings):
    """Limits of an episode with tools."""

    max_turns: int = 8
    max_tokens: int = 256
    max_episode_tokens: int = 4096
    max_tool_calls: int = 24
    """Of an episode, malformed ones not included; one more ends it, to be graded as it stands."""
    output_characters: int = 4000
    """That are shown of an answer; of a longer one, half of them from either end."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        RolloutSettings.__post_init__(self)
        for name, lowest in (("max_tool_calls", 1), ("output_characters", 80)):
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ([environment.options])")


class ToolEnvironment(MultiTurnEnvironment):
    """An environment whose model may call functions: `ask` asks, `grade` says what the last reply is worth.

    A reply without a call ends the episode. Of several calls all are carried out, in order, and each is answered; a
    malformed one is answered by what is wrong with it, and counted (`malformed` of the extras, beside `tool_calls`).

    Example:
        >>> class Sums(ToolEnvironment):
        ...     name = "sums"
        ...     def ask(self, episode):
        ...         return [{"role": "user", "content": "What is 17 + 25?"}]
        ...     async def grade(self, episode):
        ...         return Grade(reward=float("42" in episode.replies[-1]))
    """

    def __init__(
        self,
        *,
        renderer: ChatRenderer,
        tools: Sequence[Function],
        tasks: TaskSource,
        held_out: Sequence[Task] = (),
        settings: ToolSettings | None = None,
    ) -> None:
        """Raises: ConfigError for a function that is no tool, or a template that cannot show tools it says it can."""
        self.tools = {tool.name: tool for tool in map(Tool.of, tools)}
        if not self.tools or len(self.tools) < len(tools):
            raise ConfigError(f"tools must be functions of different names, got {[tool.__name__ for tool in tools]}")
        self.settings = settings or ToolSettings()
        schemas = [tool.schema for tool in self.tools.values()]
        self._template_tells = renderer.takes_tools
        super().__init__(
            renderer=renderer.with_tools(schemas) if renderer.takes_tools else renderer,
            tasks=tasks,
            held_out=held_out,
            settings=self.settings,
        )

    @abc.abstractmethod
    def ask(self, episode: Episode) -> Sequence[Message]:
        """Return the messages that ask `episode.task`; what tools there are is told besides."""

    def start(self, episode: Episode) -> Sequence[Message]:
        """Return the messages of `ask`, with the tools before them where the model's template does not tell them."""
        episode.extras |= {"tool_calls": 0, "malformed": 0}
        asked = self.ask(episode)
        if self._template_tells:
            return asked
        first, *rest = asked
        told = describe(self.tools.values())
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{told}"}, *rest]
        return [{"role": "system", "content": told}, *asked]

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        """Carry out the calls of a reply, and answer each."""
        answers: list[str] = []
        for number, found in enumerate(native_calls(self.spoken(episode), self._checked)):
            if number == MAX_CALLS:
                found = TOO_MANY
            if isinstance(found, Malformed):
                episode.extras["malformed"] += 1
                answers.append(f"error: {found.reason}")
            elif episode.extras["tool_calls"] == self.settings.max_tool_calls:
                return StepOutcome(done=True, status=TrajectoryStatus.TRUNCATED_TURNS)
            else:
                episode.extras["tool_calls"] += 1
                answers.append(await self._answer(found, episode))
            if number == MAX_CALLS:
                break
        if not answers:
            return StepOutcome(done=True)
        return StepOutcome(done=False, messages=answered(answers, CallFormat.NATIVE, by_template=self._template_tells))

    async def _answer(self, wanted: Wanted, episode: Episode) -> str:
        try:
            said = await wanted.answer(episode)
        except ToolRefusal as refusal:
            said = f"error: {refusal}"
        # what a function made of half a character, too, must be text that can be tokenised
        return shorten(said.encode(errors="replace").decode(), self.settings.output_characters)

    def _checked(self, name: str, arguments: Mapping[str, Any]) -> Wanted | Malformed:
        tool = self.tools.get(name)
        if tool is None:
            return Malformed(reason=f"there is no tool {name[:40]!r}; the tools are {', '.join(self.tools)}")
        return tool.check(arguments)


def describe(tools: Iterable[Tool]) -> str:
    """Return what a model is told of its tools where its template does not tell it."""
    form = write_native("NAME", {"ARGUMENT": "VALUE"})
    shown = [json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        [f"Call a tool with JSON, like this:\n{form}\nThe tools, with the JSON schemas of their arguments:", *shown]
    )
