"""OpenAI's API, with what vLLM adds to it: chat completions and completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from asyncrl.gateway.fields import Fields, token_ids_of
from asyncrl.gateway.http import Answer, Refused, event, event_stream, json_answer
from asyncrl.gateway.messages import messages_of, reply_of
from asyncrl.gateway.model import ServedModel
from asyncrl.gateway.sampling import Choice, Wanted, versions_of, wanted_of
from asyncrl.gateway.session import Session
from asyncrl.gateway.settings import ToolFormat
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import TokenIds

_DONE = b"data: [DONE]\n\n"
_LIMITS = ("max_tokens", "max_completion_tokens")


def response_headers(choices: Sequence[Choice], wanted: Wanted) -> dict[str, str]:
    """Return the headers that every face sends: the versions that sampled the answer, and what was ignored."""
    headers = {"asyncrl-version": versions_of(choices)}
    if wanted.ignored:
        headers["asyncrl-ignored"] = ", ".join(wanted.ignored).encode("ascii", "replace").decode()
    return headers


class _Shown:
    """What of the answer is asked for, and what all its parts have in common."""

    def __init__(self, fields: Fields, model: ServedModel, kind: str, prefix: str) -> None:
        self.stream = fields.flag("stream")
        options = fields.object("stream_options")
        self.usage = options.flag("include_usage")
        self.token_ids = fields.flag("return_token_ids")
        self.ids_as_text = fields.flag("return_tokens_as_token_ids")
        self.renderer = model.renderer
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": fields.text("model") or model.name,
        }

    def head(self, kind: str = "") -> dict[str, Any]:
        return {**self._head, **({"object": kind} if kind else {})}

    def token_text(self, token_id: int) -> str:
        if self.ids_as_text:
            return f"token_id:{token_id}"
        return self.renderer.decode([token_id], keep_special=True)


def usage_of(prompt: TokenIds, choices: Sequence[Choice]) -> dict[str, int]:
    """Return how many tokens went in and came out."""
    sampled = sum(len(choice.completion.token_ids) for choice in choices)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


# --- chat -----------------------------------------------------------------------------------------------------


async def chat(model: ServedModel, session: Session, fields: Fields) -> Answer:
    """Answer `POST /v1/chat/completions`."""
    messages = messages_of(fields.objects("messages"))
    shown = _Shown(fields, model, "chat.completion", "chatcmpl")
    logprobs = fields.flag("logprobs")
    if fields.integer("top_logprobs", 0, high=20) > 1:
        raise Refused(400, "top_logprobs must be 0 or 1: only the sampled token's log-prob is known")
    tools = offered_tools(fields, model)
    wanted = _wanted(fields, model)
    reply = partial(reply_of, form=model.tool_format, offered=bool(tools))
    prompt, found = await model.converse(session, messages, tools, wanted, reply)
    headers = response_headers([choice for choice, _ in found], wanted)
    usage = usage_of(prompt, [choice for choice, _ in found])
    if shown.stream:
        return event_stream(_chat_events(shown, prompt, found, usage, logprobs), headers=headers)
    choices = []
    for index, (choice, message) in enumerate(found):
        each = {"index": index, "message": _shown_message(message), "finish_reason": _finish_reason(choice, message)}
        each |= {"logprobs": _chat_logprobs(shown, choice) if logprobs else None, "stop_reason": choice.stop}
        choices.append(each | ({"token_ids": list(choice.completion.token_ids)} if shown.token_ids else {}))
    body = {**shown.head(), "choices": choices, "usage": usage}
    return json_answer(body | ({"prompt_token_ids": list(prompt)} if shown.token_ids else {}), headers=headers)


def offered_tools(fields: Fields, model: ServedModel) -> list[dict[str, Any]]:
    """Return the tools that the model is shown. Raises: Refused where it could not call them."""
    tools, choice = fields.objects("tools"), fields.take("tool_choice", "auto")
    if choice == "none" or not tools:
        return []
    if choice != "auto":
        raise Refused(400, f'tool_choice must be "auto" or "none", got {choice!r}: a forced call is not sampled')
    if model.tool_format is ToolFormat.NONE:
        raise Refused(
            400,
            "the model's chat template shows no way to call a tool: set tool_format ([gateway]), or describe the "
            "tools in the messages",
        )
    return tools


def _wanted(fields: Fields, model: ServedModel) -> Wanted:
    return wanted_of(
        fields,
        model.settings,
        temperature=model.temperature,
        vocab_size=model.renderer.vocab_size,
        limits=_LIMITS,
    )


def _shown_message(message: Message) -> dict[str, Any]:
    """Return a reply in OpenAI's form: arguments as text, no content where there are only calls."""
    if "tool_calls" not in message:
        return {"role": "assistant", "content": message["content"]}
    return {"role": "assistant", "content": message["content"] or None, "tool_calls": _shown_calls(message)}


def _shown_calls(message: Message) -> list[dict[str, Any]]:
    return [
        {**call, "function": {"name": call["function"]["name"], "arguments": _json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _finish_reason(choice: Choice, message: Message) -> str:
    return "tool_calls" if "tool_calls" in message else choice.finish_reason


def _chat_logprobs(shown: _Shown, choice: Choice) -> dict[str, Any]:
    return {"content": [{**entry, "top_logprobs": [entry]} for entry in _entries(shown, choice)]}


def _entries(shown: _Shown, choice: Choice) -> Iterator[dict[str, Any]]:
    completion = choice.completion
    for token_id, logprob in zip(completion.token_ids, completion.behaviour_logprobs, strict=True):
        text = shown.token_text(token_id)
        yield {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _chat_events(
    shown: _Shown,
    prompt: TokenIds,
    found: Sequence[tuple[Choice, Message]],
    usage: Mapping[str, int],
    logprobs: bool,
) -> Iterator[bytes]:
    head = shown.head("chat.completion.chunk")
    ids = {"prompt_token_ids": list(prompt)} if shown.token_ids else {}
    for index, (choice, message) in enumerate(found):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield event({**head, **ids, "choices": [first]})
        delta: dict[str, Any] = {"content": message["content"]} if message["content"] else {}
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(_shown_calls(message))]
        body = {"index": index, "delta": delta, "finish_reason": None}
        body["logprobs"] = _chat_logprobs(shown, choice) if logprobs else None
        body |= {"token_ids": list(choice.completion.token_ids)} if shown.token_ids else {}
        yield event({**head, "choices": [body]})
        last = {"index": index, "delta": {}, "finish_reason": _finish_reason(choice, message)}
        yield event({**head, "choices": [{**last, "stop_reason": choice.stop}]})
    if shown.usage:
        yield event({**head, "choices": [], "usage": usage})
    yield _DONE


# --- completions ----------------------------------------------------------------------------------------------


async def completions(model: ServedModel, session: Session, fields: Fields) -> Answer:
    """Answer `POST /v1/completions`. Several prompts are answered in order, `n` choices each."""
    prompts = await prompts_of(model, fields.take("prompt"))
    shown = _Shown(fields, model, "text_completion", "cmpl")
    shows_logprobs = "logprobs" in fields
    if fields.integer("logprobs", 0, high=20) > 1:
        raise Refused(400, "logprobs must be 0 or 1: only the sampled token's log-prob is known")
    wanted = _wanted(fields, model)
    found = [(prompt, choice) for prompt in prompts for choice in await model.complete(session, prompt, wanted)]
    choices = []
    for index, (prompt, choice) in enumerate(found):
        each = {"index": index, "text": choice.text, "finish_reason": choice.finish_reason, "stop_reason": choice.stop}
        each["logprobs"] = _text_logprobs(shown, choice) if shows_logprobs else None
        if shown.token_ids:
            each |= {"token_ids": list(choice.completion.token_ids), "prompt_token_ids": list(prompt)}
        choices.append(each)
    all_choices = [choice for _, choice in found]
    usage = usage_of(TokenIds([token for prompt in prompts for token in prompt]), all_choices)
    headers = response_headers(all_choices, wanted)
    if shown.stream:
        return event_stream(_text_events(shown, choices, usage), headers=headers)
    return json_answer({**shown.head(), "choices": choices, "usage": usage}, headers=headers)


async def prompts_of(model: ServedModel, found: Any) -> list[TokenIds]:
    """Return the prompts of a `prompt`: text, ids, or a list of either. Raises: Refused."""
    if isinstance(found, str):
        return [await model.encode(found)]
    if not isinstance(found, list) or not found:
        raise Refused(400, "prompt must be text, token ids, or a list of either")
    if type(found[0]) is int:
        return [token_ids_of(found, "prompt", vocab_size=model.renderer.vocab_size)]
    if len(found) > model.settings.max_choices:
        raise Refused(400, f"prompt may hold {model.settings.max_choices} prompts (max_choices of [gateway])")
    return [prompt for one in found for prompt in await prompts_of(model, _one_prompt(one))]


def _one_prompt(found: Any) -> Any:
    if isinstance(found, list) and found and type(found[0]) is not int:
        raise Refused(400, "prompt must be text, token ids, or a list of either")
    return found


def _text_logprobs(shown: _Shown, choice: Choice) -> dict[str, Any]:
    entries = list(_entries(shown, choice))
    offsets, end = [], 0
    for entry in entries:
        offsets.append(end)
        end += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
        "text_offset": offsets,
    }


def _text_events(shown: _Shown, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int]) -> Iterator[bytes]:
    for choice in choices:
        yield event({**shown.head(), "choices": [choice]})
    if shown.usage:
        yield event({**shown.head(), "choices": [], "usage": usage})
    yield _DONE


# --- what is served -------------------------------------------------------------------------------------------


def models(model: ServedModel) -> Answer:
    """Answer `GET /v1/models`."""
    card = {"id": model.name, "object": "model", "created": 0, "owned_by": "asyncrl", "root": model.name}
    return json_answer({"object": "list", "data": [{**card, "max_model_len": model.max_model_len}]})


async def tokenize(model: ServedModel, fields: Fields) -> Answer:
    """Answer `POST /tokenize`: the ids of a prompt, or of messages up to where the reply begins."""
    if "messages" in fields:
        ids = await model.prompt_of(messages_of(fields.objects("messages")), fields.objects("tools"))
    else:
        ids = await model.encode(fields.text("prompt"))
    body: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": list(ids)}
    if fields.flag("return_token_strs"):
        body["token_strs"] = token_texts(model.renderer, ids)
    return json_answer(body)


def detokenize(model: ServedModel, fields: Fields) -> Answer:
    """Answer `POST /detokenize`."""
    ids = fields.token_ids("tokens", vocab_size=model.renderer.vocab_size)
    return json_answer({"prompt": model.renderer.decode(ids, keep_special=True)})


def token_texts(renderer: ChatRenderer, ids: TokenIds) -> list[str]:
    """Return each token's text by itself."""
    return [renderer.decode([token_id], keep_special=True) for token_id in ids]
