"""OpenAI's API, with what vLLM adds to it: chat completions and completions."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from asyncrl.gateway.fields import Fields, token_ids_of
from asyncrl.gateway.http import Answer, Refused, event, json_answer
from asyncrl.gateway.live import Live
from asyncrl.gateway.messages import content_after, messages_of, reply_of
from asyncrl.gateway.model import ServedModel
from asyncrl.gateway.sampling import Choice, Wanted, version_names, wanted_of
from asyncrl.gateway.session import Session
from asyncrl.gateway.settings import ToolFormat
from asyncrl.gateway.streaming import Piece, Stream, headers_of
from asyncrl.gateway.tool_calls import sure_of
from asyncrl.protocols import Watch
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Logprobs, TokenIds

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
_LIMITS = ("max_tokens", "max_completion_tokens")


def response_headers(choices: Sequence[Choice], wanted: Wanted) -> dict[str, str]:
    """Return the headers that every face sends: the versions that sampled the answer, and what was ignored."""
    return headers_of(tuple(span for choice in choices for span in choice.completion.spans), wanted)


class _Shown:
    """What of the answer is asked for, and what all its parts have in common."""

    def __init__(self, fields: Fields, model: ServedModel, kind: str, prefix: str) -> None:
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


async def chat(model: ServedModel, session: Session, fields: Fields, live: Live | None) -> Answer | None:
    """Answer `POST /v1/chat/completions`."""
    messages = messages_of(fields.objects("messages"))
    shown = _Shown(fields, model, "chat.completion", "chatcmpl")
    logprobs = fields.flag("logprobs")
    if fields.integer("top_logprobs", 0, high=20) > 1:
        raise Refused(400, "top_logprobs must be 0 or 1: only the sampled token's log-prob is known")
    tools = offered_tools(fields, model)
    wanted = _wanted(fields, model)
    reply = partial(reply_of, form=model.tool_format, offered=bool(tools))
    if live is not None:
        await _stream_chat(model, session, messages, tools, wanted, reply, _ChatEvents(shown, live, logprobs=logprobs))
        return None
    prompt, found = await model.converse(session, messages, tools, wanted, lambda _, choice: reply(choice))
    choices = []
    for index, (choice, message) in enumerate(found):
        each = {"index": index, "message": _shown_message(message), "finish_reason": _finish_reason(choice, message)}
        each |= {"logprobs": _chat_logprobs(shown, *_tokens(choice)) if logprobs else None, "stop_reason": choice.stop}
        choices.append(each | ({"token_ids": list(choice.completion.token_ids)} if shown.token_ids else {}))
    body = {**shown.head(), "choices": choices, "usage": usage_of(prompt, [choice for choice, _ in found])}
    headers = response_headers([choice for choice, _ in found], wanted)
    return json_answer(body | ({"prompt_token_ids": list(prompt)} if shown.token_ids else {}), headers=headers)


async def _stream_chat(
    model: ServedModel,
    session: Session,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    wanted: Wanted,
    reply: Callable[[Choice], Message],
    events: _ChatEvents,
) -> None:
    sure = partial(sure_of, form=model.tool_format) if tools else len
    stream = Stream(events.live, model.renderer, wanted, events.piece, sure=sure)

    def watches_of(prompt: TokenIds) -> list[Watch]:
        events.prompt = prompt
        return stream.watches()

    def told_reply(place: int, choice: Choice) -> Message:
        message = reply(choice)
        events.piece(stream.rest(place, choice, content_after(stream.shown(place), message)))
        return {**message, "content": stream.shown(place)}  # an agent sends back what it was told

    prompt, found = await model.converse(session, messages, tools, wanted, told_reply, watches_of)
    for index, (choice, message) in enumerate(found):
        events.end(index, choice, message)
    events.close(usage_of(prompt, [choice for choice, _ in found]))
    session.streams_left += events.live.left


class _ChatEvents:
    """The events of a streamed chat completion."""

    def __init__(self, shown: _Shown, live: Live, *, logprobs: bool) -> None:
        self.live = live
        self.prompt = TokenIds()
        self._shown = shown
        self._logprobs = logprobs
        self._head = shown.head("chat.completion.chunk")

    def piece(self, piece: Piece) -> None:
        """Say what has been sampled of a choice."""
        if piece.is_first:
            first = {"index": piece.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ids = {"prompt_token_ids": list(self.prompt)} if self._shown.token_ids else {}
            self.live.say(event({**self._head, **ids, "choices": [first]}))
        if not (piece.text or (piece.token_ids and (self._logprobs or self._shown.token_ids))):
            return
        delta = {"content": piece.text} if piece.text else {}
        body: dict[str, Any] = {"index": piece.index, "delta": delta, "finish_reason": None}
        body["logprobs"] = _chat_logprobs(self._shown, piece.token_ids, piece.logprobs) if self._logprobs else None
        body |= {"token_ids": list(piece.token_ids)} if self._shown.token_ids else {}
        self.live.say(event({**self._head, "choices": [body]}))

    def end(self, index: int, choice: Choice, message: Message) -> None:
        """Say a choice's calls, why it ended and what sampled it."""
        if "tool_calls" in message:
            calls = [{"index": place, **call} for place, call in enumerate(_shown_calls(message))]
            body = {"index": index, "delta": {"tool_calls": calls}, "finish_reason": None, "logprobs": None}
            self.live.say(event({**self._head, "choices": [body]}))
        last = {"index": index, "delta": {}, "finish_reason": _finish_reason(choice, message)}
        last |= {"stop_reason": choice.stop, "asyncrl_version": version_names(choice.completion.spans)}
        self.live.say(event({**self._head, "choices": [last]}))

    def close(self, usage: Mapping[str, int]) -> None:
        """Say that there is no more."""
        if self._shown.usage:
            self.live.say(event({**self._head, "choices": [], "usage": usage}))
        self.live.say(DONE)


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


def _tokens(choice: Choice) -> tuple[TokenIds, Logprobs]:
    return choice.completion.token_ids, choice.completion.behaviour_logprobs


def _chat_logprobs(shown: _Shown, token_ids: TokenIds, logprobs: Logprobs) -> dict[str, Any]:
    return {"content": [{**entry, "top_logprobs": [entry]} for entry in _entries(shown, token_ids, logprobs)]}


def _entries(shown: _Shown, token_ids: TokenIds, logprobs: Logprobs) -> Iterator[dict[str, Any]]:
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = shown.token_text(token_id)
        yield {"token": text, "logprob": logprob, "bytes": list(text.encode())}


# --- completions ----------------------------------------------------------------------------------------------


async def completions(model: ServedModel, session: Session, fields: Fields, live: Live | None) -> Answer | None:
    """Answer `POST /v1/completions`. Several prompts are answered in order, `n` choices each."""
    prompts = await prompts_of(model, fields.take("prompt"))
    shown = _Shown(fields, model, "text_completion", "cmpl")
    shows_logprobs = "logprobs" in fields
    if fields.integer("logprobs", 0, high=20) > 1:
        raise Refused(400, "logprobs must be 0 or 1: only the sampled token's log-prob is known")
    wanted = _wanted(fields, model)
    if live is not None:
        await _stream_completions(model, session, prompts, wanted, shown, live, shows_logprobs=shows_logprobs)
        return None
    found = [(prompt, choice) for prompt in prompts for choice in await model.complete(session, prompt, wanted)]
    choices = []
    for index, (prompt, choice) in enumerate(found):
        each = {"index": index, "text": choice.text, "finish_reason": choice.finish_reason, "stop_reason": choice.stop}
        each["logprobs"] = _text_logprobs(shown, *_tokens(choice), start=0) if shows_logprobs else None
        if shown.token_ids:
            each |= {"token_ids": list(choice.completion.token_ids), "prompt_token_ids": list(prompt)}
        choices.append(each)
    all_choices = [choice for _, choice in found]
    usage = usage_of(_joined(prompts), all_choices)
    headers = response_headers(all_choices, wanted)
    return json_answer({**shown.head(), "choices": choices, "usage": usage}, headers=headers)


def _joined(prompts: Sequence[TokenIds]) -> TokenIds:
    return TokenIds([token for prompt in prompts for token in prompt])


async def _stream_completions(
    model: ServedModel,
    session: Session,
    prompts: Sequence[TokenIds],
    wanted: Wanted,
    shown: _Shown,
    live: Live,
    *,
    shows_logprobs: bool,
) -> None:
    ends: Counter[int] = Counter()  # choice -> characters of its tokens' texts until now
    found: list[Choice] = []
    prompt = TokenIds()

    def say(piece: Piece, **more: Any) -> None:
        """Say a piece; `more` of the last one of a choice."""
        each: dict[str, Any] = {"index": piece.index, "text": piece.text, "finish_reason": None, "logprobs": None}
        if shows_logprobs:
            each["logprobs"] = _text_logprobs(shown, piece.token_ids, piece.logprobs, start=ends[piece.index])
            ends[piece.index] += sum(map(len, each["logprobs"]["tokens"]))
        if shown.token_ids:
            each |= {"token_ids": list(piece.token_ids)}
            each |= {"prompt_token_ids": list(prompt)} if piece.is_first else {}
        live.say(event({**shown.head(), "choices": [each | more]}))

    for prompt in prompts:
        stream = Stream(live, model.renderer, wanted, say, first_index=len(found))
        for place, choice in enumerate(await model.complete(session, prompt, wanted, stream.watches())):
            last = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop}
            version = version_names(choice.completion.spans)
            say(stream.rest(place, choice, choice.text), **last, asyncrl_version=version)
            found.append(choice)
    if shown.usage:
        live.say(event({**shown.head(), "choices": [], "usage": usage_of(_joined(prompts), found)}))
    live.say(DONE)
    session.streams_left += live.left


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


def _text_logprobs(shown: _Shown, token_ids: TokenIds, logprobs: Logprobs, *, start: int) -> dict[str, Any]:
    entries = list(_entries(shown, token_ids, logprobs))
    offsets, end = [], start
    for entry in entries:
        offsets.append(end)
        end += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
        "text_offset": offsets,
    }


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
