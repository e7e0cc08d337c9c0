"""Checkpoints: one directory each, written beside its place and renamed into it, so that there is no half of one.

checkpoints/step-12/model/         the weights in Hugging Face form; transformers and vLLM load it as it is
                    learner/       optimizer, scheduler and random state
                    orchestrator.json   task position, open tasks, counters
                    manifest.json  every file with its size, and a digest of that and of the state; written last
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.durable import fsync
from asyncrl.errors import CheckpointError
from asyncrl.types import PolicyVersion

_PREFIX = "step-"
_MANIFEST = "manifest.json"
_STATE = "orchestrator.json"
FORMAT = 3
"""Of the directory; a reader refuses what it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    directory: Path
    version: PolicyVersion
    state: Mapping[str, Any]
    """What the orchestrator needs to go on."""

    @property
    def model_directory(self) -> Path:
        """The weights in Hugging Face form."""
        return self.directory / "model"


class CheckpointStore:
    """The checkpoints of one run, the newest `keep` of them."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def begin(self, version: PolicyVersion) -> Path:
        """Return an empty directory to write into; `commit` makes it a checkpoint. Raises: CheckpointError."""
        partial = self._directory / f".{_PREFIX}{version}.tmp"
        with _writing(partial):
            self._directory.mkdir(parents=True, exist_ok=True)
            for left_over in self._directory.glob(".*.tmp"):
                shutil.rmtree(left_over)
            partial.mkdir()
        return partial

    def commit(self, partial: Path, version: PolicyVersion, state: Mapping[str, Any]) -> Checkpoint:
        """Write the orchestrator's state and the manifest, rename into place, remove the oldest beyond `keep`.

        Raises: CheckpointError when the disk refuses.
        """
        with _writing(partial):
            return self._commit(partial, version, state)

    def _commit(self, partial: Path, version: PolicyVersion, state: Mapping[str, Any]) -> Checkpoint:
        _write_json(partial / _STATE, state)
        files = {
            str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()
        }
        manifest = {"format": FORMAT, "version": version, "files": files}
        _write_json(partial / _MANIFEST, manifest | {"digest": _digest(manifest, partial)})
        final = self._directory / f"{_PREFIX}{version}"
        if final.exists():  # left by a run that was resumed from an older checkpoint
            shutil.rmtree(final)
        partial.rename(final)
        fsync(self._directory)
        for old in self.versions()[: -self._keep]:
            shutil.rmtree(self._directory / f"{_PREFIX}{old}")
        return Checkpoint(directory=final, version=version, state=state)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint, or None. Raises: CheckpointError naming what of it is missing or changed, and
        the one before it, from which the run can go on as well.
        """
        versions = self.versions()
        if not versions:
            return None
        newest = self._directory / f"{_PREFIX}{versions[-1]}"
        try:
            return load_checkpoint(newest)
        except CheckpointError as error:
            if len(versions) == 1:
                raise
            before = f"{_PREFIX}{versions[-2]}"
            raise CheckpointError(f"{error}; move {newest} out of the way to go on from {before}") from error

    def of_version(self, version: PolicyVersion) -> Checkpoint | None:
        """Return the checkpoint of a version, or None where it is not kept. Raises: CheckpointError."""
        return load_checkpoint(self._directory / f"{_PREFIX}{version}") if version in self.versions() else None

    def versions(self) -> Sequence[PolicyVersion]:
        """Return the versions that are kept, the newest last."""
        names = (path.name for path in self._directory.glob(f"{_PREFIX}*"))
        return sorted(int(name.removeprefix(_PREFIX)) for name in names if name.removeprefix(_PREFIX).isdigit())

    def oldest_state(self) -> Mapping[str, Any]:
        """Return the orchestrator's state in the oldest checkpoint that is kept; there must be one."""
        state: Mapping[str, Any] = _read_json(self._directory / f"{_PREFIX}{self.versions()[0]}" / _STATE)
        return state


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error.strerror}") from error


def load_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint in `directory` after checking that every file is there with its size.

    Raises: CheckpointError.
    """
    manifest = _read_json(directory / _MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / _MANIFEST} has format {manifest.get('format')!r}; this version of asyncrl reads {FORMAT}"
        )
    digest = manifest.pop("digest", None)
    for name, num_bytes in manifest["files"].items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            what = "is missing" if found is None else f"has {found} bytes, not {num_bytes}"
            raise CheckpointError(f"checkpoint {directory}: {name} {what}")
    if digest != (found := _digest(manifest, directory)):
        raise CheckpointError(
            f"checkpoint {directory}: {_MANIFEST} has the digest {digest}, and it and {_STATE} give {found}: one of "
            "them was changed after it was written"
        )
    return Checkpoint(directory=directory, version=manifest["version"], state=_read_json(directory / _STATE))


def _digest(manifest: Mapping[str, Any], directory: Path) -> str:
    """Return the CRC-32 of a manifest and of the orchestrator's state; the learner's files are known by their sizes."""
    crc = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    return f"{zlib.crc32((directory / _STATE).read_bytes(), crc):08x}"


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is missing") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is broken: {error}") from None
