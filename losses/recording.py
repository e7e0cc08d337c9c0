"""Collects metrics as tensors and moves them to the host once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from asyncrl.losses.reduction import Max, Mean, Min, Record, Sum


class Recorder:
    """Metrics of one microbatch. Nothing waits for the device before `records`."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._makers: list[tuple[int, Callable[[Sequence[float]], Mapping[str, Record]]]] = []

    def add(self, make: Callable[[Sequence[float]], Mapping[str, Record]], *tensors: torch.Tensor) -> None:
        """Add the records that `make` builds from the numbers of `tensors`, flattened one after the other."""
        flat = [tensor.detach().double().reshape(-1) for tensor in tensors]
        self._parts.extend(flat)
        self._makers.append((sum(part.numel() for part in flat), make))

    def sum(self, name: str, value: torch.Tensor) -> None:
        """Add a total []."""
        self.add(lambda v: {name: Sum(v[0])}, value)

    def mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the mean of `values` over `mask`, of the same shape."""
        total = torch.where(mask, values.detach().double(), 0.0).sum()
        self.add(lambda v: {name: Mean(v[0], v[1])}, total, mask.sum())

    def max(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the largest of `values` over `mask`."""
        self.add(lambda v: {name: Max(v[0])}, _extreme(values, mask, -torch.inf).amax())

    def min(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the smallest of `values` over `mask`."""
        self.add(lambda v: {name: Min(v[0])}, _extreme(values, mask, torch.inf).amin())

    def records(self) -> dict[str, Record]:
        """Return everything that was added, by name."""
        numbers = torch.cat(self._parts).tolist() if self._parts else []
        found: dict[str, Record] = {}
        at = 0
        for size, make in self._makers:
            found.update(make(numbers[at : at + size]))
            at += size
        return found


def _extreme(values: torch.Tensor, mask: torch.Tensor, empty: float) -> torch.Tensor:
    chosen = torch.where(mask, values.detach().double(), empty)
    return torch.cat([chosen, chosen.new_tensor([empty])])
