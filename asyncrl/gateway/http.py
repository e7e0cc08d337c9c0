"""Requests and answers: bodies with a limit, routes, errors, event streams. Knows no connection and no model.

A web framework was rejected: what is needed of one is a table of routes, and a limit on a body that is still being sent
or unpacked is what frameworks leave out.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
import trio
from isal import isal_zlib


class Refused(Exception):  # noqa: N818  (it is the request that is at fault)
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, message: str, *, code: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """A word that a program can tell the error by; "" where the status says it all."""
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a request."""

    body: bytes | Iterable[bytes] | AsyncIterable[bytes]
    """Whole, or the parts of an event stream, which may take their time. An async generator is closed when its client
    is gone."""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer that holds `value` as JSON."""
    return Answer(body=msgspec.json.encode(value), status=status, headers=headers or {})


def event_stream(events: Iterable[bytes] | AsyncIterable[bytes], *, headers: Mapping[str, str] | None = None) -> Answer:
    """Return a stream of server-sent events, each a part of its own."""
    return Answer(
        body=events, content_type="text/event-stream", headers={"cache-control": "no-cache", **(headers or {})}
    )


def event(value: Any, *, name: str = "") -> bytes:
    """Return one server-sent event that holds `value` as JSON."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


class Request:
    """One request; its body is read when it is asked for."""

    def __init__(
        self, method: str, target: str, headers: Mapping[str, str], read: Callable[[], Awaitable[bytes]] | None = None
    ) -> None:
        """`read` returns the next piece of the body, and b"" once it has come whole; None where there is none."""
        self.method = method
        path, _, self._query = target.partition("?")
        self.path = unquote(path)
        self.parameters: dict[str, str] = {}
        """What the route's `{names}` stand for."""
        self.nursery: trio.Nursery | None = None
        """Of the server, for what makes the parts of this request's answer while they are sent: the server waits for
        it before it takes the connection's next request. None outside a server."""
        self.headers = headers
        """By name in small letters."""
        self._read = read

    @property
    def query(self) -> Mapping[str, str]:
        """The last value of each name in the query."""
        return {name: values[-1] for name, values in parse_qs(self._query).items()}

    async def body(self, *, max_bytes: int, timeout_s: float) -> bytes:
        """Return the body, unpacked where it is sent as gzip.

        Raises: Refused where it is too large, before and after unpacking, or comes too slowly.
        """
        length = self.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > max_bytes:
            raise Refused(413, f"a body may have {max_bytes} bytes, this one is said to have {length}")
        unpacker = _Unpacker(self.headers.get("content-encoding", ""), max_bytes)
        with trio.move_on_after(timeout_s):
            while self._read is not None and (piece := await self._read()):
                unpacker.add(piece)
            return unpacker.end()
        raise Refused(408, f"the body took more than {timeout_s:g} s")


class _Unpacker:
    """A body in the making that never grows beyond its limit, however small its packed form is."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        if encoding not in ("", "identity", "gzip"):
            raise Refused(415, f"content-encoding must be gzip or none, got {encoding!r}")
        self._inflate = isal_zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._length = 0

    def add(self, data: bytes) -> None:
        room = self._max_bytes + 1 - self._length
        if self._inflate is None:
            part = data[:room]
        else:
            try:
                part = self._inflate.decompress(data, room)
            except isal_zlib.error as error:  # type: ignore[misc]  # its stub has an instance for the class
                raise Refused(400, f"Invalid gzip payload: {error}") from None
        self._parts.append(part)
        self._length += len(part)
        if self._length > self._max_bytes:
            raise Refused(413, f"a body may have {self._max_bytes} bytes, unpacked")

    def end(self) -> bytes:
        if self._inflate is not None and not self._inflate.eof:
            raise Refused(400, "Invalid gzip payload: it breaks off")
        return b"".join(self._parts)


Handler = Callable[[Request], Awaitable[Answer]]
ErrorBody = Callable[[Refused], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Who answers a method and path. A part of the path in braces matches anything, and is a request's parameter."""

    method: str
    path: str
    handler: Handler
    error_body: ErrorBody

    def match(self, parts: Sequence[str]) -> dict[str, str] | None:
        """Return the parameters of a path, or None where it is another one."""
        ours = self.path.split("/")
        if len(ours) != len(parts):
            return None
        found = {}
        for own, part in zip(ours, parts, strict=True):
            if own.startswith("{"):
                found[own[1:-1]] = part
            elif own != part:
                return None
        return found


class Routes:
    """A table of routes.

    Example:
        >>> async def hello(request):
        ...     return json_answer({"hello": request.parameters["name"]})
        >>> routes = Routes([Route(method="GET", path="/hello/{name}", handler=hello, error_body=openai_error)])
        >>> request = Request("GET", "/hello/you", {})
        >>> trio.run(routes.answer, request).body
        b'{"hello":"you"}'
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = tuple(routes)
        self._by_length: dict[tuple[str, int], list[Route]] = {}
        for route in routes:
            self._by_length.setdefault((route.method, route.path.count("/") + 1), []).append(route)

    async def answer(self, request: Request) -> Answer:
        """Return the answer of the request's route, or of what refuses it."""
        error_body: ErrorBody = openai_error
        try:
            route = self._find(request)
            error_body = route.error_body
            return await route.handler(request)
        except Refused as refused:
            return error_answer(refused, error_body)

    def _find(self, request: Request) -> Route:
        parts = request.path.split("/")
        for route in self._by_length.get((request.method, len(parts)), ()):
            if (parameters := route.match(parts)) is not None:
                request.parameters = parameters
                return route
        allowed = sorted({route.method for route in self._routes if route.match(parts) is not None})
        if allowed:
            raise Refused(405, f"{request.path[:200]} takes {', '.join(allowed)}")
        raise Refused(404, f"there is no {request.path[:200]}")


def openai_error(refused: Refused) -> Any:
    """Return an error as OpenAI's API words it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code or refused.status}}


def error_answer(refused: Refused, error_body: ErrorBody = openai_error) -> Answer:
    """Return the answer to a request that is refused."""
    headers = {} if refused.retry_after_s is None else {"retry-after": str(refused.retry_after_s)}
    return json_answer(error_body(refused), status=refused.status, headers=headers)
