"""A real process of atroposlib 0.4.0 trains a tiny model in a real run: vLLM, gateway, learner, weight syncs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from atropos_client import atropos_python, environment_command
from test_atropos_process import TEMPLATE
from tiny_model import build_tiny_model

from asyncrl.run_directory import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_CONFIG = """
[run]
name = "atropos"
directory = "{directory}"
steps = 3

[model]
path = "{model}"

[environment]
name = "atropos"
options = {{ access = "{access}", num_steps = 3 }}

[buffer]
max_off_policyness = 1
groups_per_step = 2

[engine]
max_model_len = 256
max_num_seqs = 16
dtype = "float32"
kv_cache_gib = 0.1

[learner]
dtype = "float32"
learning_rate = 1e-3
"""


def wait_for_access(run: subprocess.Popen[str], access: Path) -> dict[str, str]:
    """Return what the run writes for environments once it asks for groups."""
    while not access.is_file():
        assert run.poll() is None, run.stdout and run.stdout.read()
        time.sleep(0.05)
    return json.loads(access.read_text())  # type: ignore[no-any-return]


def test_a_run_is_trained_by_an_environment_of_atropos(tmp_path: Path) -> None:
    python = atropos_python()
    model = build_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    access, log = tmp_path / "atropos.json", tmp_path / "environment.log"
    directory = RunDirectory(tmp_path / f"run_{os.getpid()}")  # its name is in shared memory, where others have theirs
    config = tmp_path / "atropos.toml"
    config.write_text(_CONFIG.format(directory=directory.path, model=model, access=access))
    command = [sys.executable, "-m", "asyncrl", "train", str(config)]
    said = ""
    told: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=told) as run,
        log.open("w") as output,
    ):
        try:
            found = wait_for_access(run, access)
            started = environment_command(python, found, model, group_size=4, total_steps=3)
            with subprocess.Popen(started, stdout=output, stderr=subprocess.STDOUT, env=told) as environment:
                try:
                    assert run.stdout is not None
                    said = run.stdout.read()
                finally:
                    environment.kill()  # it may be in the middle of a request when the run ends
        finally:
            run.kill()
    assert run.returncode == 0, said + log.read_text()[-4000:]
    summary = json.loads(directory.summary.read_text())
    assert summary["steps"] == 3
    assert summary["max_staleness_trained"] <= 1
