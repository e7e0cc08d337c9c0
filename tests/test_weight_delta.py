"""What changed between two versions: the smallest encoding, and what it makes of the base, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightMismatch
from asyncrl.types import TensorEntry, WeightDelta
from asyncrl.weight_sync.delta import DeltaWriter, apply_delta
from asyncrl.weight_sync.weight_file import layout


class Bytes:
    """Tensors' bytes by the entries' offsets."""

    def __init__(self, data: bytes) -> None:
        self.raw = bytearray(data)

    def data(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one entry, writable."""
        return memoryview(self.raw)[entry.offset : entry.offset + entry.num_bytes]


def encode(entries: tuple[TensorEntry, ...], old: Bytes, new: Bytes) -> tuple[WeightDelta, Bytes]:
    """Return the delta and the bytes of its parts."""
    writer = DeltaWriter(limit=2**40)
    for entry in entries:
        writer.add(entry, old.data(entry), new.data(entry))
    buffers = [bytes(buffer) for buffer in writer.buffers()]
    assert [len(buffer) for buffer in buffers] == [part.num_bytes for part in writer.parts]
    assert writer.num_bytes == sum(len(buffer) for buffer in buffers)
    delta = WeightDelta(version=2, base_version=1, base_digest="", location="/delta", tensors=writer.parts, digest="")
    return delta, Bytes(b"".join(buffers))


def forms(delta: WeightDelta) -> list[str]:
    return [part.name for part in delta.tensors]


def bf16(count: int, changed: int) -> tuple[tuple[TensorEntry, ...], Bytes, Bytes]:
    """Return one tensor and two versions of it that differ in so many elements."""
    old = np.random.default_rng(0).integers(0, 2**16, count, dtype=np.uint16)
    new = old.copy()
    new[np.random.default_rng(1).permutation(count)[:changed]] ^= 1
    return layout([("a", "BF16", (count,))]), Bytes(old.tobytes()), Bytes(new.tobytes())


@pytest.mark.parametrize(
    ("changed", "parts", "num_bytes"),
    [
        (0, [], 0),
        (1, ["a/positions", "a/values"], 6),
        (3126, ["a/positions", "a/values"], 3126 * 6),
        (3127, ["a/mask", "a/values"], 12504 + 3127 * 2),
        (93_000, ["a/mask", "a/values"], 12504 + 93_000 * 2),
        (93_800, ["a/whole"], 200_000),
    ],
)
def test_each_tensor_is_sent_in_the_fewest_bytes(changed: int, parts: list[str], num_bytes: int) -> None:
    """One position takes 32 bits, a mask one bit an element: they cost the same where one element in 32 has changed."""
    entries, old, new = bf16(100_000, changed)
    delta, data = encode(entries, old, new)
    assert forms(delta) == parts
    assert delta.num_bytes == num_bytes
    apply_delta(delta, data.data, entries, old.data)
    assert old.raw == new.raw


@given(st.data())
def test_the_base_and_the_delta_make_the_version(draw: st.DataObject) -> None:
    """Of every dtype's width, of lengths that fill no word of a mask, with nothing or everything changed."""
    shapes = draw.draw(
        st.lists(st.tuples(st.sampled_from(["F64", "F32", "BF16", "I8"]), st.integers(0, 200)), max_size=5)
    )
    entries = layout([(f"t{place}", dtype, (count,)) for place, (dtype, count) in enumerate(shapes)])
    total = sum(entry.num_bytes for entry in entries)
    old = Bytes(draw.draw(st.binary(min_size=total, max_size=total)))
    new = Bytes(bytes(old.raw))
    for place in draw.draw(st.lists(st.integers(0, max(total - 1, 0)), max_size=40)) if total else ():
        new.raw[place] ^= 0x80
    delta, data = encode(entries, old, new)
    assert delta.num_bytes <= total
    for _ in range(2):  # once more changes nothing
        apply_delta(delta, data.data, entries, old.data)
        assert old.raw == new.raw


def test_a_delta_that_is_no_smaller_than_the_version_is_given_up() -> None:
    """Kills: a learner that goes on to hold more than one more copy of the weights."""
    (entry,), old, new = bf16(1000, 1000)
    writer = DeltaWriter(limit=4000)
    for _ in range(3):
        assert writer.is_worth_it == (writer.num_bytes < 4000)
        writer.add(entry, old.data(entry), new.data(entry))
    assert not writer.is_worth_it
    assert writer.num_bytes == 4000, "the third was not looked at"


def test_elements_are_compared_by_their_bits() -> None:
    entries = layout([("a", "F32", (100,))])
    old, new = np.zeros(100, np.float32), np.zeros(100, np.float32)
    new[7], old[8], new[9] = -0.0, np.nan, np.nan
    new[8] = old[8]
    one, other = Bytes(old.tobytes()), Bytes(new.tobytes())
    delta, data = encode(entries, one, other)
    assert delta.tensors[1].shape == (2,), "the sign of zero and a new NaN, but not a NaN that was there"
    apply_delta(delta, data.data, entries, one.data)
    assert one.raw == other.raw


@pytest.mark.parametrize("count", [2**18 * 2 + 76, 2**18 * 2 + 77])
def test_blocks_do_not_show(count: int) -> None:
    """A tensor of more elements than one block, changed at its first, its last and at a block's edges; few and many."""
    old = np.zeros(count, np.uint16)
    edges = [0, 2**18 - 1, 2**18, count - 1]
    for places in (edges, [*edges, 6, 7, 8], list(range(0, count, 9)), list(range(0, count, 3))):
        new = old.copy()
        new[places] = 5
        entries = layout([("a", "BF16", (count,))])
        one, other = Bytes(old.tobytes()), Bytes(new.tobytes())
        delta, data = encode(entries, one, other)
        apply_delta(delta, data.data, entries, one.data)
        assert one.raw == other.raw


def test_parts_that_make_no_sense_are_refused_with_the_tensors_name() -> None:
    entries, old, new = bf16(100_000, 5)
    delta, data = encode(entries, old, new)
    positions, values = delta.tensors

    def refused(delta: WeightDelta, data: Bytes) -> None:
        with pytest.raises(WeightMismatch, match="a of version 2 cannot be made of its parts in /delta") as caught:
            apply_delta(delta, data.data, entries, old.data)
        assert caught.value.tensor == "a"

    refused(replace(delta, tensors=(positions,)), data)
    refused(replace(delta, tensors=(positions, replace(values, num_bytes=8, shape=(4,)))), data)
    refused(replace(delta, tensors=(positions, replace(values, dtype="I8"))), data)
    beyond = Bytes(bytes(data.raw))
    beyond.data(positions)[:4] = (100_000).to_bytes(4, "little")
    refused(delta, beyond)
    masked, mask_data = encode(*bf16(100_000, 9000))
    for bits in (0x00, 0xFF):  # fewer places than values, and more
        mask_data.raw[:64] = bytes([bits]) * 64
        refused(masked, mask_data)


def test_a_part_of_a_tensor_that_is_not_there_is_refused() -> None:
    entries, old, new = bf16(1000, 5)
    delta, data = encode(entries, old, new)
    with pytest.raises(WeightMismatch, match="a of version 2"):
        apply_delta(delta, data.data, layout([("b", "BF16", (1000,))]), old.data)
