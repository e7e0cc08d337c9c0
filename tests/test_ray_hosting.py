"""What a node starts is ended in order, whoever is killed: the actor, or the program between it and its process.

No Ray runs here: a process stands for the actor.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# A process that says who it is, publishes a file, and ends in order when it is told to, or badly when it is asked to.
_PROCESS = """
import os, signal, sys, time
from pathlib import Path
directory = Path(sys.argv[1])
def leave(number, frame):
    (directory / "ended").write_text("in order")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(directory / "published.weights").touch()
with open(directory / "up", "w") as fifo:
    fifo.write(str(os.getpid()))
if len(sys.argv) > 2:
    print("as asked", flush=True)
    sys.exit(int(sys.argv[2]))
time.sleep(600)
"""


@contextmanager
def _hosted(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Yield the host of a process, the process's pid, and the descriptor on which the host tells of its end."""
    os.mkfifo(directory / "up")
    orders, orders_in = os.pipe()
    events, events_in = os.pipe()
    order = {
        "name": "engine 0",
        "argv": [sys.executable, "-c", _PROCESS, str(directory), *arguments],
        "environment": {},
        "log_path": str(directory / "worker.out"),
        "pass_fds": [],
        "grace_s": 10.0,
        "own_scratch": False,
        "remove_on_exit": [str(directory / "*.weights")],
    }
    with os.fdopen(orders_in, "w") as file:
        json.dump(order, file)
    command = [sys.executable, "-m", "asyncrl.on_ray.hosting", "--order", str(orders), "--events", str(events_in)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[orders, events_in], start_new_session=True)
    os.close(orders)
    os.close(events_in)
    try:
        yield host, int((directory / "up").read_text()), events
    finally:
        host.kill()
        host.wait()
        assert host.stdin is not None
        host.stdin.close()
        os.close(events)


def _wait_gone(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 30)[0], "the process is still there"
    os.close(descriptor)


def _keeper_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.parametrize("killed", ["the host", "the actor"])
def test_the_process_ends_in_order_and_what_it_published_goes_with_it(tmp_path: Path, killed: str) -> None:
    with _hosted(tmp_path) as (host, pid, _):
        keeper = _keeper_of(pid)
        assert host.stdin is not None
        if killed == "the host":
            host.kill()  # as Ray does with what an actor has started
        else:
            host.stdin.close()  # as the kernel does when the actor is killed, and the actor when it is told to stop
        _wait_gone(keeper)
        _wait_gone(pid)
        assert (tmp_path / "ended").read_text() == "in order"
        assert list(tmp_path.glob("*.weights")) == []


def test_how_a_process_ended_by_itself_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with _hosted(tmp_path, "3") as (host, pid, events):
        with os.fdopen(os.dup(events)) as told:
            words = json.loads(told.read())
        assert words.startswith("engine 0 exited with code 3; the last lines of ")
        assert words.endswith("as asked")
        assert host.wait(30) == 0
        _wait_gone(pid)
