"""What is posted to an Atropos trainer, read and checked: a group is refused at the door with its reason, or whole.

A group is kept as the JSON that came: its fields are spliced into a batch unread, unknown ones included, so that
whatever an environment adds reaches the trainer. Empty lists and objects in place of an optional field are as null,
since the default of environments that give one trajectory at a time sends them so.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
from isal import isal_zlib

from asyncrl.atropos.glance import glance
from asyncrl.gateway.http import Refused

UNTRAINED = -100
"""In a mask, where the token is not trained on; elsewhere the mask holds the token's own id."""
MAX_LOGPROB = 1e-5  # rounding of log-softmax may exceed 0 by this much; more means that it is not a log-probability
T = TypeVar("T")
DIGEST_BYTES = 16
_MAX_ID = 2**31 - 1  # token ids are int32

KEYS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
)  # fmt: skip
"""What every group of a batch carries, null where an environment did not say."""

_INTS = list[list[int]]
_FLOATS = list[list[float]]
_TYPES: dict[str, Any] = {
    "tokens": _INTS,
    "masks": _INTS,
    "scores": list[float],
    "advantages": _FLOATS,
    "ref_logprobs": _FLOATS,
    "messages": list[list[dict[str, Any]]],
    "generation_params": dict[str, Any],
    "inference_logprobs": _FLOATS,
    "overrides": list[dict[str, Any]],
    "group_overrides": dict[str, Any],
    "images": Any,
    "env_id": int,
    "distill_token_ids": list[list[list[int]]],
    "distill_logprobs": list[list[list[float]]],
}
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in _TYPES.items()}
_REQUIRED = ("tokens", "masks", "scores")
_PER_TOKEN = ("masks", "advantages", "ref_logprobs", "inference_logprobs")
_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_EMPTY = (b"null", b"[]", b"{}")
_LONGEST_EMPTY = 16  # bytes, white space included


class BadField(Refused):
    """A field that cannot be used: 422, which an environment of Atropos logs, and does not send again."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(422, f"{where}: {message}")
        self.where = where


def error_body(refused: Refused) -> Any:
    """Return an error as the clients of Atropos know it."""
    if not isinstance(refused, BadField):
        return {"detail": str(refused)}
    return {"detail": [{"type": "value_error", "loc": ["body", *refused.where.split(".")], "msg": str(refused)}]}


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer says of itself (`POST /register`)."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    """Sequences, not groups."""
    max_token_len: int
    """0 or less is no limit."""
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class EnvironmentRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says of itself (`POST /register-env`)."""

    max_token_length: int
    weight: float
    group_size: int
    desired_name: str | None = None
    min_batch_allocation: float | None = None


def read(kind: type[T], body: bytes) -> T:
    """Return a message. Raises: BadField."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise BadField(kind.__name__, str(error)) from None


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """One group as it was posted, and found to be whole. Its fields are read when they are asked for."""

    size: int
    """Sequences."""
    env_id: int | None = None
    body: bytes = field(repr=False)
    """As it came."""

    @cached_property
    def tokens(self) -> _INTS:
        """[G][L] prompt and completion, as the model read and wrote them."""
        found: _INTS = self._typed("tokens")
        return found

    @cached_property
    def masks(self) -> _INTS:
        """[G][L] UNTRAINED, or the token's own id."""
        found: _INTS = self._typed("masks")
        return found

    @cached_property
    def scores(self) -> list[float]:
        """[G]"""
        found: list[float] = self._typed("scores")
        return found

    @cached_property
    def advantages(self) -> _FLOATS | None:
        """[G][L] in place of what the scores would give."""
        found: _FLOATS | None = self._typed("advantages")
        return found

    @cached_property
    def inference_logprobs(self) -> _FLOATS | None:
        """[G][L] nats, 1.0 where the mask is UNTRAINED."""
        found: _FLOATS | None = self._typed("inference_logprobs")
        return found

    @cached_property
    def raw(self) -> dict[str, msgspec.Raw]:
        """name -> JSON, of all fields that came, unknown ones too; without those that are empty."""
        return _fields(self.body)

    @cached_property
    def digest(self) -> bytes:
        """Of all that came, to know a group by that is sent a second time: the CRC-32 of each quarter.

        Groups that differ throughout agree once in 2^128, and such as differ in one quarter alone once in 2^32. A
        cryptographic hash would take a tenth of all that is done with a group; nobody is fooled here but who sends it.
        """
        view, length = memoryview(self.body), len(self.body)
        cuts = [length * place // 4 for place in range(5)]
        return struct.pack("<4I", *(isal_zlib.crc32(view[start:end]) for start, end in itertools.pairwise(cuts)))

    def value(self, name: str) -> Any:
        """Return a field as it came; None where it did not."""
        raw = self.raw.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    def _typed(self, name: str) -> Any:
        raw = self.raw.get(name)
        return None if raw is None else _DECODERS[name].decode(raw)


def read_group(body: bytes | msgspec.Raw, *, vocab_size: int | None = None, max_token_len: int = 0) -> ScoredGroup:
    """Return a group. Raises: BadField, naming the field, the sequence and what is wrong."""
    body = bytes(body)
    last_id = _MAX_ID if vocab_size is None else vocab_size - 1
    seen = glance(body, last_id=last_id, max_token_len=max_token_len, max_logprob=MAX_LOGPROB)
    if seen is not None:
        return ScoredGroup(size=seen.size, env_id=seen.env_id, body=body)
    values, body = _read_closely(body)
    for name in _REQUIRED:
        if name not in values:
            raise BadField(name, "the field is missing")
    _check(values, last_id=last_id, max_token_len=max_token_len)
    return ScoredGroup(size=len(values["tokens"]), env_id=values.get("env_id"), body=body)


def group_json(body: bytes) -> bytes:
    """Return a group as a batch carries it: all keys are there, and what is empty is null."""
    null = msgspec.Raw(b"null")
    return msgspec.json.encode({**dict.fromkeys(KEYS, null), **_fields(body)})


def _read_closely(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the values of a group, and its JSON with numbers in place of what stands for them. Raises: BadField."""
    raw = _fields(body)
    values: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        if name in raw:
            values[name], raw[name] = _decode(name, kind, raw[name])
    for name in raw.keys() - _TYPES.keys():
        _check_json(name, raw[name])
    return values, msgspec.json.encode(raw)


def read_groups(body: bytes, *, vocab_size: int | None = None, max_token_len: int = 0) -> list[ScoredGroup]:
    """Return the groups of a list; one that cannot be used refuses them all. Raises: BadField."""
    try:
        items = _LIST.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField("groups", f"the body must be a list of groups: {error}") from None
    groups = []
    for place, item in enumerate(items):
        try:
            groups.append(read_group(item, vocab_size=vocab_size, max_token_len=max_token_len))
        except BadField as error:
            raise BadField(f"{place}.{error.where}", str(error)) from None
    return groups


def _fields(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        found = _OBJECT.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField("group", f"the body must be a JSON object, without NaN and Infinity: {error}") from None
    return {name: value for name, value in found.items() if not _is_empty(value)}


def _is_empty(raw: msgspec.Raw) -> bool:
    return len(raw) < _LONGEST_EMPTY and bytes(raw).replace(b" ", b"") in _EMPTY


def _decode(name: str, kind: Any, raw: msgspec.Raw) -> tuple[Any, msgspec.Raw]:
    """Return a field's value and its JSON; numbers in other clothes ("1.5", true, 3.0) are taken as what they say."""
    try:
        return _DECODERS[name].decode(raw), raw
    except (msgspec.DecodeError, RecursionError) as error:
        reason = str(error)
    try:
        value = msgspec.convert(_plain(msgspec.json.decode(raw)), kind, strict=False)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise BadField(name, f"{reason} (NaN and Infinity are no JSON)") from None
    return value, msgspec.Raw(msgspec.json.encode(value))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def _check_json(name: str, raw: msgspec.Raw) -> None:
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(name, str(error)) from None


def _check(values: dict[str, Any], *, last_id: int, max_token_len: int) -> None:
    tokens: _INTS = values["tokens"]
    if not tokens:
        raise BadField("tokens", "a group has at least one sequence")
    for name in (*_PER_TOKEN, "scores", "messages", "overrides", "distill_token_ids", "distill_logprobs"):
        found = values.get(name)
        if found is not None and len(found) != len(tokens):
            raise BadField(name, f"{len(found)} entries for {len(tokens)} sequences")
    for place, score in enumerate(values["scores"]):
        if not math.isfinite(score):
            raise BadField(f"scores.{place}", f"a score must be a finite number, got {score}")
    if (env_id := values.get("env_id")) is not None and env_id < 0:
        raise BadField("env_id", f"must be >= 0, got {env_id}")
    for place, row in enumerate(tokens):
        _check_tokens(place, row, last_id=last_id, max_token_len=max_token_len)
        for name in _PER_TOKEN:
            found = values.get(name)
            if found is not None and len(found[place]) != len(row):
                raise BadField(f"{name}.{place}", f"{len(found[place])} entries for {len(row)} tokens")
    _check_messages(values.get("messages") or ())
    _check_numbers(values)


def _check_tokens(place: int, row: Sequence[int], *, last_id: int, max_token_len: int) -> None:
    if not row:
        raise BadField(f"tokens.{place}", "a sequence has at least one token")
    if 0 < max_token_len < len(row):
        raise BadField(f"tokens.{place}", f"{len(row)} tokens, and the trainer takes {max_token_len} (max_token_len)")
    if min(row) < 0 or max(row) > last_id:
        wrong = next(token_id for token_id in row if not 0 <= token_id <= last_id)
        raise BadField(f"tokens.{place}", f"ids are from 0 to {last_id}, got {wrong}")


def _check_messages(messages: Sequence[Sequence[dict[str, Any]]]) -> None:
    for place, row in enumerate(messages):
        for number, message in enumerate(row):
            if "role" not in message or "content" not in message:
                raise BadField(f"messages.{place}.{number}", "a message has role and content")


def _check_numbers(values: dict[str, Any]) -> None:
    """Refuse numbers that are not finite, and log-probs above 0 where a token is trained on."""
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        for place, row in enumerate(values.get(name) or ()):
            numbers = np.asarray(row, dtype=np.float64)
            if not np.isfinite(numbers).all():
                raise BadField(f"{name}.{place}", "all numbers must be finite")
            if name == "inference_logprobs":
                trained = np.asarray(values["masks"][place]) != UNTRAINED
                wrong = np.flatnonzero(trained & (numbers > MAX_LOGPROB))
                if len(wrong):
                    raise BadField(
                        f"{name}.{place}.{wrong[0]}",
                        f"the log-prob of a token that is trained on must be <= 0, got {numbers[wrong[0]]:g}",
                    )
    ids, logprobs = values.get("distill_token_ids"), values.get("distill_logprobs")
    if ids is not None and logprobs is not None:
        for place, (one, other) in enumerate(zip(ids, logprobs, strict=True)):
            if [len(row) for row in one] != [len(row) for row in other]:
                raise BadField(f"distill_logprobs.{place}", "must have the shape of distill_token_ids")


def big_number(value: int) -> msgspec.Raw:
    """Return JSON of an integer of any size."""
    return msgspec.Raw(json.dumps(value).encode())
