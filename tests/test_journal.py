"""The journal's files: what a cut, a flipped bit, a missing file or another's file does to what can be read."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.buffers import Damage, DamageKind, Fsync, Journal, JournalSettings, Record, read_journal
from asyncrl.buffers.journal import list_files
from asyncrl.buffers.journal_format import FILE_HEADER_BYTES, RECORD_HEADER_BYTES, file_header, pack_record, run_key
from asyncrl.errors import ConfigError, JournalError

_RUN = "run-1"


def _payloads(count: int, *, seed: int = 0, most: int = 40) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(most)) for _ in range(count)]


def _write(directory: Path, payloads: Sequence[bytes], *, file_bytes: int = 2**20, fsync: Fsync = Fsync.NEVER) -> None:
    with Journal(directory, run_id=_RUN, fsync=fsync, file_bytes=file_bytes) as journal:
        for payload in payloads:
            journal.append(len(payload) % 256, payload)


def _read(directory: Path, from_position: int = 0) -> tuple[dict[int, bytes], list[Damage]]:
    """Return position -> payload, and the damage."""
    records, damage = {}, []
    for item in read_journal(directory, run_id=_RUN, from_position=from_position):
        if isinstance(item, Record):
            assert item.position not in records
            assert item.kind == len(item.payload) % 256
            records[item.position] = item.payload
        else:
            damage.append(item)
    assert list(records) == sorted(records)
    return records, damage


@pytest.mark.parametrize("fsync", list(Fsync))
def test_what_was_appended_is_read_in_order_over_files_and_writers(tmp_path: Path, fsync: Fsync) -> None:
    payloads = [*_payloads(60), b"", b"x" * 1000]  # the last does not fit into a file of 400 bytes: it gets its own
    for start in (0, 30):
        _write(tmp_path, payloads[start : start + 30 if start == 0 else None], file_bytes=400, fsync=fsync)
    assert _read(tmp_path) == (dict(enumerate(payloads)), [])
    assert len(list_files(tmp_path)) > 3
    assert _read(tmp_path, from_position=41) == ({i: p for i, p in enumerate(payloads) if i >= 41}, [])


@pytest.mark.slow
def test_a_cut_at_every_byte_loses_only_the_record_that_it_hits(tmp_path: Path) -> None:
    payloads = _payloads(5)
    _write(tmp_path, payloads)
    (path,) = list_files(tmp_path)
    whole = path.read_bytes()
    ends = [FILE_HEADER_BYTES]
    for payload in payloads:
        ends.append(ends[-1] + RECORD_HEADER_BYTES + len(payload))
    assert ends[-1] == len(whole)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        kept = max(sum(end <= size for end in ends) - 1, 0)
        records, damage = _read(tmp_path)
        assert records == dict(enumerate(payloads[:kept]))
        assert [d.kind for d in damage] == ([] if size in ends else [DamageKind.TORN])
        with Journal(tmp_path, run_id=_RUN, fsync=Fsync.NEVER) as journal:
            if damage:
                assert journal.cut == damage[0]
                assert journal.cut.num_bytes == size - (ends[kept] if size >= ends[0] else 0)
            assert journal.append(3, b"new") == kept
        assert _read(tmp_path) == ({**dict(enumerate(payloads[:kept])), kept: b"new"}, [])


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte_is_named_and_costs_one_record(tmp_path: Path) -> None:
    rng = random.Random(5)
    payloads = _payloads(12)
    _write(tmp_path, payloads, file_bytes=250)
    assert len(list_files(tmp_path)) > 2
    for path in list_files(tmp_path):
        whole = path.read_bytes()
        for offset in range(len(whole)):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            records, damage = _read(tmp_path)
            assert len(damage) == 1, (path, offset)
            assert damage[0].file == path
            assert damage[0].offset <= offset < damage[0].offset + damage[0].num_bytes
            if offset < FILE_HEADER_BYTES:
                assert damage[0].kind is DamageKind.HEADER
                assert records == dict(enumerate(payloads))
            else:
                assert damage[0].kind is DamageKind.RECORD
                assert records == {i: p for i, p in enumerate(payloads) if i != damage[0].position}
                assert len(records) == 11
                assert damage[0].num_records in (1, None)
                assert damage[0].num_records == 1 or path == list_files(tmp_path)[-1]
        path.write_bytes(whole)


def test_a_writer_goes_on_behind_damage_and_the_gap_stays_visible(tmp_path: Path) -> None:
    _write(tmp_path, _payloads(5))
    (path,) = list_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-len(_payloads(5)[-1]) - RECORD_HEADER_BYTES + 6] ^= 4  # the length of the last record
    path.write_bytes(data)
    with Journal(tmp_path, run_id=_RUN) as journal:
        assert journal.cut is None
        assert journal.append(3, b"new") == 5
    records, damage = _read(tmp_path)
    assert sorted(records) == [0, 1, 2, 3, 5]
    assert [(d.kind, d.position, d.num_records) for d in damage] == [(DamageKind.RECORD, 4, 1)]
    assert path.read_bytes() == bytes(data), "the evidence is left as it is"


@pytest.mark.slow
def test_random_damage_never_invents_a_record(tmp_path: Path) -> None:
    payloads = _payloads(30, seed=3)
    _write(tmp_path, payloads, file_bytes=500)
    rng = random.Random(7)
    originals = {path: path.read_bytes() for path in list_files(tmp_path)}
    for _ in range(60):
        for path, whole in originals.items():
            data = bytearray(whole)
            for _ in range(rng.randrange(3)):
                start = rng.randrange(len(data))
                data[start : start + rng.randrange(1, 60)] = rng.randbytes(rng.randrange(60))
            path.write_bytes(data)
        records, damage = _read(tmp_path)
        assert records.items() <= dict(enumerate(payloads)).items()
        lost = sum(d.num_records for d in damage if d.num_records is not None)
        assert len(records) + lost <= 30 or not damage
        if len(records) < 30:
            assert damage


def test_a_record_inside_a_payload_is_never_taken_for_one(tmp_path: Path) -> None:
    inner = pack_record(3, b"abc", position=9, offset=FILE_HEADER_BYTES, key=run_key(_RUN)) + b"abc"
    _write(tmp_path, [inner, b"last"])
    (path,) = list_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[FILE_HEADER_BYTES + 8] ^= 1  # the outer record's length: its end must now be looked for
    path.write_bytes(data)
    records, damage = _read(tmp_path)
    assert records == {1: b"last"}
    assert damage[0].num_records == 1


def test_a_missing_file_is_a_hole_with_its_count(tmp_path: Path) -> None:
    payloads = _payloads(30)
    _write(tmp_path, payloads, file_bytes=300)
    files = list_files(tmp_path)
    first, after = int(files[1].stem), int(files[2].stem)
    files[1].unlink()
    records, damage = _read(tmp_path)
    assert records == {i: p for i, p in enumerate(payloads) if not first <= i < after}
    assert [(d.kind, d.position, d.num_records) for d in damage] == [(DamageKind.HOLE, first, after - first)]
    files[0].unlink()
    assert [d.position for d in _read(tmp_path, from_position=0)[1]] == [0]
    assert _read(tmp_path, from_position=after)[1] == [], "what was released is not missed"


def test_release_deletes_whole_files_and_never_what_is_needed(tmp_path: Path) -> None:
    payloads = _payloads(40)
    with Journal(tmp_path, run_id=_RUN, file_bytes=300, fsync=Fsync.NEVER) as journal:
        for position, payload in enumerate(payloads):
            journal.append(len(payload) % 256, payload)
            journal.release(position - 8)
            assert len(list_files(tmp_path)) <= 5, "disk use is bounded"
            kept, damage = _read(tmp_path, from_position=max(position - 8, 0))
            assert sorted(kept) == list(range(max(position - 8, 0), position + 1))
            assert damage == []
        assert journal.statistics().num_bytes == sum(path.stat().st_size for path in list_files(tmp_path))
        journal.release(1000)
    assert len(list_files(tmp_path)) == 1
    with Journal(tmp_path, run_id=_RUN) as journal:
        assert journal.next_position == 40


def test_another_run_and_another_format_are_refused_by_name(tmp_path: Path) -> None:
    _write(tmp_path, [b"x"])
    (path,) = list_files(tmp_path)
    for refused in (lambda: Journal(tmp_path, run_id="run-2"), lambda: list(read_journal(tmp_path, run_id="run-2"))):
        with pytest.raises(JournalError, match=f"{path} belongs to the run 'run-1', not to 'run-2'"):
            refused()
    prefix = b"ASYNCRLJ" + struct.pack("<I", 2)
    path.write_bytes(prefix + struct.pack("<I", zlib.crc32(prefix)) + file_header(_RUN, 0)[16:])
    with pytest.raises(JournalError, match="has format 2; this version of asyncrl reads 1"):
        Journal(tmp_path, run_id=_RUN)


def test_two_writers_are_refused_and_readers_are_not(tmp_path: Path) -> None:
    with Journal(tmp_path, run_id=_RUN, file_bytes=200) as journal:
        with pytest.raises(JournalError, match="is being written by another process"):
            Journal(tmp_path, run_id=_RUN)
        seen = []
        for position in range(20):
            journal.append(3, b"abc")
            seen.append(len(_read(tmp_path)[0]))
            assert seen[-1] == position + 1
    Journal(tmp_path, run_id=_RUN).close()


def test_syncs_follow_the_policy(tmp_path: Path) -> None:
    syncs = {}
    for fsync in Fsync:
        with Journal(tmp_path / fsync, run_id=_RUN, fsync=fsync) as journal:
            before = journal.statistics().num_syncs
            for _ in range(10):
                journal.append(0, b"x")
            durable = journal.statistics().durable_position
            journal.append_all([(0, b"x")] * 10)
            journal.flush()
            journal.flush()
            syncs[fsync] = (journal.statistics().num_syncs - before, durable)
    assert syncs == {Fsync.ALWAYS: (11, 10), Fsync.GROUP: (1, 0), Fsync.NEVER: (0, 0)}


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"file_mib must be from 1 to 4096 MiB, got 0 \(\[journal\]\)"):
        JournalSettings(file_mib=0)
