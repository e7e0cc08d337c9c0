"""What every transport promises, from the learner's tensors to what vLLM's real model computes with. No server, no GPU.

`nccl` runs vLLM's own trainer and worker engines over a fake communicator (`fake_nccl`).
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_nccl import LocalEngines, without_cuda
from tiny_model import build_tiny_model, state_of
from vllm_model import assert_holds, build_vllm_model

from asyncrl.errors import ConfigError, WeightMismatch, WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weight_sync import TRANSPORTS, manifest_to_json
from asyncrl.weight_sync.reports import check_reports
from asyncrl.weight_sync.settings import WeightSyncSettings

pytestmark = pytest.mark.engine

UP = "model.layers.0.mlp.up_proj.weight"


@dataclass
class Way:
    """A publisher, an engine, and how a version that is published gets from the one to the other."""

    publisher: Any
    engine: Any
    state: dict[str, torch.Tensor]
    spoil: Callable[[], None]
    """Have one byte of UP changed on the way of the next version."""
    engines: LocalEngines | None = None
    """What was asked of the engine, where the publisher asks."""
    spoiled: bool = False

    def send(self, tensors: dict[str, torch.Tensor], version: int) -> WeightManifest:
        """Publish, and let the engine pull where it is not sent."""
        manifest: WeightManifest = self.publisher.publish(tensors, version)
        if self.engines is None:
            if self.spoiled:
                with open(manifest.location, "r+b") as stream:
                    entry = next(entry for entry in manifest.tensors if entry.name == UP)
                    stream.seek(Path(manifest.location).stat().st_size - manifest.num_bytes + entry.offset)
                    stream.write(b"\x11")
            self.engine.start_weight_update()
            self.engine.receive_weights(self.engine.parse_update_info({"manifest": manifest_to_json(manifest)}))
            self.engine.finish_weight_update()
        return manifest

    def another(self, seed: int) -> dict[str, torch.Tensor]:
        """Return weights that are unlike any other seed's."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in self.state.items()}


@pytest.fixture(params=sorted(TRANSPORTS))
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    directory = build_tiny_model(tmp_path / "model")
    model, config = build_vllm_model(directory)
    module, _, name = TRANSPORTS[request.param].partition(":")
    make = getattr(importlib.import_module(module), name)
    run_id, cpu = f"test-{uuid.uuid4().hex[:8]}", torch.device("cpu")
    if request.param == "nccl":
        from asyncrl.weight_sync.vllm_nccl import NcclTransferEngine

        communicator = without_cuda(monkeypatch)
        engines = LocalEngines(NcclTransferEngine(None, config, cpu, model))
        publisher = make(run_id=run_id, engines=engines, num_workers=1, port=1, packed=False)

        def spoil() -> None:
            shape = state_of(directory)[UP].shape
            spoilt: list[torch.Tensor] = []

            def in_transit(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.shape == shape and len(spoilt) < 2:  # gate, then up
                    spoilt.append(tensor)
                    if len(spoilt) == 2:
                        tensor.view(torch.uint8).view(-1)[0] ^= 1
                return tensor

            communicator.in_transit = in_transit

        with publisher:
            yield Way(publisher, engines.engine, state_of(directory), spoil, engines)
        return
    from asyncrl.weight_sync.vllm_engine import FileTransferEngine, InitInfo

    engine = FileTransferEngine(None, config, cpu, model)
    engine.init_transfer_engine(InitInfo(run_id=run_id, version=0))
    with make(run_id=run_id, directory=tmp_path / "published") as publisher:
        ready = Way(publisher, engine, state_of(directory), lambda: setattr(ready, "spoiled", True))
        yield ready
    engine.shutdown()


def test_what_is_published_is_what_the_model_computes_with(way: Way) -> None:
    for version in (1, 5):
        tensors = way.another(version)
        manifest = way.send(tensors, version)
        assert manifest.version == version
        assert manifest.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        check_reports(manifest, [way.engine.report()], "engine")
        assert_holds(way.engine.model, tensors)
    if way.engines is not None:
        once = ["pause", "start", "update", "finish", "reports", "resume"]
        assert way.engines.calls == ["init", *once, *once]
        assert way.engines.label == "5"


def test_versions_only_grow_and_a_closed_publisher_is_closed(way: Way) -> None:
    way.send(way.another(4), 4)
    for version in (4, 3):
        with pytest.raises(WeightSyncError, match=f"version {version} was published after version 4"):
            way.publisher.publish(way.another(1), version)
    way.publisher.close()
    way.publisher.close()
    with pytest.raises(WeightSyncError, match="closed"):
        way.publisher.publish(way.another(9), 9)


def test_a_dtype_that_cannot_be_sent_is_refused_with_its_tensor_and_the_next_version_arrives(way: Way) -> None:
    odd = {**way.another(1), UP: torch.zeros(way.state[UP].shape, dtype=torch.complex64)}
    with pytest.raises(WeightSyncError, match=rf"{UP}.*complex64"):
        way.publisher.publish(odd, 1)
    tensors = way.another(2)
    way.send(tensors, 2)
    assert_holds(way.engine.model, tensors)


@pytest.mark.parametrize("kind", ["lacking", "unknown", "misshapen"])
def test_a_version_that_does_not_fit_the_model_is_refused_by_name_before_it_is_touched(way: Way, kind: str) -> None:
    held = way.another(1)
    way.send(held, 1)
    wrong = way.another(2)
    name = "model.extra.weight" if kind == "unknown" else UP
    if kind == "lacking":
        del wrong[UP]
    else:
        wrong[name] = torch.zeros(3, 5)
    with pytest.raises(WeightMismatch, match=r"version 2") as caught:
        way.send(wrong, 2)
    assert caught.value.tensor == name
    report = way.engine.report()
    assert (report["version"], report["broken"]) == (1, "")
    assert_holds(way.engine.model, held)


def test_a_byte_that_changed_on_the_way_is_found_with_its_tensor(way: Way) -> None:
    way.send(way.another(1), 1)
    way.spoil()
    with pytest.raises(WeightMismatch) as caught:
        way.send(way.another(2), 2)
    assert caught.value.tensor == UP
    if way.engines is not None:
        assert way.engines.calls[-2:] == ["finish", "reports"], "an engine with other weights is not resumed"


def test_a_transport_that_was_never_tried_is_not_offered_to_runs() -> None:
    with pytest.raises(ConfigError, match=r"transport = 'nccl' is not offered to runs .*check_nccl"):
        WeightSyncSettings(transport="nccl")


def test_the_check_on_gpus_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncrl.weight_sync import check_nccl

    assert check_nccl.main([str(tmp_path)]) == 2
    assert "no *.safetensors file" in capsys.readouterr().err
    if torch.cuda.device_count() < 2:
        assert check_nccl.main([str(build_tiny_model(tmp_path / "model"))]) == 2
        assert "two, and torch sees" in capsys.readouterr().err


def test_the_ranks_of_several_servers_follow_each_other_and_every_server_hears_everything() -> None:
    from asyncrl.weight_sync.nccl import HttpEngines

    heard: dict[str, list[tuple[str, bytes]]] = {"a": [], "b": []}

    def answer(request: httpx.Request) -> httpx.Response:
        heard[request.url.host].append((request.url.raw_path.decode(), request.content))
        sizes = {"a": 2, "b": 4}
        if request.url.path == "/get_world_size":
            return httpx.Response(200, json={"world_size": sizes[request.url.host]})
        if request.url.path == "/collective_rpc":
            return httpx.Response(200, json={"results": [request.url.host] * sizes[request.url.host]})
        if request.url.path == "/resume" and request.url.host == "b":
            return httpx.Response(500, text="no")
        return httpx.Response(200, json={})

    engines = HttpEngines(["http://a/", "http://b"], transport=httpx.MockTransport(answer))
    assert engines.num_workers() == 6
    engines.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    offsets = {host: b'"rank_offset":3' in heard[host][-1][1] for host in heard}
    assert offsets == {"a": False, "b": True}
    engines.pause()
    engines.finish_weight_update("3")
    assert [path for path, _ in heard["a"]][-2:] == ["/pause?mode=keep&clear_cache=false", "/finish_weight_update"]
    assert engines.reports() == ["a"] * 2 + ["b"] * 4
    with pytest.raises(WeightSyncError, match="http://b/resume answers 500: no"):
        engines.resume()
    engines.close()
