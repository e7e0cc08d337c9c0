"""What can be seen of a posted group at a glance: that it is surely whole, without a Python number being made.

A group of 8 x 2,048 tokens is half a megabyte of JSON, nearly all of it numbers. simdjson reads those into typed
arrays, and numpy compares them. Where anything is odd, nothing is said: `messages` then reads the group field by field,
takes numbers in other clothes, and names what is wrong. So nothing is whole here that is not whole there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import simdjson

_UNTRAINED = -100
_BRACKET = ord("[")
_INTS = ("tokens", "masks")
_FLOATS = ("inference_logprobs", "advantages", "ref_logprobs")
_SLOW = ("messages", "distill_token_ids", "distill_logprobs")
"""Seldom there, and not flat."""
_MAX_NESTED = 256  # lists and objects in what is not read: far from the depth at which any reader gives up
_OTHERS: Mapping[str, Any] = {
    "generation_params": msgspec.json.Decoder(dict[str, Any]),
    "group_overrides": msgspec.json.Decoder(dict[str, Any]),
    "overrides": msgspec.json.Decoder(list[dict[str, Any]]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A group that is whole."""

    size: int
    """Sequences."""
    env_id: int | None


class _Odd(Exception):  # noqa: N818  (never leaves this file)
    """A group that must be looked at closely."""


def glance(body: bytes, *, last_id: int, max_token_len: int, max_logprob: float) -> Seen | None:
    """Return what is to be known of a group that is surely whole, and None where it must be looked at closely.

    Ids are from 0 to `last_id`; sequences have `max_token_len` tokens at most, where that is above 0.
    """
    try:
        group = simdjson.Parser().parse(body)
        if not isinstance(group, simdjson.Object):
            return None
        return _look(body, group, last_id=last_id, max_token_len=max_token_len, max_logprob=max_logprob)
    except (_Odd, ValueError, TypeError, KeyError, RuntimeError, msgspec.DecodeError):
        return None


def _look(body: bytes, group: Any, *, last_id: int, max_token_len: int, max_logprob: float) -> Seen:
    names = list(group.keys())
    _need(len({*names}) == len(names))  # of a name that is there twice each reader takes another one
    tokens = _Rows(group["tokens"], "i", np.int64)
    size = len(tokens.lengths)
    _need(size > 0 and min(tokens.lengths) > 0)
    _need(max_token_len <= 0 or max(tokens.lengths) <= max_token_len)
    _need(tokens.numbers.min() >= 0 and tokens.numbers.max() <= last_id)
    masks = _Rows(group["masks"], "i", np.int64)
    _need(masks.lengths == tokens.lengths)
    scores = group["scores"]
    _need(isinstance(scores, simdjson.Array))
    _need(len(scores) == size == len(np.frombuffer(scores.as_buffer(of_type="d"), dtype=np.float64)))
    brackets, others = 2 * (1 + size) + 1, list[bytes]()
    for name in names:
        if name in (*_INTS, "scores"):
            continue
        value = group[name]
        if name in _FLOATS and value is not None and len(value):
            rows = _Rows(value, "d", np.float64)
            _need(rows.lengths == tokens.lengths)
            if name == "inference_logprobs":
                _need(not ((masks.numbers != _UNTRAINED) & (rows.numbers > max_logprob)).any())
            brackets += 1 + size
        else:
            others += [name.encode(), _other(name, value, size)]
    # a number that stands in a list of its own looks as one that does not: each list has been counted, or is hidden
    rest = b"".join(others)
    found = np.count_nonzero(np.frombuffer(body, dtype=np.uint8) == _BRACKET)
    _need(found == brackets + rest.count(b"["))
    _need(b"[" not in rest or b"\\" not in body)
    _need(rest.count(b"[") + rest.count(b"{") <= _MAX_NESTED)
    return Seen(size=size, env_id=group.get("env_id"))


class _Rows:
    """The numbers of a list of lists, one behind the other, and how many each list has."""

    def __init__(self, rows: Any, kind: str, dtype: type[np.generic]) -> None:
        _need(isinstance(rows, simdjson.Array))
        self.lengths = [len(row) for row in rows]
        self.numbers = np.frombuffer(rows.as_buffer(of_type=kind), dtype=dtype)
        _need(len(self.numbers) == sum(self.lengths))


def _other(name: str, value: Any, size: int) -> bytes:
    """Return a field as JSON, having checked what is asked of it."""
    if isinstance(value, (simdjson.Array, simdjson.Object)):
        found = cast(bytes, value.mini)  # its stub says str
        if len(value):
            _need(name not in _SLOW and name != "env_id")
            if (decoder := _OTHERS.get(name)) is not None:
                decoder.decode(found)
            _need(name != "overrides" or len(value) == size)
        return found
    if name in (*_SLOW, *_FLOATS, *_OTHERS):
        _need(value is None)
    if name == "env_id":
        _need(value is None or (type(value) is int and value >= 0))
    return str(value).encode()


def _need(is_so: bool | np.bool_) -> None:
    if not is_so:
        raise _Odd
