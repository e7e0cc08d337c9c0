"""Containers: what is missing is named, and nothing outlives who started it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import cannot_contain, children_of, ended_within, settings
from test_sandbox_abuse import OWNER

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import SandboxLimits
from asyncrl.sandbox import SandboxSettings, leases, open_backend
from asyncrl.sandbox.commands import Box
from asyncrl.sandbox.container_commands import Holder, run_command, run_in_shell
from asyncrl.sandbox.engine import Engine
from asyncrl.sandbox.machine import standard_library_command
from asyncrl.sandbox.results import check_caps

pytestmark = pytest.mark.slow


def opening(directory: Path, **changes: Any) -> None:
    """Open the backend, and close it."""

    async def main() -> None:
        async with open_backend(settings(backend="container", **changes), directory=directory):
            pass

    trio.run(main)


def a_program(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_engine_that_is_not_there_or_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs no-such-engine: install it, or name another by engine"):
        opening(tmp_path, engine="no-such-engine")
    broken = a_program(tmp_path, "broken", "echo cannot connect to the daemon >&2; exit 1")
    with pytest.raises(
        ConfigError, match=r"engine does not answer: .*broken info. failed: cannot connect to the daemon"
    ):
        opening(tmp_path, engine=broken)
    assert not (tmp_path / "leases").exists()


def test_an_engine_that_answers_slowly_is_given_up(tmp_path: Path) -> None:
    from trio.testing import MockClock

    from asyncrl.sandbox.engine import Engine

    asleep = a_program(tmp_path, "asleep", "exec sleep 1000")

    async def main() -> None:
        with pytest.raises(SandboxError, match=r"asleep info. did not answer within 60 s: see whether `.*asleep info`"):
            await Engine(program=asleep, runtime="").call("info")

    trio.run(main, clock=MockClock(rate=1000.0))


def test_an_image_that_is_not_here_is_not_pulled_in_the_middle_of_a_run(tmp_path: Path) -> None:
    if reason := cannot_contain():
        pytest.skip(reason)
    with pytest.raises(ConfigError, match=r"the image 'nowhere/nothing:1' is not here .*pull nowhere/nothing:1`"):
        opening(tmp_path, image="nowhere/nothing:1")


@pytest.mark.parametrize("changes", [{"backend": "container"}, {"image": "host"}])
def test_an_image_goes_with_containers_and_with_nothing_else(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="image must name what to run where backend is 'container', and only there"):
        SandboxSettings(**changes)  # type: ignore[arg-type]


def test_nothing_of_a_killed_owner_is_left(tmp_path: Path) -> None:
    if reason := cannot_contain():
        pytest.skip(reason)
    mark = f"3170{os.getpid()}"
    argv = [str(tmp_path), os.path.dirname(__file__), "3", "container"]
    program = [sys.executable, "-c", OWNER % {"mark": mark}, *argv]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        (janitor,) = [pid for pid in children_of(owner.pid) if b"janitor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        pidfd = os.pidfd_open(janitor)
        assert len(containers_of(owner.pid)) == 3
        assert str(tmp_path) in Path("/proc/self/mountinfo").read_text()
        owner.kill()
        owner.wait()
    try:
        assert ended_within(pidfd, 30)
    finally:
        os.close(pidfd)
    assert containers_of(owner.pid) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert list((tmp_path / "leases").iterdir()) == []


def test_an_engine_that_cannot_be_started_is_no_answer_of_the_agents(tmp_path: Path) -> None:
    holder = Holder(Engine(program=str(tmp_path / "podman"), runtime=""), "box", os.getpid())
    box = Box(name="box", path=str(tmp_path), uid=None, limits={}, work="/task", layer=None, deadline=0.0)
    box.directory = os.open(tmp_path, os.O_RDONLY)
    caps = check_caps(SandboxLimits(), None, None, None)
    for run in (partial(run_command, argv=["true"], stdin=b""), partial(run_in_shell, text="true")):
        with pytest.raises(SandboxError, match="podman` cannot be run: No such file"):
            trio.run(partial(run, holder, box, caps=caps))
    os.close(box.directory)


def janitor_of(ledger: Path, owner: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(standard_library_command("janitor", f"{ledger}/{owner}"), stdin=subprocess.PIPE)


def test_a_janitor_waits_for_the_end_of_an_owner_that_left_something(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:
        ledger = leases.Ledger.open(str(tmp_path), owner.pid)
        ledger.write("box", {})
        with janitor_of(tmp_path, ledger.owner) as janitor:
            assert janitor.stdin is not None
            janitor.stdin.close()
            try:
                with pytest.raises(subprocess.TimeoutExpired):  # an end is what must not come
                    janitor.wait(0.2)
                assert len(ledger.files()) == 1
            finally:
                owner.kill()
            assert janitor.wait(30) == 0
    assert ledger.files() == []


def test_a_janitor_waits_for_no_owner_that_has_removed_everything_itself(tmp_path: Path) -> None:
    other = leases.Ledger.open(str(tmp_path), os.getpid())
    other.write("box", {})
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:
        ledger = leases.Ledger.open(str(tmp_path), owner.pid)
        with janitor_of(tmp_path, ledger.owner) as janitor:
            assert janitor.stdin is not None
            janitor.stdin.close()
            try:
                assert janitor.wait(30) == 0
            finally:
                owner.kill()
    assert len(other.files()) == 1


def containers_of(owner_pid: int) -> list[str]:
    listed = subprocess.run(
        ["podman", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split() if name.startswith(f"asyncrl-{owner_pid}-")]
