"""One version on its way into the model of one vLLM worker. Runs inside vLLM's worker processes.

The work is done on a thread beside the model's, from beginning to end, and nobody waits for it: who wants to know how
far it is asks (`Progress`). vLLM answers between two decode steps, so while it decodes the questions are paced by its
steps, and an answer holds none up. (A thread, against this project's habit: vLLM's worker has one loop, which belongs
to the model, and torch lets go of the interpreter while it packs.)
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import TensorEntry, WeightManifest
from asyncrl.weight_sync.adapters import Merged, Plain
from asyncrl.weight_sync.reader import Reader, Version
from asyncrl.weight_sync.sharded import DTYPE_NAMES
from asyncrl.weight_sync.vllm_loading import load_in_place
from asyncrl.weight_sync.vllm_packing import Layouts, words_of
from asyncrl.weight_sync.vllm_patch import Patch, UnpatchableError
from asyncrl.weight_sync.vllm_staging import Shadow

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an update is."""

    num_bytes: int
    """Loaded beside the running weights; 0 until the version has been verified, and where nothing is loaded beside."""
    is_over: bool
    has_failed: bool


class Update:
    """Verifies a version and, where there is a shadow, loads it there; without one the model is loaded at the end."""

    def __init__(
        self,
        manifest: WeightManifest,
        reader: Reader,
        model: Any,
        model_config: Any,
        *,
        shadow: Shadow | None,
        patch: Patch | None,
        layouts: Layouts | None,
    ) -> None:
        self.manifest = manifest
        self._model, self._model_config, self._shadow = model, model_config, shadow
        self._layouts = layouts
        self.patch = patch
        """What writes the next delta, once this update is in place; None where nothing does."""
        self.unpatchable = ""
        """Why not, in words."""
        self._is_patched = False
        self._reader = reader
        self._opened = ExitStack()
        self._version: Version | None = None
        self._content: Plain | Merged = Plain((), lambda entry: torch.empty(0))
        self._seconds = {"read": 0.0, "load": 0.0, "cpu": 0.0}
        self._work: Future[None] | None = None
        self._num_bytes = 0
        self._is_abandoned = False

    def begin(self, executor: Executor) -> None:
        """Begin the work: the whole version is verified before anything else is done with it."""
        self._work = executor.submit(self._run)

    def progress(self, wait_s: float) -> Progress:
        """Return how far the work is, once it is over or after `wait_s`."""
        assert self._work is not None
        wait([self._work], wait_s)
        is_over = self._work.done()
        has_failed = is_over and self._work.exception() is not None
        return Progress(num_bytes=self._num_bytes, is_over=is_over, has_failed=has_failed)

    def wait_whole(self) -> None:
        """Wait for the end of the work. Raises: WeightSyncError for whatever was wrong with the version."""
        assert self._work is not None
        self._work.result()

    def commit(self) -> None:
        """Put the whole version in place; the model must not be running."""
        started = time.perf_counter()
        if self._is_patched:
            assert self.patch is not None
            self.patch.commit()
        elif self._shadow is not None:
            self._shadow.exchange()
            self._take_over()
        else:
            load_in_place(self._model, self._model_config, self._content.tensors())
        self._seconds["commit"] = time.perf_counter() - started

    def close(self) -> None:
        """Let go of the version's file, which takes longer than an exchange."""
        self._opened.close()

    @property
    def digest(self) -> str:
        """Of the version's bytes, as computed here."""
        assert self._version is not None
        return self._version.digest

    def report(self) -> dict[str, Any]:
        """Return what was read, how long each part took, and the processor's time of the thread beside the model."""
        assert self._version is not None
        return {
            "encoding": self._version.encoding,
            "num_bytes": self._version.num_bytes,
            "chain_break": self._version.chain_break or "",
            "digests": list(self._version.digests),
            "placed": "values" if self._is_patched else "exchange" if self._shadow is not None else "in_place",
            "unpatchable": self.unpatchable,
            "seconds": self._seconds,
        }

    def abandon(self) -> None:
        """Let go of everything, once the thread has stopped. What was wrong is of no matter any more."""
        self._is_abandoned = True
        if self._work is not None:
            self._work.exception()
        if self.patch is not None:
            self.patch.drop()
        self._opened.close()

    def _run(self) -> None:
        started, began = time.perf_counter(), time.thread_time()
        content = self._content = self._open()
        self._seconds["read"] = time.perf_counter() - started
        started = time.perf_counter()
        if self._is_patched:
            assert self.patch is not None
            self.patch.prepare()
        elif self._shadow is not None:
            self._shadow.begin()
            self._shadow.load(self._counted(content))
            self._shadow.seal()
            self._make_patch(self._shadow)
        self._seconds["load"] = time.perf_counter() - started
        self._seconds["cpu"] = time.thread_time() - began

    def _counted(self, content: Plain | Merged) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in content.tensors():
            if self._is_abandoned:
                raise WeightSyncError("the update was abandoned")
            yield name, tensor
            self._num_bytes += tensor.nbytes

    def _take_over(self) -> None:
        if self.patch is not None:
            try:
                self.patch.take_over(self._model)
            except UnpatchableError as error:
                self.patch, self.unpatchable = None, str(error)

    def _make_patch(self, shadow: Shadow) -> None:
        """Make ready for deltas from this version on, where they are sent."""
        version = self._version
        if self._layouts is None or version is None or not self.manifest.deltas:
            return
        if self.manifest.adapter_scale is not None:
            self.unpatchable = "the version is an adapter"
            return
        try:
            self.patch = Patch(shadow.model, self.manifest.tensors, self._tensor, self._layouts)
        except UnpatchableError as error:
            self.unpatchable = str(error)

    def _open(self) -> Plain | Merged:
        """Read and verify the version, prepare what its delta changes, and return what is loaded if that cannot be."""
        version = self._version = self._opened.enter_context(self._reader.open(self.manifest))
        if self.patch is not None and version.encoding == "delta":
            for entry in self.manifest.tensors:
                positions = version.changed.get(entry.name)
                if positions is not None:
                    self.patch.stage(entry.name, positions, words_of(self._tensor(entry))[positions])
            self._is_patched = True
        else:
            self.patch = None
        if self.manifest.adapter_scale is None:
            return Plain(self.manifest.tensors, self._tensor)
        return Merged(self._model_config.model, self.manifest, self._tensor)

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        assert self._version is not None
        return _tensor(self._version.data(entry), entry)


def _tensor(data: memoryview, entry: TensorEntry) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # the loader only reads it
        return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).reshape(entry.shape)
