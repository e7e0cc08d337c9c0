"""Stand-ins of the programs by which test scripts install what they need, for scripts whose needs are met already.

`apt-get`, `pip`, `curl`, `wget`, `uv` and `uvx` install nothing: they succeed for what was said to be there, and else
say so in a file, which makes the judging a fault of the task and no reward of 0. `pytest`, run by itself or through
uv, is the one beside this program. Versions that a script asks for are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PLACE = "/stand-ins"
MISSING = "missing.txt"
"""In the directory of the rewards: what the script asked for in vain, one name a line."""

_NAMES = ("apt", "apt-get", "pip", "pip3", "curl", "wget", "uv", "uvx", "pytest")
_RUNNER = Path(__file__).with_name("stand_in_runner.py")


def stand_in_files(python: Sequence[str], provided: Sequence[str], logs: str) -> dict[str, bytes]:
    """Return the files of the place `PLACE`; all of them may be run.

    Args: `python` runs Python there, `provided` are the names of what is there, `logs` is the rewards' directory.
    """
    interpreter = " ".join(python)
    files = {"runner.py": _RUNNER.read_bytes(), "provided.txt": "\n".join(provided).encode()}
    for name in _NAMES:
        line = f'exec {interpreter} {PLACE}/runner.py {name} {PLACE}/provided.txt {logs}/{MISSING} "$@"'
        files[f"bin/{name}"] = f"#!/bin/sh\n{line}\n".encode()
    return files


def stand_in_command(script: str, packages: str) -> list[str]:
    """Return what runs the file `script` with the stand-ins first on the path; `packages` is where pytest lies."""
    text = (
        f'export PATH="{PLACE}/bin:$PATH" PYTHONPATH="{packages}" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\n'
        'mkdir -p "$HOME/.local/bin" && : > "$HOME/.local/bin/env"\n'  # scripts source it after "installing" uv
        f"exec bash {script}\n"
    )
    return ["bash", "-c", text]
