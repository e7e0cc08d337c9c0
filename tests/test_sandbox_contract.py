"""What every sandbox backend promises, on the real ones."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import (
    LIMITS,
    groups_of,
    has_groups,
    opened,
    processes_with,
    skip_unless_possible,
    wait_started,
    with_backend,
)

from asyncrl.errors import SandboxError, UnsafeFilesError
from asyncrl.protocols import Outcome, Sandbox, SandboxBackend
from asyncrl.sandbox import SANDBOXES

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", sorted(SANDBOXES))]


def python(backend: SandboxBackend, source: str) -> list[str]:
    return [*backend.python, "-c", source]


async def shell(sandbox: Sandbox, command: str, **more: object) -> tuple[Outcome, int | None, bytes]:
    result = await sandbox.exec(["/bin/sh", "-c", command], **more)  # type: ignore[arg-type]
    return result.outcome, result.exit_code, result.stdout


def test_a_command_sees_the_files_and_its_exit_code_comes_back(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({"a/b.txt": b"hello", "c": b"\xff\x00"}, limits=LIMITS) as sandbox:
            assert await shell(sandbox, "cat a/b.txt; exit 3") == (Outcome.OK, 3, b"hello")
            assert (await sandbox.exec(["cat", "c"])).stdout == b"\xff\x00"
            assert await shell(sandbox, "kill -9 $$") == (Outcome.OK, -9, b"")
            assert sandbox.wall == sandboxes.wall

    with_backend(body, tmp_path, backend=backend)


def test_a_missing_program_and_an_impossible_argument_are_the_agents_doing(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            missing = await sandbox.exec(["no-such-program"])
            assert (missing.outcome, missing.exit_code) == (Outcome.OK, 127)
            for argv in (["sh", "-c", "echo \0"], []):
                result = await sandbox.exec(argv)
                assert (result.outcome, result.exit_code) == (Outcome.OK, 126)
            too_long = await sandbox.exec(["echo", "x" * 2**18])
            assert (too_long.outcome, too_long.exit_code) == (Outcome.OK, 126)

    with_backend(body, tmp_path, backend=backend)


def test_files_stay_between_commands_and_sandboxes_do_not_share_them(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with (
            await sandboxes.open({}, limits=LIMITS) as one,
            await sandboxes.open({}, limits=LIMITS) as two,
        ):
            await shell(one, "echo work > file; echo temporary > /tmp/file")
            assert (await shell(one, "cat file /tmp/file"))[2] == b"work\ntemporary\n"
            assert (await shell(two, "ls -A . /tmp /dev/shm"))[2] == b".:\n\n/dev/shm:\n\n/tmp:\n"

    with_backend(body, tmp_path, backend=backend)


def test_an_agent_that_closes_its_own_directory_is_no_sandbox_that_failed(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({"file": b"kept"}, limits=LIMITS) as sandbox:
            await shell(sandbox, "chmod 000 file .")
            assert (await sandbox.exec(["ls"])).stdout == b"file\n"
            assert (await sandbox.shell("chmod 000 .; exit 3")).exit_code == 3
            assert (await sandbox.shell("ls")).stdout == b"file\n"
            assert await sandbox.read("file") == b"kept"
            await sandbox.shell("(while :; do chmod 000 /task; done) >/dev/null 2>&1 & sleep 0.1")
            for _ in range(5):
                assert (await sandbox.exec(["true"])).outcome is Outcome.OK

    with_backend(body, tmp_path, backend=backend)


def test_what_no_program_and_no_file_can_be_called_is_answered_and_harms_nobody(backend: str, tmp_path: Path) -> None:
    half = "a\ud800"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({"file": b"kept"}, limits=LIMITS) as sandbox:
            for bad in (half, "a\0b"):
                for action in (
                    partial(sandbox.read, bad),
                    partial(sandbox.write, bad, b""),
                    partial(sandbox.walk, bad),
                ):
                    with pytest.raises(UnsafeFilesError, match=r"half a character|a NUL byte"):
                        await action()
                with pytest.raises(SandboxError):
                    await sandboxes.prepare({bad: b""})
                assert (await sandbox.exec(["echo", bad])).exit_code == 126
                assert (await sandbox.shell(f"echo {bad}")).exit_code == 126
            for limits in (replace(LIMITS, lifetime_s=math.nan), replace(LIMITS, memory_bytes=2**80)):
                with pytest.raises(SandboxError, match="must be a number above 0"):
                    await sandboxes.open({}, limits=limits)
            odd: Any = 5
            with pytest.raises((ValueError, TypeError, SandboxError)):
                await sandbox.read(odd)
            assert (await shell(sandbox, "cat file"))[2] == b"kept"

    with_backend(body, tmp_path, backend=backend)


def test_input_arrives_and_its_end_is_seen(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            long = bytes(range(256)) * 1024
            assert (await sandbox.exec(["wc", "-c"], stdin=long)).stdout == b"262144\n"
            waits = await sandbox.exec(python(sandboxes, "input('name? ')"), wall_s=20.0)
            assert waits.outcome is Outcome.OK
            assert b"EOFError" in waits.stderr
            assert (await sandbox.exec(["true"], stdin=long)).exit_code == 0  # nobody reads it

    with_backend(body, tmp_path, backend=backend)


def test_long_output_keeps_its_beginning_and_its_end(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        limits = replace(LIMITS, kept_output_bytes=1000)
        async with await sandboxes.open({}, limits=limits) as sandbox:
            source = "import sys; sys.stdout.write('a' * 5000 + 'z' * 5000)"  # without a newline
            result = await sandbox.exec(python(sandboxes, source))
            assert result.stdout == b"a" * 500 + b"\n[... 9000 bytes cut ...]\n" + b"z" * 500
            assert result.truncated
            assert result.output_bytes == 10000
            exact = await sandbox.exec(python(sandboxes, "print('b' * 999)"))
            assert (exact.stdout, exact.truncated) == (b"b" * 999 + b"\n", False)

    with_backend(body, tmp_path, backend=backend)


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("sleep 60", Outcome.WALL),
        ("while :; do :; done", Outcome.CPU),
        ("trap '' XCPU; while :; do :; done", Outcome.CPU),
        ("yes", Outcome.OUTPUT),
        ("cat /dev/zero > file", Outcome.DISK),
        ("for i in $(seq 1 300); do : > $i || exit 1; done", Outcome.DISK),
        ("for i in $(seq 1 100); do sleep 5 & done; wait", Outcome.PIDS),
    ],
)
def test_the_limit_that_ended_a_command_is_named(backend: str, command: str, outcome: Outcome, tmp_path: Path) -> None:
    if (outcome is Outcome.PIDS or "trap" in command) and not has_groups():
        pytest.skip("only a control group counts this")

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=replace(LIMITS, cpu_s=1.0)) as sandbox:
            wall_s = 0.2 if outcome is Outcome.WALL else 1.0 if outcome is Outcome.PIDS else 20.0
            result = await sandbox.exec(["/bin/sh", "-c", command], wall_s=wall_s)
            assert result.outcome is outcome
            assert result.exit_code is None or outcome not in (Outcome.WALL, Outcome.OUTPUT)
            assert result.seconds < 15
            again = await sandbox.exec(["true"])  # a full disk is still full, and nothing else is held against it
            assert again.outcome is (Outcome.DISK if outcome is Outcome.DISK else Outcome.OK)

    with_backend(body, tmp_path, backend=backend)


def test_memory_is_limited_for_all_processes_together(backend: str, tmp_path: Path) -> None:
    if not has_groups():
        pytest.skip("only a control group counts all processes together")
    source = """
import os, signal
signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(0))
for _ in range(4):
    if os.fork() == 0:
        hoard = b"x" * (60 * 2**20)
        signal.pause()
signal.pause()
"""

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            result = await sandbox.exec(python(sandboxes, source))
            assert result.outcome is Outcome.MEMORY
            assert result.peak_memory_bytes is not None
            assert 80 * 2**20 < result.peak_memory_bytes <= LIMITS.memory_bytes

    with_backend(body, tmp_path, backend=backend)


def test_read_write_and_list_reach_files_below_the_working_directory(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({"kept": b"1"}, limits=LIMITS) as sandbox:
            await sandbox.write("new/deep/file", b"\x00\xff")
            assert await sandbox.read("new/deep/file") == b"\x00\xff"
            await sandbox.write("kept", b"")
            assert await sandbox.read("./kept") == b""
            assert list(await sandbox.list()) == ["kept", "new"]
            assert list(await sandbox.list("new/deep")) == ["file"]
            assert await shell(sandbox, "echo more >> new/deep/file && rm -r new && echo own > kept") == (
                Outcome.OK,
                0,
                b"",
            )
            with pytest.raises(FileNotFoundError):
                await sandbox.read("new/deep/file")
            with pytest.raises(IsADirectoryError):
                await sandbox.read(".")
            with pytest.raises(SandboxError, match="4 bytes, allowed are 3"):
                await sandbox.read("kept", max_bytes=3)
            with pytest.raises(OSError, match="space") as full:
                await sandbox.write("large", b"x" * (9 * 2**20))
            assert full.value.errno == errno.ENOSPC

    with_backend(body, tmp_path, backend=backend)


def test_names_that_no_text_can_hold_are_listed(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            await sandbox.exec(python(sandboxes, r"open(b'\xff\n', 'w').write('x')"))
            (name,) = await sandbox.list()
            assert os.fsencode(name) == b"\xff\n"
            assert await sandbox.read(name) == b"x"

    with_backend(body, tmp_path, backend=backend)


def test_no_path_leads_out_of_the_sandbox(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            await shell(sandbox, "ln -s /etc/passwd link; ln -s / directory; mkfifo pipe; : > one; ln one hard")
            for path in ("../outside", "/etc/passwd", "link", "directory/etc/passwd", "pipe", "hard", "nul\0"):
                with pytest.raises(SandboxError):
                    await sandbox.read(path)
                with pytest.raises(SandboxError):
                    await sandbox.write(path, b"")
            assert await shell(sandbox, "test -s one") == (Outcome.OK, 1, b"")

    with_backend(body, tmp_path, backend=backend)


def test_strays_end_with_their_command(backend: str, tmp_path: Path) -> None:
    mark = f"3153{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            assert (await shell(sandbox, f"setsid -f sleep {mark}; setsid -f sleep {mark}; true"))[0] is Outcome.OK
            assert processes_with(mark) == []
            assert (await shell(sandbox, f"setsid -f sleep {mark}; sleep 60", wall_s=0.2))[0] is Outcome.WALL
            assert processes_with(mark) == []

    with_backend(body, tmp_path, backend=backend)


def test_a_stray_that_is_slow_to_die_is_dead_when_the_result_is_read(backend: str, tmp_path: Path) -> None:
    """Kills the mutant that answers when bubblewrap has ended, which is before all within have."""
    mark = f"3159{os.getpid()}"
    source = f"""
import os, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    hoard = b"{mark}" * (70 * 2**20 // {len(mark)})
    os.write(write, b"x")
    time.sleep(60)
os.read(read, 1)
"""

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            for _ in range(5):
                result = await sandbox.exec(python(sandboxes, source))
                assert processes_with(mark) == []
                assert (result.outcome, result.exit_code) == (Outcome.OK, 0)

    with_backend(body, tmp_path, backend=backend)


def test_no_ended_process_waits_for_a_parent(backend: str, tmp_path: Path) -> None:
    """In a container nobody may be there to adopt and await orphans; they would fill its process table."""

    mark = f"3160{os.getpid()}"
    seen: list[int] = []

    async def body(sandboxes: SandboxBackend) -> None:
        for number in range(5):
            async with await sandboxes.open({}, limits=LIMITS) as sandbox, trio.open_nursery() as nursery:
                command = f": > started; until test -e stop; do sleep 0.01; done; : {mark}"
                nursery.start_soon(shell, sandbox, command)
                await wait_started(sandbox)
                seen.extend(processes_with(mark))
                if number % 2:
                    await sandbox.write("stop", b"")
                else:
                    nursery.cancel_scope.cancel()
            assert [pid for pid in seen if Path(f"/proc/{pid}").exists()] == []

    with_backend(body, tmp_path, backend=backend)
    assert len(seen) >= 10


def test_a_cancelled_command_is_ended_and_the_sandbox_goes_on(backend: str, tmp_path: Path) -> None:
    mark = f"3154{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shell, sandbox, f": > started; sleep {mark}; true")
                await wait_started(sandbox)
                nursery.cancel_scope.cancel()
            assert (await shell(sandbox, "echo on"))[2] == b"on\n"
            assert processes_with(mark) == []

    with_backend(body, tmp_path, backend=backend)


def test_a_closed_sandbox_answers_infrastructure_and_closes_twice(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        sandbox = await sandboxes.open({}, limits=LIMITS)
        async with trio.open_nursery() as nursery:
            results = []

            async def sleep() -> None:
                results.append(await sandbox.exec(["/bin/sh", "-c", ": > started; sleep 60"]))

            nursery.start_soon(sleep)
            await wait_started(sandbox)
            await sandbox.aclose()
            await sandbox.aclose()
        assert [result.outcome for result in results] == [Outcome.INFRASTRUCTURE]
        assert (await sandbox.exec(["true"])).outcome is Outcome.INFRASTRUCTURE
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.read("file")

    with_backend(body, tmp_path, backend=backend)


def test_files_that_do_not_fit_are_refused_and_nothing_stays(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        for files in ({"large": b"x" * (9 * 2**20)}, {"../out": b""}, {"/abs": b""}, {f"{i}": b"" for i in range(300)}):
            with pytest.raises(SandboxError):
                await sandboxes.open(files, limits=LIMITS)
        async with await sandboxes.open({}, limits=LIMITS):
            assert [path.name for path in (tmp_path / "leases").iterdir() if "box" in path.name] != []

    with_backend(body, tmp_path, backend=backend, max_open=1)
    assert list((tmp_path / "leases").iterdir()) == []


def test_no_more_than_max_open_are_open(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        first = await sandboxes.open({}, limits=LIMITS)
        second = await sandboxes.open({}, limits=LIMITS)
        with trio.move_on_after(0.1) as waiting:
            await sandboxes.open({}, limits=LIMITS)
        assert waiting.cancelled_caught
        await second.aclose()
        async with await sandboxes.open({}, limits=LIMITS), first:
            pass

    with_backend(body, tmp_path, backend=backend, max_open=2)


def test_many_commands_at_a_time_get_their_own_results(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async def one(number: int) -> None:
            async with await sandboxes.open({"number": str(number).encode()}, limits=LIMITS) as sandbox:
                echoed = await sandbox.exec(["cat", "number", "-"], stdin=b"x" * number)
                assert echoed.stdout == str(number).encode() + b"x" * number

        async with trio.open_nursery() as nursery:
            for number in range(32):
                nursery.start_soon(one, number)

    with_backend(body, tmp_path, backend=backend, max_open=16, max_starting=2)


def test_leaving_the_backend_removes_everything(backend: str, tmp_path: Path) -> None:
    skip_unless_possible(backend)
    mark = f"3155{os.getpid()}"

    async def main() -> None:
        async with (
            trio.open_nursery() as nursery,
            opened(tmp_path, backend=backend) as sandboxes,
        ):
            for _ in range(3):
                sandbox = await sandboxes.open({"file": b""}, limits=LIMITS)
                nursery.start_soon(sandbox.exec, ["/bin/sh", "-c", f": > started; sleep {mark}; true"])
                await wait_started(sandbox)
            assert processes_with(mark) != []

    trio.run(main)
    assert processes_with(mark) == []
    assert groups_of(os.getpid()) == []
    assert list((tmp_path / "leases").iterdir()) == []
    assert "asyncrl" not in Path("/proc/self/mountinfo").read_text()


def test_a_command_outlives_trios_idle_worker_threads(backend: str, tmp_path: Path) -> None:
    """Kills the mutant that starts bubblewrap from a thread: trio's end after ten idle seconds, and it with them."""

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            assert await shell(sandbox, "sleep 10.7; echo done") == (Outcome.OK, 0, b"done\n")

    with_backend(body, tmp_path, backend=backend)
