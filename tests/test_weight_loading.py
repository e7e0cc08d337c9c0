"""How a version gets into vLLM's model: real vLLM layers in this process, no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import build_tiny_model, state_of
from vllm_model import INPUTS, assert_holds, build_vllm_model, layer_outputs, wanted_outputs

from asyncrl.errors import WeightSyncError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["untied", "tied"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """vLLM's model, its configuration and the directory of the weights it began with."""
    directory = build_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param == "tied")
    return (*build_vllm_model(directory), directory)


def another(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in state_of(directory).items()}


def test_a_version_reaches_every_weight_fused_packed_and_tied_ones_too(loaded: tuple[Any, Any, Path]) -> None:
    """Kills: a tied output head that keeps what it packed from the first version."""
    from asyncrl.weight_sync.vllm_loading import load_in_place

    model, config, directory = loaded
    assert_holds(model, state_of(directory))
    for seed in (1, 2):
        state = another(directory, seed)
        load_in_place(model, config.model_config, state.items())
        assert_holds(model, state)


def test_a_version_without_a_tensor_is_told_by_its_name(loaded: tuple[Any, Any, Path]) -> None:
    from asyncrl.weight_sync.vllm_loading import load_in_place

    model, config, directory = loaded
    state = another(directory, 3)
    del state["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        load_in_place(model, config.model_config, state.items())


def test_weights_that_are_quantised_as_they_load_are_quantised_anew_with_every_version(tmp_path: Path) -> None:
    """Kills: a version refused for scales that no checkpoint has, scales of the version before."""
    from asyncrl.weight_sync.vllm_loading import load_in_place

    directory = build_tiny_model(tmp_path / "model", dtype=torch.bfloat16)
    model, config = build_vllm_model(directory, dtype="bfloat16", quantization="fp8_per_channel")
    inputs = INPUTS.bfloat16()
    for seed in (None, 1, 2):
        state = another(directory, seed) if seed else state_of(directory)
        state = {name: (tensor * (seed or 1)).bfloat16() for name, tensor in state.items()}
        if seed:
            load_in_place(model, config.model_config, state.items())
        found, wanted = layer_outputs(model, inputs), wanted_outputs(state, inputs)
        for name in ("qkv", "o", "gate_up", "down"):
            distance = (found[name].float() - wanted[name].float()).norm() / wanted[name].float().norm()
            assert 0.01 < distance < 0.06, (seed, name, "three bits of mantissa, twice")
        torch.testing.assert_close(found["head"].float(), wanted["head"].float(), rtol=0.02, atol=0.02)
    del state["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        load_in_place(model, config.model_config, state.items())


def test_a_shadow_is_loaded_in_pieces_beside_the_model_and_exchanged(loaded: tuple[Any, Any, Path]) -> None:
    """Kills: a shadow that shares memory with the model, a swap that leaves a layer out, a second load on the first."""
    from asyncrl.weight_sync.vllm_loading import load_in_place
    from asyncrl.weight_sync.vllm_staging import Shadow

    model, config, directory = loaded
    held = another(directory, 4)
    load_in_place(model, config.model_config, held.items())
    shadow = Shadow(model, config.model_config)
    for seed in (5, 6, 7):
        state = another(directory, seed)
        tensors = list(state.items())
        shadow.begin()
        for start in range(0, len(tensors), 5):
            shadow.load(tensors[start : start + 5])
            assert_holds(model, held)
        shadow.seal()
        assert_holds(model, held)
        shadow.exchange()
        assert_holds(model, state)
        held = state
    shadow.begin()
    shadow.load(tensors[1:])
    with pytest.raises(WeightSyncError, match=tensors[0][0].replace(".", r"\.")):
        shadow.seal()
    assert_holds(model, held)
    load_in_place(model, config.model_config, another(directory, 8).items())
    assert_holds(model, another(directory, 8))
