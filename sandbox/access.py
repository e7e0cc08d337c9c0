"""The token that a program which serves others asks for, in a file."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from asyncrl.errors import ConfigError


def read_token(path: str, *, where: str = "[sandbox]") -> str:
    """Return the token in a file; `where` is the table of its setting. Raises ConfigError."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file: {path or 'no file'} cannot be read: {error} ({where})") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ConfigError(f"token_file: {path} must hold a token of at least 16 characters ({where})")
    return token


def make_token(path: Path) -> None:
    """Write a new token where there is none, for its owner's eyes only. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"--token-file: {path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
