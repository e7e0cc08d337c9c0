"""The journal: an append-only log of bytes that a kill at any moment leaves readable. JOURNAL.md says what holds when.

`Journal` writes and `read_journal` reads, also while another process writes. Both block on the disk: in the
orchestrator go through `GroupCommit`. What the bytes mean is the caller's.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from asyncrl.buffers.journal_format import (
    FILE_HEADER_BYTES,
    MAX_RUN_ID_BYTES,
    RECORD_HEADER_BYTES,
    Damage,
    DamageKind,
    Record,
    check_file_header,
    file_header,
    file_name,
    first_position,
    pack_record,
    run_key,
    scan,
)
from asyncrl.buffers.journal_settings import Fsync
from asyncrl.errors import JournalError

_MAX_PARTS = 1024  # IOV_MAX of Linux
DEFAULT_FILE_BYTES = 64 * 2**20  # smaller frees disk space earlier; each costs two syncs and a directory entry


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStatistics:
    """A moment's view of a journal that is being written."""

    num_files: int
    num_bytes: int
    """On disk, all files."""
    next_position: int
    """Records ever appended, lost ones included."""
    durable_position: int
    """Records before this one survive a power failure."""
    num_syncs: int


class Journal:
    """The one writer of a directory's journal.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as scratch:
        ...     with Journal(Path(scratch), run_id="demo", fsync=Fsync.GROUP) as journal:
        ...         journal.append(7, b"finished")
        ...     [record.payload for record in read_journal(Path(scratch), run_id="demo")]
        0
        [b'finished']
    """

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        fsync: Fsync = Fsync.GROUP,
        file_bytes: int = DEFAULT_FILE_BYTES,
        at_least: int = 0,
    ) -> None:
        """Take the directory's lock, cut a torn last record off and go on behind what is there.

        The next record's position is at least `at_least`: where a checkpoint knows of records that are gone,
        theirs are not given again.
        Raises: JournalError where another writer holds the lock, or where a file is another run's or of another format.
        """
        assert 0 < len(run_id.encode()) <= MAX_RUN_ID_BYTES, run_id
        self._directory = directory
        self._run_id = run_id
        self._key = run_key(run_id)
        self._fsync = fsync
        self._file_bytes = file_bytes
        self._broken: OSError | None = None
        self._unsynced = True  # what an earlier writer left may still be on its way to the disk
        self._num_syncs = 0
        self._num_bytes: dict[Path, int] = {}  # of the present file, as it was opened; `_end` is what it has now
        self.cut: Damage | None = None
        """The torn record that opening removed, for the log."""
        with ExitStack() as stack:
            self._lock = _locked(directory)
            stack.callback(os.close, self._lock)
            with _opening(directory):
                self._path, self._file, self._next = self._open_last(at_least)
                self._end = self._num_bytes[self._path]
            stack.callback(os.close, self._file)
            self._durable = first_position(self._path)
            self.flush()
            stack.pop_all()

    @property
    def next_position(self) -> int:
        """The position that the next record gets."""
        return self._next

    def append(self, kind: int, payload: bytes) -> int:
        """Write a record; return its position once the policy's promise holds. Raises: JournalError."""
        position, num_bytes = self._next, RECORD_HEADER_BYTES + len(payload)
        try:
            self._check()
            self._make_room(num_bytes)
            header = pack_record(kind, payload, position=position, offset=self._end, key=self._key)
            self._write_parts((header, payload), num_bytes, 1)
            if self._fsync is Fsync.ALWAYS:
                self._sync()
        except OSError as error:
            raise self._refused("write", error) from error
        return position

    def append_all(self, records: Sequence[tuple[int, bytes]]) -> Sequence[int]:
        """Write records, with one sync for all where the policy is `always`; return their positions.

        Raises: JournalError when the disk refuses. What was written before stays readable; after a full disk, appending
        may be tried again.
        """
        first, done = self._next, 0
        try:
            self._check()
            while done < len(records):
                done += self._write_chunk(records[done:] if done else records)
            if self._fsync is Fsync.ALWAYS:
                self._sync()
        except OSError as error:
            raise self._refused("write", error) from error
        return range(first, self._next)

    def flush(self) -> None:
        """Return once every record survives a power failure; with `never`, do nothing. Raises: JournalError."""
        if self._fsync is not Fsync.NEVER:
            try:
                self._check()
                self._sync()
            except OSError as error:
                raise self._refused("sync", error) from error

    def release(self, before_position: int) -> int:
        """Delete the files that hold only records before a position; return the bytes that were freed."""
        freed = 0
        paths = sorted(self._num_bytes)
        for path, following in pairwise(paths):
            if first_position(following) > before_position:
                break
            path.unlink(missing_ok=True)
            freed += self._num_bytes.pop(path)
        return freed

    def statistics(self) -> JournalStatistics:
        """Return what lies on disk."""
        return JournalStatistics(
            num_files=len(self._num_bytes),
            num_bytes=sum(self._num_bytes.values()) - self._num_bytes[self._path] + self._end,
            next_position=self._next,
            durable_position=self._durable,
            num_syncs=self._num_syncs,
        )

    def close(self) -> None:
        """Sync as `flush` does, and let the next writer in. May be called twice."""
        if self._file < 0:
            return
        try:
            if self._broken is None:
                self.flush()
        finally:
            os.close(self._file)
            os.close(self._lock)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    # --- files ------------------------------------------------------------------------------------------------

    def _open_last(self, at_least: int) -> tuple[Path, int, int]:
        """Return the file to append to, its descriptor and the next position."""
        paths = list_files(self._directory)
        for path in paths:
            with path.open("rb") as file:
                check_file_header(file.read(FILE_HEADER_BYTES), path, self._run_id)
            self._num_bytes[path] = path.stat().st_size
        if not paths:
            return self._create(at_least)
        last = paths[-1]
        position, whole = first_position(last), True
        for item in _scan_file(last.read_bytes(), last, self._run_id, at_end=True):
            if isinstance(item, Record):
                position = item.position + 1
            elif item.kind is DamageKind.TORN:
                self.cut = item
                _truncate(last, item.offset)
                self._num_bytes[last] = item.offset
                whole = whole and item.offset > 0
            else:
                whole = False
                position = item.position + (1 if item.num_records is None else item.num_records)
        if whole and position >= at_least:
            return last, os.open(last, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), position
        if position == first_position(last):  # a header that is not whole, and nothing behind it
            last.unlink()
            del self._num_bytes[last]
        return self._create(max(position, at_least))

    def _create(self, position: int) -> tuple[Path, int, int]:
        path = self._directory / file_name(position)
        header = file_header(self._run_id, position)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write(descriptor, header)
            if self._fsync is not Fsync.NEVER:
                os.fsync(descriptor)
                _sync_directory(self._directory)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        self._num_bytes[path] = len(header)
        return path, descriptor, position

    def _write_chunk(self, records: Sequence[tuple[int, bytes]]) -> int:
        """Write as many records as the present file takes, at least one; return how many."""
        self._make_room(RECORD_HEADER_BYTES + len(records[0][1]))
        end, parts = self._end, list[bytes]()
        for position, (kind, payload) in enumerate(records[: _MAX_PARTS // 2], start=self._next):
            if parts and end + RECORD_HEADER_BYTES + len(payload) > self._file_bytes:
                break
            parts += (pack_record(kind, payload, position=position, offset=end, key=self._key), payload)
            end += RECORD_HEADER_BYTES + len(payload)
        self._write_parts(parts, end - self._end, len(parts) // 2)
        return len(parts) // 2

    def _make_room(self, num_bytes: int) -> None:
        """Begin a new file where the present one has records and not so many bytes left."""
        if self._end + num_bytes > self._file_bytes and self._end > FILE_HEADER_BYTES:
            self._rotate()

    def _write_parts(self, parts: Sequence[bytes], num_bytes: int, num_records: int) -> None:
        try:
            written = os.writev(self._file, parts)
            if written < num_bytes:  # the disk is full, or a signal came
                _write(self._file, b"".join(parts)[written:])
        except OSError as error:
            self._take_back(error)
            raise
        self._unsynced = True
        self._end += num_bytes
        self._next += num_records

    def _rotate(self) -> None:
        if self._fsync is not Fsync.NEVER:
            self._sync()
        path, descriptor, _ = self._create(self._next)
        os.close(self._file)
        self._num_bytes[self._path] = self._end
        self._path, self._file, self._end = path, descriptor, FILE_HEADER_BYTES

    def _take_back(self, cause: OSError) -> None:
        """Remove what a failed write left behind; where even that fails, nothing more may be written."""
        try:
            os.ftruncate(self._file, self._end)
        except OSError:
            self._broken = cause

    def _sync(self) -> None:
        if not self._unsynced:
            return
        try:
            os.fdatasync(self._file)
        except OSError as error:  # the kernel may have dropped the pages: what is on disk is unknown from here on
            self._broken = error
            raise
        self._unsynced = False
        self._durable = self._next
        self._num_syncs += 1

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _refused(self, verb: str, error: OSError) -> JournalError:
        return _refusal(
            self._path, verb, error, f"; records before position {self._durable} are on disk and stay readable"
        )


def read_journal(directory: Path, *, run_id: str, from_position: int = 0) -> Iterator[Record | Damage]:
    """Yield the records from a position on, in order, and every damaged place in between.

    May run while another process writes; the record that is being written may then appear as torn. Files below
    `from_position` are not opened. Holds one file in memory at a time. Raises: JournalError where a file is another
    run's or of another format.
    """
    paths = list_files(directory)
    starts = [first_position(path) for path in paths]
    expected, uncounted = from_position, None
    for index, path in enumerate(paths):
        at_end = index + 1 == len(paths)
        if not at_end and starts[index + 1] <= from_position:
            continue
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # released by the writer since the files were listed
            expected = starts[index] if at_end else starts[index + 1]
            continue
        if uncounted is not None:
            yield replace(uncounted, num_records=max(0, starts[index] - uncounted.position))
        elif starts[index] > expected:
            yield _hole(path, expected, starts[index])
        uncounted, expected = None, max(expected, starts[index])
        for item in _scan_file(data, path, run_id, at_end=at_end):
            if isinstance(item, Record):
                expected = item.position + 1
                if item.position >= from_position:
                    yield item
            elif item.num_records is None:
                uncounted = item
            else:
                expected = max(expected, item.position + item.num_records)
                yield item
    if uncounted is not None:
        yield uncounted


def list_files(directory: Path) -> list[Path]:
    """Return a journal's files, the oldest first."""
    return sorted(path for path in directory.glob("*.journal") if path.stem.isdigit())


def _scan_file(data: bytes, path: Path, run_id: str, *, at_end: bool) -> Iterator[Record | Damage]:
    position, offset = first_position(path), min(len(data), FILE_HEADER_BYTES)
    if not check_file_header(data, path, run_id):
        yield Damage(
            kind=DamageKind.TORN if at_end and len(data) < FILE_HEADER_BYTES else DamageKind.HEADER,
            file=path,
            offset=0,
            num_bytes=offset,
            position=position,
            num_records=0,
        )
    yield from scan(data, path, key=run_key(run_id), offset=offset, position=position, at_end=at_end)


def _hole(path: Path, expected: int, found: int) -> Damage:
    return Damage(
        kind=DamageKind.HOLE, file=path, offset=0, num_bytes=0, position=expected, num_records=found - expected
    )


def _locked(directory: Path) -> int:
    """Return a descriptor that keeps other writers out; the kernel drops the lock with this process."""
    with _opening(directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise JournalError(f"the journal {directory} is being written by another process") from None
    return descriptor


@contextmanager
def _opening(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refusal(directory, "open", error) from error


def _refusal(path: Path, verb: str, error: OSError, safe: str = "") -> JournalError:
    hint = " (the disk is full: free some space)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return JournalError(f"cannot {verb} the journal {path}: {error.strerror}{hint}{safe}")


def _truncate(path: Path, num_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
