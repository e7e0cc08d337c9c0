"""Settings of LoRA, and what of them only the model's own files can tell. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.weight_sync.names import checkpoint_shapes

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the LM head."""

_SECTION = "[learner.lora]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train the two factors of an adapter for each of some weights, and leave the weights themselves as they are.

    Source: LoRA, arXiv:2106.09685.

    Example:
        >>> LoraSettings(enabled=True, rank=8, alpha=16).scale
        2.0
    """

    enabled: bool = False
    """Adapters alone have masters and moments, are sent to the engines, and stand in checkpoints. The learning rate
    wants to be about ten times that of the same run without."""
    rank: int = 16
    """Rows of the first factor and columns of the second (peft's `r`)."""
    alpha: int = 32
    """alpha / rank multiplies the factors' product (peft's `lora_alpha`)."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """The layers that get an adapter, as peft names them: ["q_proj", "v_proj"], or the end of a longer name;
    ["all-linear"] is every linear layer but the LM head."""
    dropout: float = 0.0
    """Of an adapter's input, in passes with a gradient. Above 0 it adds noise to every importance ratio."""

    @property
    def scale(self) -> float:
        """What the factors' product is multiplied by."""
        return self.alpha / self.rank

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for known in fields(self):
            value = getattr(self, known.name)
            if known.name != "enabled" and not self.enabled and value != known.default:
                raise ConfigError(f"{known.name} = {value!r} is not read with enabled = false ({_SECTION})")
        for name in ("rank", "alpha"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)} ({_SECTION})")
        if not (math.isfinite(self.dropout) and 0.0 <= self.dropout < 1.0):
            raise ConfigError(f"dropout must be in [0, 1), got {self.dropout} ({_SECTION})")
        if not self.target_modules or not all(self.target_modules):
            raise ConfigError(f"target_modules must name layers, got {list(self.target_modules)} ({_SECTION})")
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ConfigError(
                f'target_modules = {list(self.target_modules)}: "{ALL_LINEAR}" stands alone, it is every linear layer '
                f"({_SECTION})"
            )


def check_lora(settings: LoraSettings, model: Path) -> None:
    """Raise ConfigError where peft is missing, or a target is no matrix in the files of the model directory."""
    if not settings.enabled:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"enabled = true needs peft, which is not there: pip install 'asyncrl[lora]' ({_SECTION})")
    matrices = [name for name, shape in checkpoint_shapes(model).items() if len(shape) == 2]
    check_targets(settings, [name.removesuffix(".weight") for name in matrices])


def adapter_size(settings: LoraSettings, model: Path) -> int:
    """Return how many numbers an adapter of the model in a directory has, by the shapes of its files."""
    found = 0
    for name, shape in checkpoint_shapes(model).items():
        targeted = any(is_target(name.removesuffix(".weight"), target) for target in settings.target_modules)
        if len(shape) == 2 and (targeted or (settings.target_modules == (ALL_LINEAR,) and ".layers." in f".{name}")):
            found += settings.rank * sum(shape)
    return found


def version_bytes(settings: LoraSettings, model: Path, *, number_bytes: int) -> int:
    """Return what one version of the weights takes: the model's files, or an adapter of `number_bytes` a number."""
    if settings.enabled:
        return adapter_size(settings, model) * number_bytes
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def check_targets(settings: LoraSettings, modules: Iterable[str]) -> None:
    """Raise ConfigError for a target that is none of the `modules` that have a matrix, by their whole names."""
    names = list(modules)
    for target in settings.target_modules:
        if target != ALL_LINEAR and not any(is_target(name, target) for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(f"target_modules: the model has no layer {target!r}; it has {known} ({_SECTION})")


def is_target(name: str, target: str) -> bool:
    """Tell whether a target, as peft reads it, means the module called `name`."""
    return name == target or name.endswith(f".{target}")
