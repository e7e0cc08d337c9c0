"""The project's own files, as the tests about them see them."""

from __future__ import annotations

import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FOLDERS = ("buffers", "sandbox", "weight_sync", "losses", "configs")
"""The folders beside `asyncrl/` that are imported as `asyncrl.<folder>`."""


@functools.cache
def module_files() -> dict[str, Path]:
    """Return module name -> file for every Python file that is part of the package."""
    files = {}
    for folder in ("asyncrl", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = (
                relative.with_suffix("").parts if folder == "asyncrl" else ("asyncrl", *relative.with_suffix("").parts)
            )
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files
