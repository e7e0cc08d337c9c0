"""Where the tests find a Python with verifiers, and the environments of verifiers that they play."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

VARIABLE = "ASYNCRL_VERIFIERS_PYTHON"
_DEFAULT = Path(__file__).parents[1] / ".venv-verifiers" / "bin" / "python"
MODULES = Path(__file__).parent / "verifiers_modules"
"""Modules as people write them for verifiers 0.4."""


def verifiers_python() -> str:
    """Return a Python that has verifiers 0.4 and uv, or skip the test."""
    python = os.environ.get(VARIABLE, str(_DEFAULT))
    code = "from importlib.metadata import version; print(version('verifiers'), version('uv'))"
    if Path(python).is_file():
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if found.stdout.startswith("0.4."):
            return python
    pytest.skip(
        f"no verifiers 0.4 and uv at {python}: python3 -m venv .venv-verifiers && "
        f".venv-verifiers/bin/pip install 'verifiers==0.4.*' uv, or name another Python in {VARIABLE}"
    )
