"""Frames between the orchestrator and its children: a length, then one msgpack message.

The same messages are read by trio (orchestrator) and by plain sockets (learner), and the same encoding is used for
records on disk. msgspec encodes and validates; pickle was rejected because a frame may come from another machine.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from asyncrl.protocols import PLAIN_STEP, StepOptions, StepResult
from asyncrl.types import Group, Logprobs, PolicyVersion, Segment, TokenIds, WeightManifest

_HEADER = struct.Struct("!Q")
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


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Return the record that `encode` wrote. Raises msgspec.DecodeError or ValidationError."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def send(stream: socket.socket, message: Message) -> None:
    """Send one message over a blocking socket."""
    data = encode(message)
    stream.sendall(_HEADER.pack(len(data)))
    stream.sendall(data)


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
    data = encode(message)
    await stream.send_all(_HEADER.pack(len(data)))
    await stream.send_all(data)


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
        chunk = await stream.receive_some(min(num_bytes - len(buffer), 2**20))
        if not chunk:
            if not buffer:
                return None
            raise EOFError(f"the connection was closed after {len(buffer)} of {num_bytes} bytes")
        buffer += chunk
    return bytes(buffer)
