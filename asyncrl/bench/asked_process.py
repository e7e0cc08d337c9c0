"""Processes of a benchmark that are asked by names of methods, so that several can take turns while the others rest.

A process prints a line of JSON when it is ready and one for each line, the name of a method, that it reads. It ends
with its input. Here are both sides.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import trio

from asyncrl.children import last_lines
from asyncrl.errors import AsyncRLError
from asyncrl.learner.environment import thread_environment

Report = dict[str, Any]

_LAST_LINES = 15
_GRACE_S = 30.0  # to remove what was published; a process that still computes then is killed


class AskedProcess:
    """The side that asks."""

    def __init__(self, name: str, process: trio.Process, log_path: Path, limit_s: float) -> None:
        self._name, self._process, self._log_path, self._limit_s = name, process, log_path, limit_s
        self._rest = b""
        self.hello: Report = {}
        """What the process said of itself when it was ready."""

    async def ask(self, method: str) -> Report:
        """Return what a method returns. Raises: AsyncRLError with the last lines of a process that ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError):  # the answer will be missing
            await self._process.stdin.send_all(f"{method}\n".encode())
        return await self.answer()

    async def answer(self) -> Report:
        """Return the next line of its output. Raises: AsyncRLError."""
        assert self._process.stdout is not None
        with trio.fail_after(self._limit_s):
            while b"\n" not in self._rest:
                more = await self._process.stdout.receive_some()
                if not more:
                    last = last_lines(self._log_path, _LAST_LINES)
                    raise AsyncRLError(f"the benchmark's process {self._name!r} ended early; its last lines:\n{last}")
                self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        report: Report = json.loads(line)
        return report


@contextlib.asynccontextmanager
async def asked_process(
    name: str,
    module: str,
    job: Mapping[str, Any],
    *,
    directory: Path,
    limit_s: float = math.inf,
    own_cores: bool = False,
) -> AsyncIterator[AskedProcess]:
    """Run a module with a job, with the environment of a learner process, and yield once it is ready.

    What it writes besides answers goes to a log in `directory`. No answer may take longer than `limit_s`.
    Raises: AsyncRLError with its last lines where it ends before.
    """
    log_path = directory / f"{name}.log"
    with log_path.open("wb") as log:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", module, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**thread_environment(own_cores=own_cores), **os.environ},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    async with process.stdout:
        try:
            asked = AskedProcess(name, process, log_path, limit_s)
            asked.hello = await asked.answer()
            yield asked
        finally:
            with trio.move_on_after(_GRACE_S, shield=True):
                await process.stdin.aclose()
                await process.wait()
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):  # bounded: SIGKILL cannot be refused
                    await process.wait()


def answer_requests(subject: object, hello: Report) -> None:
    """Say `hello`, and answer with what the methods of `subject` return, until the input ends: the other side."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print goes with the warnings
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(subject, line.strip())()), file=answers, flush=True)
