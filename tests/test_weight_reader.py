"""How a worker comes by a version: by its delta where it holds exactly the base, else whole, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.types import TensorEntry, Verification, WeightDelta, WeightManifest
from asyncrl.weight_sync import combined_digest
from asyncrl.weight_sync.reader import ChainBreak, Reader
from asyncrl.weight_sync.shared_memory import SharedMemoryPublisher


class Source:
    """A publisher of versions of which each differs from the one before in a few elements of every tensor."""

    def __init__(self, publisher: SharedMemoryPublisher) -> None:
        self.publisher = publisher
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(64, 33, generator=generator).to(torch.bfloat16) for name in ("a.weight", "b.weight")
        }
        self.version = 0

    def next(self, *, share: float = 0.01) -> WeightManifest:
        """Change so large a share of every tensor and publish."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for name, tensor in self.tensors.items():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            self.tensors[name] = torch.where(chosen, tensor + 1, tensor)
        return self.publisher.publish(self.tensors, self.version)

    def check(self, reader: Reader, manifest: WeightManifest) -> tuple[str, ChainBreak | None, int]:
        """Read a version, compare every byte with the newest, return how it came."""
        with reader.open(manifest) as version:
            for entry in manifest.tensors:
                found = np.frombuffer(version.data(entry), np.int16)
                assert np.array_equal(found, self.tensors[entry.name].view(torch.int16).numpy().reshape(-1))
            assert version.digest == manifest.digest
            return version.encoding, version.chain_break, version.num_bytes


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with SharedMemoryPublisher(run_id="run", directory=tmp_path, delta=True) as publisher:
        yield Source(publisher)


def delta_of(manifest: WeightManifest) -> WeightDelta:
    assert manifest.delta is not None
    return manifest.delta


def test_a_worker_that_holds_the_base_reads_only_what_changed(source: Source, tmp_path: Path) -> None:
    reader = Reader()
    first, away = source.next(), tmp_path / "away"
    assert source.check(reader, first) == ("full", ChainBreak.NO_COPY, first.num_bytes)
    for _ in range(3):
        manifest = source.next()
        os.rename(manifest.location, away)  # whoever reads it is found out
        assert source.check(reader, manifest) == ("delta", None, delta_of(manifest).num_bytes)
        os.rename(away, manifest.location)
        assert delta_of(manifest).num_bytes < manifest.num_bytes / 10


def test_a_worker_that_skipped_a_version_reads_the_whole_one_and_is_in_the_chain_again(source: Source) -> None:
    reader = Reader()
    source.check(reader, source.next())
    source.next()
    assert source.check(reader, source.next())[:2] == ("full", ChainBreak.OTHER_BASE)
    assert source.check(reader, source.next())[:2] == ("delta", None)


def test_a_worker_that_joins_late_or_was_restarted_reads_the_whole_version(source: Source) -> None:
    source.next()
    source.next()
    assert source.check(Reader(), source.next())[:2] == ("full", ChainBreak.NO_COPY)


def test_a_version_that_is_sent_again_is_read_whole(source: Source) -> None:
    """Whoever sends it again mistrusts what the worker has made of it."""
    reader = Reader()
    source.check(reader, source.next())
    manifest = source.next()
    assert source.check(reader, manifest)[0] == "delta"
    assert source.check(reader, manifest)[:2] == ("full", ChainBreak.OTHER_BASE)


def test_a_base_of_another_digest_or_run_is_no_base(source: Source) -> None:
    for change in ({"digest": "0"}, {"run_id": "other"}):
        reader = Reader()
        source.check(reader, source.next())
        manifest = source.next()
        if "digest" in change:
            manifest = replace(manifest, delta=replace(delta_of(manifest), base_digest="0"))
        else:
            manifest = replace(manifest, run_id="other")
        assert source.check(reader, manifest)[:2] == ("full", ChainBreak.OTHER_BASE)


def test_a_delta_that_is_gone_costs_a_whole_read(source: Source) -> None:
    reader = Reader()
    source.check(reader, source.next())
    manifest = source.next()
    os.unlink(delta_of(manifest).location)
    assert source.check(reader, manifest)[:2] == ("full", ChainBreak.DELTA_GONE)


def test_where_almost_everything_has_changed_there_is_no_delta(source: Source) -> None:
    reader = Reader()
    source.check(reader, source.next())
    manifest = source.next(share=1.0)
    assert manifest.delta is None
    assert source.check(reader, manifest)[:2] == ("full", ChainBreak.NO_DELTA)
    assert len(os.listdir(source.publisher.directory)) == 1 + 2 + 2, "a lock, and two versions without deltas"


def test_nothing_changed_is_an_empty_delta(source: Source) -> None:
    reader = Reader()
    source.check(reader, source.next())
    assert source.check(reader, source.next(share=0.0)) == ("delta", None, 0)


@pytest.mark.parametrize("verification", list(Verification))
def test_a_wrong_byte_in_a_delta_is_named_and_sending_it_again_reads_the_whole_version(
    tmp_path: Path, verification: Verification
) -> None:
    with SharedMemoryPublisher(run_id="run", directory=tmp_path, delta=True, verification=verification) as publisher:
        source, reader = Source(publisher), Reader()
        source.check(reader, source.next())
        manifest = source.next()
        with open(delta_of(manifest).location, "r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x7e")
        with pytest.raises(WeightMismatch, match=r"b\.weight/values of version 2 has digest") as caught:
            source.check(reader, manifest)
        assert caught.value.tensor == "b.weight"
        assert source.check(reader, manifest)[:2] == ("full", ChainBreak.MISMATCH)


def test_a_delta_that_is_whole_and_leads_elsewhere_is_found_by_what_it_makes(source: Source) -> None:
    """The parts of two tensors exchanged, with digests that fit: only the result can tell."""
    reader = Reader()
    source.check(reader, source.next())
    manifest = source.next()
    delta = delta_of(manifest)
    names = {"a.weight": "b.weight", "b.weight": "a.weight"}
    swapped = tuple(
        replace(part, name=names[part.name.rpartition("/")[0]] + "/" + part.name.rpartition("/")[2])
        for part in delta.tensors
    )
    wrong = replace(manifest, delta=replace(delta, tensors=swapped, digest=combined_digest(swapped)))
    header = Path(delta.location)
    text = header.read_bytes().replace(b"a.weight/", b"c.weight/").replace(b"b.weight/", b"a.weight/")
    header.write_bytes(text.replace(b"c.weight/", b"b.weight/"))
    with pytest.raises(WeightMismatch, match=r"\.weight of version 2 has digest"):
        source.check(reader, wrong)
    assert source.check(reader, manifest)[:2] == ("full", ChainBreak.MISMATCH)


def test_no_copy_is_kept_where_no_deltas_are_sent(tmp_path: Path) -> None:
    with SharedMemoryPublisher(run_id="run", directory=tmp_path) as publisher:
        source, reader = Source(publisher), Reader()
        for _ in range(2):
            manifest = source.next()
            assert manifest.delta is None
            assert source.check(reader, manifest) == ("full", None, manifest.num_bytes)
        assert reader.copy_bytes == 0


def test_the_copy_takes_the_bytes_of_one_version(source: Source) -> None:
    reader = Reader()
    for _ in range(3):
        source.check(reader, source.next())
    assert reader.copy_bytes == sum(tensor.nbytes for tensor in source.tensors.values())


def test_a_load_that_fails_takes_the_copy_with_it(source: Source) -> None:
    reader = Reader()
    source.check(reader, source.next())
    manifest = source.next()
    with pytest.raises(WeightSyncError, match="loader"), reader.open(manifest):
        raise WeightSyncError("the loader failed")
    assert reader.copy_bytes == 0
    assert source.check(reader, manifest)[:2] == ("full", ChainBreak.NO_COPY)


def test_a_version_of_another_layout_starts_a_new_chain(source: Source) -> None:
    reader = Reader()
    source.check(reader, source.next())
    source.tensors["c.weight"] = torch.ones(5, dtype=torch.bfloat16)
    manifest = source.next()
    assert manifest.delta is None
    assert source.check(reader, manifest)[:2] == ("full", ChainBreak.NO_DELTA)
    assert source.check(reader, source.next())[0] == "delta"


def entry_named(manifest: WeightManifest, name: str) -> TensorEntry:
    return next(entry for entry in manifest.tensors if entry.name == name)


@pytest.mark.parametrize("verification", list(Verification))
def test_exchanged_and_stale_bytes_are_found_in_a_whole_version(tmp_path: Path, verification: Verification) -> None:
    with SharedMemoryPublisher(run_id="run", directory=tmp_path, verification=verification) as publisher:
        source = Source(publisher)
        before, manifest = source.next(), source.next(share=0.5)
        raw = bytearray(Path(manifest.location).read_bytes())
        start = len(raw) - manifest.num_bytes
        a, b = (entry_named(manifest, name) for name in ("a.weight", "b.weight"))

        def put(entry: TensorEntry, data: bytes) -> None:
            raw[start + entry.offset : start + entry.offset + entry.num_bytes] = data
            Path(manifest.location).write_bytes(raw)

        right = {entry.name: bytes(raw[start + entry.offset :][: entry.num_bytes]) for entry in (a, b)}
        put(a, right["b.weight"])
        put(b, right["a.weight"])
        with pytest.raises(WeightMismatch) as caught:
            source.check(Reader(), manifest)
        assert caught.value.tensor == "a.weight"
        put(a, right["a.weight"])
        put(b, Path(before.location).read_bytes()[start + b.offset :][: b.num_bytes])
        with pytest.raises(WeightMismatch) as caught:
            source.check(Reader(), manifest)
        assert caught.value.tensor == "b.weight"
