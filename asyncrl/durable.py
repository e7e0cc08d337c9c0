"""What must be on the disk before anything goes on."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Return once a file's bytes, or the names in a directory, would survive a loss of power. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
