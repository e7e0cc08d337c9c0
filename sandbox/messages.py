"""Frames between the trio program and its launcher: a JSON header and byte strings. Standard library only.

msgpack was rejected because the launcher loads no package: that keeps it small, which makes its forks fast.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

PREFIX = struct.Struct("!II")
MAX_FRAME_BYTES = 2**30  # more is a stream out of step


def encode(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Return one frame."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    body = b"".join(blobs)
    return PREFIX.pack(len(text), len(body)) + text + body


def frame_bytes(buffer: bytes | bytearray) -> int | None:
    """Return the length of the first frame in `buffer`; None until that is known. Raises ValueError."""
    if len(buffer) < PREFIX.size:
        return None
    text, body = PREFIX.unpack_from(buffer)
    if text + body > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {text + body} bytes, allowed are {MAX_FRAME_BYTES}")
    return int(PREFIX.size + text + body)


def decode(frame: bytes | bytearray) -> tuple[dict[str, Any], list[bytes]]:
    """Return header and byte strings of one whole frame. Raises ValueError where it is none."""
    text_bytes, body_bytes = PREFIX.unpack_from(frame)
    position = PREFIX.size + text_bytes
    header = json.loads(bytes(frame[PREFIX.size : position]))
    lengths = header.pop("blobs", None) if isinstance(header, dict) else None
    if not isinstance(lengths, list) or not all(isinstance(length, int) and length >= 0 for length in lengths):
        raise ValueError("a frame's header must be an object that tells the lengths of its blobs")
    if sum(lengths) != body_bytes:
        raise ValueError(f"the blobs of a frame of {body_bytes} bytes are told to have {sum(lengths)}")
    blobs = []
    for length in lengths:
        blobs.append(bytes(frame[position : position + length]))
        position += length
    return header, blobs
