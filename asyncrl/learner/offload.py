"""The learner's state moved from its GPU to host memory and back, in place: every tensor stays the object that it is.

Hooks, views of the optimizer and names hold tensors by identity, so only what they point to is exchanged, as
`torch.nn.Module.to` does. Host memory is pinned and allocated once. Sums of gradients are zeros between steps and are
let go of instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Tensors = Callable[[], Iterable[torch.Tensor]]


class Offload:
    """What is on one device, and where it is now."""

    def __init__(self, kept: Tensors, zeros: Tensors, device: torch.device) -> None:
        """Both are asked whenever the state leaves: moments come with the first step."""
        self._kept = kept
        self._zeros = zeros
        self._device = device
        self._host: dict[int, torch.Tensor] = {}  # by the identity of a tensor that lives as long as the learner
        self._gone: list[torch.Tensor] | None = None
        self._shapes: list[tuple[torch.Tensor, torch.Size]] = []

    @property
    def host_bytes(self) -> int:
        """What the state takes in host memory."""
        return sum(copy.nbytes for copy in self._host.values())

    def leave(self) -> None:
        """Move everything to host memory; nothing where it is there already."""
        if self._gone is not None:
            return
        here = self._device.type
        gone = list({id(tensor): tensor for tensor in self._kept() if tensor.device.type == here}.values())
        for tensor in gone:
            self._host_of(tensor).copy_(tensor.data, non_blocking=True)
        self._shapes = [(tensor, tensor.shape) for tensor in self._zeros()]
        self._wait()
        for tensor in gone:
            tensor.data = self._host[id(tensor)]
        for tensor, _ in self._shapes:
            tensor.data = tensor.data.new_empty(0)
        self._gone = gone
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else the allocator keeps what the engine wants

    def come_back(self) -> None:
        """Move everything to the device; nothing where it is there already."""
        if self._gone is None:
            return
        for tensor in self._gone:
            tensor.data = torch.empty_like(tensor.data, device=self._device).copy_(tensor.data, non_blocking=True)
        for tensor, shape in self._shapes:
            tensor.data = torch.zeros(shape, dtype=tensor.dtype, device=self._device)
        self._wait()
        self._gone = None

    def _host_of(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._host.get(id(tensor))
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            pinned = self._device.type == "cuda"
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host[id(tensor)] = found
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
