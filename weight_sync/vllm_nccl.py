"""The half of the NCCL transport that runs inside vLLM's worker processes: vLLM's own, which learns what it received.

Names and shapes are compared before anything is touched. The tensors then stream into the model, and the digest of each
is computed as it passes; whether they are the right ones is for whoever asks for the report to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from asyncrl.errors import WeightSyncError
from asyncrl.types import Verification, WeightManifest
from asyncrl.weight_sync.checksum import DIGESTS
from asyncrl.weight_sync.manifest import combined_digest
from asyncrl.weight_sync.names import check_follows, check_names, checkpoint_shapes, has_tied_embeddings
from asyncrl.weight_sync.sharded import bytes_of, entries_of
from asyncrl.weight_sync.vllm_loading import check_loaded, pack_tied


@dataclass
class UpdateInfo(NCCLWeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's, and which version of which run it is."""

    run_id: str = ""
    version: int = 0
    verification: str = Verification.DIGEST.value


class NcclTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Takes a version from a broadcast; reports as `FileTransferEngine` does."""

    update_info_cls = UpdateInfo
    model: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._broken = ""
        self._held: dict[str, Any] = {"run_id": None, "version": None, "digest": "", "digests": [], "num_bytes": 0}
        self._received: dict[str, Any] | None = None

    def start_weight_update(self) -> None:
        """Touch nothing yet."""
        if self._broken:
            raise WeightSyncError(f"{self._broken}: restart the engine")
        self._received = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check names and shapes, then receive and load. Raises: WeightSyncError, before the model is touched."""
        manifest = _announced(update_info)
        check_follows(manifest, self._held["run_id"], self._held["version"])
        tied = has_tied_embeddings(self.model_config)
        check_names(manifest, checkpoint_shapes(self.model_config.model), tied_embeddings=tied)
        self._broken = f"the load of version {manifest.version} did not finish"
        super().start_weight_update()
        model: torch.nn.Module = self.model
        digesting = _Digesting(model, manifest.verification)
        self.model = digesting
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model
        check_loaded(model, digesting.loaded)
        entries = [replace(entry, digest=digesting.digests.get(entry.name, "")) for entry in manifest.tensors]
        self._received = {
            "run_id": manifest.run_id,
            "version": manifest.version,
            "digest": combined_digest(entries),
            "digests": [entry.digest for entry in entries],
            "num_bytes": manifest.num_bytes,
        }

    def finish_weight_update(self) -> None:
        """Make what was received the model. Raises: WeightSyncError if nothing was."""
        if self._received is None:
            raise WeightSyncError("there is no update to finish")
        super().finish_weight_update()
        pack_tied(self.model)
        self._held, self._received, self._broken = self._received, None, ""

    def report(self) -> dict[str, Any]:
        """Return what this rank holds, with the digests that it computed itself."""
        same = {"encoding": "full", "chain_break": "", "mismatched": "", "seconds": {}}
        return {**self._held, **same, "broken": self._broken}


class _Digesting:
    """A model whose loader notes the digest of every tensor that passes."""

    def __init__(self, model: Any, verification: Verification) -> None:
        self._model, self._digest_of = model, DIGESTS[verification]
        self.digests: dict[str, str] = {}
        self.loaded: set[str] | None = set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load as the model does."""
        tensors = list(weights)
        for name, tensor in tensors:
            self.digests[name] = self._digest_of(bytes_of(tensor))
        loaded = self._model.load_weights(tensors)
        self.loaded = None if loaded is None or self.loaded is None else self.loaded | set(loaded)


def _announced(update_info: UpdateInfo) -> WeightManifest:
    empty = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
    }
    return WeightManifest(
        run_id=update_info.run_id,
        version=update_info.version,
        transport="nccl",
        location="",
        tensors=entries_of(empty),
        digest="",
        verification=Verification(update_info.verification),
    )
