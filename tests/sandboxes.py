"""How the tests open real sandboxes, and find what one left behind."""

from __future__ import annotations

import functools
import os
import select
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from asyncrl.protocols import Sandbox, SandboxBackend, SandboxLimits
from asyncrl.sandbox import SandboxSettings, open_backend
from asyncrl.sandbox.server import SandboxServer
from asyncrl.serving import listen, serve

T = TypeVar("T")

LIMITS = SandboxLimits(wall_s=20.0, memory_bytes=96 * 2**20, disk_bytes=8 * 2**20, max_files=256, max_pids=24)


@functools.cache
def cannot_sandbox() -> str:
    """Return why this machine has no sandboxes, asked of the kernel and not of the code under test; empty if it has."""
    tried = subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no user namespaces: {tried.stderr.strip()}"


@functools.cache
def has_groups() -> bool:
    """Return whether control groups can be limited here, by the file system's own word."""
    return any(os.access(path, os.W_OK) for path in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup/cgroup.subtree_control"))


@functools.cache
def cannot_contain() -> str:
    """Return why this machine runs no containers, asked of the engine itself; empty if it does."""
    program = shutil.which("podman") or shutil.which("docker")
    if program is None:
        return "neither podman nor docker is installed"
    if os.geteuid() != 0:
        return "containers need root here"
    tried = subprocess.run([program, "info"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"{program} does not answer: {tried.stderr.strip()[-200:]}"


def skip_unless_possible(backend: str) -> None:
    """Skip the test where this machine cannot have the backend."""
    reason = cannot_contain() if backend == "container" else cannot_sandbox()
    if reason:
        pytest.skip(reason)


def settings(**changes: Any) -> SandboxSettings:
    """Return settings that work on this machine."""
    if changes.get("backend") == "container":
        own = next((name for name in ("crun", "runc") if shutil.which(name)), "")
        changes = {"image": "host", "runtime": own, **changes}
    return SandboxSettings(**{"allow_weaker": not has_groups(), "limits": LIMITS, **changes})


@asynccontextmanager
async def opened(directory: Path, *, backend: str = "bubblewrap", **changes: Any) -> AsyncIterator[SandboxBackend]:
    """Yield an open backend; `remote` is asked of a server in this program that serves `bubblewrap`."""
    if backend != "remote":
        async with open_backend(settings(backend=backend, **changes), directory=directory) as sandboxes:
            yield sandboxes
        return
    token_file = directory / "token"
    token_file.write_text("a-token-of-the-tests")
    listener = listen("127.0.0.1", 0, setting="port")
    port = listener.getsockname()[1]
    async with opened(directory, **changes) as served, trio.open_nursery() as nursery:
        await nursery.start(serve, SandboxServer(served, token="a-token-of-the-tests"), listener)
        remote = settings(backend="remote", urls=(f"http://127.0.0.1:{port}",), token_file=str(token_file), **changes)
        async with open_backend(remote, directory=directory) as sandboxes:
            yield sandboxes
        nursery.cancel_scope.cancel()


def with_backend(body: Callable[[SandboxBackend], Awaitable[T]], directory: Path, **changes: Any) -> T:
    """Return what `body` makes of an open backend, within a minute; skip where the machine has no sandboxes."""
    skip_unless_possible(changes.get("backend", "bubblewrap"))

    async def main() -> T:
        with trio.fail_after(60):
            async with opened(directory, **changes) as backend:
                return await body(backend)

    return trio.run(main)


async def wait_started(sandbox: Sandbox) -> None:
    """Return when the sandbox's command has made the file `started`, of which nothing tells the outside."""
    while "started" not in await sandbox.list():  # noqa: ASYNC110 - it is another process's doing
        await trio.sleep(0.005)


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def groups_of(owner_pid: int) -> list[Path]:
    """Return the control groups that were made for process `owner_pid`."""
    return sorted(Path("/sys/fs/cgroup").glob(f"**/asyncrl-{owner_pid}-*"))


def children_of(pid: int) -> list[int]:
    """Return the child processes of `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == pid:
                found.append(int(entry.name))
    return found


def ended_within(pidfd: int, seconds: float) -> bool:
    """Return whether a process has ended, having waited for that no longer than `seconds`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
