"""Anthropic's API: `POST /v1/messages`, streamed or not, with tools."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from asyncrl.gateway.fields import Fields
from asyncrl.gateway.http import Answer, Refused, event, event_stream, json_answer
from asyncrl.gateway.messages import messages_of, reply_of, text_of, tool_call
from asyncrl.gateway.model import ServedModel
from asyncrl.gateway.openai import offered_tools, response_headers, usage_of
from asyncrl.gateway.sampling import Choice, wanted_of
from asyncrl.gateway.session import Session
from asyncrl.tokens import Message

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 410: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(refused: Refused) -> Any:
    """Return an error as Anthropic's API words it."""
    fallback = "invalid_request_error" if refused.status < 500 else "api_error"
    return {"type": "error", "error": {"type": _KINDS.get(refused.status, fallback), "message": str(refused)}}


async def messages(model: ServedModel, session: Session, fields: Fields) -> Answer:
    """Answer `POST /v1/messages`."""
    asked = _messages(fields)
    stream, name = fields.flag("stream"), fields.text("model") or model.name
    tools = offered_tools(_with_openai_tools(fields), model)
    if "max_tokens" not in fields:
        raise Refused(400, "max_tokens must be given")
    if "stop_sequences" in fields:
        fields = Fields.of({**fields.rest(), "stop": fields.rest()["stop_sequences"], "stop_sequences": None})
    wanted = wanted_of(fields, model.settings, temperature=model.temperature, vocab_size=model.renderer.vocab_size)
    if wanted.n != 1:
        raise Refused(400, f"n must be 1, got {wanted.n}")
    reply = partial(reply_of, form=model.tool_format, offered=bool(tools))
    prompt, [(choice, message)] = await model.converse(session, asked, tools, wanted, reply)
    usage = usage_of(prompt, [choice])
    body = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": name,
        "content": _blocks(message),
        "stop_reason": _stop_reason(choice, message),
        "stop_sequence": choice.stop,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
    headers = response_headers([choice], wanted)
    return event_stream(_events(body), headers=headers) if stream else json_answer(body, headers=headers)


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


def _events(body: Mapping[str, Any]) -> Iterator[bytes]:
    def named(name: str, **values: Any) -> bytes:
        return event({"type": name, **values}, name=name)

    usage = body["usage"]
    start = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
    yield named("message_start", message={**start, "usage": {**usage, "output_tokens": 0}})
    for index, block in enumerate(body["content"]):
        empty = {**block, "text": ""} if block["type"] == "text" else {**block, "input": {}}
        yield named("content_block_start", index=index, content_block=empty)
        delta: dict[str, Any] = {"type": "text_delta", "text": block.get("text")}
        if block["type"] == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
        yield named("content_block_delta", index=index, delta=delta)
        yield named("content_block_stop", index=index)
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield named("message_delta", delta=end, usage={"output_tokens": usage["output_tokens"]})
    yield named("message_stop")
