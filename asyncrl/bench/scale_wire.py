"""The wire between the orchestrator and a process of its own, against a plain socket between the same two.

One side is a trio program, as the orchestrator is, the other reads and writes a blocking socket, as the learner does.
The plain socket carries the same bytes in the same pieces, and nobody looks at them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import trio

from asyncrl import wire
from asyncrl.bench.buffer import make_group

_FRAME_BYTES = 256
_HEADER_BYTES = 8
_ANSWER = b"\0" * 16
_ROUND_TRIPS = 10  # times fewer than frames one way: each waits for the other side to wake

Side = Callable[[socket.socket], None]


def bench_wire(*, frames: int, megabytes: int, rounds: int, groups: int) -> dict[str, Any]:
    """Return `messages`, `frames`, `batches` and `records`, each with both rates and their ratio; see `scale`."""
    batch = wire.StepRequest(groups=[make_group(number) for number in range(groups)])
    data = wire.encode(batch)
    times = max(1, round(megabytes * 1e6 / len(data)))
    taken = [{**_small(frames), **_large(batch, data, times)} for _ in range(rounds)]
    report: dict[str, Any] = {"frame_bytes": _FRAME_BYTES, "batch_bytes": len(data)}
    for name in taken[0]:
        unit = "per_second" if name in ("messages", "frames") else "megabytes_per_second"
        report[name] = {
            unit: median(each[name][0] for each in taken),
            f"plain_{unit}": median(each[name][1] for each in taken),
            "ratio": median(each[name][0] / each[name][1] for each in taken),
        }
    return report


def _small(frames: int) -> dict[str, tuple[float, float]]:
    """Return the rates of the wire and of a plain socket, of messages there and back and of frames one way."""
    message, payload, trips = wire.PublishRequest(keep=[1, 2, 3]), bytes(_FRAME_BYTES), max(1, frames // _ROUND_TRIPS)
    size = len(wire.encode(message)) + _HEADER_BYTES
    ours = 2 * trips / _timed(_answer_messages, lambda stream: _ask_messages(stream, message, trips))
    plain = 2 * trips / _timed(lambda end: _answer_plain(end, size, size), lambda s: _ask_plain(s, size, trips))
    ours_one_way = frames / _timed(lambda end: _send_frames(end, payload, frames), lambda s: _read_frames(s, frames))
    plain_one_way = frames / _timed(lambda end: _send_plain(end, frames), lambda s: _read_plain(s, frames))
    return {"messages": (ours, plain), "frames": (ours_one_way, plain_one_way)}


def _large(batch: wire.StepRequest, data: bytes, times: int) -> dict[str, tuple[float, float]]:
    """Return the same of batches, as frames and with their records."""
    megabytes, whole = times * len(data) / 1e6, len(data) + _HEADER_BYTES
    plain = megabytes / _timed(
        lambda end: _answer_plain(end, whole, len(_ANSWER)), lambda s: _send_batches_plain(s, whole, times)
    )
    frames = megabytes / _timed(_answer_frames, lambda stream: _send_batches(stream, data, times))
    records = megabytes / _timed(_answer_records, lambda stream: _send_records(stream, batch, times))
    return {"batches": (frames, plain), "records": (records, plain)}


def _timed(theirs: Side, ours: Callable[[trio.SocketStream], Awaitable[None]]) -> float:
    """Return the seconds of `ours` while another process runs `theirs` on the other end of a socket."""

    async def main() -> float:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(end))
        began = time.perf_counter()
        await ours(stream)
        return time.perf_counter() - began

    with _other_side(theirs) as end:
        return trio.run(main)


@contextmanager
def _other_side(run: Side) -> Iterator[socket.socket]:
    """Yield one end of a socket; a fork of this process has the other, and is gone afterwards."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            run(theirs)
        except BaseException:  # raised again: a fork that has ended early says why
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(0)
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# --- the wire ---------------------------------------------------------------------------------------------------


async def _ask_messages(stream: trio.SocketStream, message: wire.Message, count: int) -> None:
    reader = wire.Reader(stream)
    for _ in range(count):
        await wire.send_async(stream, message)
        await reader.receive(wire.Request)


def _answer_messages(end: socket.socket) -> None:
    while (message := wire.receive(end, wire.Request)) is not None:
        wire.send(end, message)


def _send_frames(end: socket.socket, payload: bytes, count: int) -> None:
    for _ in range(count):
        wire.send_frame(end, payload)


async def _read_frames(stream: trio.SocketStream, count: int) -> None:
    reader = wire.Reader(stream)
    for _ in range(count):
        assert await reader.receive_frame() is not None, "the other side has ended"


async def _send_batches(stream: trio.SocketStream, data: bytes, count: int) -> None:
    for _ in range(count):
        await wire.send_frame_async(stream, data)
        await stream.receive_some()


def _answer_frames(end: socket.socket) -> None:
    while wire.receive_frame(end) is not None:
        end.sendall(_ANSWER)


async def _send_records(stream: trio.SocketStream, batch: wire.StepRequest, count: int) -> None:
    for _ in range(count):
        await wire.send_async(stream, batch)
        await stream.receive_some()


def _answer_records(end: socket.socket) -> None:
    while wire.receive(end, wire.Request) is not None:
        end.sendall(_ANSWER)


# --- a plain socket -----------------------------------------------------------------------------------------------


async def _ask_plain(stream: trio.SocketStream, num_bytes: int, count: int) -> None:
    data = bytes(num_bytes)
    for _ in range(count):
        await stream.send_all(data)
        await _read_async(stream, num_bytes)


def _answer_plain(end: socket.socket, num_bytes: int, answered: int) -> None:
    view, answer = memoryview(bytearray(num_bytes)), bytes(answered)
    while _read(end, view):
        end.sendall(answer)


def _send_plain(end: socket.socket, count: int) -> None:
    data = bytes(_FRAME_BYTES + _HEADER_BYTES)
    for _ in range(count):
        end.sendall(data)


async def _read_plain(stream: trio.SocketStream, count: int) -> None:
    await _read_async(stream, count * (_FRAME_BYTES + _HEADER_BYTES))


async def _send_batches_plain(stream: trio.SocketStream, num_bytes: int, count: int) -> None:
    data = bytes(num_bytes)
    for _ in range(count):
        await stream.send_all(data)
        await stream.receive_some()


async def _read_async(stream: trio.SocketStream, num_bytes: int) -> None:
    got = 0
    while got < num_bytes:
        chunk = await stream.receive_some(2**16)
        assert chunk, "the other side has ended"
        got += len(chunk)


def _read(end: socket.socket, view: memoryview) -> bool:
    """Fill `view`; False where the other side has closed."""
    got = 0
    while got < len(view):
        count = end.recv_into(view[got:])
        if not count:
            return False
        got += count
    return True
