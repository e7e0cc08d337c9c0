"""The learner of `asyncrl bench weight-sync`: two versions that lie one optimizer step apart, and a publisher.

    python -m asyncrl.bench.weight_sync_learner '{"model": ..., "run_id": ..., "learning_rate": ..., ...}'

It is asked by the names of its methods (`asyncrl.bench.asked_process`). The two versions are published by turns, so
that nothing but the publishing takes time here. There is no gradient: Adam moves a weight by about the learning rate,
whatever the gradient, so each float32 weight of the second version lies that far from the first, to a side that is
drawn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from asyncrl.bench.asked_process import Report, answer_requests
from asyncrl.weight_sync import manifest_to_json
from asyncrl.weight_sync.publisher import FilePublisher
from asyncrl.weight_sync.shared_memory import SharedMemoryPublisher


class BenchLearner:
    """The versions and who publishes them."""

    def __init__(self, model: Path, run_id: str, learning_rate: float, directory: Path) -> None:
        files = sorted(model.glob("*.safetensors"))
        first = {name: tensor for file in files for name, tensor in load_file(file).items()}
        generator = torch.Generator().manual_seed(0)
        second = {}
        for name, tensor in first.items():
            sides = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
            second[name] = (tensor.float() + learning_rate * sides).to(tensor.dtype)
        changed = sum(int((second[name] != tensor).sum()) for name, tensor in first.items())
        self._changed_share = changed / sum(tensor.numel() for tensor in first.values())
        self._versions = (first, second)
        self._run_id, self._directory = run_id, directory
        self._publisher: FilePublisher | None = None
        self._has_deltas = False
        self._version = 0

    def publish(self) -> Report:
        """Publish the next version whole, and return its manifest, what that took, and how much has changed."""
        return self._publish(delta=False)

    def publish_delta(self) -> Report:
        """The same with a delta beside it; the first one after whole versions has none."""
        return self._publish(delta=True)

    def _publish(self, *, delta: bool) -> Report:
        if self._publisher is None or self._has_deltas != delta:
            self.close()
            self._publisher = SharedMemoryPublisher(run_id=self._run_id, delta=delta)
            self._has_deltas = delta
        self._version += 1
        started = time.perf_counter()
        manifest = self._publisher.publish(self._versions[self._version % 2], self._version)
        seconds = time.perf_counter() - started
        return {
            "manifest": manifest_to_json(manifest),
            "seconds": seconds,
            "changed_share": self._changed_share,
        }

    def copy(self) -> Report:
        """Return what a plain copy of the same bytes in memory takes, into memory that is there already."""
        source = torch.cat([weight.reshape(-1).view(torch.uint8) for weight in self._versions[0].values()])
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
        save_file(self._versions[0], self._directory / "model.safetensors", metadata={"format": "pt"})
        return {"directory": str(self._directory), "seconds": time.perf_counter() - started}

    def close(self) -> None:
        """Remove what was published."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


def main() -> None:
    """Answer until the input ends."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    learner = BenchLearner(Path(job["model"]), job["run_id"], job["learning_rate"], Path(job["directory"]))
    try:
        answer_requests(learner, {})
    finally:
        learner.close()


if __name__ == "__main__":
    main()
