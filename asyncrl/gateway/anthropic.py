"""Anthropic's API: `POST /v1/messages`, streamed or not, with tools."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from asyncrl.gateway.fields import Fields
from asyncrl.gateway.http import Answer, Refused, event, json_answer
from asyncrl.gateway.live import Live
from asyncrl.gateway.messages import content_after, messages_of, reply_of, text_of, tool_call
from asyncrl.gateway.model import ServedModel
from asyncrl.gateway.openai import offered_tools, response_headers, usage_of
from asyncrl.gateway.sampling import Choice, Wanted, version_names, wanted_of
from asyncrl.gateway.session import Session
from asyncrl.gateway.streaming import Piece, Stream
from asyncrl.gateway.tool_calls import sure_of
from asyncrl.protocols import Watch
from asyncrl.tokens import Message
from asyncrl.types import TokenIds

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 410: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(refused: Refused) -> Any:
    """Return an error as Anthropic's API words it."""
    fallback = "invalid_request_error" if refused.status < 500 else "api_error"
    return {"type": "error", "error": {"type": _KINDS.get(refused.status, fallback), "message": str(refused)}}


async def messages(model: ServedModel, session: Session, fields: Fields, live: Live | None) -> Answer | None:
    """Answer `POST /v1/messages`."""
    asked = _messages(fields)
    name = fields.text("model") or model.name
    tools = offered_tools(_with_openai_tools(fields), model)
    if "max_tokens" not in fields:
        raise Refused(400, "max_tokens must be given")
    if "stop_sequences" in fields:
        fields = Fields.of({**fields.rest(), "stop": fields.rest()["stop_sequences"], "stop_sequences": None})
    wanted = wanted_of(fields, model.settings, temperature=model.temperature, vocab_size=model.renderer.vocab_size)
    if wanted.n != 1:
        raise Refused(400, f"n must be 1, got {wanted.n}")
    reply = partial(reply_of, form=model.tool_format, offered=bool(tools))
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name}
    if live is not None:
        await _stream_messages(model, session, asked, tools, wanted, reply, _Events(head, live))
        return None
    prompt, [(choice, message)] = await model.converse(session, asked, tools, wanted, lambda _, choice: reply(choice))
    usage = usage_of(prompt, [choice])
    body = {
        **head,
        "content": _blocks(message),
        "stop_reason": _stop_reason(choice, message),
        "stop_sequence": choice.stop,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
    return json_answer(body, headers=response_headers([choice], wanted))


async def _stream_messages(
    model: ServedModel,
    session: Session,
    asked: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    wanted: Wanted,
    reply: Callable[[Choice], Message],
    events: _Events,
) -> None:
    sure = partial(sure_of, form=model.tool_format) if tools else len
    stream = Stream(events.live, model.renderer, wanted, events.piece, sure=sure)

    def watches_of(prompt: TokenIds) -> list[Watch]:
        events.num_prompt_tokens = len(prompt)
        return stream.watches()

    def told_reply(place: int, choice: Choice) -> Message:
        message = reply(choice)
        events.piece(stream.rest(place, choice, content_after(stream.shown(place), message)))
        return {**message, "content": stream.shown(place)}  # an agent sends back what it was told

    _, [(choice, message)] = await model.converse(session, asked, tools, wanted, told_reply, watches_of)
    events.end(choice, message)
    session.streams_left += events.live.left


def _messages(fields: Fields) -> list[Message]:
    """Return the messages in OpenAI's form: tool results are messages of their own there, calls are beside the text."""
    system = fields.take("system")
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    for place, message in enumerate(fields.objects("messages")):
        content = message.get("content")
        if not isinstance(content, list):
            found.append(message)
            continue
        found += _from_blocks(message.get("role"), content, f"messages[{place}]")
    return messages_of(found)


def _from_blocks(role: Any, blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    results, calls, texts = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            content = text_of(block.get("content"), where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "tool_use":
            calls.append(tool_call(str(block.get("name")), block.get("input") or {}, str(block.get("id") or "")))
        elif kind in ("thinking", "redacted_thinking"):
            continue  # none was ever answered: a model's reasoning is in its text
        else:
            texts.append(block)
    rest = {"role": role, "content": texts, "tool_calls": calls or None}
    return [*results, *([rest] if texts or calls or not results else [])]


def _with_openai_tools(fields: Fields) -> Fields:
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {},
            },
        }
        for tool in fields.objects("tools")
    ]
    choice = fields.take("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return Fields.of({"tools": tools, "tool_choice": kind})


def _blocks(message: Message) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in message.get("tool_calls", ())
    ]
    return [*text, *calls]


def _stop_reason(choice: Choice, message: Message) -> str:
    if "tool_calls" in message:
        return "tool_use"
    if choice.stop is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens"}[choice.finish_reason]


class _Events:
    """The events of a streamed message."""

    def __init__(self, head: Mapping[str, Any], live: Live) -> None:
        self.live = live
        self.num_prompt_tokens = 0
        self._head = head
        self._in_text = False

    def piece(self, piece: Piece) -> None:
        """Say what has been sampled."""
        if piece.is_first:
            usage = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
            start = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            self._say("message_start", message=start)
        if not piece.text:
            return
        if not self._in_text:
            self._say("content_block_start", index=0, content_block={"type": "text", "text": ""})
            self._in_text = True
        self._say("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})

    def end(self, choice: Choice, message: Message) -> None:
        """Say the calls, and why it ended."""
        if self._in_text:
            self._say("content_block_stop", index=0)
        calls = [block for block in _blocks(message) if block["type"] == "tool_use"]
        for index, block in enumerate(calls, int(self._in_text)):
            self._say("content_block_start", index=index, content_block={**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
            self._say("content_block_delta", index=index, delta=delta)
            self._say("content_block_stop", index=index)
        end = {"stop_reason": _stop_reason(choice, message), "stop_sequence": choice.stop}
        usage = {"output_tokens": len(choice.completion.token_ids)}
        self._say("message_delta", delta=end, usage=usage, asyncrl_version=version_names(choice.completion.spans))
        self._say("message_stop")

    def _say(self, name: str, **values: Any) -> None:
        self.live.say(event({"type": name, **values}, name=name))
