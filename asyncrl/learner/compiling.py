"""The model's layers by torch.compile: norms, rotations and the parts of a layer that go element by element are fused.

Each layer is compiled by itself, for microbatches of any number of slots, up to its attention and after it: attention
is walked over a tree of tokens by the learner's own code, or by kernels that are compiled already. All layers share
their programs, and those of a sharded model are entered after its weights were gathered.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import ConfigError


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the layers of a model of transformers, none for an architecture that does not say what a layer is."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: Any, backend: str) -> None:
    """Let a backend of torch.compile make each layer's program when it is first used.

    Raises: ConfigError where there are no layers.
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(f"{type(model).__name__} does not say what a layer is; use compile = false ([learner])")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def check_compiler(on_cuda: bool) -> None:
    """Raise ConfigError unless what torch.compile needs on a CPU, or on CUDA, is on this host."""
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    needed = {
        "the package triton, which makes programs for a GPU, and it is not installed:": on_cuda
        and importlib.util.find_spec("triton") is None,
        f"a C++ compiler, and {compiler} is not found (CXX names another):": shutil.which(compiler) is None,
        f"Python's headers, and {headers} is not found:": not headers.is_file(),
    }
    for what, missing in needed.items():
        if missing:
            raise ConfigError(f"compile = true needs {what} install it, or set compile = false ([learner])")
