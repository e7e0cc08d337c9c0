"""Tool calls in what a model wrote. What is not one, or no JSON, stays text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from asyncrl.gateway.live import begun_at_end
from asyncrl.gateway.settings import ToolFormat

_HERMES_TAG = "<tool_call>"
_LLAMA_TAG = "<|python_tag|>"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def format_of(template: str, asked: ToolFormat) -> ToolFormat:
    """Return how a model with this chat template writes its calls."""
    if asked is not ToolFormat.AUTO:
        return asked
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "tools" in template and '"parameters"' in template:
        return ToolFormat.LLAMA_JSON
    return ToolFormat.NONE


def parse(text: str, form: ToolFormat) -> tuple[str, list[tuple[str, str]]]:
    """Return the text beside the calls, and each call's name and arguments as JSON text.

    Example:
        >>> parse('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ToolFormat.HERMES)
        ('Hm.', [('add', '{"a":1}')])
        >>> parse('<tool_call>{"name": "add", "argu', ToolFormat.HERMES)
        ('<tool_call>{"name": "add", "argu', [])
    """
    return _PARSERS[form](text)


def _hermes(text: str) -> tuple[str, list[tuple[str, str]]]:
    found = [_call(match[1], "arguments") for match in _HERMES.finditer(text)]
    calls = [call for call in found if call is not None]
    if not found or len(calls) < len(found):  # one that cannot be read makes the whole reply text: none is lost
        return text, []
    return _HERMES.sub("", text).strip(), calls


def _llama_json(text: str) -> tuple[str, list[tuple[str, str]]]:
    pieces = [piece for piece in text.removeprefix(_LLAMA_TAG).split(";\n") if piece.strip()]
    found = [_call(piece, "parameters") for piece in pieces]
    calls = [call for call in found if call is not None]
    return ("", calls) if calls and len(calls) == len(found) else (text, [])


def sure_of(text: str, form: ToolFormat) -> int:
    """Return how many characters of a text in the making are surely no tool call, whatever follows.

    Example:
        >>> sure_of("Hm. <tool", ToolFormat.HERMES), sure_of(' {"name"', ToolFormat.LLAMA_JSON)
        (4, 0)
    """
    if form is ToolFormat.HERMES:
        place = text.find(_HERMES_TAG)
        return place if place >= 0 else len(text) - begun_at_end(text, _HERMES_TAG)
    if form is ToolFormat.LLAMA_JSON:
        begun = text.lstrip()
        is_call = begun.startswith(("{", _LLAMA_TAG)) or _LLAMA_TAG.startswith(begun)
        return 0 if is_call else len(text)
    return len(text)


def _call(text: str, arguments_key: str) -> tuple[str, str] | None:
    try:
        call = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, Mapping):
        return None
    name, arguments = call.get("name"), call.get(arguments_key, {})
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return None
    return name, msgspec.json.encode(arguments).decode()


_PARSERS: Mapping[ToolFormat, Callable[[str], tuple[str, list[tuple[str, str]]]]] = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.LLAMA_JSON: _llama_json,
    ToolFormat.NONE: lambda text: (text, []),
}


def arguments_of(text: Any) -> Any:
    """Return a call's arguments as a chat template expects them: an object where the text is one, else the text."""
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
