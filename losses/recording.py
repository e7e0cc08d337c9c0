"""Collects metrics as tensors and moves them to the host once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncrl.losses.reduction import Max, Mean, Min, Record, Sum


class Recorder:
    """Metrics of one microbatch. Nothing waits for the device before `records`."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._makers: list[tuple[str, int, Callable[[Sequence[float]], Record]]] = []

    def add(self, name: str, make: Callable[[Sequence[float]], Record], *tensors: torch.Tensor) -> None:
        """Add the record that `make` builds from the numbers of `tensors`, flattened one after the other."""
        flat = [tensor.detach().double().reshape(-1) for tensor in tensors]
        self._parts.extend(flat)
        self._makers.append((name, sum(part.numel() for part in flat), make))

    def sum(self, name: str, value: torch.Tensor) -> None:
        """Add a total []."""
        self.add(name, lambda v: Sum(v[0]), value)

    def mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the mean of `values` over `mask`."""
        self.add(name, lambda v: Mean(v[0], v[1]), torch.where(mask, values.detach(), 0.0).sum(), mask.sum())

    def max(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the largest of `values` over `mask`."""
        chosen = torch.where(mask, values.detach(), -torch.inf)
        self.add(name, lambda v: Max(v[0]), chosen.max() if chosen.numel() else chosen.new_tensor(-torch.inf))

    def min(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the smallest of `values` over `mask`."""
        chosen = torch.where(mask, values.detach(), torch.inf)
        self.add(name, lambda v: Min(v[0]), chosen.min() if chosen.numel() else chosen.new_tensor(torch.inf))

    def records(self) -> dict[str, Record]:
        """Return everything that was added, by name."""
        numbers = torch.cat(self._parts).tolist() if self._parts else []
        found, at = {}, 0
        for name, size, make in self._makers:
            found[name] = make(numbers[at : at + size])
            at += size
        return found
