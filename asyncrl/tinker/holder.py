"""The process that holds the models, as the service sees it: orders in, replies out, one at a time and in turn."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from asyncrl import wire
from asyncrl.children import Child, start_child
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.tinker.job import ModelsJob, write_job
from asyncrl.tinker.orders import Ready, Replies, Result

SHUTDOWN_S = 20.0
"""For the process to end what it is doing; then it is terminated."""


class Holder:
    """The process's side that the service has. `ask` waits its turn: whoever asked first is answered first."""

    def __init__(self, stream: trio.SocketStream, child: Child) -> None:
        self._stream = stream
        self._child = child
        self._turn = trio.Lock()
        self._under_way = False
        self.ready: Ready

    async def wait_ready(self) -> None:
        """Return once the base is loaded. Raises: ConfigError where it cannot be; LearnerError."""
        self.ready = await self._receive()

    async def ask(self, order: wire.Message) -> Result:
        """Return what became of an order. Raises: LearnerError when the process ends."""
        async with self._turn:
            assert not self._under_way, "an order was cancelled, and its reply would be taken for the next one's"
            self._under_way = True
            try:
                await wire.send_async(self._stream, order)
            except trio.BrokenResourceError:
                await self._fail()
            result: Result = await self._receive()
            self._under_way = False
            return result

    async def _receive(self) -> Any:
        try:
            reply = await wire.receive_async(self._stream, Replies)
        except (trio.BrokenResourceError, EOFError):
            reply = None
        if reply is None:
            await self._fail()
        if isinstance(reply, wire.Failure):
            raise ConfigError(reply.message)
        return reply

    async def _fail(self) -> None:
        with trio.move_on_after(SHUTDOWN_S):
            raise LearnerError((await self._child.wait_exit()).describe())
        raise LearnerError(f"the process of the models closed its connection and did not end within {SHUTDOWN_S:.0f} s")


@asynccontextmanager
async def open_holder(job: ModelsJob, scratch: Path, *, own_cores: bool) -> AsyncIterator[Holder]:
    """Start the process, yield it when it has the base, and end it on leaving, whatever it is doing."""
    settings = scratch / "models.json"
    write_job(job, settings)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "asyncrl.tinker", "--fd", str(theirs.fileno()), "--settings", str(settings)]
        if own_cores:
            command.append("--own-cores")
        child = start_child(
            "the process of the models",
            command,
            log_path=scratch / "models.log",
            pass_fds=[theirs.fileno()],
            grace_s=SHUTDOWN_S,
        )
        async with child as process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
            theirs.close()
            holder = Holder(stream, process)
            await holder.wait_ready()
            yield holder
