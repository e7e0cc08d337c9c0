"""Versions that are a LoRA adapter alone: which weights it changes, and what they become.

An adapter comes with the names of a PEFT checkpoint, two factors for each weight it changes:

    [base_model.model.]NAME.lora_A.weight  [r, in]        [base_model.model.]NAME.lora_B.weight  [out, r]

and NAME.weight of the checkpoint that the engine was started from becomes W + scale * B A, computed in float32 and
rounded to the dtype of W. Every version is made of that checkpoint's W, never of the version before: nothing adds up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from asyncrl.errors import WeightMismatch
from asyncrl.types import TensorEntry, WeightManifest

_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")


def factors_of(manifest: WeightManifest) -> dict[str, dict[str, TensorEntry]]:
    """Return, by the name of the weight that is changed, its factors: ".lora_A.weight" and ".lora_B.weight" -> entry.

    Raises: WeightMismatch naming a tensor that is no factor, or has no partner.
    """
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in manifest.tensors:
        name = entry.name.removeprefix(_PREFIX)
        factor = next((factor for factor in _FACTORS if name.endswith(factor)), None)
        if factor is None:
            raise _misfit(manifest, entry.name, "is not a LoRA factor (NAME.lora_A.weight or NAME.lora_B.weight)")
        found.setdefault(name.removesuffix(factor) + ".weight", {})[factor] = entry
    for factors in found.values():
        if len(factors) != len(_FACTORS):
            (alone,) = factors.values()
            raise _misfit(manifest, alone.name, "comes without the other factor")
    return found


def check_adapter(manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an adapter that does not fit the engine's model, whose weights have the `expected` shapes.

    Raises: WeightMismatch naming the first tensor that is no factor, changes no weight there is, or has another shape.
    """
    for target, factors in factors_of(manifest).items():
        a, b = (factors[factor] for factor in _FACTORS)
        if target not in expected:
            raise _misfit(manifest, a.name, f"changes {target}, which the engine's model does not have")
        shape = list(expected[target])
        if len(a.shape) != 2 or a.shape[1:] != expected[target][1:]:
            raise _misfit(manifest, a.name, f"has shape {list(a.shape)}, which does not fit {target} of {shape}")
        if len(b.shape) != 2 or b.shape != (expected[target][0], a.shape[0]):
            raise _misfit(manifest, b.name, f"has shape {list(b.shape)}, which does not fit {target} of {shape}")


class Merged:
    """Every tensor of a checkpoint, with a version's adapter added to those that it changes. One at a time."""

    def __init__(
        self, directory: str | os.PathLike[str], manifest: WeightManifest, tensor: Callable[[TensorEntry], torch.Tensor]
    ) -> None:
        from safetensors import safe_open

        assert manifest.adapter_scale is not None
        self._scale = manifest.adapter_scale
        self._factors = factors_of(manifest)
        self._tensor = tensor
        self._files: list[tuple[str, Path]] = []
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                self._files += [(name, file) for name in weights.keys()]  # noqa: SIM118  (it is no dictionary)

    @property
    def names(self) -> list[str]:
        """Of all of them, in the checkpoint's order."""
        return [name for name, _ in self._files]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them, in the checkpoint's order."""
        for name, file in self._files:
            yield name, self._merged(name, _read(file, name))

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        factors = self._factors.get(name)
        if factors is None:
            return weight
        a, b = (self._tensor(factors[factor]).float() for factor in _FACTORS)
        return weight.float().addmm_(b, a, alpha=self._scale).to(weight.dtype)


class Plain:
    """Every tensor of a version, as it was sent."""

    def __init__(self, entries: Sequence[TensorEntry], tensor: Callable[[TensorEntry], torch.Tensor]) -> None:
        self._entries, self._tensor = entries, tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them, in the manifest's order."""
        for entry in self._entries:
            yield entry.name, self._tensor(entry)


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as weights:
        tensor: torch.Tensor = weights.get_tensor(name)
        return tensor


def _misfit(manifest: WeightManifest, name: str, words: str) -> WeightMismatch:
    return WeightMismatch(f"{name} of version {manifest.version} {words}", tensor=name)
