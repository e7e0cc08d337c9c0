"""A run over three hosts that are slow, lose packets, are cut off and die: it goes on, and every promise holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sandboxes import cannot_sandbox, has_groups
from slow_network import Host, Network, cannot_network, network
from tiny_model import build_tiny_model
from tiny_run import write_config

from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_DELAY_S, _LOSS, _PARTITION_S = 0.05, 0.02, 20.0
_PORT = 8780
_PATIENCE_S = 240.0  # for what a person would wait for; a hang is told by it, and nothing is measured


class Program:
    """A command on a host, and what it has said so far."""

    def __init__(self, host: Host, *arguments: str, log: Path) -> None:
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "500",
        }
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                host.command([sys.executable, "-m", "asyncrl", *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
            )
        self._seen = 0

    def wait_said(self, words: str) -> str:
        """Return the next line that has these words, after the last one that was waited for."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            lines = self.log.read_text(errors="replace").splitlines(keepends=True)
            for number, line in enumerate(lines[self._seen :], start=self._seen):
                if words in line and line.endswith("\n"):
                    self._seen = number + 1
                    return line
            assert self.process.poll() is None, f"it ended without {words!r}:\n" + "".join(lines[-40:])
            time.sleep(0.05)  # another process's file, which nothing tells of
        raise AssertionError(f"{words!r} was not said:\n" + self.log.read_text(errors="replace")[-4000:])

    def wait_end(self) -> str:
        """Return all that it said, once it has ended well."""
        assert self.process.wait(_PATIENCE_S) == 0, self.log.read_text(errors="replace")[-4000:]
        return self.log.read_text(errors="replace")


@contextmanager
def hosts(*names: str) -> Iterator[tuple[Network, ExitStack]]:
    """Yield hosts; all that runs on them is ended by the leaving, and waited for."""
    with ExitStack() as waiting, network(*names, delay_s=_DELAY_S, loss=_LOSS) as made:
        yield made, waiting


def test_a_run_over_three_hosts_survives_a_slow_network_a_partition_and_the_death_of_each_host(tmp_path: Path) -> None:
    """The bound holds, the books close and nothing is done twice.

    An engine outlives the orchestrator's host, and serves the run that goes on with its parts on other hosts.
    """
    if reason := cannot_network() or cannot_sandbox():
        pytest.skip(reason)
    model, weights, run = build_tiny_model(tmp_path / "model"), tmp_path / "weights", tmp_path / "run"
    weights.mkdir()
    token = tmp_path / "token"
    token.write_text("a-token-of-the-tests")
    config = write_config(
        tmp_path / "hosts.toml",
        model,
        {
            "run.steps": 10**6,
            "run.directory": str(run),
            "run.checkpoint_every_steps": 3,
            "evaluation.samples": 0,
            "engine.max_num_seqs": 8,
            "weight_sync.transport": "filesystem",
            "weight_sync.directory": str(weights),
            "sandbox.allow_weaker": not has_groups(),
            "roles.listen": f"0.0.0.0:{_PORT}",
            "roles.token_file": str(token),
            "roles.engines": 1,
            "roles.environments": 1,
            "roles.heartbeat_s": 1.0,
            "roles.lost_s": 6.0,
        },
    )
    with hosts("train", "gpu", "cpu") as (made, waiting):
        train, gpu, cpu = made.hosts["train"], made.hosts["gpu"], made.hosts["cpu"]

        def program(host: Host, *arguments: str, log: str) -> Program:
            started = Program(host, *arguments, log=tmp_path / log)
            waiting.callback(started.process.wait)
            return started

        def role(host: Host, kind: str) -> Program:
            connect = ["--connect", f"{train.address}:{_PORT}", "--token-file", str(token), "--name", f"{kind}-0"]
            return program(host, kind, *connect, log=f"{kind}.log")

        engine, environment = role(gpu, "engine"), role(cpu, "environment")
        first = program(train, "orchestrator", str(config), log="first.log")
        first.wait_said("step 2 ")

        made.cut("gpu")  # in the middle of whatever it does
        cut_at = time.monotonic()
        first.wait_said("engine engine-0 is lost: not heard for 6 s")
        time.sleep(max(0.0, cut_at + _PARTITION_S - time.monotonic()))
        made.mend("gpu")
        first.wait_said("engine engine-0 is back after")
        first.wait_said("step ")
        first.wait_said("step ")

        made.cut("cpu")  # a host that dies says nothing
        cpu.kill()
        environment.process.wait(_PATIENCE_S)
        made.mend("cpu")
        environment = role(cpu, "environment")
        first.wait_said("environment environment-0 is back as a new process")
        first.wait_said("step ")
        first.wait_said("step ")

        made.cut("train")
        for host in (train, cpu):
            host.kill()
        first.process.wait(_PATIENCE_S)
        environment.process.wait(_PATIENCE_S)
        made.mend("train")
        # it goes on otherwise distributed: the environment at home, its sandboxes and the learner elsewhere
        roles = {"environments": 0, "sandboxes": 1, "learner": "true"}
        changes = {"run.steps": _steps(run) + 3, **{f"roles.{name}": value for name, value in roles.items()}}
        overrides = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
        second = program(train, "orchestrator", str(config), "--resume", *overrides, log="second.log")
        others = [role(cpu, "sandbox"), role(cpu, "learner")]
        said = second.wait_end()
        assert "engine engine-0 has come from" in said
        for kind, played in zip(("engine", "sandbox", "learner"), (engine, *others), strict=True):
            assert f"{kind} {kind}-0 ends: the run ends" in played.wait_end()
        assert [host.processes() for host in made.hosts.values()] == [[], [], []], "something was left behind"
    _check_promises(run, tmp_path)
    starts = (
        (tmp_path / "runs/roles/engine-0/engine.log").read_text(errors="replace").count("Application startup complete")
    )
    assert starts == 1, "the engine was started again, though nothing had happened to it"
    assert list(weights.iterdir()) == [], "published weights were left behind"


def _steps(run: Path) -> int:
    return len(read_metrics(RunDirectory(run)))


def _check_promises(run: Path, directory: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["max_staleness_trained"] <= 1
    assert summary["weight_syncs_verified"] == summary["weight_syncs"] > 0
    books = json.loads((run / "status.json").read_text())["accounting"]
    for unit in ("groups", "trajectories", "tokens"):
        there = sum(books[state][unit] for state in ("trained", "in_buffer", "in_flight"))
        assert books["generated"][unit] == there + sum(amount[unit] for amount in books["dropped"].values()), unit
    finished = Counter(line["trajectory_id"] for line in _trajectories(run))
    assert finished
    assert max(finished.values()) == 1, "a trajectory was finished twice"


def _trajectories(run: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted((run / "trajectories").iterdir()):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
