"""The fields of a JSON body, each taken once and checked; what nobody takes is then known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.gateway.http import Refused
from asyncrl.types import TokenIds

_MAX_ID = 2**31 - 1  # token ids are int32


class Fields:
    """A JSON object. A field that is null is as one that is missing.

    Example:
        >>> fields = Fields(b'{"n": 2, "stop": "x", "top_p": 0.5}')
        >>> fields.integer("n", 1, low=1), fields.texts("stop"), fields.rest()
        (2, ('x',), {'top_p': 0.5})
    """

    def __init__(self, body: bytes) -> None:
        """Raises: Refused where the body is no JSON object."""
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise Refused(400, f"the body must be a JSON object, got {_kind(value)}")
        self._values = {name: found for name, found in value.items() if found is not None}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Fields:
        """Return fields of an object that is part of another one."""
        fields = cls(b"{}")
        fields._values = {name: found for name, found in values.items() if found is not None}
        return fields

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field, whatever it is."""
        return self._values.pop(name, default)

    def rest(self) -> Mapping[str, Any]:
        """Return the fields that nobody has taken."""
        return self._values

    def integer(self, name: str, default: int, *, low: int = 0, high: int = _MAX_ID) -> int:
        """Return a whole number from `low` to `high`."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Refused(400, f"{name} must be a whole number from {low} to {high}, got {_shown(value)}")
        return value

    def number(self, name: str, default: float | None) -> float | None:
        """Return a number."""
        value = self.take(name, default)
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value
        raise Refused(400, f"{name} must be a number, got {_shown(value)}")

    def flag(self, name: str) -> bool:
        """Return true or false; false where it is missing."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise Refused(400, f"{name} must be true or false, got {_shown(value)}")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise Refused(400, f"{name} must be a string, got {_shown(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return strings, of which one may come without its list."""
        value = self.take(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
            raise Refused(400, f"{name} must be strings that are not empty, got {_shown(value)}")
        return tuple(found)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return a list of objects; empty where it is missing."""
        value = self.take(name, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise Refused(400, f"{name} must be a list of objects, got {_shown(value)}")
        return value

    def object(self, name: str) -> Fields:
        """Return an object as fields; an empty one where it is missing."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise Refused(400, f"{name} must be an object, got {_shown(value)}")
        return Fields.of(value)

    def token_ids(self, name: str, *, vocab_size: int) -> TokenIds:
        """Return token ids; none where it is missing."""
        return token_ids_of(self.take(name, []), name, vocab_size=vocab_size)


def token_ids_of(value: Any, name: str, *, vocab_size: int) -> TokenIds:
    """Return token ids of a list of numbers. Raises: Refused."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise Refused(400, f"{name} must be a list of token ids, got {_shown(value)}")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        wrong = next(one for one in value if not 0 <= one < vocab_size)
        raise Refused(400, f"{name} must be token ids from 0 to {vocab_size - 1}, got {wrong}")
    return TokenIds(value)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "true or false"}.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
