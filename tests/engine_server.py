"""A real vLLM server of the tiny model, for all tests of a module."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiny_model import build_tiny_model

from asyncrl.engines import EngineSettings, command, free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running vLLM server and what it was started from."""

    url: str
    process: subprocess.Popen[bytes]
    model_directory: Path
    log: Path


@contextmanager
def running_server(directory: Path, settings: EngineSettings) -> Iterator[Server]:
    """Build the tiny model below `directory` and serve it; yields before the server answers."""
    build_tiny_model(directory / "model")
    port = free_port()
    argv, environment = command(settings, str(directory / "model"), port)
    log = directory / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield Server(url=f"http://127.0.0.1:{port}", process=process, model_directory=directory / "model", log=log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
