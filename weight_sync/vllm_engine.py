"""The half of weight sync that runs inside vLLM's worker processes. Loaded by vLLM, through `plugin`.

An update is all or nothing. Everything that can be wrong with it is found before the model is touched: the file is
mapped, its header compared with the manifest, names and shapes with the checkpoint that the engine was started from,
and the digest of every tensor is computed from the bytes that this process sees (`reader`). On a CPU the version is
also loaded before, into a shadow of the model (`vllm_staging`), while tokens are produced (`vllm_update`). Only then,
with the engine paused by the caller, does it take the running weights' place, in one call. If that call fails, the
model may be half new: the engine says so in its report and refuses everything until it is restarted.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weight_sync.adapters import check_adapter
from asyncrl.weight_sync.manifest import manifest_from_json
from asyncrl.weight_sync.names import check_follows, check_names, checkpoint_shapes, has_tied_embeddings
from asyncrl.weight_sync.reader import Reader
from asyncrl.weight_sync.vllm_packing import Layouts
from asyncrl.weight_sync.vllm_patch import Patch
from asyncrl.weight_sync.vllm_staging import Shadow
from asyncrl.weight_sync.vllm_thread import staging_executor
from asyncrl.weight_sync.vllm_update import Progress, Update

_NO_UPDATE: dict[str, Any] = {
    "encoding": "",
    "num_bytes": 0,
    "chain_break": "",
    "digests": [],
    "placed": "",
    "unpatchable": "",
    "seconds": {},
}


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Binds the engine to a run: later manifests of other runs are refused."""

    run_id: str
    version: int
    """What the weights that the engine was started with are called."""
    staged: bool = True
    """Load beside the running weights where that can be done; costs a second copy of them."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Begins an update, by its manifest; one without asks what was wrong with the update that is under way."""

    manifest: dict[str, Any] = field(default_factory=dict)
    abandon: bool = False
    """End the update that is under way, if there is one, and leave the model as it is. Answered by an error: that alone
    ends it for vLLM too."""


class FileTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes a version from a file that this host can map (`shared_memory`, `filesystem`)."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # one that is replayed from a graph, or quantised on its way, is loaded in place
        self._can_stage = device.type == "cpu" and self.model_config.enforce_eager and vllm_config.quant_config is None
        self._staged = True
        self._shadow: Shadow | None = None
        # parts of a weight, as the ranks of a tensor-parallel engine hold them, are not placed value by value
        self._layouts = Layouts() if self._can_stage and vllm_config.parallel_config.world_size == 1 else None
        self._patch: Patch | None = None
        self._update: Update | None = None
        self._executor = staging_executor()
        self._closing: Future[None] | None = None
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
        self._staged = init_info.staged
        if init_info.run_id != self._run_id:
            self._run_id, self._version, self._digest = init_info.run_id, init_info.version, ""
            self._last = dict(_NO_UPDATE)

    def start_weight_update(self) -> None:
        """Make way for a new update. Nothing is touched before the whole of it has been checked."""
        self._refuse_if_broken()
        self._drop()
        self._mismatched = ""
        if self._closing is not None:
            self._closing.result()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin an update; `progress` tells how far it is.

        Raises: WeightSyncError for what is wrong with it, as far as that is known, and the update is over; the model is
        untouched. Asked again without a manifest, it raises what was found since.
        """
        with self._dropping():
            if update_info.abandon:
                raise WeightSyncError("the update was abandoned")
            self._refuse_if_broken()
            if update_info.manifest:
                self._update = self._begin(manifest_from_json(update_info.manifest, "the update"))
                self._update.begin(self._executor)
            if self._update is None:
                raise WeightSyncError("an update begins with its manifest")
            if self._update.progress(0.0).has_failed:
                self._update.wait_whole()

    def progress(self, wait_s: float) -> Progress:
        """Return how far the update is, once it is over or after `wait_s`, which holds the model up."""
        if self._update is None:
            return Progress(num_bytes=0, is_over=True, has_failed=True)
        return self._update.progress(wait_s)

    def _begin(self, manifest: WeightManifest) -> Update:
        check_follows(manifest, self._run_id, self._version)
        if manifest.adapter_scale is not None:
            check_adapter(manifest, self._expected)
        else:
            check_names(manifest, self._expected, tied_embeddings=has_tied_embeddings(self.model_config))
        staged = self._staged and self._can_stage
        patch = self._patch if staged and self._is_next(manifest) else None
        if not staged or patch is not None:
            self._shadow = None
        elif self._shadow is None:
            self._shadow = Shadow(self.model, self.model_config)
        return Update(
            manifest,
            self._reader,
            self.model,
            self.model_config,
            shadow=self._shadow,
            patch=patch,
            layouts=self._layouts if staged else None,
        )

    def _is_next(self, manifest: WeightManifest) -> bool:
        """Tell whether a version's delta leads from what the model holds, and the reader's copy with it.

        The copy alone may be ahead: of a version that was read and then abandoned.
        """
        delta = manifest.delta
        held = (self._version, self._digest)
        return (
            manifest.adapter_scale is None
            and delta is not None
            and (delta.base_version, delta.base_digest) == held
            and self._reader.expects_delta(manifest)
        )

    @cached_property
    def _expected(self) -> dict[str, tuple[int, ...]]:
        return checkpoint_shapes(self.model_config.model)

    def finish_weight_update(self) -> None:
        """Put the update in place: no decode step may run meanwhile. Raises: WeightSyncError if it is not whole."""
        self._refuse_if_broken()
        with self._dropping():
            if self._update is None:
                raise WeightSyncError("there is no update to finish")
            self._update.wait_whole()
        update, self._update = self._update, None
        self._broken = f"the reload of version {update.manifest.version} did not finish"
        update.commit()
        self._closing = self._executor.submit(update.close)
        self._broken = ""
        self._patch = update.patch
        self._run_id, self._version = update.manifest.run_id, update.manifest.version
        self._last = update.report()
        self._digest = update.digest

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Whatever is wrong with an update before it is in place, note the tensor and forget the update."""
        with ExitStack() as unless_right:
            unless_right.callback(self._drop)
            try:
                yield
            except WeightMismatch as error:
                self._mismatched = error.tensor
                raise
            unless_right.pop_all()

    def _drop(self) -> None:
        """Forget an update that is not whole, and its shadow: which of its layers are loaded is not worth knowing."""
        if self._update is not None:
            self._update.abandon()
            self._update = self._shadow = None

    def report(self) -> dict[str, Any]:
        """Return what this worker holds, and of the last update what it read and how long each part took.

        `digest` and the tensors' `digests`, in the manifest's order, are those that it computed itself. `mismatched`
        names the tensor that the last update was refused for. `placed` says how the last one came into the model: by
        single "values", by an "exchange" with a shadow, or loaded "in_place" while it was paused; `unpatchable`, why
        single values cannot be placed where deltas are sent.
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
        """Let go of what is under way."""
        self._drop()
        self._executor.shutdown()

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise WeightSyncError(f"{self._broken}: restart the engine")


class WorkerReport:
    """Mixed into vLLM's worker by `--worker-extension-cls`: what a collective call asks every rank for."""

    weight_transfer_engine: Any

    def asyncrl_weight_progress(self, wait_s: float) -> dict[str, Any]:
        """Return this rank's `FileTransferEngine.progress`."""
        return asdict(self.weight_transfer_engine.progress(wait_s))

    def asyncrl_weight_report(self) -> dict[str, Any]:
        """Return this rank's `FileTransferEngine.report`."""
        report: dict[str, Any] = self.weight_transfer_engine.report()
        return report
