"""What is served of a run: scrapers that hang hold up nobody, and a port that is taken is named."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import httpx
import pytest
import trio

from asyncrl.errors import ConfigError
from asyncrl.serving import listen, serve

_LARGE = b"x" * 2**23  # more than the kernel takes for a client that reads nothing


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": _LARGE if scope["path"] == "/large" else b"small"})


@pytest.mark.slow  # the kernel's own clock has to run down
def test_a_scraper_that_reads_nothing_holds_up_neither_others_nor_the_end() -> None:
    """Without the kernel's limit the end waits for ever: not even a deadline around it is heard."""

    gave_up: list[bool] = []

    async def main() -> str:
        listener = listen("127.0.0.1", 0, setting="[metrics] port", unread_s=0.5)
        host, port = listener.getsockname()
        with closing(socket.create_connection((host, port))) as hangs:  # which outlives the server

            async def give_up() -> None:
                await trio.sleep(20.0)
                gave_up.append(True)
                hangs.close()

            trio.lowlevel.spawn_system_task(give_up)
            async with trio.open_nursery() as nursery:
                await nursery.start(serve, _answer, listener)
                hangs.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
                await trio.to_thread.run_sync(hangs.recv, 1, socket.MSG_PEEK)  # it is being answered
                async with httpx.AsyncClient(trust_env=False) as client:
                    answer = await client.get(f"http://{host}:{port}/metrics")
                nursery.cancel_scope.cancel()
        return answer.text

    assert trio.run(main) == "small"
    assert not gave_up


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with closing(listen("127.0.0.1", 0, setting="[metrics] port")) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"\[metrics\] port {port} on 127.0.0.1 cannot be used: Address already"):
            listen("127.0.0.1", port, setting="[metrics] port")
