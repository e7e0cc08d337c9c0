"""Bandwidth of the copies that carry weights: between the device, the host, and the memory that engines share.

A version of the weights is as many bytes as the model has, in one buffer or tensor by tensor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from asyncrl.bench.gpu_device import Device
from asyncrl.bench.timing import Report

_MOST_BYTES = 2**31  # of one copy: enough to reach the bandwidth, and shared memory has room for it


def measure_copies(device: Device, weights: Mapping[str, torch.Tensor]) -> Report:
    """Return name -> `bytes_per_second` and `of_device_to_device`.

    Raises: OSError where shared memory has no room for the copy.
    """
    chosen = _within(weights)
    num_bytes = sum(tensor.nbytes for tensor in chosen)
    there, staged = (torch.empty(num_bytes, dtype=torch.uint8, device=device.torch) for _ in range(2))
    tensors = [torch.empty_like(tensor) for tensor in chosen]
    host = torch.ones(num_bytes, dtype=torch.uint8)
    with tempfile.NamedTemporaryFile(prefix="asyncrl-bench-", dir=_shared_memory()) as file:
        file.truncate(num_bytes)
        shared = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
        copies: dict[str, Callable[[], object]] = {
            "device_to_device": lambda: staged.copy_(there),
            "tensor_by_tensor": lambda: torch._foreach_copy_(tensors, chosen),
            "device_to_shared_memory": lambda: shared.copy_(there),
            "shared_memory_to_device": lambda: there.copy_(shared),
            "host_to_device": lambda: there.copy_(host),
            "device_to_host": lambda: host.copy_(there),
        }
        if device.is_gpu:
            pinned = host.pin_memory()
            copies["pinned_to_device"] = lambda: there.copy_(pinned, non_blocking=True)
            copies["device_to_pinned"] = lambda: pinned.copy_(there, non_blocking=True)
        rates = {name: num_bytes / device.measure(copy)["seconds"] for name, copy in copies.items()}
    own = rates["device_to_device"]
    figures = {name: {"bytes_per_second": rate, "of_device_to_device": rate / own} for name, rate in rates.items()}
    return {"num_bytes": num_bytes, "num_tensors": len(chosen), "copies": figures}


def _within(weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the first weights that fit in one copy, at least one."""
    chosen: list[torch.Tensor] = []
    total = 0
    for tensor in weights.values():
        total += tensor.nbytes
        if chosen and total > _MOST_BYTES:
            break
        chosen.append(tensor.detach())
    return chosen


def _shared_memory() -> str:
    """Return the folder that lies in memory, or the usual one for temporary files where there is none."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() else tempfile.gettempdir()
