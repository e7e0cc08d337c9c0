"""Saved models on disk: the adapter in PEFT's own form, the optimizer beside it. Whole or not there.

    adapter_config.json, adapter_model.safetensors   peft, transformers and vLLM load these as they are
    optimizer.safetensors                            AdamW's moments and step counts, float32, where they were asked for
    state.json                                       written last: format, shape, steps taken, shape of the base

A directory is filled beside its place and renamed into it, so that a kill leaves the old one or none.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.durable import fsync
from asyncrl.errors import CheckpointError
from asyncrl.tinker.adapters import Adapted, Adapters, set_factors
from asyncrl.tinker.orders import AdapterShape
from asyncrl.tinker.shelf import PARTIAL, REPLACED, STATE

_ADAPTER = "adapter_model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_FORMAT = 1
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in state.json."""

    format: int
    shape: AdapterShape
    steps: int
    optimizer: bool
    base: str
    """Name of the base's directory."""


def save(directory: Path, adapters: Adapters, model: Adapted, *, optimizer: bool, overwrite: bool, base: Path) -> int:
    """Write a model into `directory` and return its bytes once they are on the disk. Raises: CheckpointError."""
    if directory.exists() and not overwrite:
        raise CheckpointError(f"there is a saved model {directory.name} already; overwrite replaces it")
    partial = directory.with_name(directory.name + PARTIAL)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        config = adapters.config(model)
        config.base_model_name_or_path = str(base.resolve())
        config.save_pretrained(partial)
        factors = {name: parameter.detach().contiguous() for name, parameter in model.parameters.items()}
        save_file(factors, partial / _ADAPTER)
        if optimizer:
            save_file(_moments(model), partial / _OPTIMIZER)
        state = SavedState(
            format=_FORMAT, shape=model.shape, steps=model.steps, optimizer=optimizer, base=base.resolve().name
        )
        (partial / STATE).write_bytes(msgspec.json.encode(state))
        for path in (*partial.iterdir(), partial):
            fsync(path)
        replaced = directory.with_name(directory.name + REPLACED)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
        fsync(directory.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save the model as {directory}: {error}") from error
    return sum(path.stat().st_size for path in directory.iterdir())


def read_state(directory: Path) -> SavedState:
    """Return what was saved in `directory`. Raises: CheckpointError."""
    try:
        state = msgspec.json.decode((directory / STATE).read_bytes(), type=SavedState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"there is no saved model {directory.name}: {error}") from None
    if state.format != _FORMAT:
        raise CheckpointError(f"{directory.name} has format {state.format}, this program reads {_FORMAT}")
    return state


def load(directory: Path, model: Adapted, *, optimizer: bool) -> None:
    """Put what `directory` holds into a model of its shape. Raises: CheckpointError, with the model as it was."""
    state = read_state(directory)
    if state.shape != model.shape:
        raise CheckpointError(f"{directory.name} holds an adapter of {state.shape}, the model has one of {model.shape}")
    if optimizer and not state.optimizer:
        raise CheckpointError(f"{directory.name} was saved without the optimizer's state")
    tensors = _read(directory / _ADAPTER)
    moments = _read(directory / _OPTIMIZER) if optimizer else {}
    set_factors(model, tensors, where=directory.name)
    model.discard()
    model.adam.state.clear()
    model.steps = state.steps if optimizer else 0
    for name, parameter in model.parameters.items():
        found = {key: moments[f"{key}.{name}"] for key in _MOMENTS if f"{key}.{name}" in moments}
        if found:
            moved: dict[str, Any] = {key: value.to(parameter.device) for key, value in found.items()}
            model.adam.state[parameter] = moved


def _moments(model: Adapted) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": model.adam.state[parameter][key].contiguous()
        for name, parameter in model.parameters.items()
        for key in _MOMENTS
        if key in model.adam.state.get(parameter, {})
    }


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path.parent.name}/{path.name}: {error}") from error
