"""Manifests, digests and names: what can be known to be wrong with an update before an engine is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.types import TensorEntry, WeightManifest
from asyncrl.weight_sync import combined_digest, manifest_from_json, manifest_to_json, read_manifest, write_manifest
from asyncrl.weight_sync.checksum import checksum
from asyncrl.weight_sync.names import check_names, checkpoint_shapes


def entry(name: str, shape: tuple[int, ...] = (2, 3), offset: int = 0, dtype: str = "F32") -> TensorEntry:
    """Return an entry of the right length."""
    count = {"F32": 4, "BF16": 2, "I32": 4}[dtype]
    for size in shape:
        count *= size
    return TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=count, digest="00")


def manifest(*entries: TensorEntry, version: int = 1) -> WeightManifest:
    """Return a manifest of entries laid end to end."""
    placed, offset = [], 0
    for each in entries:
        placed.append(replace(each, offset=offset))
        offset += each.num_bytes
    return WeightManifest(
        run_id="run",
        version=version,
        transport="filesystem",
        location="/nowhere",
        tensors=tuple(placed),
        digest=combined_digest(placed),
    )


def test_a_manifest_survives_being_written_and_read(tmp_path: Path) -> None:
    written = manifest(entry("a"), entry("b", (5,), dtype="BF16"))
    write_manifest(written, tmp_path / "m.json")
    assert read_manifest(tmp_path / "m.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_half_a_manifest_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(WeightSyncError, match=r"cannot read.*m\.json"):
        read_manifest(path)
    write_manifest(manifest(entry("a")), path)
    path.write_text(path.read_text()[:-5])
    with pytest.raises(WeightSyncError, match=r"m\.json is not whole"):
        read_manifest(path)
    path.write_text("[]")
    with pytest.raises(WeightSyncError, match="not an object"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": -1}, "version must be >= 0, got -1"),
        ({"version": "x"}, "not a weight manifest"),
        ({"tensors": []}, "lists no tensor"),
        ({"tensors": [["a", "F32", [2], 0, 8]]}, "not a weight manifest"),
        ({"tensors": [["a", "Q4", [2], 0, 8, "00"]]}, "a has the unknown dtype Q4"),
        ({"tensors": [["a", "F32", [2], 0, 9, "00"]]}, r"a F32\[2\] takes 8 bytes, not 9"),
        ({"tensors": [["a", "F32", [2], 0, 8, "00"], ["a", "F32", [2], 8, 8, "00"]]}, "lists a twice"),
        ({"tensors": [["a", "F32", [2], 0, 8, "00"], ["b", "F32", [2], 4, 8, "00"]]}, "b begins at 4, inside"),
        ({"digest": "0"}, "its own digest 0 does not fit"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        manifest_from_json({**manifest_to_json(manifest(entry("a"))), **change})


@pytest.mark.parametrize("field", ["run_id", "version", "transport", "location", "tensors", "digest"])
def test_a_manifest_without_a_field_is_refused_with_its_name(field: str) -> None:
    data = manifest_to_json(manifest(entry("a")))
    del data[field]
    with pytest.raises(WeightSyncError, match=field):
        manifest_from_json(data)


def test_a_manifest_is_plain_json() -> None:
    written = manifest(entry("a"))
    assert manifest_from_json(json.loads(json.dumps(manifest_to_json(written)))) == written


@given(st.binary(min_size=1, max_size=3000), st.data())
def test_one_changed_byte_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    other = draw.draw(st.integers(0, 255).filter(lambda byte: byte != data[place]))
    assert checksum(data[:place] + bytes([other]) + data[place + 1 :]) != checksum(data)


@given(st.binary(min_size=1200, max_size=5000), st.data())
def test_two_exchanged_words_change_the_digest(data: bytes, draw: st.DataObject) -> None:
    words = [data[start : start + 8] for start in range(0, len(data) // 8 * 8, 8)]
    first, second = draw.draw(st.integers(0, len(words) - 1)), draw.draw(st.integers(0, len(words) - 1))
    if words[first] == words[second]:
        return
    words[first], words[second] = words[second], words[first]
    assert checksum(b"".join(words) + data[len(words) * 8 :]) != checksum(data)


@given(st.binary(max_size=2000))
def test_length_is_part_of_the_digest(data: bytes) -> None:
    assert checksum(data + b"\0") != checksum(data)


def test_the_digest_does_not_depend_on_where_the_bytes_lie() -> None:
    data = bytes(range(256)) * 40
    assert checksum(memoryview(b"x" + data)[1:]) == checksum(data) == checksum(bytearray(data))


EXPECTED = {"a.weight": (2, 3), "b.weight": (4,)}


def test_exactly_the_expected_tensors_are_accepted() -> None:
    check_names(manifest(entry("b.weight", (4,)), entry("a.weight")), EXPECTED, tied_embeddings=False)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ([entry("a.weight")], "lacks b.weight"),
        ([entry("a.weight"), entry("b.weight", (4,)), entry("c.weight")], "has c.weight, which the engine's model"),
        ([entry("a.weight", (3, 2)), entry("b.weight", (4,))], r"a.weight .* has shape \[3, 2\], .* has \[2, 3\]"),
        ([entry("a.weight"), entry("b.weight", (4,), dtype="I32")], "b.weight .* is I32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(sent: list[TensorEntry], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        check_names(manifest(*sent), EXPECTED, tied_embeddings=False)


def test_a_tied_output_embedding_may_be_sent_or_left_out() -> None:
    head = entry("lm_head.weight", (4,))
    with_head = {**EXPECTED, "lm_head.weight": (4,)}
    rest = [entry("a.weight"), entry("b.weight", (4,))]
    check_names(manifest(*rest), with_head, tied_embeddings=True)
    check_names(manifest(*rest, head), EXPECTED, tied_embeddings=True)
    with pytest.raises(WeightSyncError, match="lacks lm_head"):
        check_names(manifest(*rest), with_head, tied_embeddings=False)
    with pytest.raises(WeightSyncError, match="has lm_head"):
        check_names(manifest(*rest, head), EXPECTED, tied_embeddings=False)


def test_a_model_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"no \*\.safetensors"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(WeightSyncError, match="cut short"):
        checkpoint_shapes(tmp_path)


@pytest.mark.slow
def test_the_plugin_is_cheap_for_those_who_use_vllm_for_something_else() -> None:
    """Importing it, which vLLM does in every process, brings in neither torch nor anything that is ours and heavy."""
    script = (
        "import sys; import asyncrl.weight_sync.plugin; "
        "print([name for name in ('torch', 'vllm', 'numpy', 'trio', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
