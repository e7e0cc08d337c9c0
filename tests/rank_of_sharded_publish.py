"""One rank of an FSDP2 learner that publishes its shards: `test_weight_sharded` runs two of these.

    python rank_of_sharded_publish.py RANK WORLD_SIZE DIRECTORY

DIRECTORY holds the model, and takes what is published. Leaves in `rank-RANK.json` the most bytes of gathered
tensors that this rank held at once, how often it gathered, and what rank 0 published.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.weight_sync import manifest_to_json
from asyncrl.weight_sync.filesystem import FilesystemPublisher
from asyncrl.weight_sync.sharded import take_part


class Held:
    """Counts the bytes of what `DTensor.full_tensor` returns for as long as anything holds their memory."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = self.gathers = 0

    def watch(self) -> None:
        """Let every gathered tensor lie in memory whose end is noticed."""
        gather = DTensor.full_tensor

        def watched(tensor: DTensor) -> torch.Tensor:
            whole = gather(tensor)
            memory = whole.view(torch.int16).numpy().copy()
            self.gathers += 1
            self.num_bytes += memory.nbytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
            weakref.finalize(memory, self._free, memory.nbytes)
            return torch.from_numpy(memory).view(whole.dtype)

        DTensor.full_tensor = watched  # type: ignore[method-assign,assignment]

    def _free(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


def sharded_model(directory: Path) -> Any:
    """Return the model of `directory` in float32, every layer and the rest sharded over all ranks."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def main(rank: int, world_size: int, directory: Path) -> None:
    """Publish two versions."""
    init_process_group("gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=world_size)
    tensors = dict(sharded_model(directory).named_parameters())
    assert all(tensor.to_local().numel() < tensor.numel() for tensor in tensors.values())
    held = Held()
    held.watch()
    report: dict[str, Any] = {}
    if rank:
        for _ in range(2):
            take_part(tensors, torch.bfloat16)
    else:
        publisher = FilesystemPublisher(run_id="sharded", directory=directory, cast_to=torch.bfloat16)
        for version in (1, 2):
            report["manifest"] = manifest_to_json(publisher.publish(tensors, version))
    destroy_process_group()
    report |= {"peak_bytes": held.peak_bytes, "gathers": held.gathers, "left": held.num_bytes}
    (directory / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
