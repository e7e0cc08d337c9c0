"""Functions of a user's own: found by name, and called at a boundary, so that what they raise is no reward of 0."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from asyncrl.errors import AsyncRLError, ConfigError, EnvironmentFault


def load_function(name: str, *, setting: str) -> Callable[..., Any]:
    """Return what "package.module:function" stands for; `setting` is named where nothing does. Raises: ConfigError."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name:
        raise ConfigError(f'{setting} must be "package.module:function", got {name!r} ([environment.options])')
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except (ImportError, TypeError) as error:  # the last for names such as ".a:x"
        raise ConfigError(f"{setting} = {name!r}: {error} ([environment.options])") from error
    if not callable(found):
        raise ConfigError(f"{setting} = {name!r}: {module_name} has no function {attribute!r} ([environment.options])")
    return found  # type: ignore[no-any-return]


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a function returns; one that is not async runs on a worker thread, and is left there if cancelled.

    Raises: EnvironmentFault where it raised anything that is not asyncrl's own.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        return await trio.to_thread.run_sync(partial(function, *arguments, **named), abandon_on_cancel=True)
    except AsyncRLError:
        raise
    except Exception as error:  # a boundary: whatever a user's own code raises masks its episode
        name = getattr(function, "__qualname__", type(function).__name__)
        raise EnvironmentFault(f"{name} raised {type(error).__name__}: {error}") from error
