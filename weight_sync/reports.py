"""What engines say that they hold, against the manifest. Standard library only: the orchestrator asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import WeightMismatch
from asyncrl.types import WeightManifest


def check_reports(manifest: WeightManifest, reports: Sequence[Mapping[str, Any]], engine: str) -> None:
    """Compare what every rank of an engine says that it holds (`FileTransferEngine.report`) with the manifest.

    Raises: WeightMismatch naming engine, rank and, where the version is right, the first tensor that is not.
    """
    wanted = (manifest.run_id, manifest.version, manifest.digest)
    for rank, report in enumerate(reports):
        found = (report["run_id"], report["version"], report["digest"])
        if not report["broken"] and found == wanted:
            continue
        tensor = "" if found[:2] != wanted[:2] else _first_difference(manifest, report["digests"])
        raise WeightMismatch(
            f"{engine} rank {rank} says that it holds (run, version, digest) {found}, sent was {wanted}"
            + f"; {tensor} is the first that differs" * bool(tensor)
            + f"; {report['broken']}" * bool(report["broken"]),
            tensor=tensor,
        )


def _first_difference(manifest: WeightManifest, digests: Sequence[str]) -> str:
    for entry, digest in zip(manifest.tensors, digests, strict=False):
        if entry.digest != digest:
            return entry.name
    return ""
