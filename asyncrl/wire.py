"""Frames between the orchestrator and its children: a length, then one msgpack message.

The same messages are read by trio (orchestrator) and by plain sockets (learner), and the same encoding is used for
records on disk. msgspec encodes and validates; pickle was rejected because a frame may come from another machine.
"""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from asyncrl.protocols import PLAIN_STEP, StepOptions, StepResult
from asyncrl.types import Group, Logprobs, PolicyVersion, Segment, TokenIds, WeightManifest

_HEADER = struct.Struct("!Q")
_COPIED_BYTES = 2**16  # of a frame that is joined with its length: below, a copy costs less than a system call
_READ_BYTES = 2**16  # at least, that one read asks for: many small frames, few of which are ready
_LARGEST_READ_BYTES = 2**20  # that one read asks for: its buffer is made before anything has come
_MAX_FRAME_BYTES = 2**32  # a batch of 10^8 tokens is 0.9 GB; anything larger is a stream out of step


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the class name is the tag on the wire."""


class Hello(Message, frozen=True, kw_only=True):
    """Learner to orchestrator, once, when it is ready to step."""

    version: PolicyVersion
    num_parameters: int
    vocab_size: int
    attention: str = ""
    """The implementation that it chose, of `asyncrl.learner.attention_kinds`."""
    device: str = ""
    canary_logprobs: tuple[float, ...] = ()
    """Under the weights that it begins with; see `WeightManifest`."""


class StepRequest(Message, frozen=True, kw_only=True):
    """Take one optimizer step on these groups."""

    groups: list[Group]
    options: StepOptions = PLAIN_STEP


class SupervisedStepRequest(Message, frozen=True, kw_only=True):
    """Take one optimizer step on demonstrations; answered by a StepReply."""

    segments: list[Segment]
    learning_rate: float


class SupervisedLossRequest(Message, frozen=True, kw_only=True):
    """Measure demonstrations, and learn nothing."""

    segments: list[Segment]


class SupervisedLossReply(Message, frozen=True, kw_only=True):
    """The mean of -logp over the masked tokens, in nats."""

    loss: float


class StepReply(Message, frozen=True, kw_only=True):
    """What the step did."""

    result: StepResult


class PublishRequest(Message, frozen=True, kw_only=True):
    """Make the present weights available to the engines."""

    keep: list[PolicyVersion] = []
    """Versions that are being read."""


class PublishReply(Message, frozen=True, kw_only=True):
    """Where they are."""

    manifest: WeightManifest


class SaveRequest(Message, frozen=True, kw_only=True):
    """Write model, optimizer and random state below `directory`, which exists and is not yet a checkpoint."""

    directory: str


class SaveReply(Message, frozen=True, kw_only=True):
    """The files are on disk (fsynced). name -> bytes."""

    files: Mapping[str, int]


class ShutdownRequest(Message, frozen=True, kw_only=True):
    """End after replying; removes what was published."""


class ShutdownReply(Message, frozen=True, kw_only=True):
    """The last message of a learner."""


class Failure(Message, frozen=True, kw_only=True):
    """The request could not be carried out; the learner ends after sending it."""

    kind: str
    message: str


Request = StepRequest | SupervisedStepRequest | SupervisedLossRequest | PublishRequest | SaveRequest | ShutdownRequest
Reply = Hello | StepReply | SupervisedLossReply | PublishReply | SaveReply | ShutdownReply | Failure


def _encode_array(value: Any) -> bytes:
    if isinstance(value, (TokenIds, Logprobs)):
        return value.tobytes()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind in (TokenIds, Logprobs) and isinstance(value, bytes):
        array = kind()
        array.frombytes(value)
        return array
    raise NotImplementedError(f"cannot decode {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(record: Any) -> bytes:
    """Return the msgpack bytes of a message or record (native byte order: one kind of host per run)."""
    return _encoder.encode(record)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return what decodes a kind: to make it anew for a union of messages takes longer than to decode a small one."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def decode(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Return the record that `encode` wrote. Raises msgspec.DecodeError or ValidationError."""
    return _decoder(kind).decode(data)


def send(stream: socket.socket, message: Message) -> None:
    """Send one message over a blocking socket."""
    send_frame(stream, encode(message))


def send_frame(stream: socket.socket, data: bytes) -> None:
    """Send a message that is encoded already."""
    for piece in _pieces(data):
        stream.sendall(piece)


def _pieces(data: bytes) -> tuple[bytes, ...]:
    """Return a frame in as few pieces as are worth a copy: each is a system call, and may wake the reader."""
    header = _HEADER.pack(len(data))
    return (header + data,) if len(data) <= _COPIED_BYTES else (header, data)


def receive(stream: socket.socket, kind: Any) -> Any:
    """Return the next message from a blocking socket, or None when the other side has closed between frames."""
    data = receive_frame(stream)
    return None if data is None else decode(data, kind)


def receive_frame(stream: socket.socket) -> bytes | None:
    """Return the next message as it was encoded; see `receive`."""
    header = _read(stream, _HEADER.size)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    data = _read(stream, _checked(length))
    if data is None:
        raise EOFError("the connection was closed inside a frame")
    return data


def _read(stream: socket.socket, num_bytes: int) -> bytes | None:
    buffer = bytearray(num_bytes)
    view, got = memoryview(buffer), 0
    while got < num_bytes:
        count = stream.recv_into(view[got:])
        if count == 0:
            if got == 0:
                return None
            raise EOFError(f"the connection was closed after {got} of {num_bytes} bytes")
        got += count
    return bytes(buffer)


def _checked(length: int, max_bytes: int = _MAX_FRAME_BYTES) -> int:
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes was announced, at most {max_bytes} are allowed")
    return length


async def send_async(stream: trio.abc.SendStream, message: Message) -> None:
    """Send one message over a trio stream."""
    await send_frame_async(stream, encode(message))


async def send_frame_async(stream: trio.abc.SendStream, data: bytes) -> None:
    """Send a message that is encoded already."""
    for piece in _pieces(data):
        await stream.send_all(piece)


async def receive_async(stream: trio.abc.ReceiveStream, kind: Any, *, max_bytes: int = _MAX_FRAME_BYTES) -> Any:
    """Return the next message from a trio stream, or None when the other side has closed between frames.

    Raises: EOFError, ValueError for a frame of more than `max_bytes`.
    """
    header = await _read_async(stream, _HEADER.size)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    data = await _read_async(stream, _checked(length, max_bytes))
    if data is None:
        raise EOFError("the connection was closed inside a frame")
    return decode(data, kind)


async def _read_async(stream: trio.abc.ReceiveStream, num_bytes: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < num_bytes:
        chunk = await stream.receive_some(min(num_bytes - len(buffer), _LARGEST_READ_BYTES))
        if not chunk:
            if not buffer:
                return None
            raise EOFError(f"the connection was closed after {len(buffer)} of {num_bytes} bytes")
        buffer += chunk
    return bytes(buffer)


class Reader:
    """Reads messages from a trio stream ahead, so that many small ones cost one read; nothing else may read it then.

    A message that has come already is returned without a checkpoint: at most as many as one read brought, which other
    tasks wait for.
    """

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._ahead = bytearray()
        self._begin = 0  # of what is not given out yet

    async def receive(self, kind: Any) -> Any:
        """Return the next message, or None when the other side has closed between frames.

        May be cancelled and called again: nothing is lost. Raises: EOFError, ValueError for a frame that is too large.
        """
        data = await self.receive_frame()
        return None if data is None else decode(data, kind)

    async def receive_frame(self) -> bytes | None:
        """Return the next message as it was encoded; see `receive`."""
        if not await self._has(_HEADER.size):
            return None
        (length,) = _HEADER.unpack_from(self._ahead, self._begin)
        await self._has(_HEADER.size + _checked(length))
        begin = self._begin + _HEADER.size
        self._begin = begin + length
        return bytes(memoryview(self._ahead)[begin : self._begin])

    async def _has(self, num_bytes: int) -> bool:
        """Return once so many bytes are there, or False where the stream ends before the first of them."""
        if len(self._ahead) - self._begin >= num_bytes:
            return True
        del self._ahead[: self._begin]
        self._begin = 0
        while (missing := num_bytes - len(self._ahead)) > 0:
            chunk = await self._stream.receive_some(min(max(missing, _READ_BYTES), _LARGEST_READ_BYTES))
            if not chunk:
                if not self._ahead:
                    return False
                raise EOFError(f"the connection was closed after {len(self._ahead)} of {num_bytes} bytes")
            self._ahead += chunk
        return True
