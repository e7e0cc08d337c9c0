"""LoRA: adapters alone are sent, and become part of the weights that vLLM's real model computes with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_model import build_tiny_model, state_of
from vllm_model import assert_holds, build_vllm_model

from asyncrl.errors import WeightMismatch
from asyncrl.learner.lora import load_lora
from asyncrl.learner.lora_settings import LoraSettings
from asyncrl.types import WeightManifest
from asyncrl.weight_sync import manifest_to_json
from asyncrl.weight_sync.filesystem import FilesystemPublisher
from asyncrl.weight_sync.reports import check_reports

pytestmark = pytest.mark.engine

RANK, SCALE = 4, 2.0
TARGETS = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")]


def adapter(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return factors for some projections, named as PEFT saves them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for target in TARGETS:
        out, into = state[f"{target}.weight"].shape
        found[f"base_model.model.{target}.lora_A.weight"] = torch.randn(RANK, into, generator=generator) * 0.1
        found[f"base_model.model.{target}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.1
    return found


def with_adapter(state: dict[str, torch.Tensor], factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with an adapter in them."""
    merged = dict(state)
    for target in TARGETS:
        a, b = (factors[f"base_model.model.{target}.lora_{side}.weight"] for side in "AB")
        merged[f"{target}.weight"] = state[f"{target}.weight"] + SCALE * (b @ a)
    return merged


@pytest.fixture(params=["staged", "in place"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    model, config = build_vllm_model(build_tiny_model(tmp_path / "model"))
    from asyncrl.weight_sync.vllm_engine import FileTransferEngine, InitInfo

    ready = FileTransferEngine(None, config, torch.device("cpu"), model)
    ready.init_transfer_engine(InitInfo(run_id="lora", version=0, staged=request.param == "staged"))
    yield ready
    ready.shutdown()


def pull(engine: Any, manifest: WeightManifest) -> dict[str, Any]:
    engine.start_weight_update()
    engine.receive_weights(engine.parse_update_info({"manifest": manifest_to_json(manifest)}))
    engine.finish_weight_update()
    report: dict[str, Any] = engine.report()
    check_reports(manifest, [report], "engine")
    return report


def test_versions_of_an_adapter_are_sent_alone_and_do_not_add_up(engine: Any, tmp_path: Path) -> None:
    """Kills: the second adapter on top of the first, a scale that is left out, base weights that are sent too."""
    state = state_of(tmp_path / "model")
    with FilesystemPublisher(run_id="lora", directory=tmp_path / "published", delta=True) as publisher:
        for version in (1, 2):
            factors = adapter(state, version)
            report = pull(engine, publisher.publish(factors, version, adapter_scale=SCALE))
            assert report["num_bytes"] == sum(tensor.nbytes for tensor in factors.values())
            assert report["num_bytes"] < sum(tensor.nbytes for tensor in state.values()) / 10
            assert_holds(engine.model, with_adapter(state, factors))
        next(iter(factors.values()))[0, 0] += 1.0
        report = pull(engine, publisher.publish(factors, 3, adapter_scale=SCALE))
        assert (report["encoding"], report["num_bytes"]) == ("delta", 8)
        assert_holds(engine.model, with_adapter(state, factors))
        whole = {name: tensor * 0.5 for name, tensor in state.items()}
        pull(engine, publisher.publish(whole, 4))
        assert_holds(engine.model, whole)


def test_vllm_itself_reads_a_checkpoint_of_adapters_as_it_is(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM imports is not this project's
        from vllm.config.lora import LoRAConfig
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
    base, saved = build_tiny_model(tmp_path / "model"), tmp_path / "saved"
    settings = LoraSettings(enabled=True, rank=RANK, alpha=8)
    model = load_lora(base, settings, dtype=torch.float32, device=torch.device("cpu"))
    saved.mkdir()
    model.write_config(saved, base)
    save_file({name: factor.detach() for name, factor in model.tensors().items()}, saved / model.weights_file)
    helper = PEFTHelper.from_local_dir(str(saved), max_position_embeddings=None)
    helper.validate_legal(LoRAConfig(max_lora_rank=16))
    names = {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")}
    read = LoRAModel.from_local_checkpoint(str(saved), names, helper, lora_model_id=1, device="cpu")
    assert (read.rank, helper.lora_alpha, len(read.loras)) == (RANK, 8, 2 * len(names))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("alone", r"q_proj\.lora_A\.weight of version 2 comes without the other factor"),
        ("unknown", r"extra\.lora_A\.weight of version 2 changes model\.extra\.weight, which the engine's model"),
        ("misshapen", r"q_proj\.lora_B\.weight of version 2 has shape \[128, 9\], which does not fit"),
        ("no factor", r"bias of version 2 is not a LoRA factor"),
        ("damaged", r"of version 2 has digest"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name_before_the_model_is_touched(
    engine: Any, tmp_path: Path, kind: str, words: str
) -> None:
    state = state_of(tmp_path / "model")
    first, wrong = adapter(state, 1), adapter(state, 2)
    b = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    if kind == "alone":
        del wrong[b]
    elif kind == "unknown":
        wrong["base_model.model.model.extra.lora_A.weight"] = torch.zeros(RANK, 5)
        wrong["base_model.model.model.extra.lora_B.weight"] = torch.zeros(5, RANK)
    elif kind == "misshapen":
        wrong[b] = torch.zeros(128, 9)
    elif kind == "no factor":
        wrong["bias"] = torch.zeros(3)
    with FilesystemPublisher(run_id="lora", directory=tmp_path / "published") as publisher:
        pull(engine, publisher.publish(first, 1, adapter_scale=SCALE))
        manifest = publisher.publish(wrong, 2, adapter_scale=SCALE)
        if kind == "damaged":
            with open(manifest.location, "r+b") as stream:
                stream.seek(-1, os.SEEK_END)
                stream.write(b"\x7e")
        with pytest.raises(WeightMismatch, match=words):
            pull(engine, manifest)
        assert engine.report()["version"] == 1
        assert_holds(engine.model, with_adapter(state, first))
