"""Every backend: the persistent shell keeps its state, and nothing that a command does confuses it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from sandboxes import LIMITS, has_groups, processes_with, wait_started, with_backend

from asyncrl.protocols import ExecResult, Outcome, Sandbox, SandboxBackend
from asyncrl.sandbox import SANDBOXES

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", sorted(SANDBOXES))]


async def said(sandbox: Sandbox, command: str) -> tuple[Outcome, int | None, bytes]:
    result = await sandbox.shell(command)
    return result.outcome, result.exit_code, result.stdout


def test_directory_variables_and_functions_stay(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({"d/f": b"inside"}, limits=LIMITS) as sandbox:
            assert await said(sandbox, "cd d; x='it'\\''s'; f() { echo \"$x\"; }\n# no end of line") == (
                Outcome.OK,
                0,
                b"",
            )
            assert await said(sandbox, "cat f; f") == (Outcome.OK, 0, b"insideit's\n")
            assert await said(sandbox, "(exit 7)") == (Outcome.OK, 7, b"")
            assert await said(sandbox, "sh -c 'kill -9 $$'") == (Outcome.OK, -9, b"")
            both = await sandbox.shell("echo out; echo err >&2")
            assert (both.stdout, both.stderr, both.output_bytes, both.detail) == (b"out\n", b"err\n", 8, "")
            assert (await sandbox.exec(["cat", "d/f"])).stdout == b"inside"  # beside it, not in it
            assert await said(sandbox, "pwd; cat <<END\ndocument\nEND") == (Outcome.OK, 0, b"/task/d\ndocument\n")

    with_backend(body, tmp_path, backend=backend)


def test_what_would_confuse_a_careless_shell_is_an_ordinary_command(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            for command in ("break", "continue", "return", "if", "'", "cat", "read x", "exec 3>&1", "", "#", "echo ')"):
                result = await sandbox.shell(command, wall_s=10.0)
                assert result.outcome is Outcome.OK, command
                assert await said(sandbox, "echo on") == (Outcome.OK, 0, b"on\n"), command
            assert (await sandbox.shell("a\0b")).exit_code == 126
            odd = await sandbox.shell("printf '\\377\\000no end'; printf \udcff")
            assert odd.stdout == b"\xff\x00no end\xff"

    with_backend(body, tmp_path, backend=backend)


def test_a_program_that_asks_is_told_that_there_is_no_input(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            asks = await sandbox.shell(f"{sandboxes.python[0]} -c 'input(\"name? \")'", wall_s=20.0)
            assert (asks.outcome, asks.stdout) == (Outcome.OK, b"name? ")
            assert b"EOFError" in asks.stderr
            terminal = await sandbox.shell("cat /dev/tty", wall_s=20.0)
            assert (terminal.outcome, terminal.exit_code) == (Outcome.OK, 1)

    with_backend(body, tmp_path, backend=backend)


def test_an_exit_ends_the_shell_and_the_next_command_says_so(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            assert await said(sandbox, "x=1; echo bye; exit 5") == (Outcome.OK, 5, b"bye\n")
            again = await sandbox.shell("echo ${x-unset}")
            assert (again.stdout, "a new shell" in again.detail) == (b"unset\n", True)
            assert (await sandbox.shell("true")).detail == ""

    with_backend(body, tmp_path, backend=backend)


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("while :; do :; done", Outcome.WALL),
        ("yes", Outcome.OUTPUT),
        ("for i in $(seq 1 100); do sleep 5 & done; wait", Outcome.PIDS),
        ("cat /dev/zero > file", Outcome.DISK),
        ("x=$(head -c 400M /dev/zero | tr '\\0' x)", Outcome.MEMORY),
    ],
)
def test_the_limit_that_ended_a_shells_command_is_named(
    backend: str, command: str, outcome: Outcome, tmp_path: Path
) -> None:
    if not has_groups() and outcome in (Outcome.PIDS, Outcome.MEMORY):
        pytest.skip("only a control group counts this")
    mark = f"3161{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            wall_s = 0.5 if outcome is Outcome.WALL else 1.0 if outcome is Outcome.PIDS else 20.0
            await sandbox.shell(f"sleep {mark} &")
            result = await sandbox.shell(command, wall_s=wall_s)
            assert result.outcome is outcome
            if outcome in (Outcome.WALL, Outcome.OUTPUT):
                assert result.exit_code is None
                assert processes_with(mark) == []
            await sandbox.shell("rm -f file")
            assert (await said(sandbox, "echo on"))[2] == b"on\n"

    with_backend(body, tmp_path, backend=backend)


def test_background_processes_go_on_between_commands(backend: str, tmp_path: Path) -> None:
    mark = f"3162{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            loop = f": {mark} > on; while test ! -e stop; do sleep 0.01; done; echo late"
            command = f"sh -c '{loop}' & until test -e on; do sleep 0.01; done"
            assert await said(sandbox, command) == (Outcome.OK, 0, b"")
            assert (await sandbox.exec(["true"])).outcome is Outcome.OK
            assert processes_with(mark) != []
            assert await said(sandbox, "touch stop; wait") == (Outcome.OK, 0, b"late\n")

    with_backend(body, tmp_path, backend=backend)


def test_a_cancelled_command_ends_its_shell_and_the_sandbox_goes_on(backend: str, tmp_path: Path) -> None:
    mark = f"3163{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sandbox.shell, f": > started; sleep {mark}; true")
                await wait_started(sandbox)
                nursery.cancel_scope.cancel()
            assert processes_with(mark) == []
            again = await sandbox.shell("echo on")
            assert (again.stdout, "a new shell" in again.detail) == (b"on\n", True)

    with_backend(body, tmp_path, backend=backend)


def test_kill_ends_everything_inside_and_keeps_the_files(backend: str, tmp_path: Path) -> None:
    mark = f"3164{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            running = "until grep -q sleep /proc/$!/cmdline; do :; done"  # and not about to be
            await sandbox.shell(f"echo kept > file; setsid -f sleep {mark}; sleep {mark} & {running}")
            assert processes_with(mark) != []
            await sandbox.kill()
            assert processes_with(mark) == []
            await sandbox.kill()  # nothing is left to end
            assert await sandbox.read("file") == b"kept\n"
            assert await said(sandbox, "cat file") == (Outcome.OK, 0, b"kept\n")

    with_backend(body, tmp_path, backend=backend)


def test_one_commands_output_caps_are_its_own(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async def both(output_bytes: int | None, kept: int | None) -> list[ExecResult]:
            argv = ["/bin/sh", "-c", "printf %0200d 7"]
            more = {"output_bytes": output_bytes, "kept_output_bytes": kept}
            return [await sandbox.exec(argv, **more), await sandbox.shell(argv[2], **more)]

        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            for result in await both(None, 20):
                assert result.stdout == b"0" * 10 + b"\n[... 180 bytes cut ...]\n" + b"0" * 9 + b"7"
                assert result.truncated
            for result in await both(100, None):
                assert (result.outcome, result.exit_code) == (Outcome.OUTPUT, None)
            for result in await both(None, None):
                assert (result.outcome, len(result.stdout), result.truncated) == (Outcome.OK, 200, False)
            for wrong in ({"wall_s": 0.0}, {"output_bytes": 0}, {"kept_output_bytes": 1}):
                with pytest.raises(ValueError, match="must be"):
                    await sandbox.shell("true", **wrong)  # type: ignore[arg-type]

    with_backend(body, tmp_path, backend=backend)


def test_a_sandbox_whose_lifetime_is_over_is_closed(backend: str, tmp_path: Path) -> None:
    mark = f"3165{os.getpid()}"

    async def body(sandboxes: SandboxBackend) -> None:
        sandbox = await sandboxes.open({}, limits=replace(LIMITS, lifetime_s=0.5))
        ended = await sandbox.shell(f"sleep {mark}; true")
        assert ended.outcome is Outcome.INFRASTRUCTURE
        assert processes_with(mark) == []
        after = await sandbox.exec(["true"])
        assert (after.outcome, "its lifetime of 0.5 s is over" in after.detail) == (Outcome.INFRASTRUCTURE, True)
        await sandbox.aclose()

    with_backend(body, tmp_path, backend=backend)
