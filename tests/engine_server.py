"""A real vLLM server of the tiny model, for all tests of a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiny_model import build_tiny_model

from asyncrl import keeper
from asyncrl.engines import LEFT_BEHIND, EngineSettings, command, free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running vLLM server and what it was started from."""

    url: str
    process: subprocess.Popen[bytes]
    """Its keeper, which ends when it does."""
    model_directory: Path
    log: Path
    scratch: str
    """Where it has its temporary files."""

    def kill(self) -> None:
        """Kill the server's own process; the keeper sees to the rest."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)


@contextmanager
def running_server(directory: Path, settings: EngineSettings) -> Iterator[Server]:
    """Build the tiny model below `directory` and serve it; yields before the server answers."""
    build_tiny_model(directory / "model")
    port = free_port()
    argv, environment = command(settings, str(directory / "model"), port)
    log = directory / "vllm.log"
    read, write = os.pipe()
    scratch = tempfile.mkdtemp(prefix="asyncrl-")  # short: sockets are in it
    options = ["--pipe", str(read), "--grace", "20", "--scratch", scratch, "--remove", LEFT_BEHIND[0]]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *options, "--", *argv],
                env={**os.environ, **environment, "TMPDIR": scratch},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[read],
            )
    finally:
        os.close(read)
    try:
        yield Server(
            url=f"http://127.0.0.1:{port}",
            process=process,
            model_directory=directory / "model",
            log=log,
            scratch=scratch,
        )
    finally:
        os.close(write)  # which ends the server and all that came from it, also when these tests are killed
        process.wait(40)
