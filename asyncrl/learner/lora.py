"""LoRA: the policy as a frozen model and adapters by peft, of which the factors alone are trained.

peft puts a layer of its own in the place of each target; it adds scale * B(A(x)) to what the layer below computes. All
else of the learner stays: packing, shared prefixes, attention, the chunked head. B begins as zeros, so at the start
every log-prob is the model's own, bit for bit.

Several adapters may share one model (`add_adapter` under a name of their own). A pass goes through the adapter of the
`LoraModel` that makes it. With gradient checkpointing its backward pass must come before another's forward pass,
because the layers are computed again in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from asyncrl.errors import ConfigError
from asyncrl.learner.context import Context
from asyncrl.learner.lora_settings import ALL_LINEAR, LoraSettings, check_targets, is_target
from asyncrl.learner.model import PolicyModel, load_model
from asyncrl.learner.ranks import ALONE, Ranks
from asyncrl.learner.sharded import ShardedModel, load_sharded
from asyncrl.packing import Microbatch

ADAPTER = "default"

_SECTION = "[learner.lora]"
_PREFIX = "base_model.model."  # what peft puts before the model's own names in its files


class LoraModel(PolicyModel):
    """One adapter and the model below it. Its `tensors` are the factors, named as in peft's files."""

    weights_file = "adapter_model.safetensors"

    def __init__(
        self,
        model: torch.nn.Module,
        config: LoraConfig,
        *,
        temperature: float,
        head_dtype: torch.dtype | None,
        adapter: str = ADAPTER,
    ) -> None:
        """`config` is what `add_adapter` returned for `adapter`."""
        super().__init__(model, temperature=temperature, head_dtype=head_dtype)
        self.config = config
        self.adapter = adapter

    @property
    def adapter_scale(self) -> float:
        """See `PolicyModel.adapter_scale`."""
        return float(self.config.lora_alpha) / int(self.config.r)

    @property
    def num_parameters(self) -> int:
        """Numbers of the adapter."""
        return sum(p.numel() for p in self.tensors().values())

    def at(self, *, temperature: float, head_dtype: torch.dtype | None) -> LoraModel:
        """Return the same weights and adapter with another head."""
        return type(self)(self.model, self.config, temperature=temperature, head_dtype=head_dtype, adapter=self.adapter)

    def base(self) -> PolicyModel:
        """See `PolicyModel.base`."""
        return _Base(self.model, temperature=self.temperature, head_dtype=self._head_dtype)

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        """Return the factors by their names in peft's files."""
        found = {}
        for name, layer in _layers(self.model):
            if self.adapter in layer.lora_A:
                found[f"{_PREFIX}{name}.lora_A.weight"] = layer.lora_A[self.adapter].weight
                found[f"{_PREFIX}{name}.lora_B.weight"] = layer.lora_B[self.adapter].weight
        return found

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """See `PolicyModel.hidden`."""
        _activate(self.model, [self.adapter])
        return super().hidden(microbatch)

    def write_config(self, directory: Path, source: Path) -> None:
        """See `PolicyModel.write_config`: adapter_config.json, which names the directory `source`, and nothing more."""
        self.config.base_model_name_or_path = str(source.resolve())
        self.config.save_pretrained(str(directory))

    def description(self) -> dict[str, Any]:
        """See `PolicyModel.description`."""
        modules = sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in self.tensors()})
        return {"rank": int(self.config.r), "alpha": self.config.lora_alpha, "modules": modules}


class _Base(PolicyModel):
    """The model below the adapters, which are left out of its passes."""

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        with without_adapters(self.model):
            return super().hidden(microbatch)


class _ShardedLora(LoraModel, ShardedModel):
    """One adapter and the model below it, of both of which this rank holds a part."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: LoraConfig,
        *,
        temperature: float,
        head_dtype: torch.dtype | None,
        adapter: str = ADAPTER,
        context: Context | None = None,
    ) -> None:
        super().__init__(model, config, temperature=temperature, head_dtype=head_dtype, adapter=adapter)
        self._context = context or Context()

    def at(self, *, temperature: float, head_dtype: torch.dtype | None) -> _ShardedLora:
        return type(self)(
            self.model,
            self.config,
            temperature=temperature,
            head_dtype=head_dtype,
            adapter=self.adapter,
            context=self._context,
        )

    def base(self) -> PolicyModel:
        return _ShardedBase(
            self.model, temperature=self.temperature, head_dtype=self._head_dtype, context=self._context
        )


class _ShardedBase(_Base, ShardedModel):
    """The model below the adapters, of which this rank holds a part."""


def load_lora(directory: Path, settings: LoraSettings, ranks: Ranks = ALONE, **options: Any) -> LoraModel:
    """Return the model in `directory`, frozen, with a new adapter; `options` are those of `load_model`.

    Several `ranks` hold both between them, as `load_sharded` says. Raises: ConfigError as `load_model` and
    `add_adapter`.
    """
    if ranks.count > 1:
        return _load_sharded(directory, settings, ranks, **options)
    frozen = load_model(directory, **options)
    frozen.model.requires_grad_(False)
    config = add_adapter(frozen.model, settings)
    return LoraModel(
        frozen.model, config, temperature=frozen.temperature, head_dtype=options.get("head_dtype", torch.float32)
    )


def _load_sharded(directory: Path, settings: LoraSettings, ranks: Ranks, **options: Any) -> LoraModel:
    configs: list[LoraConfig] = []  # of the first rank two, which are the same

    def adapt(model: Any) -> None:
        configs.append(add_adapter(model, settings))

    frozen = load_sharded(directory, ranks, adapt=adapt, **options)
    return _ShardedLora(
        frozen.model,
        configs[-1],
        temperature=frozen.temperature,
        head_dtype=options["head_dtype"],
        context=ranks.context,
    )


def add_adapter(model: Any, settings: LoraSettings, adapter: str = ADAPTER) -> LoraConfig:
    """Put a new adapter on a frozen model, in its dtype and on its device, and return peft's configuration of it.

    The first factors are drawn by torch's own generator, the second are zeros: the model computes what it did.
    Raises: ConfigError for a target that the model does not have, or that cannot have an adapter.
    """
    _check(model, settings)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if settings.target_modules == (ALL_LINEAR,) else list(settings.target_modules),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # several adapters are meant
        inject_adapter_in_model(config, model, adapter_name=adapter)
    for _, layer in _layers(model):
        if adapter in layer.lora_dropout and settings.dropout:
            layer.lora_dropout[adapter] = _Dropout(settings.dropout)
    _activate(model, [adapter])
    return config


def remove_adapter(model: Any, adapter: str) -> None:
    """Take an adapter, which `add_adapter` put there, and its factors off a model."""
    for _, layer in _layers(model):
        if adapter in layer.lora_A:
            _switch(layer, [])
            layer.delete_adapter(adapter)
    del model.peft_config[adapter]


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Leave all adapters out of the passes that are made inside."""
    before = [(layer, list(layer.active_adapters)) for _, layer in _layers(model)]
    _activate(model, [])
    try:
        yield
    finally:
        for layer, names in before:
            _switch(layer, names)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _activate(model: torch.nn.Module, names: Sequence[str]) -> None:
    for _, layer in _layers(model):
        _switch(layer, list(names))


def _switch(layer: Any, names: list[str]) -> None:
    """Let `names` alone take part. peft takes the gradient from the others' factors too, in graphs that there are."""
    if layer.active_adapters != names:
        layer.set_adapter(names)
        layer.set_requires_grad(list(layer.lora_A), True)


def _check(model: Any, settings: LoraSettings) -> None:
    modules = {}
    for name, module in model.named_modules():
        plain = module.get_base_layer() if isinstance(module, LoraLayer) else module
        weight = getattr(plain, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 2 and ".base_layer" not in name:
            modules[name] = plain
    check_targets(settings, modules)
    head = model.get_output_embeddings()
    for name, module in modules.items():
        if not any(is_target(name, target) for target in settings.target_modules):
            continue
        if module is head:
            raise ConfigError(
                f"target_modules: {name} is the LM head, which is computed tile by tile from its own weight alone: "
                f"leave it out ({_SECTION})"
            )
        if not isinstance(module, torch.nn.Linear):
            raise ConfigError(
                f"target_modules: {name} is a {type(module).__name__}, and adapters are for linear layers ({_SECTION})"
            )


class _Dropout(torch.nn.Module):
    """Dropout where a gradient is made; log-probs that are only asked for stay what the policy samples by."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(values, self.p, training=torch.is_grad_enabled())
