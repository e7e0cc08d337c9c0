"""One version on its way into the model of one vLLM worker. Runs inside vLLM's worker processes.

The work is done on a thread beside the model's, a piece for each call from outside, and each call waits for the piece
before. vLLM runs such calls between two decode steps, so while it decodes the pieces are paced by its steps and hardly
hold any up, and nobody has to ask over and over whether the work is done. (A thread, against this project's habit:
vLLM's worker has one loop, which belongs to the model, and torch lets go of the interpreter while it packs.)
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Executor, Future
from contextlib import ExitStack
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
        self._num_loaded = 0
        self._is_whole = False

    def advance(self, num_tensors: int, executor: Executor) -> None:
        """Wait for the piece before, and begin the next: up to `num_tensors` of the manifest's tensors.

        The first one verifies the whole version before anything else.
        Raises: WeightSyncError for whatever was wrong with the piece before.
        """
        self._wait()
        if not self._is_whole:
            self._work = executor.submit(self._run, num_tensors)

    def wait_whole(self) -> None:
        """Wait for the last piece. Raises: WeightSyncError for what was wrong with it, or where it is not the last."""
        self._wait()
        if not self._is_whole:
            found = f"{self._num_loaded} of {len(self.manifest.tensors)} tensors"
            raise WeightSyncError(f"{found} of version {self.manifest.version} are here")

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
            load_in_place(self._model, self._model_config, self._content.tensors(0, len(self._content)))
        self._seconds["commit"] = time.perf_counter() - started
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
        """Let go of everything, once the piece under way has ended. What was wrong with it is of no matter any more."""
        if self._work is not None:
            self._work.exception()
        if self.patch is not None:
            self.patch.drop()
        self._opened.close()

    def _wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.result()

    def _run(self, num_tensors: int) -> None:
        started, began = time.perf_counter(), time.thread_time()
        if self._version is None:
            self._content = self._open()
            self._seconds["read"] = time.perf_counter() - started
            started = time.perf_counter()
        if self._is_patched:
            self._is_whole = True
        else:
            self._load(num_tensors)
        self._seconds["load"] += time.perf_counter() - started
        self._seconds["cpu"] += time.thread_time() - began

    def _load(self, num_tensors: int) -> None:
        total, asked = len(self._content), len(self.manifest.tensors)
        end = total if num_tensors >= asked else total * num_tensors // asked
        if self._shadow is not None and end > self._num_loaded:
            if self._num_loaded == 0:
                self._shadow.begin()
            self._shadow.load(self._content.tensors(self._num_loaded, end))
        self._num_loaded = max(end, self._num_loaded)
        if self._num_loaded == total:
            if self._shadow is not None:
                self._shadow.seal()
                self._make_patch(self._shadow)
            self._is_whole = True

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
                    self.patch.stage(entry, positions, words_of(self._tensor(entry))[positions])
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
