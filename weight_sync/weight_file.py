"""The file that carries one version of the weights, in safetensors form: written by streams, read through a mapping.

The shared-memory and the filesystem transport differ only in where the file lies and in whether it must outlive a
power cut. The safetensors form was chosen over raw bytes because any tool can then read a file that is left for
inspection, and the file checks the manifest that came by another way.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.types import TensorEntry, WeightDelta, WeightManifest
from asyncrl.weight_sync.manifest import DTYPE_BYTES, tensor_of

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 2**20  # as safetensors bounds it: a longer one is not a header but something else


def header_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the header of a safetensors file: name -> {"dtype", "shape", "data_offsets"}, without the metadata.

    Raises: WeightSyncError if the file is not one.
    """
    try:
        with open(path, "rb") as stream:
            header, _ = _read_header(stream.read(_LENGTH.size), stream.read, str(path))
    except OSError as error:
        raise WeightSyncError(f"cannot read the weights in {path}: {error}") from error
    return header


def _read_header(prefix: bytes, read: Any, path: str) -> tuple[dict[str, Any], int]:
    if len(prefix) < _LENGTH.size:
        raise WeightSyncError(f"{path} is cut short: {len(prefix)} bytes are not even a header")
    (length,) = _LENGTH.unpack(prefix)
    if length > _MAX_HEADER_BYTES:
        raise WeightSyncError(f"{path} is not a safetensors file: it announces a header of {length} bytes")
    try:
        header = json.loads(bytes(read(length)))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightSyncError(f"the header of {path} is not whole: {error}") from error
    if not isinstance(header, dict):
        raise WeightSyncError(f"the header of {path} is not an object")
    header.pop("__metadata__", None)
    return header, _LENGTH.size + length


def layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, aligned: bool = True) -> tuple[TensorEntry, ...]:
    """Return entries (digests still empty) for (name, dtype, shape) triples, without gaps.

    `aligned` puts wide dtypes first; otherwise they lie in the order given.
    Raises: WeightSyncError for a dtype that cannot be sent.
    """
    triples = list(tensors)
    for name, dtype, _ in triples:
        if dtype not in DTYPE_BYTES:
            raise WeightSyncError(f"cannot send {name}: dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}")
    entries, offset = [], 0
    if aligned:
        triples.sort(key=lambda item: -DTYPE_BYTES[item[1]])
    for name, dtype, shape in triples:
        num_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=num_bytes, digest=""))
        offset += num_bytes
    return tuple(entries)


def write_weight_file(
    path: Path,
    entries: tuple[TensorEntry, ...],
    buffers: Iterable[memoryview],
    *,
    metadata: Mapping[str, str],
    durable: bool,
    digest: Callable[[memoryview], str],
) -> tuple[TensorEntry, ...]:
    """Write a new file and return the entries with their digests. One pass over the source, one copy.

    Raises: WeightSyncError when there is no room; nothing is left behind then.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
        }
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    num_bytes = _LENGTH.size + len(text) + sum(entry.num_bytes for entry in entries)
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise WeightSyncError(_no_room(path, num_bytes, free))
    done = []
    try:
        with path.open("wb", buffering=0) as stream:
            _write_all(stream.fileno(), memoryview(_LENGTH.pack(len(text)) + text))
            remaining = iter(buffers)
            for entry in entries:
                buffer = next(remaining)
                assert buffer.nbytes == entry.num_bytes, entry.name
                _write_all(stream.fileno(), buffer)
                done.append(replace(entry, digest=digest(buffer)))
                del buffer  # before the next one is made: of gathered tensors one at a time is held
            if durable:
                os.fsync(stream.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WeightSyncError(_no_room(path, num_bytes, shutil.disk_usage(path.parent).free)) from error
        raise WeightSyncError(f"cannot write the weights to {path}: {error}") from error
    return tuple(done)


def _no_room(path: Path, num_bytes: int, free: int) -> str:
    return (
        f"no room for the weights: {path} takes {num_bytes / 2**20:.0f} MiB and {path.parent} has "
        f"{free / 2**20:.0f} MiB free; enlarge it, or use another directory ([weight_sync] directory)"
    )


def _write_all(descriptor: int, buffer: memoryview) -> None:
    view = buffer.cast("B")
    while view:
        view = view[os.write(descriptor, view[: 2**30]) :]


class WeightFileGone(WeightSyncError):  # noqa: N818  (it says what has become of the file)
    """The file of a version cannot be opened: as a rule, newer versions have taken its place."""


class WeightFile:
    """One version's file, or its delta's, mapped read-only and checked against its manifest. A context manager.

    Raises, when opened: WeightFileGone, or WeightMismatch naming a tensor if it is cut short or lists others than the
    manifest.

    Example:
        >>> with WeightFile(manifest) as weights:          # doctest: +SKIP
        ...     first = weights.data(manifest.tensors[0])
    """

    def __init__(self, manifest: WeightManifest | WeightDelta) -> None:
        self.manifest = manifest
        path = manifest.location
        try:
            with open(path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size == 0:
                    raise WeightMismatch(f"{path} is empty")
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                self._mapping = mmap.mmap(stream.fileno(), size, flags=flags, prot=mmap.PROT_READ)
        except OSError as error:
            raise WeightFileGone(f"cannot map the weights of version {manifest.version}: {error}") from error
        self._view = memoryview(self._mapping)
        position = _LENGTH.size
        header, self._start = _read_header(
            bytes(self._view[:position]), lambda length: self._view[position : position + length], path
        )
        self._check_header(header, path, size)

    def _check_header(self, header: Mapping[str, Any], path: str, size: int) -> None:
        version = self.manifest.version
        listed = {entry.name for entry in self.manifest.tensors}
        for name in header:
            if name not in listed:
                raise WeightMismatch(
                    f"{path} of version {version} holds {name}, which the manifest does not list",
                    tensor=tensor_of(name),
                )
        for entry in self.manifest.tensors:
            name, found = entry.name, header.get(entry.name)
            wanted = [entry.dtype, list(entry.shape), [entry.offset, entry.offset + entry.num_bytes]]
            if found is None:
                wrong = f"{path} of version {version} lacks {name}, which the manifest lists"
            elif [found.get("dtype"), found.get("shape"), found.get("data_offsets")] != wanted:
                wrong = f"{path} of version {version} and the manifest disagree about {name}: {found} against {wanted}"
            elif self._start + entry.offset + entry.num_bytes > size:
                wrong = f"{path} of version {version} is cut short inside {name}"
            else:
                continue
            raise WeightMismatch(wrong, tensor=tensor_of(name))

    def data(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, not copied; valid until the file is closed."""
        start = self._start + entry.offset
        return self._view[start : start + entry.num_bytes]

    def close(self) -> None:
        """Drop the mapping. Whoever still holds a tensor's bytes keeps them alive until it lets go."""
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            return  # views are still held; the mapping goes with the last of them

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
