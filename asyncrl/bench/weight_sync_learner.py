"""The learner of `asyncrl bench weight-sync`: float32 weights that move as an optimizer moves them, and a publisher.

    python -m asyncrl.bench.weight_sync_learner '{"model": ..., "run_id": ..., "learning_rate": ..., "directory": ...}'

Prints a line of JSON when it is ready and one for each line, the name of a method, that it reads. It ends with its
input. There is no gradient: Adam moves a weight by about the learning rate, whatever the gradient, so each one is moved
by that much to a side that is drawn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncrl.weight_sync import manifest_to_json
from asyncrl.weight_sync.publisher import FilePublisher
from asyncrl.weight_sync.shared_memory import SharedMemoryPublisher

Report = dict[str, Any]


class BenchLearner:
    """The weights and their publisher."""

    def __init__(self, model: Path, publisher: FilePublisher, learning_rate: float, directory: Path) -> None:
        files = sorted(model.glob("*.safetensors"))
        self._weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self._masters = {name: tensor.to(torch.float32, copy=True) for name, tensor in self._weights.items()}
        self._publisher, self._learning_rate, self._directory = publisher, learning_rate, directory
        self._generator = torch.Generator().manual_seed(0)
        self._version = 0

    def publish(self) -> Report:
        """Take a step, publish what it leads to, and return the manifest, what it took, and what a step changed."""
        self._version += 1
        changed = 0
        for name, master in self._masters.items():
            sides = torch.randint(0, 2, master.shape, generator=self._generator, dtype=torch.int8)
            master.add_(sides.mul_(2).sub_(1), alpha=self._learning_rate)
            weight = master.to(self._weights[name].dtype, copy=True)
            changed += int((weight != self._weights[name]).sum())
            self._weights[name] = weight
        started = time.perf_counter()
        manifest = self._publisher.publish(self._weights, self._version)
        return {
            "manifest": manifest_to_json(manifest),
            "seconds": time.perf_counter() - started,
            "changed_share": changed / sum(weight.numel() for weight in self._weights.values()),
        }

    def copy(self) -> Report:
        """Return what a plain copy of the same bytes in memory takes, into memory that is there already."""
        source = torch.cat([weight.reshape(-1).view(torch.uint8) for weight in self._weights.values()])
        target = source.clone()
        seconds = []
        for _ in range(7):
            started = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - started)
        return {"seconds": median(seconds), "num_bytes": source.nbytes}

    def save(self) -> Report:
        """Write the weights to disk as a checkpoint, and return where and how long that took."""
        started = time.perf_counter()
        save_file(self._weights, self._directory / "model.safetensors", metadata={"format": "pt"})
        return {"directory": str(self._directory), "seconds": time.perf_counter() - started}


def main() -> None:
    """Answer until the input ends."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    with SharedMemoryPublisher(run_id=job["run_id"], delta=True) as publisher:
        learner = BenchLearner(Path(job["model"]), publisher, job["learning_rate"], Path(job["directory"]))
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(learner, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
