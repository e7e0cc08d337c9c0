"""A run on a Ray cluster of three nodes, one of which is killed: real vLLM, real learner, real Ray.

The engine is on the one node that is killed and comes back on another; the learner and an environment worker are on the
first. Then a run is killed, and Ray and the keepers leave nothing of it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from ray_cluster import Cluster, running_cluster
from tiny_model import build_tiny_model
from tiny_run import write_config

from asyncrl.buffers.accounting import Amount, Statement
from asyncrl.demonstrations import write_demonstrations
from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory

pytest.importorskip("ray", reason="Ray is not installed (asyncrl[ray])")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

_VLLM = "vllm.entrypoints.openai.api_server"
_OURS = ("asyncrl.on_ray.hosting", "keeper.py", _VLLM, "asyncrl.learner", "asyncrl serve", "asyncrl sandbox")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = {"first": {"place": 4}, "second": {"engines": 1}, "third": {"engines": 1}}
    with running_cluster(nodes) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def _config(tmp_path: Path, model: Path, cluster: Cluster, settings: Mapping[str, Any]) -> Path:
    (tmp_path / "weights").mkdir()
    place: dict[str, Any] = {"cpus": 0.0, "resources": {"place": 1.0}}
    return write_config(
        tmp_path / "tiny.toml",
        model,
        {
            "run.directory": str(tmp_path / "run"),
            "weight_sync.transport": "filesystem",
            "weight_sync.directory": str(tmp_path / "weights"),
            "ray.address": cluster.address,
            "ray.engine": {"cpus": 0.0, "resources": {"engines": 1.0}},
            **dict.fromkeys(("ray.learner", "ray.environment", "ray.sandbox"), place),
            **settings,
        },
    )


@contextmanager
def _running(config: Path, cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """Yield a run that is under way; it is killed at the end."""
    run = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "train", str(config), "--on", "ray"],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    try:
        yield run
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def _read_until(run: subprocess.Popen[str], words: str, lines: list[str]) -> None:
    """Add what the run writes to `lines`, up to a line that begins with `words`."""
    assert run.stdout is not None
    for line in run.stdout:
        lines.append(line)
        if line.startswith(words):
            return
    raise AssertionError(f"the run has not said {words!r}:\n{''.join(lines)}")


def _ours(cluster: Cluster) -> dict[int, str]:
    """Return pid -> command line of every process that a run has started on the cluster."""
    found = {}
    for node in cluster.nodes.values():
        found |= {pid: line for pid, line in node.descendants().items() if any(words in line for words in _OURS)}
    return found


def _wait_gone(pids: dict[int, str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for pid, line in pids.items():
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], f"still there: {line}"
        finally:
            os.close(descriptor)


def test_an_engine_whose_node_is_killed_comes_back_on_another_and_the_run_takes_all_its_steps(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    settings = {"run.steps": 4, "ray.environments": 1, "evaluation.samples": 0, "buffer.retries": 1}
    directory = RunDirectory(tmp_path / "run")
    lines: list[str] = []
    with _running(_config(tmp_path, model, cluster, settings), cluster) as run:
        _read_until(run, "step 1", lines)
        lost = cluster.node_of(_VLLM)
        server = next(line for line in lost.descendants().values() if _VLLM in line)
        host, port = (server.split(f"--{name} ")[1].split()[0] for name in ("host", "port"))
        assert host not in ("127.0.0.1", "127.0.0.2"), "each node has an address of its own, and the first no engine"
        assert httpx.post(f"http://{host}:{port}/pause").status_code == 401, "others can reach it, and may do nothing"
        lost.kill()
        del cluster.nodes[lost.name]
        output, _ = run.communicate(timeout=300)
    output = "".join(lines) + output
    assert run.returncode == 0, output
    assert "starting it again, 1 of 3 times" in output
    assert "(engine 0 pid=" in output, "Ray shows what the processes write"
    summary = json.loads(directory.summary.read_text())
    assert summary["steps"] == 4
    assert summary["max_staleness_trained"] <= 1
    assert summary["weight_syncs_verified"] == summary["weight_syncs"] >= 3
    assert {name: count for name, count in summary["groups_dropped"].items() if count} == {}
    books = msgspec.convert(json.loads(directory.status.read_text())["accounting"], Statement)
    assert books.difference == Amount()
    assert books.trained.groups == 8
    assert len(read_metrics(directory)) == 4
    assert _ours(cluster) == {}
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_killed_run_leaves_no_process_and_no_weights_on_any_node(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    demonstrations = tmp_path / "demonstrations.jsonl"
    talks = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "acegik"}] for i in range(64)]
    write_demonstrations(demonstrations, talks)
    settings = {
        "run.steps": 0,
        "warm_start.path": str(demonstrations),
        "warm_start.epochs": 1000,
        "learner.ranks": 2,
        "ray.sandboxes": 1,
        "evaluation.samples": 0,
    }
    with _running(_config(tmp_path, model, cluster, settings), cluster) as run:
        _read_until(run, "the learner computes on", lines := [])
        ours = _ours(cluster)
        for words in ("--rank 0 --ranks 2", "--rank 1 --ranks 2", "sandbox serve"):
            assert any(words in line for line in ours.values()), (words, lines)
        assert list((tmp_path / "weights").iterdir()), "there is something to be removed"
    _wait_gone(ours, 60)
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_cluster_without_the_resources_is_refused_by_their_names(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, model, cluster, {"ray.learner": {"gpus": 1.0}, "engine.count": 3})
    with _running(config, cluster) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 2, output
    assert "GPU: 1 asked for by 1 learner (1 each, gpus in [ray.learner]), there is 0 on" in output
    assert "engines: 3 asked for by 3 engines (1 each, resources in [ray.engine]), there is" in output
    assert not (tmp_path / "run").exists()
