"""The bytes that are published of tensors that may be sharded, of another dtype, or in a device's memory, one by one.

A tensor of which each rank holds a shard (FSDP2's DTensor) is made whole by a collective, so all its ranks must ask for
the same tensors in the same order: one publishes, the others `take_part`. What a rank needs beside its shards is the
largest tensor, whole, as it is published; a shard is cast before it travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import TensorEntry
from asyncrl.weight_sync.weight_file import layout

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's dtypes by the names that safetensors gives them."""


def entries_of(tensors: Mapping[str, Any], cast_to: torch.dtype | None = None) -> tuple[TensorEntry, ...]:
    """Return where each tensor will lie (digests still empty). Nothing is gathered.

    Raises: WeightSyncError naming a tensor whose dtype cannot be sent.
    """
    return layout((name, _dtype_name(name, sent_dtype(t, cast_to)), tuple(t.shape)) for name, t in tensors.items())


def gathered(
    tensors: Mapping[str, Any], entries: tuple[TensorEntry, ...], cast_to: torch.dtype | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of every entry's tensor. Each is made when it is asked for; hold one at a time."""
    for entry in entries:
        yield bytes_of(whole(tensors[entry.name], cast_to))


def take_part(tensors: Mapping[str, Any], cast_to: torch.dtype | None = None) -> None:
    """Give this rank's shards to the rank that publishes, and return when it has them all.

    `tensors` has the same names in the same order on all ranks. Where the publishing rank fails and ends, the
    collective raises here, or at the latest after the process group's own timeout.
    """
    for entry in entries_of(tensors, cast_to):
        whole(tensors[entry.name], cast_to)


def whole(tensor: torch.Tensor, cast_to: torch.dtype | None) -> torch.Tensor:
    """Return a tensor in the dtype that it is sent in, made whole where this rank holds a shard of it."""
    cast = tensor.detach().to(sent_dtype(tensor, cast_to))
    gather = getattr(cast, "full_tensor", None)  # a collective on all ranks
    return gather() if callable(gather) else cast


def sent_dtype(tensor: torch.Tensor, cast_to: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is sent in."""
    return cast_to if cast_to is not None and tensor.is_floating_point() else tensor.dtype


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise WeightSyncError(f"cannot send {name}: dtype {dtype} is not one of {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a whole tensor's bytes, in host memory."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
