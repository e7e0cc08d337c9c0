"""What every transport that leaves a file promises: publisher to reader, whole, checked, and nothing left behind.

What all transports promise is in `test_weight_transports`.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import ConfigError, WeightMismatch, WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weight_sync import MANIFEST_SUFFIX, TRANSPORTS, read_manifest
from asyncrl.weight_sync.stale import remove_stale
from asyncrl.weight_sync.verify import verify
from asyncrl.weight_sync.weight_file import WeightFile, header_of


@pytest.fixture(params=["filesystem", "shared_memory"])
def transport(request: pytest.FixtureRequest) -> Any:
    """The publisher's class, by the name in the table."""
    module, _, name = TRANSPORTS[request.param].partition(":")
    return getattr(importlib.import_module(module), name)


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes, one not contiguous, one of odd length, one without elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(37, 16, generator=generator).to(torch.bfloat16),
        "norm.weight": torch.randn(7, generator=generator),
        "turned.weight": torch.randn(8, 24, generator=generator).t(),
        "scale": torch.randn((), generator=generator),
        "odd.weight": torch.randn(4099, generator=generator).to(torch.bfloat16),
        "nothing": torch.empty(0, 4),
    }


def digests_of(manifest: WeightManifest) -> tuple[str, ...]:
    return tuple(entry.digest for entry in manifest.tensors)


def read_back(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Return what lies in the file, by the manifest."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    with WeightFile(manifest) as weights:
        verify(manifest, weights.data)
        return {
            entry.name: torch.frombuffer(bytearray(weights.data(entry)), dtype=dtypes[entry.dtype]).reshape(entry.shape)
            if entry.num_bytes
            else torch.empty(entry.shape, dtype=dtypes[entry.dtype])
            for entry in manifest.tensors
        }


def test_what_is_published_is_what_is_read(transport: Any, tmp_path: Path) -> None:
    tensors = some_weights()
    with transport(run_id="run", directory=tmp_path) as publisher:
        manifest = publisher.publish(tensors, 3)
        found = read_back(manifest)
    assert manifest.version == 3
    assert manifest.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_the_manifest_beside_the_file_is_the_one_returned(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        manifest = publisher.publish(some_weights(), 1)
        assert read_manifest(manifest.location + MANIFEST_SUFFIX) == manifest


def test_any_safetensors_reader_reads_the_file(transport: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = some_weights()
    with transport(run_id="run", directory=tmp_path) as publisher:
        found = load_file(publisher.publish(tensors, 1).location)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_changed_byte_is_found_with_its_tensor(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        manifest = publisher.publish(some_weights(), 1)
        start = os.path.getsize(manifest.location) - manifest.num_bytes
        for entry in manifest.tensors:
            if not entry.num_bytes:
                continue
            with open(manifest.location, "r+b") as stream:
                stream.seek(start + entry.offset + entry.num_bytes // 2)
                byte = stream.read(1)
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte[0] ^ 1]))
            with WeightFile(manifest) as weights, pytest.raises(WeightMismatch, match=entry.name):
                verify(manifest, weights.data)
            with open(manifest.location, "r+b") as stream:
                stream.seek(start + entry.offset + entry.num_bytes // 2)
                stream.write(byte)
            with WeightFile(manifest) as weights:
                assert verify(manifest, weights.data) == digests_of(manifest)


def test_a_file_cut_short_is_found(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        manifest = publisher.publish(some_weights(), 1)
        for size in (os.path.getsize(manifest.location) - 1, 20, 3, 0):
            os.truncate(manifest.location, size)
            with pytest.raises(WeightSyncError, match=r"cut short|not whole|empty"):
                WeightFile(manifest)


def test_another_versions_file_is_not_taken_for_this_one(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        first = publisher.publish(some_weights(0), 1)
        second = publisher.publish(some_weights(1), 2)
        Path(first.location).replace(second.location)
        with WeightFile(second) as weights, pytest.raises(WeightSyncError, match=r"embed\.weight|norm\.weight"):
            verify(second, weights.data)


def test_a_file_without_one_of_the_manifests_tensors_is_refused_with_its_name(transport: Any, tmp_path: Path) -> None:
    tensors = some_weights()
    with transport(run_id="run", directory=tmp_path) as publisher:
        whole = publisher.publish(tensors, 1)
        del tensors["norm.weight"]
        lacking = publisher.publish(tensors, 2)
        Path(lacking.location).replace(whole.location)
        with pytest.raises(WeightSyncError, match=r"lacks norm\.weight"):
            WeightFile(whole)


def test_at_most_two_versions_are_kept_and_none_after_close(transport: Any, tmp_path: Path) -> None:
    publisher = transport(run_id="run", directory=tmp_path)
    for version in range(1, 6):
        newest = publisher.publish(some_weights(version), version)
        weights = [path for path in tmp_path.iterdir() if path.name.endswith(".weights")]
        assert len(weights) == min(version, 2)
        assert Path(newest.location) in weights
    publisher.close()
    assert list(tmp_path.iterdir()) == []
    publisher.close()
    with pytest.raises(WeightSyncError, match="closed"):
        publisher.publish(some_weights(), 9)


def changed_a_little(version: int) -> dict[str, torch.Tensor]:
    """Return weights of which one element of each tensor depends on the version."""
    tensors = some_weights()
    for name in ("embed.weight", "odd.weight"):
        tensors[name].view(-1)[version] = 9.0
    return tensors


def test_each_version_but_the_first_has_what_differs_beside_it(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path, delta=True) as publisher:
        manifests = [publisher.publish(changed_a_little(version), version) for version in (1, 2)]
        assert all(manifest.deltas for manifest in manifests)
        assert manifests[0].delta is None
        delta = manifests[1].delta
        assert delta is not None
        assert (delta.base_version, delta.base_digest) == (1, manifests[0].digest)
        assert delta.num_bytes == 2 * 2 * (4 + 2), "two elements of two tensors: a position and a value each"
        assert os.path.getsize(delta.location) < 1000
        assert read_manifest(manifests[1].location + MANIFEST_SUFFIX) == manifests[1]
        with WeightFile(delta) as parts:
            verify(manifests[1], parts.data, part=delta)


def test_two_versions_and_their_deltas_are_kept_and_nothing_after_close(transport: Any, tmp_path: Path) -> None:
    publisher = transport(run_id="run", directory=tmp_path, delta=True)
    for version in range(1, 6):
        publisher.publish(changed_a_little(version), version)
        endings = sorted(path.name.rpartition("-")[2].partition(".")[2] for path in tmp_path.iterdir())
        assert endings.count("weights") == endings.count("weights.manifest.json") == min(version, 2)
        assert endings.count("weights.delta") == (0, 1, 2, 2, 2)[version - 1]
        assert len(endings) == 1 + (2, 5, 6, 6, 6)[version - 1]
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_being_read_is_kept_and_the_other_one_goes(transport: Any, tmp_path: Path) -> None:
    """Kills: removing the older of two, whoever reads it; a third version on the disk."""
    with transport(run_id="run", directory=tmp_path) as publisher:
        read = publisher.publish(some_weights(1), 1)
        for version in (2, 3, 4):
            publisher.publish(some_weights(version), version, keep=[1])
            kept = {path.name for path in tmp_path.glob("*.weights")}
            assert kept == {"asyncrl-run-1.weights", f"asyncrl-run-{version}.weights"}
        read_back(read)
        publisher.publish(some_weights(5), 5, keep=[4])
        assert {path.name for path in tmp_path.glob("*.weights")} == {"asyncrl-run-4.weights", "asyncrl-run-5.weights"}
        with pytest.raises(WeightSyncError, match=r"versions 4, 5 are both being read: none may be removed"):
            publisher.publish(some_weights(6), 6, keep=[4, 5])


def test_an_engine_that_still_reads_a_removed_version_reads_it_whole(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        manifest = publisher.publish(some_weights(), 1)
        with WeightFile(manifest) as weights:
            for version in (2, 3, 4):
                publisher.publish(some_weights(version), version)
            assert not Path(manifest.location).exists()
            assert verify(manifest, weights.data) == digests_of(manifest)


def test_versions_only_grow(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        publisher.publish(some_weights(), 4)
        for version in (4, 3):
            with pytest.raises(WeightSyncError, match=f"version {version} was published after version 4"):
                publisher.publish(some_weights(), version)


def test_two_publishers_of_one_run_are_refused(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        kept = publisher.publish(some_weights(), 1)
        with pytest.raises(WeightSyncError, match="already has a living publisher"):
            transport(run_id="run", directory=tmp_path)
        with transport(run_id="other", directory=tmp_path):
            pass
        assert Path(kept.location).exists()


@pytest.mark.parametrize("run_id", ["", "-x", "a/b", "a b", "x" * 101])
def test_a_run_id_that_is_no_file_name_is_refused(transport: Any, tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        transport(run_id=run_id, directory=tmp_path)


def test_a_dtype_that_cannot_be_sent_is_refused_with_its_tensor(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        with pytest.raises(WeightSyncError, match=r"a\.weight.*complex64"):
            publisher.publish({"a.weight": torch.zeros(2, dtype=torch.complex64)}, 1)
        assert publisher.publish(some_weights(), 1).version == 1


@pytest.mark.slow
def test_a_directory_without_room_is_refused_and_nothing_is_left(transport: Any) -> None:
    """The limit on file size stands in for a full disk: both come back from the kernel in the middle of a write."""
    script = """
import resource, signal, sys, tempfile, pathlib, torch, importlib
from asyncrl.errors import WeightSyncError
module, _, name = sys.argv[1].partition(":")
publisher_class = getattr(importlib.import_module(module), name)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryDirectory() as directory:
    publisher = publisher_class(run_id="run", directory=directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        publisher.publish({"a.weight": torch.zeros(1_000_000)}, 1)
    except WeightSyncError as error:
        print(error)
    print(sorted(path.suffix for path in pathlib.Path(directory).iterdir()))
"""
    source = next(value for value in TRANSPORTS.values() if value.endswith(":" + transport.__name__))
    done = subprocess.run([sys.executable, "-c", script, source], capture_output=True, text=True, check=True)
    assert "cannot write the weights" in done.stdout
    assert done.stdout.splitlines()[-1] == "['.lock']"


@pytest.mark.slow
def test_a_version_whose_delta_finds_no_room_is_not_published_at_all(transport: Any) -> None:
    """Of a thousand small tensors a delta's header is longer than all that it saves, so it alone meets the limit."""
    script = """
import importlib, os, pathlib, resource, signal, sys, tempfile, torch
from asyncrl.errors import WeightSyncError
module, _, name = sys.argv[1].partition(":")
publisher_class = getattr(importlib.import_module(module), name)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with tempfile.TemporaryDirectory() as directory:
    publisher = publisher_class(run_id="run", directory=directory, delta=True)
    tensors = {f"layer.{place}.weight": torch.zeros(64, dtype=torch.bfloat16) for place in range(1000)}
    size = os.path.getsize(publisher.publish(tensors, 1).location)
    before = sorted(pathlib.Path(directory).iterdir())
    for tensor in tensors.values():
        tensor[::3] = 1.0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
    try:
        publisher.publish(tensors, 2)
    except WeightSyncError as error:
        print(error)
    print(sorted(pathlib.Path(directory).iterdir()) == before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(publisher.publish(tensors, 2).delta.base_version)
    publisher.close()
"""
    source = next(value for value in TRANSPORTS.values() if value.endswith(":" + transport.__name__))
    done = subprocess.run([sys.executable, "-c", script, source], capture_output=True, text=True, check=True)
    first, *rest = done.stdout.splitlines()
    assert "cannot write the weights" in first
    assert "-2.weights.delta" in first
    assert rest == ["True", "1"]


def test_room_is_checked_before_anything_is_written(transport: Any, tmp_path: Path) -> None:
    giant = torch.empty(1, dtype=torch.float32).expand(2**40)
    with transport(run_id="run", directory=tmp_path) as publisher:
        with pytest.raises(WeightSyncError, match=r"no room for the weights.*4194304 MiB"):
            publisher.publish({"a.weight": giant}, 1)
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_files_of_a_killed_publisher_are_removed_at_the_next_start_and_no_others(
    transport: Any, tmp_path: Path
) -> None:
    script = """
import importlib, os, sys, torch
module, _, name = sys.argv[1].partition(":")
publisher = getattr(importlib.import_module(module), name)(run_id="killed", directory=sys.argv[2], delta=True)
publisher.publish({"a.weight": torch.zeros(10)}, 1)
publisher.publish({"a.weight": torch.zeros(10)}, 2)
print("ready", flush=True)
sys.stdin.read()
"""
    source = next(value for value in TRANSPORTS.values() if value.endswith(":" + transport.__name__))
    (tmp_path / "unrelated").write_text("kept")
    with transport(run_id="living", directory=tmp_path) as living:
        kept = living.publish(some_weights(), 1)
        argv = [sys.executable, "-c", script, source, str(tmp_path)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            assert remove_stale(tmp_path) == ()
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert len([path for path in tmp_path.iterdir() if "killed" in path.name]) == 6
        with transport(run_id="next", directory=tmp_path):
            assert not [path for path in tmp_path.iterdir() if "killed" in path.name]
        with WeightFile(kept) as weights:
            verify(kept, weights.data)
    assert [path.name for path in tmp_path.iterdir()] == ["unrelated"]


def test_a_header_is_read_without_the_weights(transport: Any, tmp_path: Path) -> None:
    with transport(run_id="run", directory=tmp_path) as publisher:
        header = header_of(publisher.publish(some_weights(), 1).location)
    assert header["embed.weight"]["shape"] == [37, 16]
    assert "__metadata__" not in header
