"""No agent gets out, takes more than its share, or leaves anything behind; nor does a killed owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from sandboxes import (
    LIMITS,
    cannot_sandbox,
    children_of,
    ended_within,
    groups_of,
    has_groups,
    processes_with,
    wait_started,
    with_backend,
)

from asyncrl.errors import SandboxError
from asyncrl.protocols import Outcome, SandboxBackend
from asyncrl.sandbox import SANDBOXES, AbuseResult, abuse_names, self_test

WALLS = sorted(set(SANDBOXES) - {"remote"})  # which has none of its own, but its servers'
with_every_wall = pytest.mark.parametrize("backend", WALLS)
with_a_launcher = pytest.mark.parametrize("backend", ["bubblewrap"])

pytestmark = pytest.mark.slow


@with_every_wall
def test_every_abuse_of_the_self_test_is_stopped(backend: str, tmp_path: Path) -> None:
    results: list[AbuseResult] = []

    async def body(sandboxes: SandboxBackend) -> None:
        results.extend(await self_test(sandboxes))

    with_backend(body, tmp_path, backend=backend)
    assert [result.name for result in results] == list(abuse_names())
    tolerated = set() if has_groups() else {"memory bomb of many processes"}
    assert [result for result in results if not result.stopped and result.name not in tolerated] == []


@with_a_launcher
def test_a_secret_in_the_owners_environment_is_nowhere_inside(backend: str, tmp_path: Path) -> None:
    """With a canary, in a program of its own, so that the test sees a leak for certain."""
    if reason := cannot_sandbox():
        pytest.skip(reason)
    program = """
import sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from sandboxes import LIMITS, with_backend
async def body(backend):
    async with await backend.open({}, limits=LIMITS) as sandbox:
        result = await sandbox.exec(["/bin/sh", "-c", "env; cat /proc/*/environ /proc/*/cmdline /proc/cmdline 2>&1"])
        print(result.stdout.decode(errors="replace"))
with_backend(body, Path(sys.argv[1]))
"""
    environment = {**os.environ, "CANARY": "canary-in-the-environment"}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), os.path.dirname(__file__)],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "PATH=" in ran.stdout
    assert "canary" not in ran.stdout
    assert str(tmp_path) not in ran.stdout


@with_every_wall
def test_a_link_swapped_in_a_race_is_never_followed(backend: str, tmp_path: Path) -> None:
    """Kills the mutant that checks the path first and opens it then."""
    source = """
import os
os.mkdir("a")
open("a/passwd", "w").write("inside")
os.symlink("/etc", "link")
open("started", "w").close()
while True:
    os.rename("a", "b"); os.rename("link", "a")
    os.rename("a", "link"); os.rename("b", "a")
"""
    read: dict[bytes, int] = {}
    refused = 0

    async def body(sandboxes: SandboxBackend) -> None:
        nonlocal refused
        async with await sandboxes.open({}, limits=LIMITS) as sandbox, trio.open_nursery() as nursery:
            nursery.start_soon(sandbox.exec, [*sandboxes.python, "-c", source])
            await wait_started(sandbox)
            for _ in range(1000):
                try:
                    data = await sandbox.read("a/passwd")
                    read[data] = read.get(data, 0) + 1
                except (SandboxError, OSError):
                    refused += 1
            nursery.cancel_scope.cancel()

    with_backend(body, tmp_path, backend=backend)
    assert set(read) <= {b"inside"}
    assert read
    assert refused


@with_every_wall
def test_a_setuid_file_has_no_effect_and_nothing_of_the_host_can_be_written(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            command = "cp /usr/bin/id own && chmod 6755 own && ./own -u; touch /usr/x /etc/x /x /dev/x; id -u"
            result = await sandbox.exec(["/bin/sh", "-c", command])
            assert result.stdout == b"1000\n1000\n"
            assert result.stderr.count(b"Read-only file system") >= 3
            assert result.stderr.count(b"cannot touch") == 4

    with_backend(body, tmp_path, backend=backend)


@with_every_wall
def test_a_hostile_sandbox_does_not_keep_others_from_working(backend: str, tmp_path: Path) -> None:
    if not has_groups():
        pytest.skip("without control groups one user's processes are limited together")

    async def body(sandboxes: SandboxBackend) -> None:
        async with trio.open_nursery() as nursery:
            for command in (":(){ :|:& };:", "yes", "cat /dev/zero > /tmp/x; while :; do :; done"):
                sandbox = await sandboxes.open({}, limits=LIMITS)
                nursery.start_soon(sandbox.exec, ["/bin/bash", "-c", command])
            for _ in range(5):
                async with await sandboxes.open({}, limits=LIMITS) as quiet:
                    result = await quiet.exec(["echo", "here"])
                    assert (result.outcome, result.stdout) == (Outcome.OK, b"here\n")
            nursery.cancel_scope.cancel()

    with_backend(body, tmp_path, backend=backend)


OWNER = """
import sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from sandboxes import LIMITS, wait_started, with_backend
async def body(backend):
    async with trio.open_nursery() as nursery:
        async def open_one():
            sandbox = await backend.open({"file": b"x"}, limits=LIMITS)
            command = ": > started; setsid -f sleep %(mark)s; sleep %(mark)s; true"
            nursery.start_soon(sandbox.exec, ["/bin/sh", "-c", command])
            await wait_started(sandbox)
        async with trio.open_nursery() as opening:
            for _ in range(int(sys.argv[3])):
                opening.start_soon(open_one)
        print("ready", flush=True)
        await trio.sleep_forever()
with_backend(body, Path(sys.argv[1]), backend=sys.argv[4])
"""


def start_owner(directory: Path, num_sandboxes: int, backend: str, mark: str) -> subprocess.Popen[str]:
    """Return a program that has `num_sandboxes` open, each running something."""
    if reason := cannot_sandbox():
        pytest.skip(reason)
    argv = [str(directory), os.path.dirname(__file__), str(num_sandboxes), backend]
    owner = subprocess.Popen([sys.executable, "-c", OWNER % {"mark": mark}, *argv], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


@with_a_launcher
def test_nothing_is_left_within_seconds_of_killing_the_owner_of_50_sandboxes(backend: str, tmp_path: Path) -> None:
    mark = f"3156{os.getpid()}"
    with start_owner(tmp_path, 50, backend, mark) as owner:
        (launcher,) = children_of(owner.pid)
        pidfd = os.pidfd_open(launcher)
        leases = sorted((tmp_path / "leases").iterdir())
        assert len(leases) >= 50
        assert len(processes_with(mark)) >= 100
        assert bool(groups_of(owner.pid)) is has_groups()
        owner.kill()
        owner.wait()
        try:
            assert ended_within(pidfd, 10)
        finally:
            os.close(pidfd)
        assert processes_with(mark) == []
        assert groups_of(owner.pid) == []
        assert list((tmp_path / "leases").iterdir()) == []


@with_a_launcher
def test_the_next_start_removes_what_a_killed_launcher_left(backend: str, tmp_path: Path) -> None:
    mark = f"3157{os.getpid()}"
    with start_owner(tmp_path, 3, backend, mark) as owner:
        (launcher,) = children_of(owner.pid)
        running = [os.pidfd_open(pid) for pid in processes_with(mark)]
        os.kill(owner.pid, signal.SIGSTOP)  # so that it does not see its launcher die
        os.kill(launcher, signal.SIGKILL)
        owner.kill()
        owner.wait()
        for pidfd in running:
            assert ended_within(pidfd, 10)
            os.close(pidfd)
    assert processes_with(mark) == []
    left = list((tmp_path / "leases").iterdir())
    assert len(left) >= 3
    assert bool(groups_of(owner.pid)) is has_groups()
    assert all("boot" in json.loads(lease.read_text()) for lease in left)

    async def body(sandboxes: SandboxBackend) -> None:
        assert groups_of(owner.pid) == []
        assert not any(lease.exists() for lease in left)

    with_backend(body, tmp_path, backend=backend)


@with_a_launcher
def test_leases_of_an_owner_that_lives_are_left_alone(backend: str, tmp_path: Path) -> None:
    mark = f"3158{os.getpid()}"
    with start_owner(tmp_path, 2, backend, mark) as owner:
        (launcher,) = children_of(owner.pid)
        pidfd = os.pidfd_open(launcher)
        before = len(processes_with(mark))

        async def body(sandboxes: SandboxBackend) -> None:
            async with await sandboxes.open({}, limits=LIMITS) as sandbox:
                assert (await sandbox.exec(["true"])).exit_code == 0

        with_backend(body, tmp_path, backend=backend)
        assert len(processes_with(mark)) == before
        owner.kill()
        owner.wait()
        assert ended_within(pidfd, 10)
        os.close(pidfd)
    assert processes_with(mark) == []
