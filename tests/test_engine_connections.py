"""The connections that completions are asked over: used again while they are open, and closed where they cannot be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
import trio.testing

from asyncrl.engines.connections import ConnectionFault, Connections
from asyncrl.engines.control import ControlRoutes

_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Sends its answers in order, whichever connection asks; keeps connections open."""

    def __init__(self, answers: Sequence[Sequence[bytes]]) -> None:
        """Each answer comes in pieces, with a pause after each that lets the client read it."""
        self._answers = iter(answers)
        self.connections = 0
        self.heads: list[bytes] = []
        self.closed = trio.Event()
        """Set once it has closed a connection."""

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        data = b""
        async for piece in stream:
            data += piece
            head, found, _ = data.partition(b"\r\n\r\n")
            if not found or not data.endswith(b"{}"):
                continue
            self.heads.append(head)
            data = b""
            for part in next(self._answers):
                if part == b"":
                    await stream.aclose()
                    self.closed.set()
                    return
                await stream.send_all(part)
                await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def serving(server: Server, *, max_idle: int = 4, path: str = "", user: str = "") -> AsyncIterator[Connections]:
    """Yield connections to a server."""
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1"))
        connections = Connections(f"http://{user}127.0.0.1:{listener.socket.getsockname()[1]}{path}", max_idle=max_idle)
        yield connections
        connections.close()
        nursery.cancel_scope.cancel()


async def lines_of(connections: Connections) -> list[bytes]:
    """Return all lines of an answer."""
    found: list[bytes] = []
    async with connections.post("/generate", b"{}") as answer:
        while lines := await answer.read_lines():
            found += lines
    return found


def run(server: Server, body: Callable[[Connections], Awaitable[None]], **options: object) -> None:
    """Run a test body with connections to a server."""

    async def main() -> None:
        with trio.fail_after(20):
            async with serving(server, **options) as connections:  # type: ignore[arg-type]
                await body(connections)

    trio.run(main)


def chunked(*parts: bytes) -> list[bytes]:
    """Return an answer whose parts come one after the other."""
    return [_CHUNKED, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def sized(body: bytes) -> list[bytes]:
    """Return an answer that comes at once."""
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)]


def test_lines_are_put_together_wherever_they_are_cut_and_the_connection_is_used_again() -> None:
    server = Server([chunked(b"data: on", b"e\n\ndata: two\n", b"last"), sized(b"a\nb\n"), sized(b"")])

    async def body(connections: Connections) -> None:
        assert await lines_of(connections) == [b"data: one", b"", b"data: two", b"last"]
        assert await lines_of(connections) == [b"a", b"b"]
        assert await lines_of(connections) == []

    run(server, body)
    assert server.connections == 1


def test_a_server_that_says_continue_first_is_heard_to_the_end() -> None:
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"

    async def body(connections: Connections) -> None:
        assert await lines_of(connections) == [b"a"]

    run(Server([[go_on, *sized(b"a")]]), body)


def test_an_answer_that_is_not_read_to_its_end_takes_its_connection_with_it() -> None:
    """Kills: the next request reads what was left of the one before."""
    server = Server([sized(b"first\nmore"), sized(b"second")])

    async def body(connections: Connections) -> None:
        async with connections.post("/generate", b"{}") as answer:
            assert answer.status == 200
        assert await lines_of(connections) == [b"second"]

    run(server, body)
    assert server.connections == 2


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    """Kills: a request that nobody reads, and an engine that is doubted for it."""
    server = Server([[*sized(b"first"), b""], sized(b"second")])

    async def body(connections: Connections) -> None:
        assert await lines_of(connections) == [b"first"]
        await server.closed.wait()
        assert await lines_of(connections) == [b"second"]

    run(server, body)
    assert server.connections == 2


def test_a_connection_that_has_been_idle_for_long_is_not_used_again() -> None:
    server = Server([sized(b"first"), sized(b"second")])

    async def main() -> None:
        async with serving(server) as connections:
            await lines_of(connections)
            await trio.sleep(3)
            assert await lines_of(connections) == [b"second"]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert server.connections == 2


def test_no_more_connections_are_kept_than_may_be() -> None:
    server = Server([sized(b"a")] * 4)

    async def body(connections: Connections) -> None:
        for _ in range(2):
            async with connections.post("/generate", b"{}") as one, connections.post("/generate", b"{}") as other:
                await one.read_all()
                await other.read_all()

    run(server, body, max_idle=1)
    assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([_CHUNKED, b"5\r\nab"], "incomplete chunked read"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"], "without sending complete message body"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "illegal status line"),
        ([], "^the server has closed the connection without an answer$"),
    ],
)
def test_what_breaks_off_or_is_no_http_is_a_fault_in_words(answer: Sequence[bytes], words: str) -> None:
    async def body(connections: Connections) -> None:
        with pytest.raises(ConnectionFault, match=words):
            await lines_of(connections)

    run(Server([[*answer, b""]]), body)


def test_the_path_and_the_key_of_the_servers_url_go_with_each_request() -> None:
    server = Server([sized(b"a")])

    async def body(connections: Connections) -> None:
        await lines_of(connections)

    run(server, body, path="/engines/0/", user="me:s%40cret@")
    assert server.heads[0].startswith(b"POST /engines/0/generate HTTP/1.1\r\n")
    assert b"authorization: Basic bWU6c0BjcmV0" in server.heads[0]
    assert b"host: 127.0.0.1:" in server.heads[0]


def test_a_server_without_an_address_cannot_be_asked() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionFault, match="names no host"):
            await lines_of(Connections("", max_idle=1))

    trio.run(main)


def test_a_server_that_is_no_longer_spoken_to_says_nothing_of_itself() -> None:
    """Kills: a run that ends with a traceback because its metrics were read while its engines were closed."""

    async def main() -> None:
        client = httpx.AsyncClient()
        await client.aclose()
        assert await ControlRoutes("engine 0", "http://127.0.0.1:1", client).metrics() == ""

    trio.run(main)
