"""What several ranks write of a checkpoint, and how any number of them read it.

learner/optimizer/shard-*.safetensors: each rank's parts of masters and moments, with where they lie in the whole, by
`torch.distributed.checkpoint`; learner/teacher/ and learner/critic/ hold what an averaged teacher and a critic are, in
the same way. Its usual files hold pickles, which run code when they are read; these hold arrays only. A single rank's
`learner/optimizer.safetensors` is read in the same way, as one part that is the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.errors import CheckpointError
from asyncrl.learner.ranks import Ranks
from asyncrl.weight_sync.checksum import checksum
from asyncrl.weight_sync.sharded import entries_of, gathered, take_part
from asyncrl.weight_sync.weight_file import write_weight_file

OPTIMIZER = "optimizer"
TEACHER = "teacher"
CRITIC = "critic"


def is_sharded(learner: Path) -> bool:
    """Tell whether several ranks wrote the `learner` folder of a checkpoint."""
    return (learner / OPTIMIZER).is_dir()


def whole_file(learner: Path, part: str) -> Path:
    """Return where a single rank writes `part`, which is OPTIMIZER, TEACHER or CRITIC."""
    return learner / f"{part}.safetensors"


def write_model(
    weights: Mapping[str, torch.Tensor], path: Path, cast_to: torch.dtype | None, *, is_first: bool
) -> None:
    """Write sharded `weights` to one safetensors file, gathered one by one; all ranks call it, the first writes.

    Raises, there: WeightSyncError where there is no room.
    """
    if not is_first:
        return take_part(weights, cast_to)
    entries = entries_of(weights, cast_to)
    buffers = gathered(weights, entries, cast_to)
    write_weight_file(path, entries, buffers, metadata={"format": "pt"}, durable=True, digest=checksum)


def write_state(state: Mapping[str, torch.Tensor], learner: Path, part: str, ranks: Ranks) -> None:
    """Write this rank's parts of `state` below `learner`, as `part` of it; all ranks call it."""
    folder = learner / part
    folder.mkdir(exist_ok=True)
    save(
        dict(state),
        storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        process_group=ranks.in_host_memory,
    )


def read_state(blank: dict[str, torch.Tensor], learner: Path, part: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Fill this rank's parts in `blank` with `part` of what stands below `learner`, and return it; all ranks call it.

    Raises: CheckpointError naming what is missing or of another shape.
    """
    if not blank:
        return blank
    try:
        _check(blank, _reader(learner, part), learner.parent)
        with warnings.catch_warnings():
            # It is what is meant: one process reads what several wrote.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(
                blank,
                storage_reader=_reader(learner, part),
                process_group=ranks.in_host_memory,
                no_dist=ranks.count == 1,
            )
    except (OSError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {learner.parent}: learner/{part} cannot be read: {error}") from None
    return blank


def _reader(learner: Path, part: str) -> HuggingFaceStorageReader:
    """Return a reader of the shards of `part`, or of the one file that a single rank wrote."""
    if is_sharded(learner):
        return HuggingFaceStorageReader(str(learner / part))
    reader = HuggingFaceStorageReader(str(learner))
    reader.fs = _OneFile(str(whole_file(learner, part)))
    return reader


class _OneFile(FileSystem):
    """A directory of which one file is seen: those of other parts beside it may hold the same names."""

    def __init__(self, path: str) -> None:
        self._path = path

    def ls(self, path: Any) -> list[str]:
        """See `FileSystem.ls`."""
        return [self._path]


def _check(blank: Mapping[str, torch.Tensor], reader: HuggingFaceStorageReader, directory: Path) -> None:
    known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    for name, tensor in blank.items():
        found = known.get(name)
        if found is None:
            raise CheckpointError(f"checkpoint {directory}: {name} of the learner's state is missing: {_OTHER}")
        if tuple(found.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"checkpoint {directory}: {name} has shape {list(found.size)}, not {list(tensor.shape)}: {_OTHER}"
            )


_OTHER = "it was written for a model of another architecture, or is not whole"
