"""Connections between hosts: how long a silent one is kept, and what carries bytes from one to another."""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from asyncrl import wire
from asyncrl.roles.messages import MAX_BYTES, Beat

GONE = (trio.BrokenResourceError, trio.ClosedResourceError, EOFError)
"""What a connection that ends raises."""

GOODBYE_S = 2.0
"""For a last message to be sent; who does not get it sees the connection close."""


def endure(stream: trio.SocketStream, seconds: float) -> None:
    """Let the kernel break a connection whose other side acknowledges nothing for so long, busy or idle."""
    probe_s = max(1, round(seconds / 3))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)


async def join(one: trio.abc.Stream, other: trio.abc.Stream) -> None:
    """Carry bytes both ways until either side ends; the caller closes both."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_carry, one, other, nursery.cancel_scope)
        nursery.start_soon(_carry, other, one, nursery.cancel_scope)


async def _carry(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, scope: trio.CancelScope) -> None:
    try:
        async for piece in source:
            await sink.send_all(piece)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # either side is gone, which is how a channel ends
    scope.cancel()


class Conversation:
    """Messages both ways over one stream, with signs of life and a limit on silence."""

    def __init__(self, stream: trio.abc.Stream, *, heartbeat_s: float, lost_s: float) -> None:
        self.heard_at = trio.current_time()
        self._stream = stream
        self._heartbeat_s = heartbeat_s
        self._lost_s = lost_s
        # no bound of its own: it holds what is asked for, and each of that waits for an answer
        self._send, self._outbox = trio.open_memory_channel[tuple[wire.Message, trio.Event | None]](math.inf)

    def post(self, message: wire.Message) -> None:
        """Send a message as soon as those before it are sent."""
        self._send.send_nowait((message, None))

    async def say_last(self, message: wire.Message) -> None:
        """Return when a message has been sent, or cannot be in `GOODBYE_S`. Only while the conversation is held."""
        sent = trio.Event()
        with trio.move_on_after(GOODBYE_S, shield=True):
            self._send.send_nowait((message, sent))
            await sent.wait()

    async def close(self) -> None:
        """Break it off: another one has taken its place."""
        await trio.aclose_forcefully(self._stream)

    async def hold(self, kinds: Any, handle: Callable[[Any], Awaitable[bool]]) -> None:
        """Send what is posted and hand over what comes until `handle` returns True.

        Raises: EOFError, trio.BrokenResourceError where it breaks, or nothing has come for `lost_s`.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._beat)
            while True:
                with trio.move_on_after(self._lost_s) as patience:
                    message = await wire.receive_async(self._stream, kinds, max_bytes=MAX_BYTES)
                if patience.cancelled_caught:
                    raise EOFError(f"nothing was heard for {self._lost_s:g} s")
                if message is None:
                    raise EOFError("the connection was closed")
                self.heard_at = trio.current_time()
                if not isinstance(message, Beat) and await handle(message):
                    break
            nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        async for message, sent in self._outbox:
            await wire.send_async(self._stream, message)
            if sent is not None:
                sent.set()

    async def _beat(self) -> None:
        while True:
            self.post(Beat())
            await trio.sleep(self._heartbeat_s)
