"""Processes that a benchmark asks: one that ends is named with its last lines, and none is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from asyncrl.bench.asked_process import asked_process
from asyncrl.errors import AsyncRLError


def _module(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Make a module that says who it is, and then runs `code`; return its name."""
    start = 'import json, os, sys, time\nprint(json.dumps({"pid": os.getpid()}), flush=True)\n'
    (directory / "asked.py").write_text(start + code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return "asked"


@pytest.mark.parametrize("read", ["sys.stdin.readline()", "sys.stdin.close()"])
def test_a_process_that_ends_instead_of_answering_is_named_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    module = _module(tmp_path, monkeypatch, f'{read}\nsys.exit("no memory left")\n')

    async def main() -> None:
        async with asked_process("padded", module, {}, directory=tmp_path) as asked:
            if "close" in read:
                await asked._process.wait()  # nobody reads the question any more
            await asked.ask("step")

    with pytest.raises(AsyncRLError, match="process 'padded' ended early; its last lines:\nno memory left"):
        trio.run(main)


def test_a_process_that_does_not_end_with_its_input_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module(tmp_path, monkeypatch, "time.sleep(600)\n")

    async def main() -> int:
        async with asked_process("learner", module, {}, directory=tmp_path) as asked:
            return int(asked.hello["pid"])

    pid = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
