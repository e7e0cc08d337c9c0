"""The policy: a Hugging Face causal language model that reads token trees and gives log-probs.

Any architecture that goes through transformers' attention interface with plain causal attention is taken; one with
sliding windows or soft-capped logits is refused, because the tree attention and the chunked head compute neither.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner import norm
from asyncrl.learner.attention_kinds import choose, register
from asyncrl.learner.compiling import compile_layers
from asyncrl.learner.context import Gather, Tree
from asyncrl.learner.head import logprobs_and_entropy
from asyncrl.packing import Microbatch, nothing, to_device, unpack

_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Of the model directory everything else is copied: configuration, tokenizer, chat template, license."""

_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size", "logit_scale")


class PolicyModel:
    """A causal language model in one dtype on one device."""

    weights_file = "model.safetensors"
    """What a checkpoint calls the file of `tensors`."""

    def __init__(self, model: torch.nn.Module, *, temperature: float, head_dtype: torch.dtype | None) -> None:
        self.model = model
        self.temperature = temperature
        self._head_dtype = head_dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""
        return int(self.model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]

    @property
    def head(self) -> torch.Tensor:
        """[V, C] weight of the LM head."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight  # type: ignore[operator]
        return weight

    @property
    def head_dtype(self) -> torch.dtype:
        """Of the logits."""
        return self._head_dtype or self.head.dtype

    @property
    def adapter_scale(self) -> float | None:
        """What the product of an adapter's factors is multiplied by, where `tensors` are those (`lora`)."""
        return None

    @property
    def num_parameters(self) -> int:
        """Trained numbers; tied embeddings count once."""
        return sum(p.numel() for p in self.model.parameters())

    def at(self, *, temperature: float, head_dtype: torch.dtype | None) -> PolicyModel:
        """Return the same weights with another head."""
        return type(self)(self.model, temperature=temperature, head_dtype=head_dtype)

    def write_config(self, directory: Path, source: Path) -> None:
        """Write all that goes with `weights_file` into a checkpoint's model folder.

        `source` is the model directory that the run began with.
        """
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, directory / path.name)

    def description(self) -> dict[str, Any]:
        """Return what the tensors mean besides the model's own weights; nothing where there is no adapter."""
        return {}

    def check_resumes(self, found: Mapping[str, Any], directory: Path) -> None:
        """Raise CheckpointError unless a checkpoint, of the `description` found, is of a model like this one."""
        ours = self.description()
        for name in sorted({*ours, *found}):
            if found.get(name) != ours.get(name):
                was, now = (_described(name, one.get(name)) for one in (found, ours))
                raise CheckpointError(
                    f"checkpoint {directory} was written {was}, and cannot go on {now} ([learner.lora])"
                )

    def base(self) -> PolicyModel | None:
        """Return the frozen model below an adapter, of the same weights in memory; None where there is no adapter."""
        return None

    def release(self) -> None:
        """Say that a run of passes has ended and weights may change: what a sharded model gathered for them goes."""

    def keep_pace(self, device: torch.device, *, backward: bool, between: Callable[[], None] = lambda: None) -> None:
        """Make a pass over one token that adds nothing, beside ranks that have more to forward than this one.

        `between` is called where those pass through another model before they go back through this one.
        """
        logprobs, _ = self.logprobs(to_device(nothing(), device))
        between()
        if backward:
            logprobs.sum().backward()

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by their name in the checkpoint; tied embeddings once."""
        return dict(self.model.named_parameters())

    def hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """Return [P, C], the body's last hidden state at the slots that predict a scored token; differentiable."""
        return hidden_states(self.model.get_decoder(), microbatch)  # type: ignore[operator]

    def logprobs(self, microbatch: Microbatch, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([T_m] policy log-probs, [T_m] entropy) in nats, 0.0 where no token is scored; differentiable.

        `hidden` is what `hidden` returned for this microbatch, where it is needed elsewhere too.
        """
        hidden = self.hidden(microbatch) if hidden is None else hidden  # before the head, which it makes whole
        logprobs, entropy = self.predicted(microbatch, hidden)
        return unpack(microbatch, logprobs), unpack(microbatch, entropy)

    def predicted(self, microbatch: Microbatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([P] log-prob of each prediction's target, [P] entropy) from the states [P, C]; differentiable."""
        return logprobs_and_entropy(
            hidden,
            self.head,
            microbatch.target_ids,
            temperature=self.temperature,
            logits_dtype=self.head_dtype,
        )


def hidden_states(body: torch.nn.Module, microbatch: Microbatch, gather: Gather | None = None) -> torch.Tensor:
    """Return [P, C], the last hidden state of `body` at the slots that predict a scored token; differentiable.

    `gather` is given where `microbatch` is a rank's part of one.
    """
    states = body(
        input_ids=microbatch.tree_token_ids.unsqueeze(0),
        position_ids=microbatch.tree_position_ids.unsqueeze(0),
        use_cache=False,
        tree=Tree(microbatch.blocks, gather),
    ).last_hidden_state[0]
    predicting: torch.Tensor = states.index_select(0, microbatch.predict_slot)
    return predicting


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    temperature: float = 1.0,
    head_dtype: torch.dtype | None = torch.float32,
    gradient_checkpointing: bool = False,
    attention: str = "auto",
    compiled: str = "",
    weights: Mapping[str, torch.Tensor] | None = None,
) -> PolicyModel:
    """Return the model in `directory`, layers `compiled` by that backend of torch.compile; `weights` replace its own.

    Raises: ConfigError where there are no weights, or the architecture needs what the learner does not compute.
    """
    chosen = choose(attention, device, dtype)
    model = torch.nn.Module.to(read_model(directory, dtype=dtype, attention=chosen, compiled=compiled), device)
    if weights is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    prepare(model, gradient_checkpointing=gradient_checkpointing, compiled=compiled)
    return PolicyModel(model, temperature=temperature, head_dtype=head_dtype)


def read_model(directory: Path, *, dtype: torch.dtype, attention: str, compiled: str = "") -> Any:
    """Return transformers' own model of `directory`, on the CPU, with the `attention` of `attention_kinds`.

    Raises: ConfigError as `load_model`.
    """
    check_directory(directory)
    config = AutoConfig.from_pretrained(directory)
    _check_architecture(config, directory)
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=register(attention, compiled=bool(compiled)),
        local_files_only=True,
    )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{directory}: the LM head has a bias, which the learner does not compute")
    return model


def prepare(model: Any, *, gradient_checkpointing: bool, compiled: str = "") -> None:
    """Make a model of transformers the learner's: no dropout, our own norms or layers compiled, activations as asked.

    Raises: ConfigError where layers cannot be compiled.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if compiled:
        compile_layers(model, compiled)  # which fuses the norms as they are
    else:
        norm.install(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
    else:
        model.eval()  # no dropout of any kind: a second forward gives the same numbers


def check_directory(directory: Path) -> None:
    """Raise ConfigError unless `directory` holds a configuration and safetensors weights."""
    if not directory.is_dir():
        raise ConfigError(f"the model directory {directory} does not exist ([model])")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"the model directory {directory} has no config.json ([model])")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"the model directory {directory} has no weights (*.safetensors) ([model])")


def _described(name: str, value: Any) -> str:
    if value is None:
        return "without LoRA"
    return f"with adapters of {', '.join(value)}" if name == "modules" else f"with {name} = {value}"


def _check_architecture(config: Any, directory: Path) -> None:
    for name in _UNSUPPORTED:
        if getattr(config, name, None):
            raise ConfigError(f"{directory}: its architecture uses {name}, which the learner does not compute")
    windows = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in windows) or (
        not windows and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        raise ConfigError(f"{directory}: some of its layers do not attend to all that went before; not supported")
