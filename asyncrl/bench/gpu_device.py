"""Seconds and peak memory of work on one device, a GPU or the CPU that stands in for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from asyncrl.bench.gpu_settings import stated_flops
from asyncrl.bench.timing import Report, timed
from asyncrl.errors import ConfigError

_PRODUCT_WIDTH = {"cuda": 8192, "cpu": 512}  # of the square product that says what the device reaches


class Device:
    """Where everything is measured.

    Raises: ConfigError where there is no such device.
    """

    def __init__(self, kind: str, *, rounds: int) -> None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "this machine has no GPU that torch can use (torch.cuda.is_available() is False): run this on one that "
                "has, or take --device cpu --shape tiny, which runs every piece and whose figures say nothing"
            )
        self.torch = torch.device(kind)
        self._rounds = rounds

    @property
    def is_gpu(self) -> bool:
        """Whether it is one."""
        return self.torch.type == "cuda"

    def describe(self) -> Report:
        """Return name, versions, memory, and the operations a second that a large bfloat16 product reaches."""
        found: Report = {"device": self.torch.type, "name": "CPU", "torch": torch.__version__, "cuda": None}
        found |= {"memory_bytes": None, "stated_flops": None}
        if self.is_gpu:
            card = torch.cuda.get_device_properties(self.torch)
            found |= {"name": card.name, "cuda": torch.version.cuda, "memory_bytes": card.total_memory}
            found |= {"capability": f"{card.major}.{card.minor}", "stated_flops": stated_flops(card.name)}
        width = _PRODUCT_WIDTH[self.torch.type]
        one, other = (torch.randn(width, width, device=self.torch, dtype=torch.bfloat16) for _ in range(2))
        seconds = self.measure(lambda: one @ other)["seconds"]
        return {**found, "product_flops": 2 * width**3 / seconds}

    def measure(self, run: Callable[[], Any]) -> Report:
        """Return `seconds` (the median round's) and `peak_bytes`, the most memory that `run` took at once for itself.

        Or `out_of_memory`, a GPU's own words, where the device is too small for it.
        """
        try:
            once = self._peak(run)  # which also is the first call of every kernel
            seconds = [self._seconds(run) for _ in range(self._rounds)]
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return {"out_of_memory": str(error).splitlines()[0]}
        return {"seconds": median(seconds), "peak_bytes": once}

    def _peak(self, run: Callable[[], Any]) -> int:
        if not self.is_gpu:

            def told() -> Report:
                run()
                return {}

            return int(timed(told)["peak_bytes"])
        torch.cuda.synchronize(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        run()
        torch.cuda.synchronize(self.torch)
        return torch.cuda.max_memory_allocated(self.torch) - before

    def _seconds(self, run: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Return when the device has done all that was asked of it."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)
