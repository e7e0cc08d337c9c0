"""How a version gets into vLLM's model. Runs inside vLLM's worker processes.

vLLM's own loader is used (`initialize_layerwise_reload` ... `finalize_layerwise_reload`), because on a CPU the linear
weights are kept packed for a kernel and the originals are dropped: plain `load_weights` has nothing to load into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from asyncrl.errors import WeightSyncError


@torch.no_grad()
def load_in_place(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load every tensor into the model, over what it holds.

    Raises: WeightSyncError naming a parameter that nothing was loaded into.
    """
    initialize_layerwise_reload(model)
    loaded = model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
    check_loaded(model, loaded)
    pack_tied(model)


def check_loaded(model: torch.nn.Module, loaded: Iterable[str] | None) -> None:
    """Refuse a model that kept some parameter. `loaded` is what vLLM's loader returns; some models' tell nothing.

    Raises: WeightSyncError naming the parameter.
    """
    if loaded is None:
        return
    untouched = set(_loadable(model)) - set(loaded)
    if untouched:
        raise WeightSyncError(f"the load left {sorted(untouched)[0]} as it was")


def _loadable(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that a checkpoint's tensors are for.

    A layer that quantises as it loads has more: what it makes of the tensors anew each time, such as their scales.
    """
    for path, _ in model.named_parameters():
        prefix, _, name = path.rpartition(".")
        forms, _ = get_layerwise_info(model.get_submodule(prefix)).restore_metadata
        if name in forms or name in SKIP_TENSORS:
            yield path


def pack_tied(model: torch.nn.Module) -> None:
    """Let every layer that borrows another's parameter, as a tied output head does, prepare its kernel anew.

    The lender alone is loaded. What the borrower has packed from the old values for a CPU kernel, vLLM 0.32 leaves as
    it was, so that the head would stay at the first version for ever. Other devices read the shared tensor itself, and
    must not be made to prepare it twice.
    """
    for layer, parameter in _borrowers(model):
        method = getattr(layer, "quant_method", None)
        if method is not None and parameter.device.type == "cpu":
            method.process_weights_after_loading(layer)


def _borrowers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    lenders: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if lenders.setdefault(id(parameter), layer) is not layer:
                yield layer, parameter
                break
