"""TOML files into frozen settings: unknown keys are refused with the nearest match, values are checked by type.

The standard library reads TOML; msgspec converts and checks single values. pydantic was rejected because each part's
settings are plain dataclasses beside that part, and this file is all that is needed to compose them.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.errors import ConfigError

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the file's tables. Raises ConfigError naming the file, and the line where one is broken."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def apply_overrides(tables: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `tables` with each `section.key=value` set; the value is read as TOML, or as text where that fails."""
    result = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not separator or len(keys) < 2 or not all(keys):
            raise ConfigError(f"--set takes section.key=value, got {override!r}")
        table: dict[str, Any] = result
        for key in keys[:-1]:
            below = table.get(key, {})
            if not isinstance(below, dict):
                raise ConfigError(f"--set {override}: {key} is a value, not a section")
            table[key] = dict(below)
            table = table[key]
        table[keys[-1]] = _value(text)
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def build(kind: type[T], table: Mapping[str, Any], *, section: str = "") -> T:
    """Return a `kind` (a dataclass, nested ones as sub-tables) from a TOML table.

    Raises: ConfigError naming the setting, what was found and what is allowed.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(_unknown(key, list(fields), section))
        values[key] = _convert(hints[key], value, key=key, section=section)
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{_where(missing[0], section)} must be given")
    return kind(**values)


def _convert(hint: Any, value: Any, *, key: str, section: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        below = f"{section}.{key}" if section else key
        if not isinstance(value, Mapping):
            raise ConfigError(f"{below} must be a section, got {value!r}")
        return build(hint, value, section=below)
    if hint is Path:
        if not isinstance(value, str):
            raise ConfigError(f"{_where(key, section)} must be a path, got {value!r}")
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, Enum) and value not in (allowed := [one.value for one in hint]):
        raise ConfigError(f"{_where(key, section)} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_where(key, section)}: {str(error)[:1].lower()}{str(error)[1:]}, got {value!r}") from None


def _unknown(key: str, known: Sequence[str], section: str) -> str:
    kind, place = ("setting", f" in [{section}]") if section else ("section", "")
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; allowed: {', '.join(sorted(known))}"
    return f"unknown {kind} {key!r}{place}{hint}"


def _where(key: str, section: str) -> str:
    return f"{key} ([{section}])" if section else f"[{key}]"


def to_table(settings: Any) -> dict[str, Any]:
    """Return settings as TOML-like tables: the inverse of `build`. None is left out, since TOML has no such value."""
    return {
        field.name: value
        for field in dataclasses.fields(settings)
        if (value := _plain(getattr(settings, field.name))) is not None
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_table(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return "" if value == Path("") else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
