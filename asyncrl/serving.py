"""HTTP in the trio program, by hypercorn (prometheus-client's own server was rejected: it starts a thread)."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import hypercorn.config
import hypercorn.trio
import trio

from asyncrl.errors import ConfigError


def listen(host: str, port: int, *, setting: str, unread_s: float = 0.0) -> socket.socket:
    """Return a listening socket; a client that reads nothing of what it is sent for `unread_s` is cut off (0: never).

    By the kernel, since hypercorn's sends cannot be cancelled: a scraper that hangs would hold up a run's end for ever.
    Raises: ConfigError naming the setting when the port is taken or not ours to take.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * unread_s))  # clients have it too
        listener.bind((host, port))
        listener.listen()  # from here on a client waits in the backlog instead of being refused
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{setting} {port} on {host} cannot be used: {error.strerror}; take another, or 0 for a free one"
        ) from None
    return listener


@asynccontextmanager
async def until_signalled() -> AsyncIterator[None]:
    """Cancel the body at SIGINT or SIGTERM; what it opened is closed, and the program goes on behind it."""
    async with trio.open_nursery() as nursery:
        await nursery.start(_cancel_at_signal, nursery.cancel_scope)
        yield
        nursery.cancel_scope.cancel()


async def _cancel_at_signal(scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()


async def serve(
    app: Any, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve an ASGI app on a listening socket until cancelled; takes the socket over."""
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]  # hypercorn closes it
    config.errorlog = None
    config.graceful_timeout = 1.0
    task_status.started()
    await hypercorn.trio.serve(app, config, mode="asgi")
