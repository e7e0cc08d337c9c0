"""Why a token's ratio or influence stands out, and the line of spikes.jsonl that says so. Standard library only.

A cause is told by rules on what is known of the token and of its step, the first that holds:

not_finite       the ratio or the influence is no finite number
advantage        it is there for its influence, and its log ratio is at most 0.1 nats: what is large is its advantage
noise            its log ratio is at most 0.1 nats: what an engine in bf16 differs by from the learner
log_prob_mode    the step's tokens of staleness 0 are off by more than 0.15 nats in the mean: engine and learner do not
                 mean the same distribution (another temperature, or raw log-probs for processed ones)
stale_prefix     its reply was begun under older weights than it was sampled under: the engine kept what it had computed
rare_token       its probability was below 1 % when it was sampled: small differences of logits are large ratios there
engine_mismatch  staleness 0: the weights are the same, so that engine and learner compute differently
old_version      nothing else: the weights have moved since
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from asyncrl.protocols import StepResult

MAX_LINE_BYTES = 10_000
"""Of spikes.jsonl: 1 MB in 100 steps. The tokens that stand out least are left out of a line that would be longer."""

_NOISE_NATS = 0.1  # a bf16 engine differs by 0.03 in the mean; below this nothing needs an explanation
_MISMATCH_NATS = 0.15  # in the mean over all tokens of staleness 0; bf16 alone stays below 0.05
_RARE_LOGPROB = math.log(0.01)  # below it the ratio of one token says little
_CHARACTERS_BEFORE = 120  # of decoded context that are kept
_CHARACTERS_AFTER = 40
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so tokens, that one character may take


class Cause(StrEnum):
    """Why a token stands out; the module's table has the rules."""

    NOT_FINITE = "not_finite"
    ADVANTAGE = "advantage"
    NOISE = "noise"
    LOG_PROB_MODE = "log_prob_mode"
    STALE_PREFIX = "stale_prefix"
    RARE_TOKEN = "rare_token"
    ENGINE_MISMATCH = "engine_mismatch"
    OLD_VERSION = "old_version"


WORDS: Mapping[Cause, str] = {
    Cause.NOT_FINITE: "a number that is not finite",
    Cause.ADVANTAGE: "a large advantage at an ordinary ratio",
    Cause.NOISE: "within what engine and learner differ by",
    Cause.LOG_PROB_MODE: "another temperature or log-prob mode in engine and learner",
    Cause.STALE_PREFIX: "a reply that was begun under older weights",
    Cause.RARE_TOKEN: "a token of probability below 1 %",
    Cause.ENGINE_MISMATCH: "engine and learner differ under the same weights",
    Cause.OLD_VERSION: "the weights have moved since it was sampled",
}
"""Cause -> what it means, for people."""


def likely_cause(row: Mapping[str, Any], metrics: Mapping[str, float]) -> Cause:
    """Return the likely cause of a row of `StepResult.spikes`, in a step of these metrics.

    Example:
        >>> row = {"by": {"ratio": 1}, "ratio": 3.0, "influence": 0.1, "behaviour_logprob": -1.0, "staleness": 2,
        ...        "version": 5, "begun_under": 5}
        >>> likely_cause(row, {}).value
        'old_version'
    """
    if row["ratio"] is None or row["influence"] is None or row["behaviour_logprob"] is None:
        return Cause.NOT_FINITE
    if abs(math.log(max(row["ratio"], 1e-300))) <= _NOISE_NATS:
        return Cause.ADVANTAGE if "influence" in row["by"] else Cause.NOISE
    if metrics.get("mismatch_abs_mean", 0.0) > _MISMATCH_NATS:
        return Cause.LOG_PROB_MODE
    if row["begun_under"] < row["version"]:
        return Cause.STALE_PREFIX
    if row["behaviour_logprob"] < _RARE_LOGPROB:
        return Cause.RARE_TOKEN
    return Cause.ENGINE_MISMATCH if row["staleness"] == 0 else Cause.OLD_VERSION


def spike_line(
    result: StepResult,
    *,
    step: int,
    decode: Callable[[Sequence[int]], str],
    sampling: Mapping[str, Any],
) -> bytes:
    """Return the step's line of spikes.jsonl, its newline included, of at most MAX_LINE_BYTES.

    `left_out` says how many of its tokens would have made it longer.
    """
    tokens = [_decoded(row, decode) | {"cause": likely_cause(row, result.metrics)} for row in result.spikes]
    tokens.sort(key=lambda token: min(token["by"].values()))
    line = {"step": step, "version": result.version, "sampling": dict(sampling), "tokens": tokens, "left_out": 0}
    while len(encoded := _encode(line)) > MAX_LINE_BYTES and tokens:
        tokens.pop()
        line["left_out"] = len(result.spikes) - len(tokens)
    return encoded


def shown_line(result: StepResult, *, step: int, decode: Callable[[Sequence[int]], str]) -> bytes:
    """Return the step's line of tokens.jsonl: one trajectory, its tokens' text in place of their ids."""
    shown = dict(result.shown)
    shown["segments"] = [[_run_of_text(run, decode) for run in runs] for runs in shown.get("segments", [])]
    return _encode({"step": step, "version": result.version, **shown})


def _run_of_text(run: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    ids = run["token_ids"]
    if "ratio" not in run:
        return {"turn": None, "text": _cut_middle(decode(ids))}
    tokens = list(zip(pieces(ids, decode), run["ratio"], run["advantage"], run["version"], strict=True))
    return {"turn": run["turn"], "tokens": tokens}


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text that each token adds; a character of several tokens is the last one's, the others add nothing.

    Example:
        >>> pieces([104, 195, 188], lambda ids: bytes(ids).decode(errors="replace"))
        ['h', '', '\\xfc']
    """
    found = list[str]()
    told = read = 0  # decoded behind `told`, so that a token's leading space is kept; `read` ids have given their text
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[told:read]), decode(ids[told:end])
        if now.endswith("\ufffd") and end < len(ids) and end - read < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(now[len(before) :])
        told, read = read, end
    return found


def visible(text: str) -> str:
    """Return text in which what cannot be seen, or would turn the text around it, is written as an escape.

    Example:
        >>> visible("a\\x1b[2J b\\n")
        'a\\\\x1b[2J b\\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _decoded(row: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the row with text in place of ids, and its numbers in five figures."""
    token = {name: _short(value) for name, value in row.items() if name not in ("before", "after")}
    token["text"] = decode([row["token_id"]]) or f"[token {row['token_id']}]"
    token["before"] = decode(row["before"])[-_CHARACTERS_BEFORE:]
    token["after"] = decode(row["after"])[:_CHARACTERS_AFTER]
    return token


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _cut_middle(text: str, limit: int = 4000) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} [... {len(text) - limit} characters ...] {text[-limit // 2 :]}"


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
