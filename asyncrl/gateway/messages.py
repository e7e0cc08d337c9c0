"""Chat messages as chat templates read them, from OpenAI's form; and the reply in that form."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.gateway.http import Refused
from asyncrl.gateway.sampling import Choice
from asyncrl.gateway.settings import ToolFormat
from asyncrl.gateway.tool_calls import arguments_of, parse
from asyncrl.tokens import Message

_ROLES = {"developer": "system", "function": "tool"}
_SHOWN_ONLY = ("refusal", "annotations", "audio", "function_call", "index", "reasoning", "token_ids")
"""What replies carry and agents send back, and what no template reads."""


def messages_of(found: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages whose content is text and whose tool calls' arguments are objects. Raises: Refused."""
    if not found:
        raise Refused(400, "messages must hold at least one message")
    return [_message(message, place) for place, message in enumerate(found)]


def _message(found: Mapping[str, Any], place: int) -> Message:
    where, role = f"messages[{place}]", found.get("role")
    if not isinstance(role, str) or not role:
        raise Refused(400, f"{where}.role must be a string, got {role!r}")
    message: dict[str, Any] = {
        key: value for key, value in found.items() if value is not None and key not in _SHOWN_ONLY
    }
    message |= {"role": _ROLES.get(role, role), "content": text_of(found.get("content"), where)}
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise Refused(400, f"{where}.tool_calls must be a list, got {calls!r}")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content. Raises: Refused for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where}.content must be a string or a list of parts, got {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(400, f"{where}.content has a part of type {kind!r}: only text can be read")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{where} must be an object with function.name")
    return tool_call(function["name"], arguments_of(function.get("arguments") or {}), str(call.get("id") or ""))


def tool_call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    """Return a call as templates read it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def reply_of(choice: Choice, form: ToolFormat, *, offered: bool) -> Message:
    """Return what a model sampled as a message; calls are looked for where tools were `offered`."""
    text, calls = parse(choice.text, form) if offered else (choice.text, [])
    if not calls:
        return {"role": "assistant", "content": choice.text}
    found = [tool_call(name, arguments_of(arguments)) for name, arguments in calls]
    return {"role": "assistant", "content": text, "tool_calls": found}


def content_after(shown: str, message: Message) -> str:
    """Return a reply's text where its beginning has been shown, before anyone knew that calls follow it."""
    content: str = message["content"]
    if "tool_calls" not in message or not shown:
        return content
    return shown + content.removeprefix(shown.strip())
