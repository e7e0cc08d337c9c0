"""New weights beside the running ones, and the exchange of the two. Runs inside vLLM's worker processes.

On a CPU most of a load goes into packing every linear weight for its kernel: for 269 MB some 300 ms, in which no token
would be produced. Here a shadow of the model is loaded while the model runs, and then every layer and its shadow swap
what they hold: some thousand assignments. The shadow then keeps the weights of the version before, whose memory the
next load writes over.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any, cast

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

from asyncrl.weight_sync.vllm_loading import check_loaded, pack_tied

_WRAPPER = "online_process_loader"
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Shadow:
    """A second set of weights for a model that runs on a CPU, eagerly (a captured graph would keep the first set).

    `load` may run on another thread than the model. Nothing that the model uses changes before `exchange`.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model_config = model_config
        self._pairs: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        self.model = self._shadow(model, {}, {})
        """What is loaded into: to be read once it is sealed."""
        self._loaded: set[str] | None = set()

    def _shadow(
        self,
        layer: torch.nn.Module,
        layers: dict[int, torch.nn.Module],
        parameters: dict[int, torch.nn.Parameter],
    ) -> Any:
        """Return a layer that shares everything with `layer` but its weights, and what is below it likewise."""
        if id(layer) in layers:
            return layers[id(layer)]
        shadow = layers[id(layer)] = copy.copy(layer)
        for name in _TABLES:
            shadow.__dict__[name] = copy.copy(layer.__dict__[name])
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = _like(parameter)
                shadow._parameters[name] = parameters[id(parameter)]
        for name, buffer in layer._buffers.items():
            if buffer is not None and name not in layer._non_persistent_buffers_set:
                shadow._buffers[name] = buffer.clone()
        parameter_forms, buffer_forms = get_layerwise_info(layer).restore_metadata
        get_layerwise_info(shadow).restore_metadata = (
            {name: _form(form, shadow) for name, form in parameter_forms.items()},
            {name: _form(form, shadow) for name, form in buffer_forms.items()},
        )
        get_layerwise_info(shadow).restore_device = get_layerwise_info(layer).restore_device
        self._pairs.append((layer, shadow))
        for name, child in layer._modules.items():
            if child is not None:
                shadow._modules[name] = self._shadow(child, layers, parameters)
        return shadow

    @torch.no_grad()
    def begin(self) -> None:
        """Make ready for a whole version."""
        self._before = [dict(shadow.__dict__) for _, shadow in self._pairs]
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some of the version's tensors."""
        loaded = self.model.load_weights(tensors)
        self._loaded = None if self._loaded is None or loaded is None else self._loaded | set(loaded)

    @torch.no_grad()
    def seal(self) -> None:
        """Finish what the last tensors leave to do. Raises: WeightSyncError naming a parameter that was not loaded."""
        finalize_layerwise_reload(self.model, self._model_config)
        check_loaded(self.model, self._loaded)
        pack_tied(self.model)

    def exchange(self) -> None:
        """Let the model and its shadow swap weights, and whatever else the load has made anew."""
        for (layer, shadow), before in zip(self._pairs, self._before, strict=True):
            for name in _changed(shadow, before):
                new = shadow.__dict__[name]
                layer.__dict__[name], shadow.__dict__[name] = new, layer.__dict__.get(name, new)
            layer._parameters, shadow._parameters = shadow._parameters, layer._parameters
            for name in layer._buffers.keys() - layer._non_persistent_buffers_set:
                layer._buffers[name], shadow._buffers[name] = shadow._buffers[name], layer._buffers[name]


def _like(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter of the same shape, class and attributes; what it holds is left open."""
    fresh = torch.empty_like(parameter.data)
    fresh.__class__ = parameter.__class__
    fresh.__dict__ = dict(parameter.__dict__)
    fresh.requires_grad_(False)
    return fresh  # type: ignore[return-value]


def _form(form: torch.Tensor, shadow: torch.nn.Module) -> torch.Tensor:
    """Return a copy of what vLLM remembers of a parameter's form before it was packed, whose loader loads `shadow`.

    vLLM keeps the wrapper of the last reload in it, and that one counts for the layer that was reloaded.
    """
    fresh = to_meta_tensor(form)
    loader = getattr(fresh, "weight_loader", None)
    if loader is not None:
        loader = inspect.unwrap(loader, stop=lambda function: function.__name__ != _WRAPPER)
        fresh.weight_loader = MethodType(loader.__func__, shadow) if isinstance(loader, MethodType) else loader
    return cast(torch.Tensor, fresh)


def _changed(layer: torch.nn.Module, before: dict[str, Any]) -> Iterator[str]:
    for name, value in layer.__dict__.items():
        if name not in _TABLES and (name not in before or before[name] is not value):
            yield name
