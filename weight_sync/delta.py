"""What changed between two versions, encoded in parts that lie in a weight file of their own, and put in place again.

Of a tensor NAME there are, whichever are the fewest bytes:

    (nothing)                         no element has changed
    NAME/positions  NAME/values       the places of the changed elements, as U32, and what they are now
    NAME/mask       NAME/values       a bit for every element, lowest first, set where it has changed, and the values
    NAME/whole                        all of it

Elements are compared by their bits, so that NaN, infinities and the sign of zero are exact. Values replace, they are
not added: to put a delta in place twice is to put it in place once. A position takes 32 bits and a mask one bit an
element, so masks are smaller where more than one element in 32 has changed.

numpy alone: the engine's half needs no torch for it. Elements are taken in blocks that stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import WeightMismatch
from asyncrl.types import TensorEntry, WeightDelta
from asyncrl.weight_sync.manifest import DTYPE_BYTES, tensor_of
from asyncrl.weight_sync.weight_file import layout

_BLOCK = 2**18  # elements
_MASK_UNIT = 64  # elements: masks are whole words, so that what follows them is aligned for most dtypes
_MAX_POSITIONS = 2**32  # elements of a tensor, beyond which a position does not fit
_WIDE = 8  # bytes that are compared at once
_SPARSE = 2  # where no more than one in so many of them has changed, these alone are looked into

Words = npt.NDArray[np.unsignedinteger[Any]]
Positions = npt.NDArray[np.intp]
"""Of elements, in a tensor that is read as one row."""
Data = Callable[[TensorEntry], memoryview]
"""The bytes of a tensor of one version."""


class _Form(Enum):
    NOTHING = "nothing"
    POSITIONS = "positions"
    MASK = "mask"
    WHOLE = "whole"


class DeltaWriter:
    """The delta from one version to the next of the same layout, made tensor by tensor while the next one is written.

    Held in memory: the delta. Once that is no smaller than `limit` bytes, the rest is not looked at, and it is of no
    use (`is_worth_it`).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: list[tuple[str, str, tuple[int, ...]]] = []
        self._buffers: list[memoryview] = []
        self.num_bytes = 0
        """Bytes of all parts."""

    @property
    def is_worth_it(self) -> bool:
        """Whether the delta is smaller than the whole version."""
        return self.num_bytes < self._limit

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """Entries (digests still empty) in the order of `buffers`."""
        return layout(self._names, aligned=False)

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of every part."""
        yield from self._buffers

    def add(self, entry: TensorEntry, old: memoryview, new: memoryview) -> None:
        """Add what differs between a tensor's bytes in the two versions."""
        if not self.is_worth_it:
            return
        before, after = _as_words(old, entry), _as_words(new, entry)
        changes = list(_changes(before, after))
        form = _smallest_form(entry, sum(len(change.values) for change in changes))
        match form:
            case _Form.WHOLE:
                self._part(f"{entry.name}/whole", entry.dtype, entry.shape, after.copy())
            case _Form.POSITIONS:
                positions = np.concatenate([change.places + np.uint32(change.start) for change in changes])
                self._part(f"{entry.name}/positions", "U32", positions.shape, positions.astype("<u4", copy=False))
            case _Form.MASK:
                mask = np.zeros(_mask_bytes(len(after)), np.uint8)
                for change in changes:
                    differs = np.zeros(min(_BLOCK, len(after) - change.start), np.uint8)
                    differs[change.places] = 1
                    bits = np.packbits(differs, bitorder="little")
                    mask[change.start // 8 : change.start // 8 + len(bits)] = bits
                self._part(f"{entry.name}/mask", "U8", mask.shape, mask)
        if form in (_Form.POSITIONS, _Form.MASK):
            values = np.concatenate([change.values for change in changes])
            self._part(f"{entry.name}/values", entry.dtype, values.shape, values)

    def _part(self, name: str, dtype: str, shape: tuple[int, ...], array: npt.NDArray[Any]) -> None:
        self._names.append((name, dtype, shape))
        self._buffers.append(_bytes(array))
        self.num_bytes += array.nbytes


@dataclass(frozen=True, slots=True)
class _Change:
    """What has changed in a block of a tensor."""

    start: int
    places: npt.NDArray[np.uint32]
    """Of the changed elements, counted from `start`."""
    values: Words


def _changes(old: Words, new: Words) -> Iterator[_Change]:
    """Yield every block that has changed."""
    ratio = _WIDE // new.itemsize
    shift = ratio.bit_length() - 1
    for start in range(0, len(new), _BLOCK):
        before, after = old[start : start + _BLOCK], new[start : start + _BLOCK]
        words = None
        if len(after) % ratio == 0:
            wide = after.view(f"<u{_WIDE}")
            words = np.flatnonzero(before.view(wide.dtype) != wide)
        if words is None or len(words) * _SPARSE > len(after) // ratio:
            places = np.flatnonzero(before != after)
        else:
            differs = before.view(wide.dtype)[words].view(new.dtype) != wide[words].view(new.dtype)
            inside = np.flatnonzero(differs)
            places = (words[inside >> shift] << shift) + (inside & (ratio - 1))
        if len(places):
            yield _Change(start, places.astype(np.uint32), after[places])


def _smallest_form(entry: TensorEntry, num_changed: int) -> _Form:
    size = DTYPE_BYTES[entry.dtype]
    count = entry.num_bytes // size
    if not num_changed:
        return _Form.NOTHING
    sizes = {_Form.MASK: _mask_bytes(count) + num_changed * size, _Form.WHOLE: entry.num_bytes}
    if count <= _MAX_POSITIONS:
        sizes = {_Form.POSITIONS: num_changed * (4 + size), **sizes}
    return min(sizes, key=lambda form: sizes[form])


def apply_delta(
    delta: WeightDelta, parts: Data, entries: tuple[TensorEntry, ...], target: Callable[[TensorEntry], memoryview]
) -> dict[str, Positions]:
    """Put a delta in place in a copy of its base, which is `target`'s writable bytes, and return what has changed.

    That is, by name, the positions of the changed elements of every tensor that has any.
    Raises: WeightMismatch naming the tensor whose parts make no sense; the copy is then neither version.
    """
    changed: dict[str, Positions] = {}
    found: dict[str, dict[str, TensorEntry]] = {}
    for part in delta.tensors:
        name = tensor_of(part.name)
        found.setdefault(name, {})[part.name.removeprefix(f"{name}/")] = part
    for entry in entries:
        forms = found.pop(entry.name, {})
        if not forms:
            continue
        words = _as_words(target(entry), entry)
        if any(part.dtype != entry.dtype for form, part in forms.items() if form in ("values", "whole")):
            raise _senseless(delta, entry.name)
        match sorted(forms):
            case ["whole"] if forms["whole"].num_bytes == entry.num_bytes:
                words[:] = _as_words(parts(forms["whole"]), entry)
                changed[entry.name] = np.arange(len(words))
            case ["positions", "values"]:
                positions = np.frombuffer(parts(forms["positions"]), "<u4")
                values = _as_words(parts(forms["values"]), entry)
                if len(positions) != len(values) or (len(positions) and positions.max() >= len(words)):
                    raise _senseless(delta, entry.name)
                changed[entry.name] = positions.astype(np.intp)
                words[changed[entry.name]] = values
            case ["mask", "values"] if forms["mask"].num_bytes == _mask_bytes(len(words)):
                mask = np.frombuffer(parts(forms["mask"]), np.uint8)
                places = _place(words, mask, _as_words(parts(forms["values"]), entry))
                if places is None:
                    raise _senseless(delta, entry.name)
                changed[entry.name] = places
            case _:
                raise _senseless(delta, entry.name)
    for name in found:
        raise _senseless(delta, name)
    return changed


def _place(words: Words, mask: npt.NDArray[np.uint8], values: Words) -> Positions | None:
    """Put `values` where the mask is set and return the positions; None if there were not exactly as many."""
    positions = np.empty(len(values), np.intp)
    done = 0
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        bits = mask[start // 8 : (start + len(block) + 7) // 8]
        places = np.flatnonzero(np.unpackbits(bits, bitorder="little", count=len(block)).view(bool))
        end = done + len(places)
        if end > len(values):
            return None
        block[places] = values[done:end]
        positions[done:end] = places + start
        done = end
    return positions if done == len(values) else None


def _senseless(delta: WeightDelta, name: str) -> WeightMismatch:
    return WeightMismatch(
        f"{name} of version {delta.version} cannot be made of its parts in {delta.location}", tensor=name
    )


def _mask_bytes(count: int) -> int:
    return -(-count // _MASK_UNIT) * (_MASK_UNIT // 8)


def _as_words(data: memoryview, entry: TensorEntry) -> Words:
    return np.frombuffer(data, f"<u{DTYPE_BYTES[entry.dtype]}")


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")
