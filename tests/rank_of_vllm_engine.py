"""One rank of a tensor-parallel vLLM model that takes versions: `test_weight_ranks` runs two of these, joined by gloo.

    python rank_of_vllm_engine.py RANK WORLD_SIZE DIRECTORY

DIRECTORY holds the model that the engine starts from and, as `to_pull.json`, the manifests to take. Leaves in
`rank-RANK.json` the report after each, and how far every layer's output is from what this rank's part of the newest
tensors makes of the same inputs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_model import build_vllm_model, layer_outputs

from asyncrl.weight_sync import manifest_from_json


def shares(state: dict[str, torch.Tensor], inputs: torch.Tensor, rank: int, world_size: int) -> dict[str, Any]:
    """Return what `layer_outputs` must be on one rank.

    Queries, gate and up are split by rows, and what a rank makes of them stays with it; the one key and value head is
    on every rank. Output and down projection, embedding and head are split too, and their results are made whole.
    """
    first = {name.removeprefix("model.layers.0."): tensor for name, tensor in state.items()}

    def part(name: str) -> torch.Tensor:
        return first[name].chunk(world_size)[rank]

    query, gate, up = (part(f"{name}.weight") for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"))
    key, value = first["self_attn.k_proj.weight"], first["self_attn.v_proj.weight"]
    twice = torch.cat([inputs, inputs], 1)
    return {
        "embed": state["model.embed_tokens.weight"][:8],
        "qkv": inputs @ torch.cat([query, key, value]).T,
        "o": inputs @ first["self_attn.o_proj.weight"].T,
        "gate_up": inputs @ torch.cat([gate, up]).T,
        "down": twice @ first["mlp.down_proj.weight"].T,
        "norm": first["input_layernorm.weight"],
        "head": inputs @ state["lm_head.weight"].T,
    }


def main(rank: int, world_size: int, directory: Path) -> None:
    """Take every version and compare the last."""
    os.environ["VLLM_DIST_IDENT"] = f"rank {rank}"  # names that differ keep vLLM from its own shared-memory group
    model, config = build_vllm_model(directory / "model", rank=rank, world_size=world_size)
    from safetensors.torch import load_file
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    from asyncrl.weight_sync.vllm_engine import FileTransferEngine, InitInfo

    engine = FileTransferEngine(None, config, torch.device("cpu"), model)
    engine.init_transfer_engine(InitInfo(run_id="ranks", version=0))
    manifests = json.loads((directory / "to_pull.json").read_text())
    reports = []
    for manifest in manifests:
        engine.start_weight_update()
        engine.receive_weights(engine.parse_update_info({"manifest": manifest}))
        engine.finish_weight_update()
        reports.append(engine.report())
    inputs = torch.randn((3, 128), generator=torch.Generator().manual_seed(1))
    found = layer_outputs(model, inputs, rank=rank, world_size=world_size)
    wanted = shares(load_file(manifest_from_json(manifests[-1]).location), inputs, rank, world_size)
    distances = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted if found[name] is not None}
    (directory / f"rank-{rank}.json").write_text(json.dumps({"reports": reports, "distances": distances}))
    engine.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
