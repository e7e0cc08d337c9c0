"""Demonstrations: a JSON Lines file of conversations or token ids, read into segments to train on. Imports no torch.

A line is one of

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"token_ids": [5, 7, 9], "loss_mask": [0, 1, 1]}

Further keys of a line (a name, a source) are left alone. A conversation is rendered as rollouts render theirs: the
model's chat template around the messages, and each assistant's turn as if it had been sampled, its text followed by the
end token. These two are trained on; what else the template writes is not, nor is a turn of the assistant's that has
"weight": 0, such as a mistake whose correction is shown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from asyncrl.errors import ConfigError
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Logprobs, Segment, TokenIds, TokenSpan

ROLES = ("system", "user", "assistant", "tool")
TOO_LONG = ("refuse", "drop")


@runtime_checkable
class Demonstrating(Protocol):
    """What an environment with reference solutions may offer besides `Environment`."""

    def demonstrations(self) -> Iterable[Sequence[Message]] | AsyncIterable[Sequence[Message]]:
        """Return a conversation for every training task, never a held-out one: what is asked, and a solution.

        It is async where the conversations are played.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What a file holds."""

    segments: tuple[Segment, ...]
    """In the file's order. Nobody sampled them: their spans say version 0, and behaviour log-probs are 0, unread."""
    num_dropped: int
    """Lines that were longer than the limit."""
    digest: str
    """Hex SHA-256 of the file's bytes."""


class _TooLongError(ConfigError):
    """A line that may be dropped instead of refused."""


def read_demonstrations(
    path: Path, renderer: ChatRenderer, *, max_tokens: int, too_long: str = "refuse"
) -> Demonstrations:
    """Return what the file holds; lines of more than `max_tokens` tokens are refused, or dropped and counted.

    Raises: ConfigError naming the file, and the line that cannot be trained on.
    """
    assert too_long in TOO_LONG
    segments: list[Segment] = []
    num_dropped, digest = 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                try:
                    segments.append(_segment(line, renderer, max_tokens))
                except _TooLongError as error:
                    if too_long == "refuse":
                        raise ConfigError(f'{path}, line {number}: {error}; or set too_long = "drop"') from None
                    num_dropped += 1
                except ConfigError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"path: there is no file of demonstrations {path} ([warm_start])") from None
    except OSError as error:
        raise ConfigError(f"path: {path} cannot be read: {error.strerror} ([warm_start])") from None
    if not segments:
        dropped = f": all {num_dropped} are longer than {max_tokens} tokens" if num_dropped else ""
        raise ConfigError(f"{path} holds no demonstrations{dropped} ([warm_start] path)")
    return Demonstrations(segments=tuple(segments), num_dropped=num_dropped, digest=digest.hexdigest())


async def first(
    conversations: Iterable[Sequence[Message]] | AsyncIterable[Sequence[Message]], limit: int | None
) -> list[Sequence[Message]]:
    """Return the first `limit` conversations, all for None; no more of them are made."""
    if not isinstance(conversations, AsyncIterable):
        return list(islice(conversations, limit))
    found: list[Sequence[Message]] = []
    async with aclosing(aiter(conversations)) as each:  # type: ignore[type-var]
        while limit is None or len(found) < limit:
            try:
                found.append(await anext(each))
            except StopAsyncIteration:
                break
    return found


def write_demonstrations(path: Path, conversations: Iterable[Sequence[Message]]) -> int:
    """Write a file of conversations, in one step, and return how many. Raises: ConfigError where it cannot be written.

    An existing file is replaced.
    """
    count, partial = 0, path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            for messages in conversations:
                file.write(json.dumps({"messages": list(messages)}) + "\n")
                count += 1
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return count


def _segment(line: bytes, renderer: ChatRenderer, max_tokens: int) -> Segment:
    """Return what one line holds. Raises: ConfigError saying what is wrong, `_TooLongError` where its length is."""
    record = _record(line)
    if "messages" in record:
        token_ids, mask = _conversation(record["messages"], renderer)
    else:
        token_ids, mask = _ids(record["token_ids"]), _mask(record["loss_mask"])
    if len(mask) != len(token_ids):
        raise ConfigError(f"loss_mask has {len(mask)} entries for {len(token_ids)} token_ids")
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < renderer.vocab_size:
            raise ConfigError(f"token {position} has id {token_id}, allowed are 0 to {renderer.vocab_size - 1}")
    if not any(mask):
        raise ConfigError("no token is trained on: loss_mask, or every weight, is 0")
    if mask[0]:
        raise ConfigError("the first token is trained on, but nothing predicts it")
    if len(token_ids) > max_tokens:
        raise _TooLongError(f"{len(token_ids)} tokens, at most {max_tokens} are allowed (max_tokens, [warm_start])")
    return Segment(
        token_ids=TokenIds(token_ids),
        loss_mask=bytes(mask),
        behaviour_logprobs=Logprobs([0.0] * len(mask)),
        spans=tuple(TokenSpan(start=start, end=end, version=0) for start, end in _runs(mask)),
    )


def _record(line: bytes) -> Mapping[str, Any]:
    if not line.strip():
        raise ConfigError("is empty")
    try:
        record = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ConfigError(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"must be a JSON object, found {type(record).__name__}")
    if ("messages" in record) == ("token_ids" in record or "loss_mask" in record):
        raise ConfigError('must hold either "messages", or "token_ids" and "loss_mask"')
    for name in () if "messages" in record else ("token_ids", "loss_mask"):
        if name not in record:
            raise ConfigError(f"{name} is missing")
    return record


def _conversation(messages: Any, renderer: ChatRenderer) -> tuple[list[int], bytes]:
    """Return ids and mask of a conversation, as a rollout in which the assistant said just this would have them."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"messages must be a list with something in it, found {str(messages)[:80]}")
    token_ids: list[int] = []
    mask = bytearray()
    unanswered: list[Message] = []
    for place, message in enumerate(messages):
        _check_message(message, place)
        if message["role"] != "assistant":
            unanswered.append(message)
            continue
        if not unanswered:
            raise ConfigError(f"messages[{place}]: the assistant speaks where nobody has spoken to it")
        context = renderer.extend(unanswered, ended=True) if token_ids else renderer.start(unanswered)
        reply = renderer.encode(message["content"])
        if not renderer.end_token_ids.isdisjoint(reply):
            raise ConfigError(f"messages[{place}]: its content holds an end token of the model")
        token_ids += [*context, *reply, renderer.reply_end]
        mask += bytes(len(context)) + bytes([message.get("weight", 1)]) * (len(reply) + 1)
        unanswered = []
    if unanswered:
        raise ConfigError(f"the last message must be the assistant's, found role {messages[-1]['role']!r}")
    return token_ids, bytes(mask)


def _check_message(message: Any, place: int) -> None:
    if not isinstance(message, dict) or {*message} - {"weight"} != {"role", "content"}:
        found = sorted(message) if isinstance(message, dict) else type(message).__name__
        raise ConfigError(f"messages[{place}] must hold role, content and perhaps weight, found {found}")
    role, content = message["role"], message["content"]
    weight = message.get("weight", 1)
    if type(weight) is not int or weight not in (0, 1) or ("weight" in message and role != "assistant"):
        raise ConfigError(f"messages[{place}]: weight must be 0 or 1, of the assistant's alone, found {weight!r}")
    if role not in ROLES:
        raise ConfigError(f"messages[{place}]: role must be one of {', '.join(ROLES)}, found {role!r}")
    if not isinstance(content, str) or (role == "assistant" and not content):
        raise ConfigError(f"messages[{place}]: content must be text, found {content!r}")


def _ids(values: Any) -> list[int]:
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise ConfigError(f"token_ids must be a list of integers with something in it, found {str(values)[:80]}")
    return values


def _mask(values: Any) -> bytes:
    if not isinstance(values, list) or not all(value in (0, 1) for value in values):
        raise ConfigError(f"loss_mask must be a list of 0 and 1, found {str(values)[:80]}")
    return bytes(int(value) for value in values)


def _runs(mask: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of ones."""
    start = mask.find(1)
    while start >= 0:
        end = mask.find(0, start)
        yield start, end if end >= 0 else len(mask)
        start = mask.find(1, end) if end >= 0 else -1
