"""Models as LoRA adapters on one base: their factors, gradients and optimizers.

`asyncrl.learner.lora` puts adapters beside each other on the frozen base, B of zeros, A uniform within 1/sqrt(in). Here
factors, gradients and moments are float32 whatever the base is (float64 for float64), so they are their own masters.
The LM head is adapted too where that is asked: its logits are never made whole, so its factors are columns beside the
hidden state and the head, [h, s A h] [W, B]^T = W h + s B A h.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.head import logprobs_and_entropy
from asyncrl.learner.lora import LoraModel, add_adapter, remove_adapter, without_adapters
from asyncrl.learner.lora_settings import LoraSettings
from asyncrl.learner.model import PolicyModel
from asyncrl.packing import Microbatch, unpack
from asyncrl.tinker.orders import AdapterShape

ALPHA = 32
"""Numerator of LoRA's scale, alpha / rank. The same for every rank, so that learning rates carry over between them."""
HEAD = "lm_head"
HEAD_A, HEAD_B = f"base_model.model.{HEAD}.lora_A.weight", f"base_model.model.{HEAD}.lora_B.weight"


@dataclass(slots=True, kw_only=True)
class Adapted:
    """One model."""

    shape: AdapterShape
    lora: LoraModel | None
    """Of the layers below the head; None where the head alone is adapted."""
    parameters: Mapping[str, torch.nn.Parameter]
    """By name in a PEFT checkpoint."""
    adam: torch.optim.AdamW
    steps: int = 0
    passes: int = 0
    """Backward passes since the last step."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return ALPHA / self.shape.rank

    def gradient_norm(self) -> float:
        """Return the norm of the summed gradients, nan or inf where any of them is."""
        norms = torch._foreach_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        return math.sqrt(sum(float(norm.double()) ** 2 for norm in norms))

    def discard(self) -> None:
        """Forget the gradients."""
        self.passes = 0
        for parameter in self.parameters.values():
            parameter.grad = None


class Adapters:
    """All models of one base."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        policy.model.requires_grad_(False)
        self._attention, self._mlp = _linear_layers(policy.model)
        self._names = 0

    def create(self, shape: AdapterShape, seed: int | None) -> Adapted:
        """Return a new model that computes what the base does. Raises: ConfigError."""
        head = self._policy.head
        if not 1 <= shape.rank <= head.shape[1]:
            raise ConfigError(f"rank must be from 1 to {head.shape[1]}, got {shape.rank}")
        if not (shape.attention or shape.mlp or shape.unembed):
            raise ConfigError("an adapter needs one of train_attn, train_mlp and train_unembed")
        lora, parameters = None, {}
        with torch.random.fork_rng(devices=[head.device] if head.is_cuda else []):
            torch.manual_seed(torch.seed() if seed is None else seed)
            if shape.attention or shape.mlp:
                lora = self._inject(shape)
                parameters = lora.tensors()
            if shape.unembed:
                parameters |= _head_factors(head, shape.rank)
        adam = torch.optim.AdamW(parameters.values(), fused=True)
        return Adapted(shape=shape, lora=lora, parameters=parameters, adam=adam)

    def _inject(self, shape: AdapterShape) -> LoraModel:
        self._names += 1
        targets = (*self._attention * shape.attention, *self._mlp * shape.mlp)
        settings = LoraSettings(enabled=True, rank=shape.rank, alpha=ALPHA, target_modules=targets)
        name = f"model{self._names}"
        model = self._policy.model
        config = add_adapter(model, settings, name)
        lora = LoraModel(
            model, config, temperature=self._policy.temperature, head_dtype=self._policy.head_dtype, adapter=name
        )
        for parameter in lora.tensors().values():
            parameter.data = parameter.data.to(_wide(parameter.dtype))
        return lora

    def remove(self, model: Adapted) -> None:
        """Forget a model."""
        if model.lora is not None:
            remove_adapter(model.lora.model, model.lora.adapter)

    def hidden(self, model: Adapted | None, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([P, C] last hidden states where a token is predicted, [V, C] head), wider where the head is adapted.

        Their product is the logits of the model, or of the base (None); differentiable.
        """
        if model is not None and model.lora is not None:
            hidden = model.lora.hidden(microbatch)
        else:
            with without_adapters(self._policy.model):
                hidden = self._policy.hidden(microbatch)
        head = self._policy.head
        if model is None or not model.shape.unembed:
            return hidden, head
        a, b = model.parameters[HEAD_A], model.parameters[HEAD_B]
        low = torch.nn.functional.linear(hidden.to(a.dtype), a) * model.scale
        return torch.cat([hidden, low.to(hidden.dtype)], 1), torch.cat([head, b.to(head.dtype)], 1)

    def logprobs(self, model: Adapted | None, microbatch: Microbatch) -> torch.Tensor:
        """Return [T_m] log-probs in nats, 0.0 where no token is scored; differentiable."""
        hidden, head = self.hidden(model, microbatch)
        dtype = self._policy.head_dtype
        logprobs, _ = logprobs_and_entropy(hidden, head, microbatch.target_ids, logits_dtype=dtype)
        return unpack(microbatch, logprobs)

    def config(self, model: Adapted) -> Any:
        """Return peft's description of a model's adapter, its head included."""
        from peft import LoraConfig

        targets = [*self._attention * model.shape.attention, *self._mlp * model.shape.mlp]
        targets += [HEAD] * model.shape.unembed
        return LoraConfig(
            r=model.shape.rank, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", inference_mode=True
        )


def set_factors(model: Adapted, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Replace the factors. Raises: CheckpointError naming the first that is missing, strange or of another shape."""
    for name, parameter in model.parameters.items():
        found = tensors.get(name)
        if found is None or found.shape != parameter.shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}, not {list(parameter.shape)}"
            raise CheckpointError(f"{where}: {name} {what}")
    if strangers := tensors.keys() - model.parameters.keys():
        raise CheckpointError(f"{where}: {min(strangers)} belongs to no weight of this base")
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            parameter.copy_(tensors[name])


def _head_factors(head: torch.Tensor, rank: int) -> dict[str, torch.nn.Parameter]:
    a = torch.empty(rank, head.shape[1], dtype=_wide(head.dtype), device=head.device)
    torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as peft's: uniform within 1/sqrt(in)
    b = torch.zeros(head.shape[0], rank, dtype=a.dtype, device=head.device)
    return {HEAD_A: torch.nn.Parameter(a), HEAD_B: torch.nn.Parameter(b)}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _linear_layers(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the last parts of the names of attention's linear layers, and of the others below the head."""
    attention: set[str] = set()
    mlp: set[str] = set()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            path, _, last = name.rpartition(".")
            (attention if "attn" in path or "attention" in path else mlp).add(last)
    return tuple(sorted(attention)), tuple(sorted(mlp))
