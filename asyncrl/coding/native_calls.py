"""Calls in the form that models are taught: JSON between tool_call tags, whatever the tools are.

What looks like a call and is none is malformed, and says why; it takes its place among the others, so that the answers
come in the order of the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_CALLS = 8
"""Of one reply; each costs an answer in the context, and none of the later ones can know the earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """What was meant as a call, or a reply without any."""

    reason: str
    """As the agent is told it, in a few words."""


T = TypeVar("T")
Check = Callable[[str, Mapping[str, Any]], T | Malformed]
"""(name, arguments) -> a call that can be carried out, or what is wrong with it."""

TOO_MANY = Malformed(reason=f"a reply may hold {MAX_CALLS} calls; the others were not looked at")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLANK = re.compile(r"\s*")


def native_calls(text: str, checked: Check[T]) -> Iterator[T | Malformed]:
    """Yield what `checked` makes of the name and arguments of each call in a reply, in order."""
    place = text.find(_OPEN)
    while place >= 0:
        start = _skip_blank(text, place + len(_OPEN))
        call, end = _native_call(text, start, checked)
        yield call
        place = text.find(_OPEN, end)


def _native_call(text: str, start: int, checked: Check[T]) -> tuple[T | Malformed, int]:
    """Return the call whose JSON begins at `start`, and where to look for the next one."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        return Malformed(reason="the call is nested too deeply"), _after_close(text, start)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return Malformed(reason=f"the call is not JSON: {reason[:80]}"), _after_close(text, start)
    end = _skip_blank(text, end)
    if not text.startswith(_CLOSE, end):
        return Malformed(reason=f"the call is not closed by {_CLOSE}"), end
    return _native_checked(value, checked), end


def _after_close(text: str, start: int) -> int:
    """Return where a call ends that cannot be read: what its broken text quotes is no call."""
    end = text.find(_CLOSE, start)
    return len(text) if end < 0 else end + len(_CLOSE)


def _native_checked(value: Any, checked: Check[T]) -> T | Malformed:
    if not isinstance(value, dict) or not {"name"} <= {*value} <= {"name", "arguments"}:
        return Malformed(reason='a call is {"name": ..., "arguments": {...}}')
    name, arguments = value["name"], value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Malformed(reason="name must be text and arguments an object")
    return checked(name, arguments)


def _skip_blank(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    assert found is not None
    return found.end()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice, strict=False)


def write_native(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a call, as `native_calls` reads it."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{_OPEN}\n{body}\n{_CLOSE}"
