"""vLLM's own model of the tiny weights, in this process and without a server: what its loader makes of a version."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

INPUTS = torch.randn((3, 128), generator=torch.Generator().manual_seed(1))


def build_vllm_model(
    directory: Path, *, dtype: str = "float32", rank: int = 0, world_size: int = 1, quantization: str | None = None
) -> tuple[Any, Any]:
    """Return vLLM's model of a model directory as its worker holds it, and vLLM's configuration.

    Of a tensor-parallel model, which several processes hold together, it is one rank's part.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # what vLLM imports is not this project's
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does before it loads
        return _build(directory, dtype, rank, world_size, quantization)


def _build(directory: Path, dtype: str, rank: int, world_size: int, quantization: str | None) -> tuple[Any, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = EngineArgs(
        model=str(directory),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        tensor_parallel_size=world_size,
        quantization=quantization,
    )
    config = arguments.create_engine_config()
    config.parallel_config.rank = rank
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(world_size, rank, f"file://{directory / 'rendezvous'}", rank, "gloo")
            ensure_model_parallel_initialized(world_size, 1)
        return get_model(vllm_config=config), config


def layer_outputs(model: Any, inputs: torch.Tensor, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Return what every weight of the first layer, the embedding and the head make of `inputs` [n, 128].

    A rank of a tensor-parallel model gets its share of what the layer before would have made; all must call this.
    """
    layer = model.model.layers[0]

    def share(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(world_size, 1)[rank].contiguous()

    with torch.no_grad():
        return {
            "embed": model.model.embed_input_ids(torch.arange(8)),
            "qkv": layer.self_attn.qkv_proj(inputs)[0],
            "o": layer.self_attn.o_proj(share(inputs))[0],
            "gate_up": layer.mlp.gate_up_proj(inputs)[0],
            "down": layer.mlp.down_proj(share(torch.cat([inputs, inputs], 1)))[0],
            "norm": layer.input_layernorm.weight.clone(),
            "head": model.compute_logits(inputs),
        }


def wanted_outputs(state: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same from the tensors alone, by their names in a checkpoint."""
    state = {name: tensor.to(inputs.dtype) for name, tensor in state.items()}
    first = {name.removeprefix("model.layers.0."): tensor for name, tensor in state.items()}
    embedding = state["model.embed_tokens.weight"]

    def through(*names: str) -> torch.Tensor:
        x = torch.cat([inputs, inputs], 1) if names == ("mlp.down_proj",) else inputs
        return x @ torch.cat([first[f"{name}.weight"] for name in names]).T

    return {
        "embed": embedding[:8],
        "qkv": through("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": through("self_attn.o_proj"),
        "gate_up": through("mlp.gate_proj", "mlp.up_proj"),
        "down": through("mlp.down_proj"),
        "norm": first["input_layernorm.weight"],
        "head": inputs @ state.get("lm_head.weight", embedding).T,
    }


def assert_holds(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Compare what every kind of weight makes of some inputs with what the tensors alone make of them."""
    found, wanted = layer_outputs(model, INPUTS), wanted_outputs(state, INPUTS)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4, msg=lambda words, n=name: f"{n}: {words}")
