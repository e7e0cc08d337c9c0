"""Connections to one server that are kept open, and answers that are read as they come.

A completion is asked over these, all else over httpx. httpx for both was rejected: of what the gateway adds to a
request it took the larger part, as its pool looks at every connection whenever a request begins or ends, and each event
of a stream goes through six generators. h11, on which it stands, knows the protocol here too.
"""

from __future__ import annotations

import base64
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import unquote, urlsplit

import h11
import trio

from asyncrl.engines.answers import named

_PIECE = 64 * 1024
_IDLE_S = 2.0  # the server closes idle connections after 5 s: never reuse one that it is closing


class ConnectionFault(Exception):  # noqa: N818  (it is the server that is at fault)
    """A server that cannot be reached, or breaks off, or does not speak HTTP."""


class Connections:
    """As many connections as there are requests; those that are idle are used again, for a short while.

    Example:
        >>> connections = Connections("http://127.0.0.1:8000", max_idle=64)                # doctest: +SKIP
        >>> async with connections.post("/inference/v1/generate", b"{}") as answer:       # doctest: +SKIP
        ...     while lines := await answer.read_lines():
        ...         print(answer.status, lines)
    """

    def __init__(self, url: str, *, max_idle: int, token: str = "") -> None:
        """`url` is empty where there is no server yet. Of idle connections `max_idle` are kept. `token` is shown."""
        place = urlsplit(url)
        self._host = place.hostname
        self._ssl = ssl.create_default_context() if place.scheme == "https" else None
        self._port = place.port or (443 if self._ssl else 80)
        self._prefix = place.path.rstrip("/")
        self._headers = [("host", place.netloc.rpartition("@")[2]), ("content-type", "application/json")]
        if token:
            self._headers.append(("authorization", f"Bearer {token}"))
        elif place.username is not None:
            secret = f"{unquote(place.username)}:{unquote(place.password or '')}".encode()
            self._headers.append(("authorization", f"Basic {base64.b64encode(secret).decode()}"))
        self._max_idle = max_idle
        self._idle: deque[tuple[float, _Connection]] = deque()
        """Since when, oldest first."""

    @asynccontextmanager
    async def post(self, path: str, content: bytes) -> AsyncIterator[_Connection]:
        """Send a request and yield its answer, whose body is read in the body of the `with`; reading may stop anywhere.

        Raises: ConnectionFault, in the body too.
        """
        connection = await self._take()
        try:
            await connection.ask(self._prefix + path, [*self._headers, ("content-length", str(len(content)))], content)
            yield connection
        finally:
            if connection.is_ready and len(self._idle) < self._max_idle:
                self._idle.append((trio.current_time(), connection))
            else:
                connection.close()

    async def _take(self) -> _Connection:
        now = trio.current_time()
        while self._idle and now - self._idle[0][0] > _IDLE_S:
            self._idle.popleft()[1].close()
        while self._idle:
            connection = self._idle.pop()[1]
            if connection.is_open:
                return connection
            connection.close()
        if not self._host:
            raise ConnectionFault("its URL names no host")
        try:
            if self._ssl is None:
                stream = await trio.open_tcp_stream(self._host, self._port)
                return _Connection(stream, stream)
            secured = await trio.open_ssl_over_tcp_stream(
                self._host, self._port, ssl_context=self._ssl, https_compatible=True
            )
            return _Connection(secured, secured.transport_stream)
        except (OSError, trio.BrokenResourceError) as error:
            raise ConnectionFault(named(error)) from error

    def close(self) -> None:
        """Close the idle connections; those in use are closed where they are used."""
        while self._idle:
            self._idle.pop()[1].close()


class _Connection:
    """One connection, and the answer that comes over it."""

    def __init__(
        self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], socket: trio.SocketStream
    ) -> None:
        self._stream = stream
        self._socket = socket.socket
        self._h11 = h11.Connection(h11.CLIENT)
        self._begun = b""  # of a line
        self.status = 0
        """Of the answer."""

    @property
    def is_ready(self) -> bool:
        """Whether its answer has come whole, and another request may follow."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    @property
    def is_open(self) -> bool:
        """Whether an idle one seems to be open at the other end: all that a server says on one is that it closes it."""
        return not self._socket.is_readable()

    def close(self) -> None:
        """Close it at once, whatever is under way."""
        self._socket.close()

    async def ask(self, target: str, headers: list[tuple[str, str]], content: bytes) -> None:
        """Send a request and read the answer's head. Raises: ConnectionFault."""
        if self.is_ready:
            self._h11.start_next_cycle()
        self._begun = b""
        head = self._h11.send(h11.Request(method="POST", target=target, headers=headers)) or b""
        head += self._h11.send(h11.Data(data=content)) or b""
        self._h11.send(h11.EndOfMessage())
        try:
            await self._stream.send_all(head)
        except trio.BrokenResourceError as error:
            raise ConnectionFault(named(error)) from error
        event = await self._next_event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next_event()
        assert isinstance(event, h11.Response), event
        self.status = event.status_code

    async def read(self) -> bytes:
        """Return the next piece of the body, b"" once it has come whole. Raises: ConnectionFault."""
        if self._h11.their_state is not h11.SEND_BODY:
            return b""
        event = await self._next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def read_all(self) -> bytes:
        """Return the body. Raises: ConnectionFault."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    async def read_lines(self) -> list[bytes]:
        """Return the lines of the body that have come since, without their ends; none once it has come whole.

        Raises: ConnectionFault; what has come of the line under way is then lost.
        """
        while piece := await self.read():
            *lines, self._begun = (self._begun + piece).split(b"\n")
            if lines:
                return lines
        last, self._begun = self._begun, b""
        return [last] if last else []

    async def _next_event(self) -> object:
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                data = await self._stream.receive_some(_PIECE)
                if not data and self._h11.their_state is h11.SEND_RESPONSE:
                    raise ConnectionFault("the server has closed the connection without an answer")
                self._h11.receive_data(bytes(data))  # SSL gives bytearrays
        except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            raise ConnectionFault(named(error)) from error
        return event
