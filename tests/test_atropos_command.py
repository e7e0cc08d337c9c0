"""`asyncrl serve atropos`, as the page on environments shows it: killed, started again, and used wrongly."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from atropos_rig import REGISTRATION, firsts, group
from tree import ROOT

from asyncrl.cli import main

PAGE = (ROOT / "asyncrl" / "environments" / "ENVIRONMENTS.md").read_text(encoding="ascii")
(COMMAND,) = re.findall(r"^asyncrl serve atropos.*$", PAGE, re.MULTILINE)


@contextmanager
def server(directory: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Yield the page's server in a process of its own, on a free port, and a client."""
    words = [*shlex.split(COMMAND)[1:], "--port", "0", "--directory", str(directory)]
    with subprocess.Popen([sys.executable, "-m", "asyncrl", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline(), process.stdout.readline()]
        try:
            with httpx.Client(base_url=said[1].split()[-1], trust_env=False, verify=False) as client:
                yield process, client
        finally:
            process.terminate()
            assert process.wait() in (0, -9)


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    with server(tmp_path / "queue") as (process, client):
        client.post("/register", json=REGISTRATION).raise_for_status()
        for first in range(2):
            client.post("/scored_data", json=group(first)).raise_for_status()
        assert firsts(client.get("/batch").json()["batch"]) == [0]
        process.kill()
        process.wait()
    with server(tmp_path / "queue") as (_, client):
        assert client.get("/status").json() == {"current_step": 1, "queue_size": 1}
        client.post("/register", json=REGISTRATION).raise_for_status()
        assert [firsts(client.get("/batch").json()["batch"]) for _ in range(2)] == [[0], [1]]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--max-body-mib", "0"], "--max-body-mib must be >= 1, got 0"),
        (["--max-queue-mib", "-1"], "--max-queue-mib must be >= 1, got -1"),
        (["--ghost-seconds", "nan"], "--ghost-seconds must be > 0, got nan"),
    ],
)
def test_what_was_typed_wrong_is_named(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "atropos", "--directory", str(tmp_path / "queue"), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "queue").exists()
