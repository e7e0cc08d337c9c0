"""What several ranks write of a checkpoint, and how any number of them read it.

learner/optimizer/shard-*.safetensors: each rank's parts of masters and moments, with where they lie in the whole, by
`torch.distributed.checkpoint`. Its usual files hold pickles, which run code when they are read; these hold arrays only.
A single rank's `learner/optimizer.safetensors` is read in the same way, as one part that is the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.errors import CheckpointError
from asyncrl.learner.ranks import Ranks
from asyncrl.weight_sync.checksum import checksum
from asyncrl.weight_sync.sharded import entries_of, gathered, take_part
from asyncrl.weight_sync.weight_file import write_weight_file

_FOLDER = "optimizer"


def is_sharded(learner: Path) -> bool:
    """Tell whether several ranks wrote the `learner` folder of a checkpoint."""
    return (learner / _FOLDER).is_dir()


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


def write_state(state: Mapping[str, torch.Tensor], learner: Path, ranks: Ranks) -> None:
    """Write this rank's parts of `state` below `learner`; all ranks call it."""
    folder = learner / _FOLDER
    folder.mkdir(exist_ok=True)
    save(
        dict(state),
        storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        process_group=ranks.in_host_memory,
    )


def read_state(blank: dict[str, torch.Tensor], learner: Path, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Fill this rank's parts in `blank` with what stands below `learner`, and return it; all ranks call it.

    Raises: CheckpointError naming what is missing or of another shape.
    """
    folder = learner / _FOLDER if is_sharded(learner) else learner
    try:
        _check(blank, HuggingFaceStorageReader(str(folder)), learner.parent)
        with warnings.catch_warnings():
            # It is what is meant: one process reads what several wrote.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(
                blank,
                storage_reader=HuggingFaceStorageReader(str(folder)),
                process_group=ranks.in_host_memory,
                no_dist=ranks.count == 1,
            )
    except (OSError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {learner.parent}: learner/{_FOLDER} cannot be read: {error}") from None
    return blank


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
