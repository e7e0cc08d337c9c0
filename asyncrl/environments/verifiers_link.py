"""The process that plays an environment of verifiers, as the run sees it: started, spoken to, and ended."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

from asyncrl.children import last_lines, start_child
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.gateway import Session

_PROGRAM = Path(__file__).with_name("verifiers_process.py")
_PIECE = 2**16
_STOP_S = 1.0  # for a process that takes nothing to be told that nobody waits any more


class Failure(msgspec.Struct):
    type: str
    message: str


class Trace(msgspec.Struct):
    """What one agent of an episode did."""

    agent: str
    ok: bool
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    errors: list[Failure]
    stop: str
    truncated: bool
    timed_out: bool


class Episode(msgspec.Struct):
    traces: list[Trace]
    """One for each time that an agent was run."""
    errors: list[Failure]
    """Of the episode as a whole."""


class Listed(msgspec.Struct):
    id: str
    data: dict[str, Any]


class _Ready(msgspec.Struct, tag_field="kind", tag="ready"):
    name: str
    tasks: list[Listed]


class _Refused(msgspec.Struct, tag_field="kind", tag="refused"):
    reason: str


class _Played(msgspec.Struct, tag_field="kind", tag="played"):
    number: int
    episode: Episode


_FIRST = msgspec.json.Decoder(_Ready | _Refused)
_LATER = msgspec.json.Decoder(_Played)


@asynccontextmanager
async def started(python: str, log_path: Path) -> AsyncIterator[VerifiersProcess]:
    """Start the process, and end it on leaving; what it writes goes to `log_path`."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        child = start_child(
            "verifiers",
            [python, "-P", str(_PROGRAM), "--fd", str(theirs.fileno())],
            log_path=log_path,
            pass_fds=[theirs.fileno()],
        )
        async with child:
            theirs.close()
            async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
                yield VerifiersProcess(stream, log_path)


class VerifiersProcess:
    """The process, as it is spoken to."""

    def __init__(self, stream: trio.SocketStream, log_path: Path) -> None:
        self._stream = stream
        self._log_path = log_path
        self._buffer = bytearray()
        self._sending = trio.Lock()
        self._waiting: dict[int, trio.MemorySendChannel[Episode]] = {}
        self._num_asked = 0
        self.num_played = 0
        """Episodes that have come back."""

    async def begin(self, message: Mapping[str, Any]) -> Sequence[Listed]:
        """Return the tasks. Raises: ConfigError with its reason where it refuses, EnvironmentFault where it dies."""
        await self._send(message)
        answer = _FIRST.decode(await self._line())
        if isinstance(answer, _Refused):
            raise ConfigError(f"verifiers cannot be played: {answer.reason} ([environment.options])")
        return answer.tasks

    async def run(self) -> None:
        """Hand on what it says. Raises: EnvironmentFault where it dies, as does every `play` that waits."""
        try:
            while True:
                played = _LATER.decode(await self._line())
                self.num_played += 1
                if (waiting := self._waiting.pop(played.number, None)) is not None:  # else nobody waits any more
                    waiting.send_nowait(played.episode)
        finally:
            for waiting in self._waiting.values():
                waiting.close()
            self._waiting.clear()

    async def play(self, place: int, session: Session, model: str) -> Episode:
        """Return an episode of the task at `place`; one that is cancelled is stopped there too.

        Raises: EnvironmentFault where the process dies.
        """
        self._num_asked += 1
        number = self._num_asked
        self._waiting[number], inbox = trio.open_memory_channel[Episode](1)
        asked = {"kind": "play", "number": number, "task": place, "model": model}
        try:
            await self._send({**asked, "base_url": session.base_url, "key": session.token})
            return await inbox.receive()
        except trio.EndOfChannel:
            raise self._ended() from None
        finally:
            if self._waiting.pop(number, None) is not None:
                with trio.move_on_after(_STOP_S, shield=True), suppress(EnvironmentFault):
                    await self._send({"kind": "stop", "number": number})

    async def _send(self, message: Mapping[str, Any]) -> None:
        async with self._sending:
            try:
                await self._stream.send_all(msgspec.json.encode(message) + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise self._ended() from None

    async def _line(self) -> bytes:
        end = self._buffer.find(b"\n")
        while end < 0:
            try:
                piece = await self._stream.receive_some(_PIECE)
            except trio.BrokenResourceError:
                piece = b""
            if not piece:
                raise self._ended()
            end = piece.find(b"\n")
            end += len(self._buffer) if end >= 0 else 0
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _ended(self) -> EnvironmentFault:
        return EnvironmentFault(
            f"the process of verifiers has ended; the last lines of {self._log_path}:\n{last_lines(self._log_path, 15)}"
        )
