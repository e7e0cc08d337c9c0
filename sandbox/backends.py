"""The table of backends, and how one is opened by its name."""

from __future__ import annotations

import difflib
import importlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import SandboxBackend
from asyncrl.sandbox.bubblewrap import open_bubblewrap
from asyncrl.sandbox.container import open_container
from asyncrl.sandbox.remote import open_remote
from asyncrl.sandbox.settings import SandboxSettings

SANDBOXES: MappingProxyType[str, Callable[..., AbstractAsyncContextManager[SandboxBackend]]] = MappingProxyType(
    {"bubblewrap": open_bubblewrap, "container": open_container, "remote": open_remote}
)
"""Name -> `opener(settings, *, directory)`, an async context manager that yields the backend."""


def open_backend(settings: SandboxSettings, *, directory: Path | str) -> AbstractAsyncContextManager[SandboxBackend]:
    """Return the context manager of the backend that `settings` names; what it needs to remember lies in `directory`.

    Leaving it removes every sandbox; a killed owner's are removed at once by its launcher, and at the next opening.
    Raises: ConfigError for an unknown name or a missing program; on entering, SandboxError where none can be made.
    """
    # the launcher has another working directory
    return _opener(settings.backend)(settings, directory=Path(directory).absolute())


def _opener(name: str) -> Callable[..., AbstractAsyncContextManager[SandboxBackend]]:
    if name in SANDBOXES:
        return SANDBOXES[name]
    module_name, separator, attribute = name.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, SANDBOXES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ' (or "package.module:opener")'
        raise ConfigError(f"backend must be one of {', '.join(SANDBOXES)}, got {name!r} ([sandbox]){hint}")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except (ImportError, ValueError, TypeError) as error:  # the last two for names such as ":x" and ".a:x"
        raise ConfigError(f"backend {name!r}: {error} ([sandbox])") from error
    if not callable(found):
        raise ConfigError(f"backend {name!r}: {module_name} has no function {attribute!r} ([sandbox])")
    return found  # type: ignore[no-any-return]


async def probe(settings: SandboxSettings) -> str:
    """Open and close the backend, and return the name of its wall.

    Raises: ConfigError saying what is missing and what to install or set.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-probe-") as directory:
        try:
            async with open_backend(settings, directory=directory) as backend:
                return backend.wall
        except SandboxError as error:
            raise ConfigError(f"{error} ([sandbox])") from None
