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


@dataclass(frozen=True, slots=True)
class _Change:
    entry: TensorEntry
    form: _Form
    num_changed: int


class DeltaWriter:
    """The delta from one version to the next of the same layout: first its size, then its bytes, part by part.

    Held in memory at any time: the parts of one tensor.
    """

    def __init__(self, entries: tuple[TensorEntry, ...], old: Data, new: Data) -> None:
        self._old, self._new = old, new
        self._changes = [self._change(entry) for entry in entries]
        self.parts = layout((part for change in self._changes for part in _parts(change)), aligned=False)
        """Entries (digests still empty) in the order that `buffers` yields them in."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def _change(self, entry: TensorEntry) -> _Change:
        old, new = self._words(entry)
        num_changed = sum(
            int(np.count_nonzero(old[start : start + _BLOCK] != new[start : start + _BLOCK]))
            for start in range(0, len(new), _BLOCK)
        )
        sizes = {
            _Form.NOTHING: 0 if not num_changed else entry.num_bytes + 1,
            _Form.POSITIONS: num_changed * (4 + new.itemsize) if len(new) <= _MAX_POSITIONS else entry.num_bytes + 1,
            _Form.MASK: _mask_bytes(len(new)) + num_changed * new.itemsize,
            _Form.WHOLE: entry.num_bytes,
        }
        return _Change(entry, min(sizes, key=lambda form: sizes[form]), num_changed)

    def _words(self, entry: TensorEntry) -> tuple[Words, Words]:
        return _as_words(self._old(entry), entry), _as_words(self._new(entry), entry)

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of every part."""
        for change in self._changes:
            if change.form is _Form.WHOLE:
                yield self._new(change.entry)
            elif change.form is not _Form.NOTHING:
                yield from self._sparse(change)

    def _sparse(self, change: _Change) -> Iterator[memoryview]:
        old, new = self._words(change.entry)
        values = np.empty(change.num_changed, new.dtype)
        positions = np.empty(change.num_changed if change.form is _Form.POSITIONS else 0, "<u4")
        mask = np.zeros(_mask_bytes(len(new)) if change.form is _Form.MASK else 0, np.uint8)
        done = 0
        for start in range(0, len(new), _BLOCK):
            block = new[start : start + _BLOCK]
            differs = old[start : start + _BLOCK] != block
            places = np.flatnonzero(differs)
            end = done + len(places)
            values[done:end] = block[places]
            if change.form is _Form.POSITIONS:
                positions[done:end] = places + start
            else:
                bits = np.packbits(differs, bitorder="little")
                mask[start // 8 : start // 8 + len(bits)] = bits
            done = end
        yield _bytes(positions if change.form is _Form.POSITIONS else mask)
        yield _bytes(values)


def _parts(change: _Change) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    entry = change.entry
    count = entry.num_bytes // DTYPE_BYTES[entry.dtype]
    match change.form:
        case _Form.POSITIONS:
            yield f"{entry.name}/positions", "U32", (change.num_changed,)
        case _Form.MASK:
            yield f"{entry.name}/mask", "U8", (_mask_bytes(count),)
        case _Form.WHOLE:
            yield f"{entry.name}/whole", entry.dtype, entry.shape
    if change.form in (_Form.POSITIONS, _Form.MASK):
        yield f"{entry.name}/values", entry.dtype, (change.num_changed,)


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
