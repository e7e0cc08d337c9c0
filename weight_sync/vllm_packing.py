"""Linear weights packed for a CPU such that single elements can be written. Runs inside vLLM's worker processes.

vLLM keeps a packed weight inside an object of C++ that gives no access to it. torch packs for the same kernels of
oneDNN (`mkldnn`), into memory whose address it tells. Where an element [n, k] lies there is not documented. It is
found, once for each shape and dtype, by packing weights that carry their own indices, and proven by packing random
bits: a layout is taken for known only if every element of them is found where it is said to be.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BATCH = 16  # rows that the packing is meant for; another number of them runs as well
_BASE = 255  # digits 1 to 255 are exact in every dtype of floats, bfloat16 with its 8 bits too
_BLOCK_ROWS = 128  # of places at once: they stay in a core's cache

Places = npt.NDArray[np.intp]
Words = npt.NDArray[np.unsignedinteger[Any]]
"""Elements as bits."""


class UnknownLayoutError(Exception):
    """The elements of a packed weight do not lie where a sum of two offsets says."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Element [n, k] of a weight lies at place `rows[n] + columns[k]`, in elements."""

    rows: Places
    columns: Places


class Layouts:
    """The layouts that have been found and proven. On one CPU they depend on shape and dtype alone."""

    def __init__(self, pack: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._pack = pack or _pack
        self._known: dict[tuple[torch.Size, torch.dtype], Layout] = {}

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Layout:
        """Return the layout of packed weights of a shape. Raises: UnknownLayoutError."""
        if (shape, dtype) not in self._known:
            self._known[shape, dtype] = self._proven(shape, dtype)
        return self._known[shape, dtype]

    def _proven(self, shape: torch.Size, dtype: torch.dtype) -> Layout:
        rows = self._found(shape, dtype, 0)
        columns = self._found(shape, dtype, 1)
        layout = Layout(rows, columns - rows[0])
        # positive and finite ones: whether the bits of a NaN survive is not asked
        top = int(torch.tensor(math.inf, dtype=dtype).view(_BITS[dtype.itemsize]).item())
        bits = torch.randint(0, top, shape, dtype=_BITS[dtype.itemsize])
        packed = self._pack(bits.view(dtype))
        found, wanted = words_of(packed), _words(bits)
        if layout.rows.max() + layout.columns.max() >= len(found) or layout.rows.min() + layout.columns.min() < 0:
            raise UnknownLayoutError(f"a packed weight of {list(shape)}, {dtype}, is no sum of rows and columns")
        for start in range(0, shape[0], _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            if not np.array_equal(found[layout.rows[block, None] + layout.columns], wanted[block]):
                raise UnknownLayoutError(f"a packed weight of {list(shape)}, {dtype}, is no sum of rows and columns")
        return layout

    def _found(self, shape: torch.Size, dtype: torch.dtype, axis: int) -> Places:
        """Return where the elements [n, 0] (`axis` 0) or [0, k] (1) lie."""
        size = shape[axis]
        places, indices = np.empty(0, np.intp), np.zeros(size, np.intp)
        for power in range(max(1, math.ceil(math.log(size, _BASE) - 1e-9))):
            weight = torch.zeros(shape, dtype=dtype)
            weight.select(1 - axis, 0).copy_(torch.arange(size) // _BASE**power % _BASE + 1)
            packed = self._pack(weight)
            words = words_of(packed)
            if power == 0:
                places = np.flatnonzero(words)
            if len(places) != size:
                raise UnknownLayoutError(f"{len(places)} of {size} indices are in a packed weight of {list(shape)}")
            digits = torch.from_numpy(words[places].view(f"i{dtype.itemsize}")).view(dtype)
            indices += (digits.to(torch.int64).numpy() - 1) * _BASE**power
        if not np.array_equal(np.sort(indices), np.arange(size)):
            raise UnknownLayoutError(f"a packed weight of {list(shape)}, {dtype}, does not hold every index once")
        found = np.empty(size, np.intp)
        found[indices] = places
        return found


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackedLinear:
    """A weight [out, in], packed; called as vLLM calls the kernel of a layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = _pack(weight)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias; the layer's own `weight` is not read."""
        return self._multiply(x, self.packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH)
    return packed


def words_of(packed: torch.Tensor) -> Words:
    """Return the memory of a packed weight, or of a plain one, to be read and written. It ends with the tensor."""
    if not packed.is_mkldnn:
        return _words(packed.view(-1))
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    memory = (ctypes.c_uint8 * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    return np.frombuffer(memory, f"u{packed.dtype.itemsize}")


def _words(tensor: torch.Tensor) -> Words:
    size = tensor.dtype.itemsize
    return tensor.detach().view(_BITS[size]).numpy().view(f"u{size}")
