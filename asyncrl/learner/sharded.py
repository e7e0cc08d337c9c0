"""The policy's weights over all ranks: PyTorch's FSDP2, one group of weights a layer and one for the rest.

Each rank keeps its part of every weight in float32, which is the master; a layer is gathered in the dtype of the
forward pass when it is needed and let go of afterwards. Gradients are summed over ranks in float32: a microbatch's loss
is divided by the whole batch's counts, so a sum is what belongs together, never a mean.

The first rank alone reads the model's files. It hands out the architecture, then tensor by tensor; another rank never
holds more than its own part and the largest tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.learner.attention_kinds import choose, register
from asyncrl.learner.compiling import layers_of
from asyncrl.learner.context import Context, Gather
from asyncrl.learner.model import PolicyModel, hidden_states, prepare, read_model
from asyncrl.learner.ranks import Ranks
from asyncrl.packing import Microbatch, unpack

_READ = "read_microbatch"


class ShardedModel(PolicyModel):
    """A causal language model of which this rank holds a part."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        temperature: float,
        head_dtype: torch.dtype | None,
        context: Context | None = None,
    ) -> None:
        """`context` are the ranks that read one microbatch between them."""
        super().__init__(model, temperature=temperature, head_dtype=head_dtype)
        self._context = context or Context()

    def at(self, *, temperature: float, head_dtype: torch.dtype | None) -> ShardedModel:
        """Return the same weights with another head."""
        return type(self)(self.model, temperature=temperature, head_dtype=head_dtype, context=self._context)

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """See `PolicyModel.hidden`. All ranks call it at once; the head's weight is whole until the backward pass.

        Of ranks that read one microbatch between them each returns its own predictions' states.
        """
        gather = None
        if self._context.count > 1:
            microbatch, gather = self._context.part_of(microbatch).microbatch, self._context.gather
        states: torch.Tensor = getattr(self.model, _READ)(microbatch, gather)
        return states

    def logprobs(self, microbatch: Microbatch, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PolicyModel.logprobs`: of the whole microbatch, on each rank that reads it."""
        if self._context.count == 1:
            return super().logprobs(microbatch, hidden)
        hidden = self.hidden(microbatch) if hidden is None else hidden
        part = self._context.part_of(microbatch)
        made = self.predicted(part.microbatch, hidden)
        logprobs, entropy = (self._context.predicted(part, values) for values in made)
        return unpack(microbatch, logprobs), unpack(microbatch, entropy)

    def release(self) -> None:
        """See `PolicyModel.release`: a pass without a gradient leaves the head and embeddings whole."""
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()


def load_sharded(
    directory: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    device: torch.device,
    temperature: float,
    head_dtype: torch.dtype | None,
    gradient_checkpointing: bool,
    attention: str,
    compiled: str = "",
    frozen: bool = False,
    with_head: bool = True,
    adapt: Callable[[Any], None] | None = None,
) -> ShardedModel:
    """Return this rank's part of the model in `directory`, which the first rank alone reads. All ranks call it at once.

    Its parameters are float32 (float64 for float64); `dtype` is what they are gathered in. One that is `frozen` has no
    masters: its parameters are of `dtype`, and need no gradient. Without its LM head a model gives hidden states alone.
    `adapt` puts parameters of its own on a frozen model, which alone are trained.
    Raises: ConfigError as `load_model`, and for an architecture that does not say what a layer is.
    """
    chosen = choose(attention, device, dtype)
    whole = read_model(directory, dtype=dtype, attention=chosen, compiled=compiled) if ranks.is_first else None
    told = b"" if whole is None else whole.config.to_json_string().encode()
    model = _without_weights(json.loads(ranks.pass_on(told)), dtype, register(chosen, compiled=bool(compiled)))
    prepare(model, gradient_checkpointing=gradient_checkpointing, compiled=compiled)
    wide = torch.promote_types(dtype, torch.float32)
    model.requires_grad_(adapt is None and not frozen)
    if adapt is not None:
        for one in (model,) if whole is None else (whole.requires_grad_(False), model):
            adapt(one)
    for parameter in model.parameters():  # and no buffer: a rotary frequency is as exact as the first rank's
        parameter.data = parameter.data.to(wide if parameter.requires_grad else dtype)
    if not with_head:
        model.set_output_embeddings(torch.nn.Identity())
    _shard(model, ranks, dtype, wide, device)
    model.to_empty(device=device)
    if with_head:
        model.tie_weights()
    with torch.no_grad():
        _hand_out(model, {} if whole is None else _tensors(whole), ranks)
    return ShardedModel(model, temperature=temperature, head_dtype=head_dtype, context=ranks.context)


def _without_weights(config: Mapping[str, Any], dtype: torch.dtype, attention: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=dtype, attn_implementation=attention
        )


def _shard(model: Any, ranks: Ranks, dtype: torch.dtype, reduced: torch.dtype, device: torch.device) -> None:
    layers: list[Any] = list(layers_of(model))
    if not layers:
        raise ConfigError(f"{type(model).__name__} does not say what a layer is; use ranks = 1 ([learner])")
    mesh = init_device_mesh(device.type, (ranks.count,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    setattr(model, _READ, MethodType(_read, model))
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(model, _READ)
    for module in (*layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else the factor is multiplied in by what gloo does not have


def _read(model: Any, microbatch: Microbatch, gather: Gather | None) -> torch.Tensor:
    return hidden_states(model.get_decoder(), microbatch, gather)


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _hand_out(model: Any, whole: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Fill the model's tensors with the first rank's, which is emptied on the way."""
    for name, tensor in _tensors(model).items():
        found = whole.pop(name, None)
        assert (found is not None) == ranks.is_first, name
        if isinstance(tensor, DTensor):
            given = torch.empty(tensor.shape, dtype=tensor.dtype) if found is None else found.to(tensor.dtype)
            part = distribute_tensor(given.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=0)
            tensor.to_local().copy_(part.to_local())
        else:
            given = torch.empty(tensor.shape, dtype=tensor.dtype) if found is None else found
            ranks.hand_out(given)
            tensor.copy_(given)
