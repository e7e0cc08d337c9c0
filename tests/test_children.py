"""Children end with the run, whatever ends the run, and so does everything they started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from asyncrl import keeper as keeper_module
from asyncrl.children import last_lines, start_child
from asyncrl.errors import EngineError

# A child that starts a grandchild in a session of its own, which ignores SIGTERM, then writes both pids.
_FAMILY = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
grandchild.stdout.readline()
with open(sys.argv[1], "w") as fifo:
    fifo.write(f"{os.getppid()} {os.getpid()} {grandchild.pid}")
time.sleep(600)
"""

# An orchestrator in a process of its own, to be killed.
_ORCHESTRATOR = """
import sys, trio
from pathlib import Path
from asyncrl.children import start_child
async def main():
    argv = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
    log_path = Path(sys.argv[2] + ".log")
    own = {"remove_on_exit": [sys.argv[3], sys.argv[4]], "own_scratch": True}
    async with start_child("family", argv, log_path=log_path, grace_s=1, **own):
        await trio.sleep_forever()
trio.run(main)
"""


def _wait_gone(pids: list[int]) -> None:
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([fd], [], [], 20)[0], f"process {pid} is still there"
        os.close(fd)


def _scratch_of(pid: int) -> Path:
    """Return where a process puts temporary files."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return Path(next(value for name, _, value in (line.partition("=") for line in variables) if name == "TMPDIR"))


@pytest.mark.slow
def test_leaving_the_context_ends_the_child_and_its_whole_family(tmp_path: Path) -> None:
    async def main() -> list[int]:
        fifo = tmp_path / "pids"
        os.mkfifo(fifo)
        argv = [sys.executable, "-c", _FAMILY, str(fifo)]
        async with start_child("family", argv, log_path=tmp_path / "log", grace_s=1, own_scratch=True):
            pids = [int(pid) for pid in (await trio.to_thread.run_sync(fifo.read_text)).split()]
            scratches.append(_scratch_of(pids[1]))
            (scratches[0] / "left").touch()
            return pids

    scratches: list[Path] = []
    _wait_gone(trio.run(main))
    assert not scratches[0].exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "keeper"])
def test_kill_9_leaves_nothing(tmp_path: Path, victim: str) -> None:
    fifo, left_over = tmp_path / "pids", tmp_path / "shared.weights"
    os.mkfifo(fifo)
    left_over.write_bytes(b"weights")
    patterns = [str(tmp_path / "*.weights"), str(tmp_path / "of {scratch}-*")]
    orchestrator = subprocess.Popen([sys.executable, "-c", _ORCHESTRATOR, _FAMILY, str(fifo), *patterns])
    keeper, child, grandchild = (int(pid) for pid in fifo.read_text().split())
    scratch = _scratch_of(child)
    (scratch / "meeting[0]").touch()
    named, another = tmp_path / "of meeting[0]-1", tmp_path / "of meeting0-1"
    named.touch()
    another.touch()
    if victim == "orchestrator":
        orchestrator.kill()
        orchestrator.wait()
        _wait_gone([keeper, child, grandchild])
        assert not left_over.exists()
        assert not scratch.exists()
        assert not named.exists()
        assert another.exists()
    else:
        os.kill(keeper, signal.SIGKILL)
        _wait_gone([child])
        orchestrator.kill()
        orchestrator.wait()
        keeper_module.remove([], str(scratch))
        os.kill(
            grandchild, signal.SIGKILL
        )  # with its keeper killed a grandchild in its own session is the test's to end


@pytest.mark.slow
def test_a_death_is_named_with_its_code_and_last_lines(tmp_path: Path) -> None:
    async def main() -> None:
        argv = [sys.executable, "-c", "print('loading'); print('out of memory'); raise SystemExit(3)"]
        async with start_child("engine 0", argv, log_path=tmp_path / "log") as child:
            await child.fail_on_exit(EngineError)

    with pytest.raises(EngineError, match=r"(?s)engine 0 exited with code 3.*loading\nout of memory"):
        trio.run(main)


@pytest.mark.slow
def test_a_signal_is_told_from_an_exit_code(tmp_path: Path) -> None:
    async def main() -> str:
        argv = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
        async with start_child("learner", argv, log_path=tmp_path / "log") as child:
            return (await child.wait_exit()).describe()

    assert "learner was ended by signal 9" in trio.run(main)


def test_last_lines_of_a_long_file_are_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert last_lines(path, 2) == "line 99998\nline 99999"
    assert last_lines(tmp_path / "none", 2) == ""
