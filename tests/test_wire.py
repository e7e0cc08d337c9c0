"""Frames: what is read ahead is neither lost nor mixed up, and a stream that ends inside one is no end."""

from __future__ import annotations

import struct

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import wire

MESSAGES = st.lists(
    st.integers(0, 3).flatmap(
        lambda kind: st.just(
            [
                wire.PublishRequest(keep=[1, 2]),
                wire.ShutdownRequest(),
                wire.SaveRequest(directory="d" * 300),
                wire.Failure(kind="E", message="x" * 70_000),
            ][kind]
        )
    ),
    min_size=1,
    max_size=12,
)
KINDS = wire.Request | wire.Failure


def bytes_of(messages: list[wire.Message]) -> bytes:
    return b"".join(struct.pack("!Q", len(data)) + data for data in map(wire.encode, messages))


@settings(max_examples=40, deadline=None)
@given(MESSAGES, st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_a_reader_returns_what_was_sent_however_it_is_cut(messages: list[wire.Message], cuts: list[int]) -> None:
    async def main() -> list[wire.Message | None]:
        ours, theirs = trio.testing.memory_stream_one_way_pair()
        data, found = bytes_of(messages), []

        async def send() -> None:
            rest, cut = data, 0
            while rest:
                await ours.send_all(rest[: cuts[cut % len(cuts)]])
                rest, cut = rest[cuts[cut % len(cuts)] :], cut + 1
            await ours.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            reader = wire.Reader(theirs)
            for _ in range(len(messages) + 1):
                found.append(await reader.receive(KINDS))
        return found

    assert trio.run(main) == [*messages, None]


def test_a_reader_that_was_cancelled_goes_on_where_it_was() -> None:
    message = wire.SaveRequest(directory="d" * 300)

    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_one_way_pair()
        reader, data = wire.Reader(theirs), bytes_of([message, message])
        await ours.send_all(data[:400])
        assert await reader.receive(KINDS) == message
        with trio.move_on_after(1) as scope:
            await reader.receive(KINDS)
        assert scope.cancelled_caught
        await ours.send_all(data[400:])
        assert await reader.receive(KINDS) == message

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("length", [3, 8, 20])
def test_a_stream_that_ends_inside_a_frame_is_told(length: int) -> None:
    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_one_way_pair()
        await ours.send_all(bytes_of([wire.ShutdownRequest()])[:length])
        await ours.aclose()
        with pytest.raises(EOFError, match="closed after"):
            await wire.Reader(theirs).receive(KINDS)

    trio.run(main)


def test_a_stream_out_of_step_is_refused_before_it_is_read() -> None:
    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_one_way_pair()
        await ours.send_all(b"HTTP/1.1 400 Bad Request")
        with pytest.raises(ValueError, match="was announced"):
            await wire.Reader(theirs).receive(KINDS)

    trio.run(main)


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode(wire.encode(wire.ShutdownRequest()), wire.Reply)
