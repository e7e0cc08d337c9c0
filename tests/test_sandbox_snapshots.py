"""Every backend: sandboxes lie over a task's files without copying them, fork, and show further places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sandboxes import LIMITS, with_backend

from asyncrl.errors import SandboxError, UnsafeFilesError
from asyncrl.protocols import FileKind, Outcome, Sandbox, SandboxBackend
from asyncrl.sandbox import SANDBOXES

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", sorted(SANDBOXES))]


async def sh(sandbox: Sandbox, command: str) -> bytes:
    """Return what a command that must work wrote."""
    result = await sandbox.exec(["/bin/sh", "-c", command])
    assert (result.outcome, result.exit_code, result.stderr) == (Outcome.OK, 0, b""), result
    return result.stdout


def test_sandboxes_over_one_snapshot_do_not_see_each_others_changes(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        files = {"a/one": b"1", "a/two": b"2", "run.sh": b"#!/bin/sh\necho ran\n"}
        task = await sandboxes.prepare(files, executable=["run.sh"])
        assert task.num_files == 4
        async with (
            await sandboxes.open(task, limits=LIMITS) as first,
            await sandboxes.open(task, limits=LIMITS) as second,
        ):
            await task.aclose()  # those that are open go on
            await task.aclose()
            assert await sh(first, "./run.sh; cat a/one; rm a/one; echo new > a/two; mv a b") == b"ran\n1"
            assert await sh(first, "find . -type f | sort; cat b/two") == b"./b/two\n./run.sh\nnew\n"
            assert await sh(second, "find . -type f | sort; cat a/one a/two") == b"./a/one\n./a/two\n./run.sh\n12"
            with pytest.raises(FileNotFoundError):
                await first.read("a/one")
            assert await second.read("a/one") == b"1"
        with pytest.raises(SandboxError, match="closed"):
            await sandboxes.open(task, limits=LIMITS)

    with_backend(body, tmp_path, backend=backend)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_fork_has_what_was_there_and_goes_its_own_way(backend: str, prepared: bool, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        files = {"kept": b"kept", "gone": b"gone", "dir/below": b"below"}
        task = await sandboxes.prepare(files)
        async with await sandboxes.open(task if prepared else files, limits=LIMITS) as parent:
            made = "rm gone; rm -r dir; mkdir dir; echo own > dir/own; ln -s own dir/link; chmod 750 dir; mkfifo pipe"
            await sh(parent, f"{made}; echo 1 > a")
            async with await parent.fork() as child, await child.fork() as grandchild:
                for one in (parent, child, grandchild):
                    seen = await sh(
                        one, "find . | sort; cat kept dir/link; stat -c %a:%u dir; echo 2 >> a; cat a; id -u"
                    )
                    found = b".\n./a\n./dir\n./dir/link\n./dir/own\n./kept\n./pipe\n"
                    assert seen == found + b"keptown\n750:1000\n1\n2\n1000\n"
                await sh(child, "echo child > kept; rm -r dir")
                assert await sh(parent, "cat kept dir/own") == b"keptown\n"
                assert await sh(grandchild, "cat kept dir/own") == b"keptown\n"
                await child.aclose()
                assert await sh(grandchild, "cat kept") == b"kept"

    with_backend(body, tmp_path, backend=backend)


def test_a_long_chain_of_forks_stays_whole(backend: str, tmp_path: Path) -> None:
    """Kills the mutant that flattens a deep chain from its last part alone."""

    async def body(sandboxes: SandboxBackend) -> None:
        sandbox: Sandbox = await sandboxes.open({"0": b"", "first": b"yes"}, limits=LIMITS)
        for number in range(1, 20):
            child = await sandbox.fork()
            await sandbox.aclose()
            sandbox = child
            await sandbox.write(str(number), b"")
        assert sorted(await sandbox.list(), key=str) == sorted(["first", *map(str, range(20))])
        assert await sh(sandbox, "cat first") == b"yes"
        await sandbox.aclose()

    with_backend(body, tmp_path, backend=backend)


def test_a_snapshot_takes_no_more_room_than_what_it_is_of(backend: str, tmp_path: Path) -> None:
    """Kills the mutants that fill holes, and that copy a file once for every name it has."""

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            await sh(
                sandbox, "for i in 1 2 3 4; do truncate -s 7M sparse$i; done; head -c 5M /dev/zero > one; ln one two"
            )
            async with await sandbox.fork() as fork:
                assert await sh(fork, "stat -c %s sparse1 one; stat -c %h two") == b"7340032\n5242880\n2\n"
                full = await fork.exec(["/bin/sh", "-c", "head -c 4M /dev/zero > more"])
                assert full.outcome is Outcome.OK or sandboxes.wall.endswith("rlimits")

    with_backend(body, tmp_path, backend=backend)


def test_what_cannot_be_copied_is_the_agents_doing_and_ends_nothing(backend: str, tmp_path: Path) -> None:
    nested = "import os\nfor _ in range(150):\n    os.mkdir('d'); os.chdir('d')"

    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({}, limits=LIMITS) as sandbox:
            await sandbox.exec([*sandboxes.python, "-c", nested])
            with pytest.raises(UnsafeFilesError, match="nested more than"):
                await sandbox.fork()
            await sh(sandbox, "rm -r d")
            async with await sandbox.fork() as fork:
                assert await fork.list() == ()

    with_backend(body, tmp_path, backend=backend)


def test_files_that_do_not_fit_below_a_sandbox_are_refused(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        task = await sandboxes.prepare({"large": b"x" * 2**20, "b": b"", "c": b""})
        with pytest.raises(SandboxError, match="disk_bytes 1048576, allowed are 524288"):
            await sandboxes.open(task, limits=replace(LIMITS, disk_bytes=2**19))
        with pytest.raises(SandboxError, match="max_files 3, allowed are 2"):
            await sandboxes.open(task, limits=replace(LIMITS, max_files=2))
        for files in ({"../out": b""}, {"/abs": b""}):
            with pytest.raises(SandboxError):
                await sandboxes.prepare(files)

    with_backend(body, tmp_path, backend=backend)


def test_places_are_shown_read_only_or_writable(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        tests = await sandboxes.prepare({"test.sh": b"#!/bin/sh\necho 1 > /logs/reward\n"}, executable=["test.sh"])
        places = {"/tests": tests, "/logs": None}
        async with await sandboxes.open({"a": b"1"}, limits=LIMITS, work="/app", places=places) as sandbox:
            assert await sh(sandbox, "pwd; cat /app/a; /tests/test.sh; cat /logs/reward") == b"/app\n11\n"
            assert await sandbox.read("/logs/reward") == b"1\n"
            assert await sandbox.read("/app/a") == b"1"
            await sandbox.write("/logs/deep/x", b"x")
            assert await sandbox.list("/logs") == ("deep", "reward")
            planted = await sandbox.exec(["/bin/sh", "-c", "echo x > /tests/test.sh; rm /tests/test.sh; touch /x"])
            assert planted.stderr.count(b"\n") == 3
            for path in ("/tests/test.sh", "/logs/../app/a", "/etc/passwd", "/logsx"):
                with pytest.raises(SandboxError):
                    await sandbox.read(path)
            await tests.aclose()
            async with await sandbox.fork() as fork:
                assert await sh(fork, "cat a /tests/test.sh | wc -l; ls -A /logs") == b"2\n"

    with_backend(body, tmp_path, backend=backend)


def test_what_an_agent_made_cannot_be_changed_where_it_is_shown_to_it(backend: str, tmp_path: Path) -> None:
    """Kills the mutant that relies on the files' owner: here it is the same user."""

    async def body(sandboxes: SandboxBackend) -> None:
        agent: Sandbox = await sandboxes.open({}, limits=LIMITS)
        await sh(agent, "echo own > own")
        for _ in range(2):  # one layer, and one over another
            made = await agent.snapshot()
            async with await sandboxes.open(made, limits=LIMITS, places={"/made": made}) as other:
                tried = await other.exec(["/bin/sh", "-c", "echo x > /made/own; rm /made/own; touch /made/new"])
                assert tried.stderr.count(b"Read-only file system") == 3
                assert await sh(other, "cat /made/own") == b"own\n"
                await agent.aclose()
                agent = await other.fork()
        await agent.aclose()

    with_backend(body, tmp_path, backend=backend)


@pytest.mark.parametrize("path", ["/usr/x", "/etc", "/proc", "relative", "/a/../b", "/", "/a:b", "/task/below", "/tmp"])
def test_a_place_that_would_hide_the_system_is_refused(backend: str, path: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        with pytest.raises(SandboxError, match="place"):
            await sandboxes.open({}, limits=LIMITS, places={path: None})

    with_backend(body, tmp_path, backend=backend)


def test_a_walk_tells_what_is_there_without_following_anything(backend: str, tmp_path: Path) -> None:
    async def body(sandboxes: SandboxBackend) -> None:
        async with await sandboxes.open({"d/file": b"12345"}, limits=LIMITS) as sandbox:
            await sh(sandbox, "ln -s / root; ln -s file d/link; mkfifo d/pipe; touch \"$(printf 'new\\nline\\377')\"")
            found = await sandbox.walk()
            assert [(entry.path, entry.kind) for entry in found] == [
                ("d", FileKind.DIRECTORY),
                ("d/file", FileKind.FILE),
                ("d/link", FileKind.LINK),
                ("d/pipe", FileKind.OTHER),
                ("new\nline\udcff", FileKind.FILE),
                ("root", FileKind.LINK),
            ]
            assert found[1].num_bytes == 5
            assert [entry.path for entry in await sandbox.walk("d")] == ["d/file", "d/link", "d/pipe"]
            with pytest.raises(UnsafeFilesError, match="more than the 5 files allowed"):
                await sandbox.walk(max_entries=5)
            for path in ("root", "d/link", "../x"):
                with pytest.raises((UnsafeFilesError, NotADirectoryError)):
                    await sandbox.walk(path)

    with_backend(body, tmp_path, backend=backend)
