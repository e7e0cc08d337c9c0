"""Tools as typed functions: what the model is told, which calls are carried out, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import gateway_rig
import msgspec
import pytest
import trio
from scripted import ScriptedSampler, write_chat_files

from asyncrl.coding.native_calls import MAX_CALLS
from asyncrl.environments.tools import Tool, ToolEnvironment, ToolRefusal, ToolSettings
from asyncrl.errors import ConfigError
from asyncrl.rollout import Episode, Grade, TaskSource
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

TASKS = [Task(task_id="one", environment="house")]


@dataclass
class Lamp:
    """One lamp."""

    room: str
    watts: int = 40


def switch(lamp: Lamp, state: Literal["on", "off"], times: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1) -> str:
    """Switches a lamp."""
    if lamp.room == "cellar":
        raise ToolRefusal("there is no light in the cellar")
    return f"{lamp.room} {state} {times} {lamp.watts}"


async def look(episode: Episode) -> list[str]:
    """Looks around."""
    await trio.lowlevel.checkpoint()
    return [episode.task.task_id]


def echo(text: str) -> str:
    """Says it again."""
    return text


def fuse(episode: Episode) -> None:
    """Blows a fuse."""
    raise RuntimeError("no current")


def nothing(episode: Episode) -> None:
    """Does nothing."""


class House(ToolEnvironment):
    name = "house"

    def __init__(self, renderer: ChatRenderer, **options: Any) -> None:
        tools = [switch, look, echo, fuse, nothing]
        settings = ToolSettings(max_retries=0, **{"max_tokens": 400, **options})
        super().__init__(
            renderer=renderer, tools=tools, tasks=TaskSource(lambda epoch: TASKS, seed=0), settings=settings
        )

    def ask(self, episode: Episode) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": "Let there be light."}]

    async def grade(self, episode: Episode) -> Grade:
        return Grade(reward=float(len(episode.turns)))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def play(renderer: ChatRenderer, *replies: str, **options: Any) -> tuple[Trajectory, str]:
    """Return the trajectory of an episode, and its whole text."""

    async def main() -> Trajectory:
        environment = House(renderer, **options)
        sampler = ScriptedSampler(renderer, lambda trajectory_id, number: replies[number])
        (found,) = await environment.collect_trajectories(TASKS[0], sampler, group_id="0", group_size=1)
        return found

    found = trio.run(main)
    return found, renderer.decode(found.segments[0].token_ids) if found.segments else ""


@pytest.fixture
def plain(tmp_path: Path) -> ChatRenderer:
    """A model whose template knows no tools."""
    return ChatRenderer.load(write_chat_files(tmp_path))


@pytest.fixture
def taught(tmp_path: Path) -> ChatRenderer:
    """A model whose template shows its tools."""
    return gateway_rig.make_renderer(tmp_path)


def test_the_schema_is_what_annotations_and_docstring_say() -> None:
    assert Tool.of(switch).schema == {
        "type": "function",
        "function": {
            "name": "switch",
            "description": "Switches a lamp.",
            "parameters": {
                "type": "object",
                "properties": {
                    "lamp": {"$ref": "#/$defs/Lamp"},
                    "state": {"enum": ["off", "on"]},
                    "times": {"type": "integer", "minimum": 1, "maximum": 3, "default": 1},
                },
                "required": ["lamp", "state"],
                "additionalProperties": False,
                "$defs": {
                    "Lamp": {
                        "title": "Lamp",
                        "description": "One lamp.",
                        "type": "object",
                        "properties": {"room": {"type": "string"}, "watts": {"type": "integer", "default": 40}},
                        "required": ["room"],
                    }
                },
            },
        },
    }
    assert Tool.of(look).schema["function"]["parameters"]["properties"] == {}  # the episode is not the model's to give


def test_calls_are_carried_out_in_order_with_values_of_their_types(plain: ChatRenderer) -> None:
    lamp = '{"lamp": {"room": "hall"}, "state": "on", "times": 2}'
    found, text = play(plain, f"Hm. {call('switch', lamp)} {call('look')}{call('nothing')}", "It is light.")
    assert (found.reward, found.status) == (2.0, TrajectoryStatus.COMPLETED)
    assert found.extras == {"tool_calls": 3, "malformed": 0}
    assert text.index("hall on 2 40") < text.index('["one"]') < text.index("done")


def test_the_template_tells_of_tools_where_it_can_and_a_message_does_where_not(
    plain: ChatRenderer, taught: ChatRenderer
) -> None:
    _, told = play(plain, "No.")
    assert told.index("Call a tool with JSON") < told.index('"name": "switch"') < told.index("Let there be light.")
    _, text = play(taught, call("echo", '{"text": "hello"}'), "No.")
    assert text.startswith("Call <tool_call>")
    assert "Call a tool with JSON" not in text
    assert "tool: hello" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("<tool_call>{not json}</tool_call>", "error: the call is not JSON"),
        (call("swich"), "error: there is no tool 'swich'; the tools are switch, look, echo, fuse, nothing"),
        (call("switch", '{"lamp": {"room": "hall"}}'), "error: switch: Object missing required field `state`"),
        (
            call("switch", '{"lamp": {"room": "hall"}, "state": "on", "times": 9}'),
            "error: switch: Expected `int` <= 3 - at `$.times`",
        ),
        (call("switch", '{"lamp": {"room": 1}, "state": "on"}'), "error: switch: Expected `str`, got `int`"),
        (call("echo", '{"text": "a", "loud": true}'), "error: echo: Object contains unknown field `loud`"),
        (call("look", '{"episode": 1}'), "error: look: Object contains unknown field `episode`"),
        (call("echo", '{"text": "\\ud800"}'), "error: echo: an argument holds half a character"),
        (
            "<tool_call>" + '{"name": "echo", "arguments": {"text": ' + "[" * 99_999,
            "error: the call is nested too deeply",
        ),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_answered_and_counted(plain: ChatRenderer, asked: str, said: str) -> None:
    found, text = play(plain, asked, "So be it.", max_tokens=200_000, max_episode_tokens=400_000)
    assert said in text
    assert found.extras == {"tool_calls": 0, "malformed": 1}
    assert found.reward == 2.0


def test_a_refusal_is_an_answer_and_any_other_error_masks_the_episode(plain: ChatRenderer) -> None:
    found, text = play(plain, call("switch", '{"lamp": {"room": "cellar"}, "state": "on"}'), "Dark.")
    assert "error: there is no light in the cellar" in text
    assert found.extras == {"tool_calls": 1, "malformed": 0}
    broken, _ = play(plain, call("fuse"))
    assert (broken.reward, broken.status) == (None, TrajectoryStatus.FAILED_ENVIRONMENT)
    assert "fuse raised RuntimeError: no current" in broken.detail


def test_limits_hold(plain: ChatRenderer) -> None:
    found, text = play(plain, call("look") * (MAX_CALLS + 3), "So be it.", max_tokens=2000)
    assert text.count('["one"]') == MAX_CALLS
    assert "the others were not looked at" in text
    assert found.extras == {"tool_calls": MAX_CALLS, "malformed": 1}
    cut, _ = play(plain, call("look") * 3, max_tool_calls=2)
    assert (cut.status, cut.reward, cut.extras["tool_calls"]) == (TrajectoryStatus.TRUNCATED_TURNS, 1.0, 2)
    long = "x" * 300
    _, text = play(plain, call("echo", f'{{"text": "{long}"}}'), "So be it.", output_characters=80)
    assert "the middle is left out; 300 characters in all" in text


def untold(a: int) -> int:
    return a


def unnamed(*a: int) -> int:
    """Says it again."""
    return a[0]


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Says it again."""
    return a  # type: ignore[no-any-return]


def unspeakable(a: Callable[[], int]) -> int:
    """Calls it."""
    return a()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untold, "untold has no docstring"),
        (unnamed, r"\*a: 'int' cannot be given by name"),
        (untyped, "a has no annotation"),
        (unspeakable, "(?s)tool unspeakable: .*Callable.* is not supported"),
    ],
)
def test_a_function_that_no_model_could_be_told_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tool.of(function)


@pytest.mark.parametrize(("option", "value"), [("max_tool_calls", 0), ("output_characters", 79)])
def test_settings_out_of_range_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be >= {value + 1}, got {value}"):
        ToolSettings(**{option: value})
