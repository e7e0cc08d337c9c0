"""The thread that prepares weights beside a model that runs. Inside vLLM's worker processes."""

from __future__ import annotations

import ctypes
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import torch

_OPENMP = ("libgomp", "libiomp", "libomp")


def staging_executor() -> Executor:
    """Return an executor with one thread, whose work in torch is done by half as many threads as the model's.

    A decode step ends when the last of its threads has ended. As many threads again would take turns with all of them.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="asyncrl-weights", initializer=_halve_threads)


def _halve_threads() -> None:
    # The number that OpenMP keeps is the calling thread's own; what torch would set beside it is the process's. Asked
    # for it, torch gives a new thread the model's number first.
    count = max(1, torch.get_num_threads() // 2)
    for path in _openmp_libraries():
        ctypes.CDLL(path).omp_set_num_threads(count)


def _openmp_libraries() -> set[str]:
    """Return the paths of those that are loaded: as a rule torch's own, or the one that was preloaded."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in mapped if "/" in line}
    return {path for path in paths if Path(path).name.startswith(_OPENMP)}
