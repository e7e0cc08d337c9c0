"""Which tensors an engine expects, and whether a manifest has exactly those, before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.types import PolicyVersion, WeightManifest
from asyncrl.weight_sync.weight_file import header_of

_OUTPUT_EMBEDDING = "lm_head.weight"
_FLOATS = ("BF16", "F16", "F32", "F64")


def checkpoint_shapes(directory: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor in a model directory's safetensors files.

    The engine was started from that directory, so these are the names that its loader knows, before it fuses and
    repacks them.
    Raises: WeightSyncError if there is no safetensors file.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"the engine's model directory {directory} has no *.safetensors file to check names by")
    return {name: tuple(entry["shape"]) for file in files for name, entry in header_of(file).items()}


def has_tied_embeddings(model_config: Any) -> bool:
    """Tell whether a model's output embedding is its input embedding, from vLLM's `ModelConfig`."""
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))


def check_follows(manifest: WeightManifest, run_id: str | None, version: PolicyVersion | None) -> None:
    """Refuse a manifest of another run than the engine's, or of a version before the one it holds.

    None stands for an engine that belongs to no run, or holds no version, yet. Raises: WeightSyncError.
    """
    if run_id is not None and manifest.run_id != run_id:
        raise WeightSyncError(f"this engine belongs to run {run_id}, the manifest is of run {manifest.run_id}")
    if version is not None and manifest.version < version:
        raise WeightSyncError(f"version {manifest.version} was sent to an engine that holds {version}")


def check_names(manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]], *, tied_embeddings: bool) -> None:
    """Refuse a manifest whose tensors are not exactly the expected ones.

    With tied embeddings the output embedding may be sent or left out: it is the input embedding.
    Raises: WeightMismatch naming the first tensor that is missing, unknown, of another shape, or not of floats.
    """
    sent = {entry.name: entry for entry in manifest.tensors}
    optional = {_OUTPUT_EMBEDDING} if tied_embeddings else set()
    version = f"version {manifest.version}"
    for name in expected:
        if name not in sent and name not in optional:
            raise WeightMismatch(f"{version} lacks {name}, which the engine's model has", tensor=name)
    for name, entry in sent.items():
        if name not in expected:
            if name in optional:
                continue
            raise WeightMismatch(f"{version} has {name}, which the engine's model does not have", tensor=name)
        if entry.shape != expected[name]:
            raise WeightMismatch(
                f"{name} of {version} has shape {list(entry.shape)}, the engine's model has {list(expected[name])}",
                tensor=name,
            )
        if entry.dtype not in _FLOATS:
            raise WeightMismatch(f"{name} of {version} is {entry.dtype}, not one of {_FLOATS}", tensor=name)
