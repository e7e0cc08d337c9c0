"""The service as its page starts it, in a process of its own on the tiny model, and connections that break."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from tiny_model import build_tiny_model
from tiny_run import write_config
from tree import ROOT

PAGE = (ROOT / "asyncrl" / "tinker" / "TINKER.md").read_text(encoding="ascii")
(COMMAND,) = re.findall(r"^asyncrl serve tinker.*$", PAGE, re.MULTILINE)
PYTHON = "ASYNCRL_TINKER_PYTHON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service that answers."""

    url: str
    token: str
    process: subprocess.Popen[str]
    directory: Path
    said: list[str]

    def get(self, path: str, token: str | None = None) -> httpx.Response:
        headers = {"x-api-key": self.token if token is None else token}
        return httpx.get(f"{self.url}/api/v1/{path}", headers=headers, trust_env=False)

    def post(self, path: str, body: object, token: str | None = None) -> httpx.Response:
        headers = {"x-api-key": self.token if token is None else token}
        return httpx.post(f"{self.url}/api/v1/{path}", json=body, headers=headers, trust_env=False)


@contextmanager
def service(home: Path, *options: str) -> Iterator[Service]:
    """Yield the page's service, with `options` put after its own; `home` holds its model, token and saved models."""
    model = home / "base"
    if not model.exists():
        build_tiny_model(model, tied=True, dtype=torch.float32)
    config = write_config(home / "tinker.toml", model, {"learner.threads": 1})
    words = shlex.split(COMMAND)[1:]
    words[words.index("configs/demo.toml")] = str(config)
    words += ["--port", "0", "--directory", str(home / "saved"), "--token-file", str(home / "token"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}  # of the configuration's environment
    command = [sys.executable, "-m", "asyncrl", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=home) as process:
        assert process.stdout is not None
        said: list[str] = []
        while line := process.stdout.readline():
            said.append(line.strip())
            if "training loops connect to" in line:
                break
        try:
            assert said, "the service ended"
            assert "connect to" in said[-1], said
            token = (home / "token").read_text().strip()
            yield Service(url=said[-1].split()[-1], token=token, process=process, directory=home / "saved", said=said)
        finally:
            process.terminate()
            process.wait()


class Breaking(httpx.AsyncBaseTransport):
    """A network that carries every request to its end and loses the first answer to each: the connection breaks."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self._seen: set[tuple[str, bytes]] = set()
        self.lost: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        key = (request.url.path, bytes(request.content))
        loses = key not in self._seen
        self._seen.add(key)
        response = await self._inner.handle_async_request(request)
        if loses:
            await response.aclose()
            self.lost.append(request.url.path)
            raise httpx.ReadError("the connection broke", request=request)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def sdk_python() -> str:
    """Return a Python that has tinker's SDK, or skip the test."""
    python = os.environ.get(PYTHON, "")
    if not python:
        pytest.skip(f"name a Python that has tinker (pip install tinker) in {PYTHON}")
    found = subprocess.run([python, "-c", "import tinker"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{PYTHON}={python} has no tinker: {found.stderr.strip()[-200:]}")
    return python
