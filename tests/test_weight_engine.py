"""Our half inside vLLM's worker, with vLLM's real model and loader in this process: what it takes and refuses."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import build_tiny_model, state_of
from vllm_model import INPUTS, assert_holds, build_vllm_model, layer_outputs, wanted_outputs

from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.types import TensorEntry, Verification, WeightManifest
from asyncrl.weight_sync import combined_digest, manifest_to_json
from asyncrl.weight_sync.reports import check_reports
from asyncrl.weight_sync.shared_memory import SharedMemoryPublisher

pytestmark = pytest.mark.engine

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


@dataclass
class Rig:
    """A worker's engine, a publisher, and the newest version's weights."""

    engine: Any
    model: Any
    publisher: SharedMemoryPublisher
    state: dict[str, torch.Tensor]
    version: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)

    def publish(self, *, share: float = 0.02) -> WeightManifest:
        """Publish a version that differs from the one before in so large a share of the elements."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for name, tensor in self.state.items():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            self.state[name] = torch.where(chosen, torch.randn(tensor.shape, generator=generator) * 0.1, tensor)
        return self.publisher.publish(self.state, self.version)

    def pull(self, manifest: WeightManifest) -> dict[str, Any]:
        """Let the engine take a version as vLLM's worker does, and return its report."""
        self.engine.start_weight_update()
        self.engine.receive_weights(self.engine.parse_update_info({"manifest": manifest_to_json(manifest)}))
        self.engine.finish_weight_update()
        report: dict[str, Any] = self.engine.report()
        return report


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    directory = build_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    return (*build_vllm_model(directory), directory)


@pytest.fixture(params=list(Verification))
def rig(request: pytest.FixtureRequest, built: tuple[Any, Any, Path]) -> Iterator[Rig]:
    from asyncrl.weight_sync.vllm_engine import FileTransferEngine, InitInfo

    model, config, directory = built
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    engine = FileTransferEngine(None, config, torch.device("cpu"), model)
    engine.init_transfer_engine(InitInfo(run_id=run_id, version=0))
    with SharedMemoryPublisher(run_id=run_id, delta=True, verification=request.param) as publisher:
        yield Rig(engine=engine, model=model, publisher=publisher, state=state_of(directory))


def test_deltas_and_whole_versions_load_the_same_weights(rig: Rig) -> None:
    reports = []
    for _ in range(3):
        manifest = rig.publish()
        reports.append(rig.pull(manifest))
        check_reports(manifest, reports[-1:], "engine")
        assert_holds(rig.model, rig.state)
    rig.publish()
    manifest = rig.publish()
    reports.append(rig.pull(manifest))
    assert_holds(rig.model, rig.state)
    assert [(report["encoding"], report["chain_break"]) for report in reports] == [
        ("full", "no_copy"),
        ("delta", ""),
        ("delta", ""),
        ("full", "other_base"),
    ]
    assert [report["placed"] for report in reports] == ["exchange", "values", "values", "exchange"]
    assert reports[0]["num_bytes"] == manifest.num_bytes > 8 * reports[1]["num_bytes"] > 0


def test_a_delta_from_a_version_that_was_read_and_abandoned_is_not_put_on_top_of_an_older_one(rig: Rig) -> None:
    """Kills: values of 2 -> 3 written into a model that holds 1, because the copy of what was read holds 2."""
    for _ in range(2):
        rig.pull(rig.publish())
    held = dict(rig.state)
    rig.engine.start_weight_update()
    rig.engine.receive_weights(rig.engine.parse_update_info({"manifest": manifest_to_json(rig.publish())}))
    assert_holds(rig.model, held)
    with pytest.raises(WeightSyncError, match="abandoned"):
        rig.engine.receive_weights(rig.engine.parse_update_info({"abandon": True}))
    report = rig.pull(rig.publish())
    assert_holds(rig.model, rig.state)
    assert report["placed"] == "exchange"
    report = rig.pull(rig.publish())
    assert_holds(rig.model, rig.state)
    assert report["placed"] == "values"


def test_an_update_tells_how_far_it_is_and_what_was_wrong_with_it(rig: Rig) -> None:
    def begin(manifest: WeightManifest) -> None:
        rig.engine.start_weight_update()
        rig.engine.receive_weights(rig.engine.parse_update_info({"manifest": manifest_to_json(manifest)}))

    manifest = rig.publish()
    begin(manifest)
    progress = rig.engine.progress(10.0)
    assert (progress.num_bytes, progress.is_over, progress.has_failed) == (manifest.num_bytes, True, False)
    rig.engine.finish_weight_update()
    manifest = rig.publish()
    write(manifest, UP, bytes(4))
    begin(replace(manifest, delta=None))
    progress = rig.engine.progress(10.0)
    assert (progress.num_bytes, progress.is_over, progress.has_failed) == (0, True, True)
    with pytest.raises(WeightMismatch) as caught:
        rig.engine.receive_weights(rig.engine.parse_update_info({}))
    assert caught.value.tensor == UP
    assert rig.engine.progress(0.0).has_failed, "there is no update any more"


def test_a_delta_is_placed_value_by_value_however_it_is_encoded(rig: Rig) -> None:
    rig.pull(rig.publish())
    found = set()
    for share in (0.0005, 0.2):
        rig.state[UP] = torch.randn(rig.state[UP].shape, generator=torch.Generator().manual_seed(int(1 / share)))
        manifest = rig.publish(share=share)
        assert manifest.delta is not None
        found |= {part.name.rpartition("/")[2] for part in manifest.delta.tensors}
        assert rig.pull(manifest)["placed"] == "values"
        assert_holds(rig.model, rig.state)
    assert found == {"positions", "mask", "values", "whole"}


def test_a_report_names_the_first_tensor_that_is_not_the_manifests(rig: Rig) -> None:
    manifest = rig.publish()
    report = rig.pull(manifest)
    place = next(place for place, entry in enumerate(manifest.tensors) if entry.name == UP)
    digests = [*report["digests"]]
    digests[place] = "0"
    with pytest.raises(WeightMismatch, match=rf"engine 0 rank 1 says .*{UP} is the first that differs") as caught:
        check_reports(manifest, [report, {**report, "digest": "0", "digests": digests}], "engine 0")
    assert caught.value.tensor == UP
    with pytest.raises(WeightMismatch, match="rank 0 says that it holds") as caught:
        check_reports(manifest, [{**report, "version": 7}], "engine 0")
    assert caught.value.tensor == ""


def place_of(manifest: WeightManifest, name: str) -> tuple[TensorEntry, int]:
    """Return a tensor's entry and where its bytes begin in the file."""
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    return entry, os.path.getsize(manifest.location) - manifest.num_bytes + entry.offset


def read(manifest: WeightManifest, name: str) -> bytes:
    entry, start = place_of(manifest, name)
    return Path(manifest.location).read_bytes()[start : start + entry.num_bytes]


def write(manifest: WeightManifest, name: str, data: bytes) -> None:
    with open(manifest.location, "r+b") as stream:
        stream.seek(place_of(manifest, name)[1])
        stream.write(data)


def dropped(rig: Rig, before: WeightManifest, manifest: WeightManifest) -> WeightManifest:
    entries = tuple(entry for entry in manifest.tensors if entry.name != UP)
    return replace(manifest, tensors=entries, digest=combined_digest(entries), delta=None)


def swapped(rig: Rig, before: WeightManifest, manifest: WeightManifest) -> WeightManifest:
    gate, up = read(manifest, GATE), read(manifest, UP)
    write(manifest, UP, gate)
    write(manifest, GATE, up)
    return replace(manifest, delta=None)


def truncated(rig: Rig, before: WeightManifest, manifest: WeightManifest) -> WeightManifest:
    entry, start = place_of(manifest, UP)
    os.truncate(manifest.location, start + entry.num_bytes // 2)
    return replace(manifest, delta=None)


def stale(rig: Rig, before: WeightManifest, manifest: WeightManifest) -> WeightManifest:
    write(manifest, UP, read(before, UP))
    return replace(manifest, delta=None)


def stale_in_the_delta(rig: Rig, before: WeightManifest, manifest: WeightManifest) -> WeightManifest:
    """The delta has nothing of one tensor, so that the base's bytes stay."""
    assert manifest.delta is not None
    renamed = manifest.delta.location + ".cut"
    os.rename(manifest.delta.location, renamed)
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(renamed, "pt") as parts:
        kept = {name: parts.get_tensor(name) for name in parts.keys() if not name.startswith(UP)}  # noqa: SIM118
    save_file(kept, manifest.delta.location)
    from asyncrl.weight_sync.weight_file import header_of

    header = header_of(manifest.delta.location)
    known = {entry.name: entry for entry in manifest.delta.tensors}
    entries = tuple(
        replace(known[name], offset=header[name]["data_offsets"][0])
        for name in sorted(header, key=lambda name: header[name]["data_offsets"][0])
    )
    os.unlink(renamed)
    return replace(manifest, delta=replace(manifest.delta, tensors=entries, digest=combined_digest(entries)))


@pytest.mark.parametrize(
    ("damage", "tensor"),
    [(dropped, UP), (swapped, GATE), (truncated, UP), (stale, UP), (stale_in_the_delta, UP)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_dropped_swapped_truncated_or_stale_tensor_is_named_before_the_model_is_touched(
    rig: Rig, damage: Callable[[Rig, WeightManifest, WeightManifest], WeightManifest], tensor: str
) -> None:
    before = rig.publish()
    rig.pull(before)
    held = dict(rig.state)
    manifest = rig.publish()
    whole = Path(manifest.location).read_bytes()
    with pytest.raises(WeightMismatch, match=r"version 2") as caught:
        rig.pull(damage(rig, before, manifest))
    # the order of the file decides which of two exchanged tensors comes first
    assert caught.value.tensor in ({GATE, UP} if damage is swapped else {tensor})
    report = rig.engine.report()
    assert (report["version"], report["broken"], report["mismatched"]) == (1, "", caught.value.tensor)
    assert_holds(rig.model, held)
    Path(manifest.location).write_bytes(whole)
    again = rig.pull(manifest)
    assert (again["version"], again["mismatched"]) == (2, "")
    assert_holds(rig.model, rig.state)


def test_master_weights_of_float32_become_the_engines_dtype(tmp_path: Path) -> None:
    """What the loader makes of float32 is what rounding to the engine's dtype makes of it."""
    from asyncrl.weight_sync.vllm_engine import FileTransferEngine, InitInfo

    directory = build_tiny_model(tmp_path / "model", tied=False)
    model, config = build_vllm_model(directory, dtype="bfloat16")
    engine = FileTransferEngine(None, config, torch.device("cpu"), model)
    engine.init_transfer_engine(InitInfo(run_id="cast", version=0))
    with SharedMemoryPublisher(run_id="cast", directory=tmp_path) as publisher:
        rig = Rig(engine=engine, model=model, publisher=publisher, state=state_of(directory))
        manifest = rig.publish(share=1.0)
        assert {entry.dtype for entry in manifest.tensors} == {"F32"}
        rig.pull(manifest)
    found = layer_outputs(model, INPUTS.bfloat16())
    for name, tensor in rig.state.items():
        if name == "model.embed_tokens.weight":
            assert torch.equal(found["embed"], tensor[:8].bfloat16())
        if name == "model.layers.0.input_layernorm.weight":
            assert torch.equal(found["norm"], tensor.bfloat16())
    rounded = {name: tensor.bfloat16().float() for name, tensor in rig.state.items()}
    for name, wanted in wanted_outputs(rounded, INPUTS.bfloat16().float()).items():
        torch.testing.assert_close(found[name].float(), wanted, atol=2e-2, rtol=2e-2)
