"""Tool calls: which tools an agent has, how their calls are written, and how they are read out of its replies.

| format | a call | goes with |
|---|---|---|
| native | `<tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>` | models that were taught tools |
| fenced | a block between fences, whose first line names the tool and its path | any other, base models too |

Whatever else a reply holds is the agent talking to itself. What looks like a call and is none is malformed, and says
why; it takes its place among the others, so that the answers come in the order of the calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.coding.native_calls import MAX_CALLS, TOO_MANY, Malformed, native_calls, write_native


class CallFormat(StrEnum):
    """How an agent writes its calls."""

    NATIVE = "native"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One thing that an agent can do."""

    name: str
    says: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Name -> what it is; all are text, and all are required."""
    fenced: str = ""
    """An example of the block's inside, the first line's path included."""


_PATH = "Path of a file, relative to the working directory."
_DIVIDER = "======="

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="run",
            says="Runs commands in a shell that stays open.",
            arguments={"command": "What the shell is to run."},
            fenced="\npython3 examples.py",
        ),
        Tool(name="read", says="Shows a file.", arguments={"path": _PATH}, fenced=" notes.txt"),
        Tool(
            name="write",
            says="Writes a whole file.",
            arguments={"path": _PATH, "content": "All that it is to hold."},
            fenced=" notes.txt\nthe file's new content",
        ),
        Tool(
            name="edit",
            says="Replaces text that occurs exactly once in a file.",
            arguments={"path": _PATH, "old": "The text as it is.", "new": "What is to stand there instead."},
            fenced=f" notes.txt\nold text\n{_DIVIDER}\nnew text",
        ),
        Tool(name="submit", says="Ends the work; the files are judged as they are then."),
    )
}


CHANGING = frozenset({"write", "edit"})
"""Tools that are for changing files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that can be carried out.

    Example:
        >>> read_calls("I look.\\n```run\\nls\\n```\\n", CallFormat.FENCED)
        (ToolCall(name='run', arguments={'command': 'ls'}),)
    """

    name: str
    """One of `TOOLS`."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """All that the tool wants, and nothing else."""


_MAX_ARGUMENT_CHARACTERS = 2**20  # as large as the largest file that is read back
_NO_CALL = Malformed(reason=f"no tool was called; the tools are {', '.join(TOOLS)}")


def read_calls(text: str, form: CallFormat) -> tuple[ToolCall | Malformed, ...]:
    """Return the calls of a reply in order, never none: a reply without a call is malformed itself."""
    found: list[ToolCall | Malformed] = []
    for call in native_calls(text, _checked) if form is CallFormat.NATIVE else _fenced_calls(text):
        if len(found) == MAX_CALLS:
            return (*found, TOO_MANY)
        found.append(call)
    return tuple(found) or (_NO_CALL,)


def _checked(name: str, arguments: Mapping[str, Any]) -> ToolCall | Malformed:
    """Return the call, or what is wrong with it."""
    tool = TOOLS.get(name)
    if tool is None:
        return Malformed(reason=f"there is no tool {name[:40]!r}; the tools are {', '.join(TOOLS)}")
    missing = [argument for argument in tool.arguments if argument not in arguments]
    unknown = [argument for argument in arguments if argument not in tool.arguments]
    if missing or unknown:
        wanted = ", ".join(tool.arguments) or "no arguments"
        what = f"lacks {', '.join(missing)}" if missing else f"has no argument {unknown[0][:40]!r}"
        return Malformed(reason=f"{name} {what}; it takes {wanted}")
    for argument, value in arguments.items():
        if not isinstance(value, str):
            return Malformed(reason=f"{argument} of {name} must be text")
        if len(value) > _MAX_ARGUMENT_CHARACTERS:
            return Malformed(reason=f"{argument} of {name} is longer than {_MAX_ARGUMENT_CHARACTERS} characters")
        if "\0" in value and argument != "content":
            return Malformed(reason=f"{argument} of {name} holds a NUL character")
        if not _is_encodable(value):
            return Malformed(reason=f"{argument} of {name} holds half a character (a lone surrogate)")
    if not arguments.get("path", "x").strip():
        return Malformed(reason=f"path of {name} is empty")
    if not arguments.get("old", "x"):
        return Malformed(reason="old of edit is empty")
    return ToolCall(name=name, arguments=dict(arguments))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- fenced ---------------------------------------------------------------------------------------------------

_FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^\s`]*)")


def _fenced_calls(text: str) -> Iterator[ToolCall | Malformed]:
    """Yield what the blocks say whose first word is a tool.

    A block ends at a line of at least as many backticks as it began with, so that longer fences hold shorter ones; or
    at backticks at the very end of the reply, where a model that stops at its fence stops.
    """
    lines = text.rstrip().split("\n")
    place = 0
    while place < len(lines):
        opened = _FENCE.match(lines[place])
        place += 1
        if opened is None:
            continue
        fence, word = opened.groups()
        rest = lines[place - 1][opened.end() :].strip()
        body: list[str] | None
        if rest.endswith(fence):
            body, rest = [], rest.rstrip("`").rstrip()
        else:
            body, place = _body(lines, place, fence)
        if word in TOOLS:
            yield Malformed(reason=f"the block of {word} is not closed") if body is None else _block(word, rest, body)


def _body(lines: Sequence[str], place: int, fence: str) -> tuple[list[str] | None, int]:
    """Return a block's lines, None for one that is not closed, and the line after its end."""
    for end in range(place, len(lines)):
        line = lines[end].strip()
        if len(line) >= len(fence) and not line.strip("`"):
            return list(lines[place:end]), end + 1
    if place < len(lines) and lines[-1].endswith(fence):
        return [*lines[place:-1], lines[-1].rstrip("`")], len(lines)
    return None, len(lines)


def _block(word: str, rest: str, body: Sequence[str]) -> ToolCall | Malformed:
    """Return the call of a block: the rest of its first line is the path, or the first line of the commands."""
    if word == "run":
        command = "\n".join([rest, *body]).strip("\n")
        return (
            _checked(word, {"command": command}) if command.strip() else Malformed(reason="the block of run is empty")
        )
    if word == "write":
        return _checked(word, {"path": rest, "content": "".join(f"{line}\n" for line in body)})
    if word == "edit":
        if list(body).count(_DIVIDER) != 1:
            return Malformed(reason=f"the block of edit must hold one line {_DIVIDER} between old and new text")
        place = list(body).index(_DIVIDER)
        return _checked(word, {"path": rest, "old": "\n".join(body[:place]), "new": "\n".join(body[place + 1 :])})
    if "".join(body).strip():
        return Malformed(reason=f"the block of {word} must be empty")
    if word == "submit" and rest:
        return Malformed(reason="submit takes no arguments")
    return _checked(word, {"path": rest} if word == "read" else {})


# --- writing --------------------------------------------------------------------------------------------------


def write_call(call: ToolCall, form: CallFormat) -> str:
    """Return the text of a call, as `read_calls` reads it. Raises: ValueError for an edit that no block can hold."""
    arguments = call.arguments
    if form is CallFormat.NATIVE:
        return write_native(call.name, arguments)
    inside = ""
    if call.name == "run":
        inside = f"\n{arguments['command']}"
    elif "path" in arguments:
        inside = f" {arguments['path']}"
    if call.name == "write":
        inside += "\n" + arguments["content"].removesuffix("\n")
    elif call.name == "edit":
        if _DIVIDER in f"{arguments['old']}\n{arguments['new']}".split("\n"):
            raise ValueError(f"the block of an edit cannot hold a line {_DIVIDER} besides its own")
        inside += f"\n{arguments['old']}\n{_DIVIDER}\n{arguments['new']}"
    longest = max(map(len, re.findall("`+", inside)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{call.name}{inside}\n{fence}"


def describe_tools(form: CallFormat) -> str:
    """Return what an agent is told of the tools and of how to call them, where its template does not."""
    if form is CallFormat.NATIVE:
        example = write_call(ToolCall(name="run", arguments={"command": "ls"}), form)
        lines = [f"{t.name}({', '.join(t.arguments)}): {t.says}" for t in TOOLS.values()]
        return "\n".join([f"Call a tool with JSON, like this:\n{example}\nThe tools:", *lines])
    blocks = [f"{t.says}\n```{t.name}{t.fenced}\n```" for t in TOOLS.values()]
    return "\n".join(["Call a tool with one of these blocks:", *blocks])


def tool_schemas() -> list[dict[str, Any]]:
    """Return the tools as OpenAI's function calling describes them, for a chat template that shows tools itself."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.says,
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": says} for name, says in tool.arguments.items()
                    },
                    "required": list(tool.arguments),
                },
            },
        }
        for tool in TOOLS.values()
    ]
