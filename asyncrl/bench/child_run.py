"""Whole runs of `asyncrl train` and other programs, as children of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.configs import Config, dump_config
from asyncrl.errors import AsyncRLError
from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory


def train_in_child(config: Config, settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train in a directory that is removed, and return the steps and the summary.

    `settings` ("section.key" -> value) are put over the configuration. Nothing is measured on held-out tasks, and one
    checkpoint is written, at the end. Raises: AsyncRLError with the last lines of a run that failed.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        path, directory = Path(scratch) / "bench.toml", RunDirectory(Path(scratch) / "run")
        path.write_text(dump_config(config), encoding="utf-8")
        values = {
            "run.directory": f'"{directory.path}"',
            "run.checkpoint_every_steps": 0,
            "run.keep_checkpoints": 1,
            "evaluation.samples": 0,
            **settings,
        }
        sets = [argument for name, value in values.items() for argument in ("--set", f"{name}={value}")]
        call([sys.executable, "-m", "asyncrl", "train", str(path), *sets], "asyncrl")
        return read_metrics(directory), json.loads(directory.summary.read_text(encoding="utf-8"))


def call(command: Sequence[str], name: str) -> str:
    """Return what a program printed. Raises: AsyncRLError with its last lines where it failed."""
    print(f"running {name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise AsyncRLError(f"{name} exited with code {done.returncode}; its last lines:\n{last}")
    return done.stdout
