"""An FSDP2 learner's shards become one version: gathered one by one, in the engine's dtype, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from tiny_model import build_tiny_model, state_of

from asyncrl.weight_sync import manifest_from_json


@pytest.mark.slow
def test_shards_are_published_whole_and_no_more_than_one_tensor_is_gathered_at_a_time(tmp_path: Path) -> None:
    """Kills: a state dict of the whole model, float32 on the wire, a tensor kept while the next one is gathered."""
    from safetensors.torch import load_file

    wanted = state_of(build_tiny_model(tmp_path / "model"))
    publishing, other = run_ranks("rank_of_sharded_publish.py", tmp_path)
    manifest = manifest_from_json(publishing["manifest"])
    found = load_file(manifest.location)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    largest = max(entry.num_bytes for entry in manifest.tensors)
    assert manifest.num_bytes > 8 * largest
    for rank in (publishing, other):
        assert rank["gathers"] == 2 * len(wanted)
        assert rank["peak_bytes"] == largest
        assert rank["left"] == 0
