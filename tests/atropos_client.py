"""Starts a real process of atroposlib, where a Python with atroposlib 0.4.0 is at hand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from tree import ROOT

VARIABLE = "ASYNCRL_ATROPOS_PYTHON"
_DEFAULT = ROOT / ".venv-atropos" / "bin" / "python"
_SCRIPT = Path(__file__).with_name("atropos_process.py")


@cache
def atropos_python() -> str:
    """Return a Python that has atroposlib 0.4.0, or skip the test."""
    python = os.environ.get(VARIABLE, str(_DEFAULT))
    code = "from importlib.metadata import version; print(version('atroposlib'))"
    if Path(python).is_file():
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if found.stdout.strip() == "0.4.0":
            return python
    pytest.skip(
        f"no atroposlib 0.4.0 at {python}: python3 -m venv .venv-atropos && "
        f".venv-atropos/bin/pip install atroposlib==0.4.0, or name another Python in {VARIABLE}"
    )


def environment_command(python: str, access: Mapping[str, str], model: Path, **env: object) -> list[str]:
    """Return the command line of an environment that is told of a run as the page on environments says."""
    options = {
        "env.rollout_server_url": access["rollout_server_url"],
        "env.tokenizer_name": model,
        "env.use_wandb": False,
        "env.wandb_name": "letters",
        "env.max_token_length": 256,
        **{f"env.{name}": value for name, value in env.items()},
        "openai.base_url": access["base_url"],
        "openai.api_key": access["api_key"],
        "openai.server_type": "vllm",
        "openai.model_name": "policy",
        "openai.tokenizer_name": model,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [python, str(_SCRIPT), "serve", *words]
