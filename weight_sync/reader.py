"""How an engine's worker comes by a version: by its delta where it holds exactly the base, else by the whole file.

Nothing here knows vLLM. Where deltas are sent, the worker keeps a copy of the version it holds in host memory, and a
delta is put in place in that copy. Every version is published whole too, so the worker decides by itself: whatever
keeps it from taking a delta (it is new, was restarted, has skipped a version) costs one whole read, and is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from asyncrl.errors import WeightMismatch
from asyncrl.types import TensorEntry, WeightManifest
from asyncrl.weight_sync.delta import Positions, apply_delta
from asyncrl.weight_sync.manifest import combined_digest, layout_of
from asyncrl.weight_sync.verify import verify
from asyncrl.weight_sync.weight_file import WeightFile, WeightFileGone


class ChainBreak(StrEnum):
    """Why a version was read whole where deltas are sent."""

    NO_COPY = "no_copy"
    """The worker holds no copy of any version: it is new, or was restarted."""
    NO_DELTA = "no_delta"
    """None was published: this is the publisher's first version, or almost everything has changed."""
    OTHER_BASE = "other_base"
    """The worker holds another version than the delta's base: it has skipped one, or is sent one again."""
    DELTA_GONE = "delta_gone"
    """The delta's file has been removed: two newer versions have been published."""
    MISMATCH = "mismatch"
    """The last version's bytes were wrong, and the worker has thrown its copy away."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version whose bytes have been read and verified; valid inside the `with` that yielded it."""

    manifest: WeightManifest
    weights: WeightFile | Copy
    digests: tuple[str, ...]
    """Of its tensors, in the manifest's order, computed from the bytes that are here."""
    encoding: str
    """"delta" or "full"."""
    num_bytes: int
    """That were read from what the publisher wrote."""
    chain_break: ChainBreak | None
    """None where it came by a delta, or no deltas are sent."""
    changed: Mapping[str, Positions] = field(default_factory=dict)
    """Where it came by a delta: which elements of which tensors are others than the base's."""

    @property
    def digest(self) -> str:
        """Of the whole version, as computed here."""
        entries = zip(self.manifest.tensors, self.digests, strict=True)
        return combined_digest([replace(entry, digest=digest) for entry, digest in entries])

    def data(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, not copied."""
        return self.weights.data(entry)


class Copy:
    """One version's tensors in host memory, one after the other."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._bytes = np.empty(max(entry.offset + entry.num_bytes for entry in manifest.tensors), np.uint8)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self._bytes.nbytes

    def data(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, not copied."""
        return self._bytes[entry.offset : entry.offset + entry.num_bytes].data

    def take(self, weights: WeightFile) -> None:
        """Overwrite everything with a whole file of the same layout."""
        for entry in weights.manifest.tensors:
            self._bytes[entry.offset : entry.offset + entry.num_bytes] = np.frombuffer(weights.data(entry), np.uint8)


class Reader:
    """Reads version after version; keeps a copy of the last one where deltas are sent."""

    def __init__(self) -> None:
        self._copy: Copy | None = None
        self._why_no_copy = ChainBreak.NO_COPY

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copy takes; 0 where there is none."""
        return self._copy.num_bytes if self._copy else 0

    def expects_delta(self, manifest: WeightManifest) -> bool:
        """Tell whether a version will come by its delta, unless that has been removed."""
        return self._copy is not None and manifest.delta is not None and _is_base(self._copy.manifest, manifest)

    @contextmanager
    def open(self, manifest: WeightManifest) -> Iterator[Version]:
        """Yield a version, verified.

        Raises: WeightSyncError if it cannot be read; WeightMismatch naming the tensor whose bytes are wrong. The copy
        is thrown away then, so that sending the version again reads it whole; so it is if the `with` block fails.
        """
        copy, self._copy = self._copy, None
        why = self._why_no_copy
        try:
            with self._version(manifest, copy, why) as version:
                yield version
        except WeightMismatch:
            self._why_no_copy = ChainBreak.MISMATCH
            raise
        self._why_no_copy = ChainBreak.NO_COPY
        if isinstance(version.weights, Copy):
            version.weights.manifest = manifest
            self._copy = version.weights

    @contextmanager
    def _version(self, manifest: WeightManifest, copy: Copy | None, why: ChainBreak) -> Iterator[Version]:
        if not manifest.deltas:
            with WeightFile(manifest) as weights:
                digests = verify(manifest, weights.data)
                yield Version(manifest, weights, digests, "full", manifest.num_bytes, None)
            return
        changed: dict[str, Positions] = {}
        chain_break = self._patch(manifest, copy, why, changed)
        num_bytes, source = manifest.num_bytes, manifest.location
        if chain_break is None:
            assert copy is not None
            assert manifest.delta is not None
            num_bytes, source = manifest.delta.num_bytes, manifest.delta.location
        else:
            if copy is None or layout_of(copy.manifest.tensors) != layout_of(manifest.tensors):
                copy = Copy(manifest)
            with WeightFile(manifest) as weights:
                copy.take(weights)
        digests = verify(manifest, copy.data, source=source)
        yield Version(manifest, copy, digests, "full" if chain_break else "delta", num_bytes, chain_break, changed)

    def _patch(
        self, manifest: WeightManifest, copy: Copy | None, why: ChainBreak, changed: dict[str, Positions]
    ) -> ChainBreak | None:
        """Put the version's delta in place in the copy, adding to `changed`, or return why that cannot be."""
        delta = manifest.delta
        if copy is None:
            return why
        if delta is None:
            return ChainBreak.NO_DELTA
        held = copy.manifest
        if not _is_base(held, manifest):
            return ChainBreak.OTHER_BASE
        if layout_of(held.tensors) != layout_of(manifest.tensors):
            raise WeightMismatch(f"version {manifest.version} has a delta from a version of another layout")
        try:
            parts = WeightFile(delta)
        except WeightFileGone:
            return ChainBreak.DELTA_GONE
        with parts:
            verify(manifest, parts.data, part=delta)
            changed.update(apply_delta(delta, parts.data, manifest.tensors, copy.data))
        return None


def _is_base(held: WeightManifest, manifest: WeightManifest) -> bool:
    delta = manifest.delta
    assert delta is not None
    return (held.run_id, held.version, held.digest) == (manifest.run_id, delta.base_version, delta.base_digest)
