"""Files that hold a secret, such as how a server of this machine is reached."""

from __future__ import annotations

import os
from pathlib import Path


def write_privately(path: Path, text: str) -> None:
    """Write a file that nobody but its owner can read, in place of one that is there. Raises: OSError."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
