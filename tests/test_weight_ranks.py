"""A tensor-parallel engine: every rank reads the version by itself and takes its share of each tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from tiny_model import build_tiny_model, state_of

from asyncrl.weight_sync import manifest_to_json
from asyncrl.weight_sync.filesystem import FilesystemPublisher
from asyncrl.weight_sync.reports import check_reports

pytestmark = pytest.mark.engine


def test_each_rank_takes_its_share_of_a_whole_version_and_of_a_delta(tmp_path: Path) -> None:
    """Kills: every rank the first one's rows, a delta put in place on one rank alone."""
    state = state_of(build_tiny_model(tmp_path / "model"))
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in state.items()}
    with FilesystemPublisher(run_id="ranks", directory=tmp_path / "published", delta=True) as publisher:
        first = publisher.publish(state, 1)
        for tensor in state.values():
            tensor.view(-1)[::7] += 0.3
        second = publisher.publish(state, 2)
        (tmp_path / "to_pull.json").write_text(json.dumps([manifest_to_json(first), manifest_to_json(second)]))
        ranks = run_ranks("rank_of_vllm_engine.py", tmp_path)
    assert [[report["encoding"] for report in rank["reports"]] for rank in ranks] == [["full", "delta"]] * 2
    check_reports(second, [rank["reports"][-1] for rank in ranks], "engine")
    for number, rank in enumerate(ranks):
        assert rank["distances"].keys() >= {"embed", "qkv", "o", "gate_up", "down", "norm"}
        assert max(rank["distances"].values()) < 1e-4, (number, rank["distances"])
    assert any("head" in rank["distances"] for rank in ranks)
