"""What a vLLM server answers, and whether it can be believed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.errors import EngineError
from asyncrl.types import Completion, FinishReason, Logprobs, TokenIds, TokenSpan

_ROUNDING = 1e-4  # log-softmax in bfloat16 can end this far above 0; anything more is nonsense
_UNSAMPLED = -9999.0  # vLLM's mark for a log-prob that it does not have
_WORKER_ERROR = re.compile(r"Worker failed with error ['\"](.*)['\"], please check", re.DOTALL)
_CALL_ERROR = re.compile(r"Call to \w+ method failed: (.*)", re.DOTALL)


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


def completion_of(lines: Sequence[str], engine: str, seconds: float) -> Completion:
    """Return the completion that a stream's "data: {...}" lines make up together.

    Raises: EngineError if the server says that it failed, or a token lacks its log-prob or its version.
    """
    try:
        events = [_decoder.decode(line[len("data: ") :]) for line in lines]
    except msgspec.DecodeError as error:
        raise EngineError(f"{engine} answers what is not a completion: {error}") from error
    for event in events:
        if event.error is not None:
            raise EngineError(f"{engine} failed a request: {first_line(str(event.error))}")
    choices = [choice for event in events for choice in event.choices]
    if not choices or choices[-1].finish_reason not in ("stop", "length"):
        reason = choices[-1].finish_reason if choices else None
        raise EngineError(f"{engine} ended a completion with {reason or 'no reason'}")
    last = choices[-1]
    token_ids = TokenIds([token for choice in choices for token in choice.token_ids or ()])
    entries = [entry for choice in choices for entry in (choice.logprobs or _Logprobs()).content or ()]
    if [entry.token_id for entry in entries] != list(token_ids):
        raise EngineError(f"{engine} returned {len(entries)} log-probs for {len(token_ids)} other tokens")
    for place, entry in enumerate(entries):
        if not (math.isfinite(entry.logprob) and _UNSAMPLED < entry.logprob <= _ROUNDING):
            raise EngineError(f"{engine} returned the log-prob {entry.logprob} for token {place}")
    return Completion(
        token_ids=token_ids,
        behaviour_logprobs=Logprobs([min(entry.logprob, 0.0) for entry in entries]),
        spans=_spans(last.weight_versions, len(token_ids), engine),
        finish_reason=FinishReason.STOP if last.finish_reason == "stop" else FinishReason.LENGTH,
        seconds=seconds,
        engine=engine,
    )


def _spans(labels: Sequence[_Span] | None, num_tokens: int, engine: str) -> tuple[TokenSpan, ...]:
    spans, end = [], 0
    for label in labels or ():
        if label.start != end or label.end < label.start or not label.version.isdecimal():
            break
        if label.end > label.start:
            spans.append(TokenSpan(start=label.start, end=label.end, version=int(label.version)))
        end = label.end
    if end != num_tokens or not num_tokens:
        shown = [(label.version, label.start, label.end) for label in labels or ()]
        raise EngineError(f"{engine} labels {num_tokens} tokens with the versions {shown}")
    return tuple(spans)


def first_line(text: str) -> str:
    """Return what a person needs of an error body: the worker's own message where there is one."""
    match = _WORKER_ERROR.search(text)
    message = match[1] if match else text
    try:
        data = msgspec.json.decode(message.encode())
    except msgspec.DecodeError:
        data = None
    if isinstance(data, dict) and "error" in data:
        inner = data["error"]
        message = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    inside = _CALL_ERROR.fullmatch(message)
    lines = (inside[1] if inside else message).strip().splitlines()
    return lines[0][:500] if lines else "(nothing)"


def named(error: Exception) -> str:
    """Return the error's words behind its class, for errors that have no words of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
