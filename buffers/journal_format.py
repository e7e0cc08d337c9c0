"""How records lie in a journal's files, and how they are found again. Bytes only: no file is opened here.

    file    magic 8, format 4, crc32 of these 4 | run id 64, first position 8, crc32 of all before 4 | record ...
    record  marker 4, kind 1, length 4, position 8, crc32 of the payload 4, crc32 of all before 4 | payload

All numbers are little-endian. A record's header checksum begins with the run id and the record's place in its file, so
that the bytes of a record that lie inside a payload, or in another place or run, are never taken for one. A header and
its payload are checked apart: where only the payload is damaged, the next record's place is still known, and where the
header is, the next one is looked for by its marker. Positions count records over the whole journal and tell how many
were lost.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from asyncrl.errors import JournalError

FORMAT = 1
"""Of the files; a reader refuses what it does not know."""
MAX_RUN_ID_BYTES = 64
MAX_PAYLOAD_BYTES = 2**32 - 1

_MAGIC = b"ASYNCRLJ"
_MARKER = b"\xa5\x5aRC"  # not ASCII and not UTF-8, so that text holds none
_PREFIX = struct.Struct("<8sI")
_IDENTITY = struct.Struct("<64sQ")
_RECORD = struct.Struct("<4sBIQI")
_CRC = struct.Struct("<I")

FILE_HEADER_BYTES = _PREFIX.size + _CRC.size + _IDENTITY.size + _CRC.size
RECORD_HEADER_BYTES = _RECORD.size + _CRC.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record as it was appended."""

    position: int
    """Its number, counted from 0 over the whole journal."""
    kind: int
    """From 0 to 255; the caller's."""
    payload: bytes


class DamageKind(StrEnum):
    """What is wrong with a place in a journal."""

    TORN = "torn"
    """The last record was not finished: its writer was killed, or still writes. It was never acknowledged."""
    RECORD = "record"
    """The checksum of a record that was whole disagrees, or bytes are missing before the end of the journal."""
    HEADER = "header"
    """The header of a file is damaged; its records may be whole."""
    HOLE = "hole"
    """Records are missing: a file is gone, or was never written to the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A place that cannot be read."""

    kind: DamageKind
    file: Path
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int
    position: int
    """Of the first record that is lost."""
    num_records: int | None
    """Records that are lost, a torn one not counted; None where nothing behind the place tells."""

    def __str__(self) -> str:
        """Return one line for a person."""
        count = "an unknown number of records" if self.num_records is None else f"{self.num_records} records"
        lost = f"{count} from position {self.position} on are lost"
        where = f"{self.file} at byte {self.offset}"
        match self.kind:
            case DamageKind.TORN:
                return f"{where}: record {self.position} was not finished ({self.num_bytes} bytes)"
            case DamageKind.RECORD:
                return f"{where}: {self.num_bytes} bytes are damaged; {lost}"
            case DamageKind.HEADER:
                return f"{where}: the file's header is damaged; its records are read all the same"
            case DamageKind.HOLE:
                return f"{where}: {lost}, which stood before this place"


def file_name(first_position: int) -> str:
    """Return the name of the file whose first record has this position; names sort as positions do."""
    return f"{first_position:020d}.journal"


def first_position(path: Path) -> int:
    """Return the position that a file's name tells."""
    return int(path.stem)


def run_key(run_id: str) -> int:
    """Return what the checksums of a run's records begin with."""
    return zlib.crc32(run_id.encode())


def file_header(run_id: str, position: int) -> bytes:
    """Return the header of a file whose first record has `position`."""
    prefix = _PREFIX.pack(_MAGIC, FORMAT)
    header = prefix + _CRC.pack(zlib.crc32(prefix)) + _IDENTITY.pack(run_id.encode(), position)
    return header + _CRC.pack(zlib.crc32(header))


def check_file_header(data: bytes, path: Path, run_id: str) -> bool:
    """Tell whether the header that `data` begins with is whole.

    Raises: JournalError where it is, and is of another format or of another run.
    """
    if len(data) < FILE_HEADER_BYTES:
        return False
    magic, found = _PREFIX.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _PREFIX.size)
    if magic != _MAGIC or crc != zlib.crc32(data[: _PREFIX.size]):
        return False
    if found != FORMAT:
        raise JournalError(f"{path} has format {found}; this version of asyncrl reads {FORMAT}")
    end = FILE_HEADER_BYTES - _CRC.size
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return False
    owner, position = _IDENTITY.unpack_from(data, _PREFIX.size + _CRC.size)
    if (theirs := owner.rstrip(b"\0").decode()) != run_id:
        raise JournalError(f"{path} belongs to the run {theirs!r}, not to {run_id!r}")
    return bool(position == first_position(path))


def pack_record(kind: int, payload: bytes, *, position: int, offset: int, key: int) -> bytes:
    """Return the header of a record that will lie at `offset` in its file; the payload follows it."""
    header = _RECORD.pack(_MARKER, kind, len(payload), position, zlib.crc32(payload))
    return header + _CRC.pack(_header_crc(header, offset, key))


def _header_crc(header: bytes, offset: int, key: int) -> int:
    return zlib.crc32(header, key ^ (offset & 0xFFFFFFFF))  # another start always gives another checksum


def scan(data: bytes, path: Path, *, key: int, offset: int, position: int, at_end: bool) -> Iterator[Record | Damage]:
    """Yield the records of a file in order, and the damage between them.

    `offset` is where the first record begins, `position` the least that it can have, and `at_end` says that no file
    follows: only then may the last record be torn.
    """
    while offset < len(data):
        header = _read_header(data, offset, key)
        if header is None:
            found = None if len(data) - offset < RECORD_HEADER_BYTES else _find(data, offset + 1, key, position)
            if found is None:
                torn = at_end and len(data) - offset < RECORD_HEADER_BYTES
                yield _damage(path, offset, len(data), position, 0 if torn else None, torn=torn)
                return
            there = _read_header(data, found, key)
            assert there is not None
            yield _damage(path, offset, found, position, there[2] - position)
            offset, position = found, there[2]
            continue
        kind, length, found_position, crc = header
        if found_position > position:
            yield Damage(
                kind=DamageKind.HOLE,
                file=path,
                offset=offset,
                num_bytes=0,
                position=position,
                num_records=found_position - position,
            )
        end = offset + RECORD_HEADER_BYTES + length
        if end > len(data):
            yield _damage(path, offset, len(data), found_position, 0 if at_end else 1, torn=at_end)
            return
        payload = data[offset + RECORD_HEADER_BYTES : end]
        if zlib.crc32(payload) != crc:
            yield _damage(path, offset, end, found_position, 1)
        elif found_position >= position:  # one that was seen before lies in a file that somebody copied
            yield Record(position=found_position, kind=kind, payload=payload)
        offset, position = end, max(position, found_position + 1)


def _read_header(data: bytes, offset: int, key: int) -> tuple[int, int, int, int] | None:
    """Return kind, length, position and payload checksum of the record at `offset`, or None where there is none."""
    end = offset + _RECORD.size
    if end + _CRC.size > len(data) or not data.startswith(_MARKER, offset):
        return None
    if _CRC.unpack_from(data, end)[0] != _header_crc(data[offset:end], offset, key):
        return None
    _, kind, length, position, crc = _RECORD.unpack_from(data, offset)
    return kind, length, position, crc


def _find(data: bytes, offset: int, key: int, position: int) -> int | None:
    """Return where the next record begins, or None."""
    while (offset := data.find(_MARKER, offset)) >= 0:
        header = _read_header(data, offset, key)
        if header is not None and header[2] >= position:
            return offset
        offset += 1
    return None


def _damage(path: Path, offset: int, end: int, position: int, num_records: int | None, *, torn: bool = False) -> Damage:
    return Damage(
        kind=DamageKind.TORN if torn else DamageKind.RECORD,
        file=path,
        offset=offset,
        num_bytes=end - offset,
        position=position,
        num_records=num_records,
    )
