"""An HTTP/1.1 server: h11 reads and writes the protocol, trio the connections.

hypercorn, which serves the other ports of this program, was rejected here. It shields what it sends from cancellation,
so that a client that takes nothing holds up the end of the program; it catches and forgets what an application raises;
and it fails where an answer goes out before its request has come whole, which is how a body that is too large must be
answered (0.18).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import aclosing

import h11
import trio

from asyncrl.gateway.http import Answer, Refused, Request, error_answer

_KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections, so that none is reused while it is being closed
_MAX_HEAD_BYTES = 64 * 1024
_PIECE = 256 * 1024
_LINGER_S = 1.0  # an answer to a request that is not read to its end is lost if the connection is closed at once
_BACKLOG = 4096  # connections that wait to be taken; Linux keeps no more by default

Respond = Callable[[Request], Awaitable[Answer]]


class HTTPServer:
    """Answers requests on all connections of a socket. What `respond` raises ends it: that is a bug."""

    def __init__(self, respond: Respond, *, stalled_client_s: float = 30.0) -> None:
        """A client that takes nothing of its answer for `stalled_client_s` is let go."""
        self._respond = respond
        self._stalled_client_s = stalled_client_s

    async def serve(
        self, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer requests until cancelled; takes the socket over."""
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        task_status.started()
        await trio.serve_listeners(self._serve, [trio.SocketListener(trio.socket.from_stdlib_socket(listener))])

    async def _serve(self, stream: trio.SocketStream) -> None:
        connection = _Connection(stream, self._stalled_client_s)
        try:
            while await self._serve_one(connection):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, _Stalled):
            return  # the client is gone, or as good as gone
        finally:
            stream.socket.close()  # and not the stream, whose closing can be cancelled: a bug's words would be lost

    async def _serve_one(self, connection: _Connection) -> bool:
        """Answer the next request of a connection; return whether there may be another one."""
        try:
            request = await connection.next_request()
        except h11.RemoteProtocolError as error:
            await connection.send(error_answer(Refused(error.error_status_hint, f"this is no HTTP request: {error}")))
            return False
        if request is None:
            return False
        answer: Answer | None = None
        sent = False
        async with trio.open_nursery() as nursery:
            request.nursery = nursery
            waiting, watching = [nursery.cancel_scope], trio.CancelScope()
            nursery.start_soon(connection.cancel_when_gone, waiting, watching)
            try:
                answer = await self._respond(request)
            except h11.RemoteProtocolError as error:  # in the middle of its body
                answer = error_answer(Refused(error.error_status_hint, f"this is no HTTP request: {error}"))
            if not isinstance(answer.body, bytes):
                with trio.CancelScope() as sending:  # alone: whoever makes the parts is told, and ends in order
                    waiting[0] = sending
                    sent = await connection.send_parts(answer)
            watching.cancel()
        if answer is None:
            return False
        if isinstance(answer.body, bytes):
            await connection.send(answer)
            sent = True
        return sent and await connection.start_next()


class _Stalled(Exception):  # noqa: N818  (never leaves this file)
    """A client took nothing for too long."""


class _Connection:
    """One client's connection: a request at a time."""

    def __init__(self, stream: trio.SocketStream, stalled_client_s: float) -> None:
        self._stream = stream
        self._stalled_client_s = stalled_client_s
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._whole = trio.Event()
        """Set once the request under way has come whole."""

    async def next_request(self) -> Request | None:
        """Return the next request; None where none comes. Raises: h11.RemoteProtocolError."""
        self._whole = trio.Event()
        with trio.move_on_after(_KEEP_ALIVE_S):
            event = await self._next_event()
            if not isinstance(event, h11.Request):
                return None
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            return Request(event.method.decode("ascii"), event.target.decode("latin-1"), headers, self._read_body)
        return None

    async def _read_body(self) -> bytes:
        if self._whole.is_set():
            return b""
        if self._h11.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._send_all(self._h11.send(go_on))
        event = await self._next_event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        self._whole.set()
        return b""

    async def _next_event(self) -> object:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._stream.receive_some(_PIECE))
        return event

    async def cancel_when_gone(self, waiting: list[trio.CancelScope], watching: trio.CancelScope) -> None:
        """Cancel the one scope of `waiting` when the client closes its connection after its request: nobody waits for
        the answer any more. `watching` ends this.
        """
        with watching:
            await self._whole.wait()
            try:
                data = await self._stream.receive_some(_PIECE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if data:
                self._h11.receive_data(data)  # its next request, which is read after this one
            else:
                waiting[0].cancel()

    async def send_parts(self, answer: Answer) -> bool:
        """Send an answer that comes in parts; return whether the client has taken all of it."""
        try:
            await self.send(answer)
        except (trio.BrokenResourceError, trio.ClosedResourceError, _Stalled):
            return False
        return True

    async def send(self, answer: Answer) -> None:
        """Send an answer. Raises: _Stalled, trio.BrokenResourceError."""
        if self._h11.our_state not in (h11.SEND_RESPONSE, h11.IDLE):
            return  # the connection is in no state to be answered on
        if self._h11.their_state is h11.SEND_BODY:
            with contextlib.suppress(h11.RemoteProtocolError):
                self._h11.next_event()  # the end of a request without a body, which nobody has read
        headers = {"content-type": answer.content_type, **answer.headers}
        if isinstance(answer.body, bytes):
            headers["content-length"] = str(len(answer.body))
        if self._h11.their_state is not h11.DONE:
            headers["connection"] = "close"
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        head = self._h11.send(h11.Response(status_code=answer.status, headers=pairs)) or b""
        if isinstance(answer.body, bytes):
            await self._send_all(head + (self._h11.send(h11.Data(data=answer.body)) or b""))
        else:
            await self._send_all(head)
            async with aclosing(_each(answer.body)) as parts:
                async for part in parts:
                    await self._send_all(self._h11.send(h11.Data(data=part)))
        await self._send_all(self._h11.send(h11.EndOfMessage()))

    async def _send_all(self, data: bytes | None) -> None:
        view = memoryview(data or b"")
        for start in range(0, len(view), _PIECE):
            with trio.move_on_after(self._stalled_client_s) as patience:
                await self._stream.send_all(view[start : start + _PIECE])
            if patience.cancelled_caught:
                raise _Stalled

    async def start_next(self) -> bool:
        """Make ready for the next request; return whether there may be one."""
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            return True
        with trio.move_on_after(_LINGER_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(_PIECE):
                pass
        return False


async def _each(parts: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    if isinstance(parts, AsyncGenerator):
        async with aclosing(parts):
            async for part in parts:
                yield part
    elif isinstance(parts, AsyncIterable):
        async for part in parts:
            yield part
    else:
        for part in parts:
            yield part
