"""`asyncrl sandbox`: walls are tested from the command line, and what killed programs left is removed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from sandboxes import cannot_sandbox, children_of, ended_within, groups_of, has_groups
from test_sandbox_abuse import start_owner

from asyncrl.cli import main

WEAK = () if has_groups() else ("--set", "sandbox.allow_weaker=true")
HARMLESS = ("connection to the host's loopback", "abstract socket of the host", "vsock and other families")
"""Attempts that take nothing from the machine where they succeed."""


@pytest.mark.slow
def test_the_self_test_prints_a_list_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    only = [word for name in HARMLESS for word in ("--only", name)]
    assert main(["sandbox", "self-test", "--json", *only, *WEAK]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["name"] for result in results] == list(HARMLESS)
    for result in results:
        assert set(result) == {"name", "stopped", "detail"}
        assert result["stopped"] is True


@pytest.mark.slow
def test_without_a_wall_the_self_test_says_so_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Kills the mutant that calls everything stopped."""
    config = tmp_path / "bare.toml"
    config.write_text('[sandbox]\nbackend = "bare_sandboxes:open_bare"\n')
    more = (*HARMLESS, "socket file of the host", "secrets of the owner", "signal to the owner", "files of the host")
    only = [word for name in more for word in ("--only", name)]
    os.environ["ASYNCRL_TEST_CANARY"] = "a canary's value"
    try:
        assert main(["sandbox", "self-test", str(config), "--json", *only]) == 1
    finally:
        del os.environ["ASYNCRL_TEST_CANARY"]
    results = {result["name"]: result for result in json.loads(capsys.readouterr().out)}
    assert {name for name, result in results.items() if not result["stopped"]} == set(more)
    assert main(["sandbox", "self-test", str(config), "--only", HARMLESS[0]]) == 1
    shown = capsys.readouterr().out
    assert "none: 0 of 1 attempts stopped" in shown
    assert "NO" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "demon"], "there is no attempt 'demon'; did you mean 'daemon'?"),
        (["--set", "run.seed=1"], "--set takes sandbox.KEY=VALUE here, got 'run.seed=1'"),
        (["--set", "sandbox.backend=bublewrap"], "did you mean 'bubblewrap'?"),
        (["--set", "sandbox.backend=nowhere:opener"], "No module named 'nowhere'"),
        (["--set", "sandbox.backend=os:nothing"], "os has no function 'nothing'"),
        (["--set", "sandbox.max_opne=1"], "did you mean 'max_open'?"),
        (["missing.toml"], "there is no configuration file missing.toml"),
    ],
)
def test_what_cannot_be_tested_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sandbox", "self-test", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_reap_removes_what_a_killed_launcher_left_and_nothing_of_the_living(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dead, living = tmp_path / "run-1" / "sandboxes", tmp_path / "run-2" / "sandboxes"
    for path in (dead, living):
        path.mkdir(parents=True)
    with (
        start_owner(dead, 2, "bubblewrap", f"3166{os.getpid()}") as owner,
        start_owner(living, 1, "bubblewrap", f"3167{os.getpid()}") as other,
    ):
        (launcher,) = children_of(owner.pid)
        os.kill(owner.pid, signal.SIGSTOP)  # so that it does not see its launcher die
        os.kill(launcher, signal.SIGKILL)
        owner.kill()
        owner.wait()
        leases = [json.loads(path.read_text()) for path in (dead / "leases").glob("*box-2.json")]
        assert [(lease["box"], len(lease["mounts"]), lease["deadline_s_after_boot"] > 0) for lease in leases] == [
            ("box-2", 1, True)
        ]
        if has_groups():
            assert all(Path(group).is_dir() for group in leases[0]["group"])
        assert main(["sandbox", "reap", str(tmp_path), "--json"]) == 0
        settled = json.loads(capsys.readouterr().out)
        assert len(settled) >= 3
        assert all(name.startswith(str(dead)) for name in settled)
        assert groups_of(owner.pid) == []
        assert list((dead / "leases").iterdir()) == []
        assert len(list((living / "leases").iterdir())) >= 2
        (launcher,) = children_of(other.pid)
        pidfd = os.pidfd_open(launcher)
        other.kill()
        other.wait()
        assert ended_within(pidfd, 10)
        os.close(pidfd)
    assert main(["sandbox", "reap", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 leases")


def test_reaping_where_nothing_is_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sandbox", "reap", str(tmp_path / "none")]) == 2
    assert "there is no directory" in capsys.readouterr().err
