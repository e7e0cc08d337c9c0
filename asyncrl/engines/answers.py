"""What a vLLM server answers, and whether it can be believed."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from asyncrl.engines.draft import Part
from asyncrl.errors import EngineError
from asyncrl.types import FinishReason, Logprobs, TokenIds, TokenSpan

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


class Answer:
    """What a server streams for one request. Events may stop anywhere; what came before is then still good."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._token_ids = TokenIds()
        self._logprobs = Logprobs()
        self._last: _Choice | None = None
        self._versions: set[str] = set()
        self._complaint = ""
        self._mistake = ""
        """Why nothing of it can be believed, or ""."""

    def add(self, line: bytes) -> int:
        """Take one "data: {...}" line and return how many tokens it brings. Raises nothing: see `complaint`."""
        try:
            event = _decoder.decode(line[len("data: ") :])
        except msgspec.DecodeError as error:
            self._complaint = self._complaint or f"{self._engine} answers what is not a completion: {error}"
            return 0
        if event.error is not None:
            self._complaint = self._complaint or f"{self._engine} failed a request: {first_line(str(event.error))}"
        if self._complaint:
            return 0
        for choice in event.choices:
            self._take(choice)
        return sum(len(choice.token_ids or ()) for choice in event.choices)

    def _take(self, choice: _Choice) -> None:
        self._last = choice
        self._versions.update(span.version for span in choice.weight_versions or ())
        token_ids, entries = choice.token_ids or [], (choice.logprobs or _Logprobs()).content or []
        if [entry.token_id for entry in entries] != token_ids:
            self._mistake = self._mistake or f"returned {len(entries)} log-probs for {len(token_ids)} other tokens"
        for place, entry in enumerate(entries, len(self._token_ids)):
            if not (math.isfinite(entry.logprob) and _UNSAMPLED < entry.logprob <= _ROUNDING):
                self._mistake = self._mistake or f"returned the log-prob {entry.logprob} for token {place}"
        self._token_ids.extend(token_ids)
        self._logprobs.extend([min(entry.logprob, 0.0) for entry in entries])

    @property
    def begun(self) -> bool:
        """True once something has been sampled, or went wrong."""
        return bool(self._last or self._complaint)

    def sampled_under(self, version: int) -> bool:
        """Tell whether any token that has arrived is labelled with a version."""
        return str(version) in self._versions

    @property
    def finished(self) -> bool:
        """True once the model has come to an end of its own, or to the limit on tokens."""
        return self._last is not None and self._last.finish_reason in ("stop", "length")

    @property
    def complaint(self) -> str:
        """Why the server did not come to an end, or ""."""
        if self.finished or self._complaint:
            return self._complaint
        reason = self._last.finish_reason if self._last else None
        return f"{self._engine} ended a completion with {reason or 'no reason'}"

    def part(self) -> Part:
        """Return what has been sampled until now.

        Raises: EngineError if a token lacks its log-prob or its version, or has one that cannot be right.
        """
        if self._mistake:
            raise EngineError(f"{self._engine} {self._mistake}")
        reason = None
        if self._last is not None and self.finished:
            reason = FinishReason.STOP if self._last.finish_reason == "stop" else FinishReason.LENGTH
        return Part(
            token_ids=TokenIds(self._token_ids),
            behaviour_logprobs=Logprobs(self._logprobs),
            spans=self._spans(len(self._token_ids)),
            finish_reason=reason,
        )

    def _spans(self, num_tokens: int) -> tuple[TokenSpan, ...]:
        labels = (self._last.weight_versions if self._last else None) or ()
        spans, end = [], 0
        for label in labels:
            if label.start != end or label.end < label.start or not label.version.isdecimal():
                break
            if label.end > label.start:
                spans.append(TokenSpan(start=label.start, end=label.end, version=int(label.version)))
            end = label.end
        if end != num_tokens or (self.finished and not num_tokens):
            shown = [(label.version, label.start, label.end) for label in labels]
            raise EngineError(f"{self._engine} labels {num_tokens} tokens with the versions {shown}")
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
