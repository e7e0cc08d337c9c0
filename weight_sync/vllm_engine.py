"""The half of weight sync that runs inside vLLM's worker processes. Loaded by vLLM, through `plugin`.

An update is all or nothing. Everything that can be wrong with it is found before the model is touched: the file is
mapped, its header compared with the manifest, names and shapes with the checkpoint that the engine was started from,
and the digest of every tensor is computed from the bytes that this process sees (`reader`). Only then is the model
reloaded, in one call in which no decode step can run (the caller has paused the engine). If the reload itself fails,
the model may be half new: the engine says so in its report and refuses everything until it is restarted
(`vllm_loading`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.types import TensorEntry
from asyncrl.weight_sync.manifest import manifest_from_json
from asyncrl.weight_sync.names import check_names, checkpoint_shapes
from asyncrl.weight_sync.reader import Reader, Version
from asyncrl.weight_sync.vllm_loading import load_in_place

_NO_UPDATE: dict[str, Any] = {"encoding": "", "num_bytes": 0, "chain_break": "", "digests": [], "seconds": {}}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Binds the engine to a run: later manifests of other runs are refused."""

    run_id: str
    version: int
    """What the weights that the engine was started with are called."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update: the manifest, as JSON-like values."""

    manifest: dict[str, Any] = field(default_factory=dict)


class FileTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes a version from a file that this host can map (`shared_memory`, `filesystem`)."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._run_id: str | None = None
        self._version: int | None = None
        self._digest = ""
        self._last: dict[str, Any] = dict(_NO_UPDATE)
        self._mismatched = ""
        self._broken = ""
        self._reader = Reader()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Bind to a run. A second run may take over an engine, but not while it is half updated."""
        self._refuse_if_broken()
        if init_info.run_id != self._run_id:
            self._run_id, self._version, self._digest = init_info.run_id, init_info.version, ""
            self._last = dict(_NO_UPDATE)

    def start_weight_update(self) -> None:
        """Nothing is touched before the whole update has been checked."""
        self._refuse_if_broken()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check one version, then load it. Raises: WeightSyncError, with the model untouched unless it says so."""
        self._refuse_if_broken()
        self._mismatched = ""
        try:
            self._take(update_info)
        except WeightMismatch as error:
            self._mismatched = error.tensor
            raise

    def _take(self, update_info: UpdateInfo) -> None:
        manifest = manifest_from_json(update_info.manifest, "the update")
        if self._run_id is not None and manifest.run_id != self._run_id:
            raise WeightSyncError(
                f"this engine belongs to run {self._run_id}, the manifest is of run {manifest.run_id}"
            )
        if self._version is not None and manifest.version < self._version:
            raise WeightSyncError(f"version {manifest.version} was sent to an engine that holds {self._version}")
        started = time.perf_counter()
        check_names(
            manifest,
            checkpoint_shapes(self.model_config.model),
            tied_embeddings=bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)),
        )
        with self._reader.open(manifest) as version:
            verified = time.perf_counter()
            self._load(version)
        self._run_id, self._version = manifest.run_id, manifest.version
        self._digest = version.digest
        self._last = {
            "encoding": version.encoding,
            "num_bytes": version.num_bytes,
            "chain_break": version.chain_break or "",
            "digests": list(version.digests),
            "seconds": {"read": verified - started, "load": time.perf_counter() - verified},
        }

    def _load(self, version: Version) -> None:
        self._broken = f"the reload of version {version.manifest.version} did not finish"
        load_in_place(self.model, self.model_config, _tensors(version))
        self._broken = ""

    def finish_weight_update(self) -> None:
        """Nothing is left to do: the model was whole when `receive_weights` returned."""
        self._refuse_if_broken()

    def report(self) -> dict[str, Any]:
        """Return what this worker holds, and of the last update what it read and how long each part took.

        `digest` and the tensors' `digests`, in the manifest's order, are those that it computed itself. `mismatched`
        names the tensor that the last update was refused for.
        """
        return {
            "run_id": self._run_id,
            "version": self._version,
            "digest": self._digest,
            "mismatched": self._mismatched,
            "broken": self._broken,
            **self._last,
        }

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise WeightSyncError(f"{self._broken}: restart the engine")


def _tensors(version: Version) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in version.manifest.tensors:
        yield entry.name, _tensor(version.data(entry), entry)


def _tensor(data: memoryview, entry: TensorEntry) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # the loader only reads it
        return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)


class WorkerReport:
    """Mixed into vLLM's worker by `--worker-extension-cls`: what a collective call asks every rank for."""

    weight_transfer_engine: Any

    def asyncrl_weight_report(self) -> dict[str, Any]:
        """Return this rank's `FileTransferEngine.report`."""
        report: dict[str, Any] = self.weight_transfer_engine.report()
        return report
