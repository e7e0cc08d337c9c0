"""Writers of the journal that are killed, run out of disk, or are many tasks at once."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import cannot_sandbox

from asyncrl.buffers import DamageKind, Fsync, GroupCommit, Journal, Record, read_journal
from asyncrl.errors import JournalError

_RUN = "run-1"

_ONE_BY_ONE = """
import random, sys
from pathlib import Path
from asyncrl.buffers import Fsync, Journal
journal = Journal(Path(sys.argv[1]), run_id="run-1", fsync=Fsync(sys.argv[2]), file_bytes=20_000)
rng = random.Random(journal.next_position)
while True:
    payload = b"%d:" % journal.next_position + rng.randbytes(rng.randrange(3000))
    print(journal.append(1, payload), flush=True)
"""

_TOGETHER = """
import sys
from pathlib import Path
import trio
from asyncrl.buffers import Fsync, GroupCommit, Journal
async def write(log, name):
    for number in range(10**9):
        position = await log.append(1, b"%d" % log.next_position + b":" + b"x" * 500)
        print(position, flush=True)
async def main():
    log = GroupCommit(Journal(Path(sys.argv[1]), run_id="run-1", fsync=Fsync(sys.argv[2]), file_bytes=20_000))
    async with trio.open_nursery() as nursery:
        for name in range(8):
            nursery.start_soon(write, log, name)
trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "unacknowledged"), [(_ONE_BY_ONE, 1), (_TOGETHER, 8)])
@pytest.mark.parametrize("fsync", [Fsync.ALWAYS, Fsync.NEVER])
def test_kill_9_loses_nothing_that_was_acknowledged(
    tmp_path: Path, program: str, unacknowledged: int, fsync: Fsync
) -> None:
    rng = random.Random(1)
    total = 0
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", program, tmp_path, fsync], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(rng.randrange(1, 60))]
        writer.kill()
        acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        writer.wait()
        writer.stdout.close()
        assert min(acknowledged) >= total, "positions go on where the last writer ended"
        items = list(read_journal(tmp_path, run_id=_RUN))
        records = {item.position: item.payload for item in items if isinstance(item, Record)}
        damage = [item for item in items if not isinstance(item, Record)]
        assert all(item.kind is DamageKind.TORN for item in damage)
        assert set(acknowledged) <= set(records)
        assert len(records) - total - len(acknowledged) <= unacknowledged
        assert list(records) == list(range(len(records)))
        if unacknowledged == 1:
            assert all(payload.startswith(b"%d:" % position) for position, payload in records.items())
        total = len(records)


_FULL_DISK = """
import sys
from pathlib import Path
from asyncrl.buffers import Fsync, Journal, read_journal
from asyncrl.errors import JournalError
directory = Path(sys.argv[1])
journal = Journal(directory, run_id="run-1", fsync=Fsync(sys.argv[2]), file_bytes=50_000)
try:
    while True:
        position = journal.append(1, b"x" * 4000)
except JournalError as error:
    print(error)
records = list(read_journal(directory, run_id="run-1"))
assert [record.position for record in records] == list(range(position + 1)), records[-1]
freed = journal.release(position // 2)
assert freed > 50_000, freed
assert journal.append(1, b"again") == position + 1
journal.close()
print(len(list(read_journal(directory, run_id="run-1"))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fsync", [Fsync.ALWAYS, Fsync.NEVER])
def test_a_full_disk_is_named_and_what_was_written_stays(tmp_path: Path, fsync: Fsync) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    script = 'mount -t tmpfs -o size=400k none "$1" && exec "$2" -c "$3" "$1/journal" "$4"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh"]
    done = subprocess.run(
        [*command, tmp_path, sys.executable, _FULL_DISK, fsync], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    message = done.stdout.splitlines()[0]
    assert "No space left on device (the disk is full: free some space)" in message
    assert "are on disk and stay readable" in message


def _run(body: Callable[[GroupCommit, Journal], Any], directory: Path, fsync: Fsync = Fsync.ALWAYS) -> None:
    with Journal(directory, run_id=_RUN, fsync=fsync) as journal:

        async def main() -> None:
            with trio.fail_after(60):
                await body(GroupCommit(journal), journal)

        trio.run(main)


def test_appends_that_wait_together_share_one_sync(tmp_path: Path) -> None:
    async def body(log: GroupCommit, journal: Journal) -> None:
        before = journal.statistics().num_syncs
        positions: dict[int, int] = {}

        async def append(number: int) -> None:
            positions[number] = await log.append(1, b"%d" % number)
            assert journal.statistics().durable_position > positions[number]

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(append, number)
        assert journal.statistics().num_syncs - before <= 2
        records = [item for item in read_journal(tmp_path, run_id=_RUN) if isinstance(item, Record)]
        assert {item.position: int(item.payload) for item in records} == {p: n for n, p in positions.items()}

    _run(body, tmp_path)


def test_what_was_handed_in_without_waiting_comes_first_in_its_order(tmp_path: Path) -> None:
    async def body(log: GroupCommit, journal: Journal) -> None:
        assert [log.append_nowait(1, b"a"), log.append_nowait(1, b"b")] == [0, 1]
        assert log.next_position == 2
        assert journal.next_position == 0
        assert await log.append(1, b"c") == 2
        assert journal.next_position == 3
        log.append_nowait(1, b"d")
        await log.flush()
        payloads = [item.payload for item in read_journal(tmp_path, run_id=_RUN) if isinstance(item, Record)]
        assert payloads == [b"a", b"b", b"c", b"d"]
        assert journal.statistics().durable_position == 4

    _run(body, tmp_path, Fsync.GROUP)


def test_a_cancelled_append_moves_no_other_records_position(tmp_path: Path) -> None:
    async def body(log: GroupCommit, journal: Journal) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await log.append(1, b"cancelled")
        assert scope.cancelled_caught
        assert await log.append(1, b"next") == 1
        payloads = [item.payload for item in read_journal(tmp_path, run_id=_RUN) if isinstance(item, Record)]
        assert payloads == [b"cancelled", b"next"]

    _run(body, tmp_path)


def test_the_first_failure_is_final(tmp_path: Path) -> None:
    async def body(log: GroupCommit, journal: Journal) -> None:
        failures: list[str] = []

        async def append() -> None:
            try:
                await log.append(1, b"x" * 1000)
            except JournalError as error:
                failures.append(str(error))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(append)
        assert len(failures) == 5
        with pytest.raises(JournalError, match="the journal failed before: cannot write the journal"):
            log.append_nowait(1, b"x")

    with Journal(tmp_path, run_id=_RUN, file_bytes=100) as journal:
        journal.append(1, b"before")

        async def main() -> None:
            await body(GroupCommit(journal), journal)

        (tmp_path / "00000000000000000001.journal").mkdir()  # where the next file would begin
        trio.run(main)


def test_what_is_handed_in_while_the_disk_is_busy_makes_the_next_batch(tmp_path: Path) -> None:
    with Journal(tmp_path, run_id=_RUN) as journal:

        async def busy(work: Callable[[], Any]) -> Any:
            if journal.next_position == 0:
                assert log.append_nowait(1, b"meanwhile") == 1
            return work()

        log = GroupCommit(journal, run_blocking=busy)
        assert trio.run(log.append, 1, b"first") == 0
        assert journal.next_position == 1
        trio.run(log.flush)
        payloads = [item.payload for item in read_journal(tmp_path, run_id=_RUN) if isinstance(item, Record)]
        assert payloads == [b"first", b"meanwhile"]
