"""The learner's half of the transports that leave a file: names, two versions at most, and nothing left behind.

A publisher holds a lock (flock) on `asyncrl-<run id>.lock` in its directory for as long as it lives. The kernel lets
go of the lock when the process dies, however it dies, so `remove_stale` can tell a dead owner's files from a living
one's without process ids, which are reused and mean nothing across containers.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.types import PolicyVersion, TensorEntry, Verification, WeightDelta, WeightManifest
from asyncrl.weight_sync.checksum import DIGESTS
from asyncrl.weight_sync.delta import DeltaWriter
from asyncrl.weight_sync.manifest import MANIFEST_SUFFIX, combined_digest, layout_of, write_manifest
from asyncrl.weight_sync.sharded import entries_of, gathered
from asyncrl.weight_sync.stale import DELTA_SUFFIX, LOCK_SUFFIX, PREFIX, WEIGHTS_SUFFIX, remove_stale
from asyncrl.weight_sync.weight_file import WeightFile, write_weight_file

if TYPE_CHECKING:
    import torch

_RUN_ID = re.compile(r"[A-Za-z0-9_.]([A-Za-z0-9_.-]{0,99})")


class FilePublisher:
    """Writes each version to a file in `directory`; at most two versions are there at any moment.

    With `delta` each version but the first also has a file of what differs from the one before, where that is smaller.
    The bytes to compare with are read from the file of the version before, so that it costs no memory. `cast_to` is
    what tensors of floats become, as master weights of float32 do for an engine of bfloat16; None leaves them.
    Raises, when made: ConfigError for a run id that is no file name, WeightSyncError if the run has a publisher
    already or the directory cannot be written.
    """

    transport = "filesystem"
    durable = True

    def __init__(
        self,
        *,
        run_id: str,
        directory: str | os.PathLike[str],
        delta: bool = False,
        verification: Verification = Verification.DIGEST,
        cast_to: torch.dtype | None = None,
    ) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise ConfigError(
                f"run id must be at most 100 letters, digits, '.', '_' or '-', not beginning with '-'; got {run_id!r}"
            )
        self.run_id = run_id
        self.directory = Path(directory)
        self._delta = delta
        self._verification = verification
        self._cast_to = cast_to
        self._published: list[WeightManifest] = []
        self._lock: int | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_stale(self.directory)
            self._lock = _take_lock(self._lock_path, run_id)
        except OSError as error:
            raise WeightSyncError(f"cannot publish weights in {self.directory}: {error}") from error

    @property
    def _lock_path(self) -> Path:
        return self.directory / f"{PREFIX}{self.run_id}{LOCK_SUFFIX}"

    def publish(
        self,
        tensors: Mapping[str, Any],
        version: PolicyVersion,
        *,
        keep: Collection[PolicyVersion] = (),
        adapter_scale: float | None = None,
    ) -> WeightManifest:
        """Write `tensors` (name -> torch.Tensor) and return the manifest.

        Of what was published before one version stays: the one in `keep`, which is being read, or else the last.
        One copy of the weights is made, in the file; a tensor that is not contiguous, not in host memory or of another
        dtype is copied on its own first, and one that is sharded is gathered on its own. The ranks that hold its other
        shards call `sharded.take_part` with the same tensors at the same time. With an `adapter_scale` (alpha / r of
        LoRA) the tensors are the factors of an adapter alone, named as PEFT names them (`adapters`).
        Raises: WeightSyncError if the version does not grow, a dtype cannot be sent, or there is no room.
        """
        if self._lock is None:
            raise WeightSyncError(f"the publisher of run {self.run_id} is closed")
        if self._published and version <= self._published[-1].version:
            raise WeightSyncError(f"version {version} was published after version {self._published[-1].version}")
        entries = entries_of(tensors, self._cast_to)
        spare = [manifest for manifest in self._published if manifest.version not in keep]
        if len(self._published) > 1 and not spare:
            both = ", ".join(str(manifest.version) for manifest in self._published)
            raise WeightSyncError(f"versions {both} are both being read: none may be removed for version {version}")
        for manifest in spare[: len(self._published) - 1]:
            self._published.remove(manifest)
            _remove(Path(manifest.location))
        path = self.directory / f"{PREFIX}{self.run_id}-{version}{WEIGHTS_SUFFIX}"
        last = self._published[-1:] if self._delta else ()
        with ExitStack() as unless_whole, _Base(last, entries) as base:
            unless_whole.callback(_remove, path)
            entries = write_weight_file(
                path,
                entries,
                base.compared(gathered(tensors, entries, self._cast_to)),
                metadata={"format": "pt", "run_id": self.run_id, "version": str(version)},
                durable=self.durable,
                digest=DIGESTS[self._verification],
            )
            manifest = WeightManifest(
                run_id=self.run_id,
                version=version,
                transport=self.transport,
                location=str(path),
                tensors=entries,
                digest=combined_digest(entries),
                verification=self._verification,
                adapter_scale=adapter_scale,
                deltas=self._delta,
            )
            manifest = replace(manifest, delta=self._write_delta(base, manifest))
            write_manifest(manifest, path.with_name(path.name + MANIFEST_SUFFIX))
            unless_whole.pop_all()
        self._published.append(manifest)
        return manifest

    def _write_delta(self, base: _Base, manifest: WeightManifest) -> WeightDelta | None:
        """Write what differs from the base, or return None where an engine is better off with the whole version."""
        if base.manifest is None or not base.delta.is_worth_it:
            return None
        path = Path(manifest.location + DELTA_SUFFIX)
        parts = write_weight_file(
            path,
            base.delta.parts,
            base.delta.buffers(),
            metadata={"base_version": str(base.manifest.version), "version": str(manifest.version)},
            durable=self.durable,
            digest=DIGESTS[self._verification],
        )
        return WeightDelta(
            version=manifest.version,
            base_version=base.manifest.version,
            base_digest=base.manifest.digest,
            location=str(path),
            tensors=parts,
            digest=combined_digest(parts),
        )

    def close(self) -> None:
        """Remove what was published. May be called twice."""
        for manifest in self._published:
            _remove(Path(manifest.location))
        self._published.clear()
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> FilePublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Base:
    """The version that a delta leads from, where there is one: the last of `published`, read from its file."""

    def __init__(self, published: Sequence[WeightManifest], entries: tuple[TensorEntry, ...]) -> None:
        self._entries = entries
        self._file: WeightFile | None = None
        self.manifest: WeightManifest | None = None
        """None where there is none."""
        self.delta = DeltaWriter(sum(entry.num_bytes for entry in entries))
        if published and layout_of(published[-1].tensors) == layout_of(entries):
            with suppress(WeightSyncError):  # another hand has removed or cut it; engines report what they read instead
                self._file = WeightFile(published[-1])
                self.manifest = published[-1]

    def compared(self, buffers: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield the bytes of every entry, compared with the base's."""
        for entry in self._entries:
            buffer = next(buffers)
            if self._file is not None:
                self.delta.add(entry, self._file.data(entry), buffer)
            yield buffer
            del buffer  # before the next one is made, as in `write_weight_file`

    def __enter__(self) -> _Base:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _remove(path: Path) -> None:
    for suffix in (MANIFEST_SUFFIX, MANIFEST_SUFFIX + ".tmp", DELTA_SUFFIX, ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _take_lock(path: Path, run_id: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise WeightSyncError(f"run {run_id} already has a living publisher (it holds {path})") from None
        os.close(descriptor)  # removed as stale between open and lock: take a fresh one
