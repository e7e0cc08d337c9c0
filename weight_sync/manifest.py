"""The manifest of one version of the weights: written last, renamed into place, and checked whole when read."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import WeightSyncError
from asyncrl.types import TensorEntry, Verification, WeightDelta, WeightManifest

MANIFEST_SUFFIX = ".manifest.json"

DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the name that safetensors gives the dtype."""


def tensor_of(part: str) -> str:
    """Return the name of the tensor that an entry is of: an entry of a delta is a part of one (`delta`)."""
    name, _, form = part.rpartition("/")
    return name if name and form in ("positions", "mask", "values", "whole") else part


def combined_digest(entries: Iterable[TensorEntry]) -> str:
    """Return the digest of a whole version: over the names and digests of its tensors, in order."""
    crc = 0
    for entry in entries:
        crc = zlib.crc32(f"{entry.name} {entry.dtype} {entry.shape} {entry.digest}\n".encode(), crc)
    return f"{crc:08x}"


def layout_of(entries: Iterable[TensorEntry]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return what the tensors of two versions must have in common for a delta to lead from one to the other."""
    return [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in entries]


def manifest_to_json(manifest: WeightManifest) -> dict[str, Any]:
    """Return the manifest as JSON-like values, as `manifest_from_json` takes them."""
    delta = manifest.delta
    return {
        "run_id": manifest.run_id,
        "version": manifest.version,
        "transport": manifest.transport,
        "location": manifest.location,
        "digest": manifest.digest,
        "verification": manifest.verification.value,
        "tensors": _entries_to_json(manifest.tensors),
        "adapter_scale": manifest.adapter_scale,
        "deltas": manifest.deltas,
        "delta": delta
        and {
            "base_version": delta.base_version,
            "base_digest": delta.base_digest,
            "location": delta.location,
            "digest": delta.digest,
            "tensors": _entries_to_json(delta.tensors),
        },
    }


def _entries_to_json(entries: Iterable[TensorEntry]) -> list[list[Any]]:
    return [
        [entry.name, entry.dtype, list(entry.shape), entry.offset, entry.num_bytes, entry.digest] for entry in entries
    ]


def _entries_from_json(data: Any) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(
            name=str(name),
            dtype=str(dtype),
            shape=tuple(int(size) for size in shape),
            offset=int(offset),
            num_bytes=int(num_bytes),
            digest=str(digest),
        )
        for name, dtype, shape, offset, num_bytes, digest in data
    )


def manifest_from_json(data: Mapping[str, Any], source: str = "the manifest") -> WeightManifest:
    """Return the manifest that `manifest_to_json` wrote, checked for what can be checked without the weights.

    Raises: WeightSyncError naming `source` and the field or tensor that cannot be right.
    """
    try:
        version, delta = int(data["version"]), data["delta"]
        manifest = WeightManifest(
            run_id=str(data["run_id"]),
            version=version,
            transport=str(data["transport"]),
            location=str(data["location"]),
            tensors=_entries_from_json(data["tensors"]),
            digest=str(data["digest"]),
            verification=Verification(data["verification"]),
            adapter_scale=None if data["adapter_scale"] is None else float(data["adapter_scale"]),
            deltas=bool(data["deltas"]),
            delta=delta
            and WeightDelta(
                version=version,
                base_version=int(delta["base_version"]),
                base_digest=str(delta["base_digest"]),
                location=str(delta["location"]),
                tensors=_entries_from_json(delta["tensors"]),
                digest=str(delta["digest"]),
            ),
        )
    except KeyError as error:
        raise WeightSyncError(f"{source} lacks the field {error}") from error
    except (TypeError, ValueError) as error:
        raise WeightSyncError(f"{source} is not a weight manifest: {error}") from error
    _check(manifest, source)
    return manifest


def _check(manifest: WeightManifest, source: str) -> None:
    if manifest.version < 0:
        raise WeightSyncError(f"{source}: version must be >= 0, got {manifest.version}")
    if not manifest.tensors:
        raise WeightSyncError(f"{source} lists no tensor")
    _check_entries(manifest.tensors, manifest.digest, source)
    if (delta := manifest.delta) is None:
        return
    if not 0 <= delta.base_version < manifest.version:
        raise WeightSyncError(
            f"{source}: the base of version {manifest.version}'s delta must be a version before it, got "
            f"{delta.base_version}"
        )
    _check_entries(delta.tensors, delta.digest, f"the delta of {source}")


def _check_entries(entries: Sequence[TensorEntry], digest: str, source: str) -> None:
    names: set[str] = set()
    end = 0
    for entry in entries:
        if entry.name in names:
            raise WeightSyncError(f"{source} lists {entry.name} twice")
        names.add(entry.name)
        if entry.dtype not in DTYPE_BYTES:
            raise WeightSyncError(f"{source}: {entry.name} has the unknown dtype {entry.dtype}")
        count = DTYPE_BYTES[entry.dtype]
        for size in entry.shape:
            count *= size
        if entry.num_bytes != count:
            raise WeightSyncError(
                f"{source}: {entry.name} {entry.dtype}{list(entry.shape)} takes {count} bytes, not {entry.num_bytes}"
            )
        if entry.offset < end:
            raise WeightSyncError(f"{source}: {entry.name} begins at {entry.offset}, inside the tensor before it")
        end = entry.offset + entry.num_bytes
    if combined_digest(entries) != digest:
        raise WeightSyncError(f"{source}: its own digest {digest} does not fit its tensors' digests")


def write_manifest(manifest: WeightManifest, path: str | os.PathLike[str]) -> None:
    """Write the manifest so that a reader sees all of it or nothing (temporary file, fsync, rename)."""
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    with temporary.open("w", encoding="ascii") as stream:
        stream.write(json.dumps(manifest_to_json(manifest)))  # `dump` encodes in Python, which takes ten times as long
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(target)


def read_manifest(path: str | os.PathLike[str]) -> WeightManifest:
    """Return the manifest in a file.

    Raises: WeightSyncError if there is none, or what is there is not a whole manifest.
    """
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightSyncError(f"cannot read the weight manifest {path}: {error}") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise WeightSyncError(f"the weight manifest {path} is not whole: {error}") from error
    if not isinstance(data, dict):
        raise WeightSyncError(f"the weight manifest {path} is not an object")
    return manifest_from_json(data, str(path))
