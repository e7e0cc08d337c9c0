"""Whole runs of `asyncrl train`: real vLLM on a tiny random model, the real learner, real sandboxes, real signals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_tree import descendants
from tiny_model import build_tiny_model
from tiny_run import write_config

from asyncrl import cli
from asyncrl.recording import read_metrics, read_spikes, read_tokens
from asyncrl.run_directory import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_SETTINGS = {"run.steps": 3, "run.checkpoint_every_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / f"run_{os.getpid()}")  # its name is in shared memory, where other runs have theirs


@pytest.fixture
def config(tmp_path: Path, model: Path, directory: RunDirectory) -> Path:
    return write_config(tmp_path / "tiny.toml", model, {**_SETTINGS, "run.directory": str(directory.path)})


def _command(config: Path, *arguments: str, verb: str = "train") -> list[str]:
    return [sys.executable, "-m", "asyncrl", verb, str(config), *arguments]


def _environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}


def _train(config: Path, *arguments: str, verb: str = "train") -> str:
    done = subprocess.run(
        _command(config, *arguments, verb=verb),
        cwd=config.parent,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def _running(config: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Yield a run that has taken its first step, and the lines that it has written so far; it is killed at the end."""
    run = subprocess.Popen(
        _command(config, *arguments), env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.stdout is not None
    lines: list[str] = []
    try:
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step "):
                break
        assert lines[-1].startswith("step "), "".join(lines)
        yield run, lines
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def _wait_gone(pids: Sequence[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} is still there"


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _check_nothing_left(directory: RunDirectory, before: set[str]) -> None:
    """Fail where shared memory has a file of the run's name, or one that is new and that no living process uses.

    Other runs on the machine, which come and go meanwhile, are none of its business.
    """
    used = _used_in_shared_memory()
    left = set()
    for name in _shared_memory() - before:
        if name.startswith("asyncrl-"):
            left |= {name} if name.startswith(f"asyncrl-{directory.path.name}-") else set()
        elif (path := Path("/dev/shm", name)).exists() and path.stat().st_ino not in used:
            left.add(name)
    assert not left


def _used_in_shared_memory() -> set[int]:
    """Return the inodes of what living processes have mapped: a semaphore's mapping has another name than its file."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or is another user's
        used |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return used


def _one(processes: Mapping[int, str], words: str) -> int:
    (pid,) = (pid for pid, line in processes.items() if words in line and "keeper.py" not in line)
    return pid


def test_a_run_trains_measures_checkpoints_and_goes_on_until_its_tasks_end(
    config: Path, directory: RunDirectory
) -> None:
    before = _shared_memory()
    tasks = ("--set", "environment.options.epochs=2")  # ten tasks, two a step
    with config.open("a") as text:
        text.write('\n[weight_sync]\ndelta = true\nverify = "full"\n')
    output = _train(config, *tasks)
    assert "the learner computes on cpu, attention by tiles" in output
    assert "what the run did" in output
    summary = json.loads(directory.summary.read_text())
    assert summary["steps"] == summary["policy_version"] == 3
    assert summary["weight_syncs"] == summary["weight_syncs_verified"] == 3 - summary["versions_superseded"] > 0
    assert 0 <= summary["last_sync"]["canary_distance"] < 0.5
    assert summary["weight_sync_chain_breaks"]["no_copy"] == 1, "the engine's first version"
    assert summary["weight_sync_bytes"]["full"] > 0
    assert summary["max_staleness_trained"] <= 1
    assert 0 < summary["tokens_trained"] <= summary["tokens_generated"]
    assert summary["eval"]["tasks"] == 2
    assert 0.0 <= summary["eval"]["after"] <= 1.0
    assert sum(summary["trajectories"].values()) >= 3 * 8
    steps = read_metrics(directory)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["grad_norm"] > 0 for step in steps)
    assert max(step["importance_ratio_max"] for step in steps if step["staleness_max"] == 0) < 1.01

    _train(config, "--resume", "--set", "run.steps=100", "--set", "buffer.max_off_policyness=1", *tasks)
    summary = json.loads(directory.summary.read_text())
    assert summary["policy_version"] == 5
    assert summary["groups_trained"] == 10
    assert summary["eval"]["after"] is not None
    assert [step["step"] for step in read_metrics(directory)] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["step-4", "step-5"]
    _check_model_loads(directory.checkpoints / "step-5" / "model")
    _check_what_is_shown(directory)
    _check_nothing_left(directory, before)


def _check_what_is_shown(directory: RunDirectory) -> None:
    """Fail unless the run tells of its tokens and of its times, and both commands make something of it."""
    lines = read_spikes(directory)
    assert [line["step"] for line in lines] == [line["step"] for line in read_tokens(directory)] == [1, 2, 3, 4, 5]
    tokens = [token for line in lines for token in line["tokens"]]
    assert {(token["engine"], token["environment"]) for token in tokens} == {("engine 0", "parity")}
    assert {token["finish_reason"] for token in tokens} <= {"stop", "length"}
    assert cli.main(["trace", str(directory.path)]) == 0
    trace = json.loads((directory.path / "trace.json").read_text())["traceEvents"]
    kinds = {event["cat"] for event in trace if event["ph"] == "X"}
    assert {"learner", "weight syncs", "groups", "episodes"} <= kinds
    steps = [event["name"] for event in trace if event["name"].startswith("step ")]
    assert steps == ["step 1", "step 2", "step 3", "step 4", "step 5"]
    assert cli.main(["report", str(directory.path)]) == 0
    page = (directory.path / "report.html").read_text(encoding="utf-8")
    assert 'id="figure-ratio"' in page
    assert "What to know about these figures" not in page


def _check_model_loads(path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).chat_template


def test_bound_zero_trains_on_policy_in_the_same_code_and_its_end_is_measured_against_its_beginning(
    config: Path, directory: RunDirectory, model: Path, tmp_path: Path
) -> None:
    relative = ("--set", f"run.directory={directory.path.name}")
    _train(config, *relative, "--set", "buffer.max_off_policyness=0", "--set", "evaluation.samples=0")
    summary = json.loads(directory.summary.read_text())
    assert summary["max_staleness_trained"] == 0
    assert summary["max_importance_ratio"] < 1.01

    compared = ("--run", directory.path.name, "--baseline", str(model), "--samples", "3", "--out", "compared.json")
    said = _train(config, *compared, verb="eval")
    found = json.loads((tmp_path / "compared.json").read_text())
    assert (found["version"], found["num_tasks"], found["num_samples"]) == (3, 2, 6)
    assert found["model"].endswith("step-3/model")
    assert len(found["pass_at"]) == 3
    assert found["interval"][0] <= found["solve_rate"] <= found["interval"][1]
    assert found["difference"]["solve_rate"] == pytest.approx(found["solve_rate"] - found["baseline"]["solve_rate"])
    assert "pass@2" in said


def test_ctrl_c_finishes_the_step_saves_and_leaves_nothing(config: Path, directory: RunDirectory) -> None:
    before = _shared_memory()
    with _running(config, "--set", "run.steps=1000", "--set", "evaluation.before=false") as (run, lines):
        _check_scrape(lines)
        report = subprocess.run(
            [sys.executable, "-m", "asyncrl", "status", str(directory.path), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(report.stdout)["state"] == "running"
        processes = descendants(run.pid)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
        _wait_gone(list(processes), 1.0)
    summary = json.loads(directory.summary.read_text())
    assert (directory.checkpoints / f"step-{summary['policy_version']}" / "manifest.json").exists()
    assert summary["eval"]["after"] is None
    _check_nothing_left(directory, before)


def _check_scrape(lines: Sequence[str]) -> None:
    (line,) = (line for line in lines if line.startswith("Prometheus metrics at "))
    address = line.split()[-1]
    assert "gate " in httpx.get(address.removesuffix("metrics")).text, "the run as a page"
    text = httpx.get(address).text
    values: dict[str, Any] = {}
    for sample in text.splitlines():
        if not sample.startswith("#"):
            name, value = sample.rsplit(" ", 1)
            values[name] = float(value)
    assert values["asyncrl_policy_version"] >= 1
    assert values["asyncrl_tokens_generated_total"] > 0
    assert values["asyncrl_importance_ratio_max"] > 0
    assert values['asyncrl_engine_generation_tokens_total{engine="engine 0"}'] > 0, "what the engine says of itself"
    assert values['asyncrl_memory_bytes{role="learner"}'] > 2**27
    assert values["asyncrl_disk_free_bytes"] > 0
    assert sum(value for name, value in values.items() if name.startswith("asyncrl_phase{")) == 1


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing(config: Path, directory: RunDirectory) -> None:
    before = _shared_memory()
    with _running(config, "--set", "run.steps=1000", "--set", "evaluation.before=false") as (run, _):
        processes = descendants(run.pid)
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None
        for line in run.stdout:
            if "once more to stop at once" in line:
                break
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
        _wait_gone(list(processes), 1.0)
    _check_nothing_left(directory, before)


def test_kill_9_of_the_orchestrator_leaves_nothing_and_the_run_goes_on(config: Path, directory: RunDirectory) -> None:
    before = _shared_memory()
    settings = ("--set", "run.checkpoint_every_steps=1", "--set", "evaluation.samples=0")
    with _running(config, "--set", "run.steps=1000", *settings) as (run, _):
        assert run.stdout is not None
        run.stdout.readline()  # the second step: the checkpoint of the first is whole
        processes = descendants(run.pid)
        run.kill()
        run.wait()
        _wait_gone(list(processes), 20.0)
    _check_nothing_left(directory, before)
    saved = max(int(path.name.removeprefix("step-")) for path in directory.checkpoints.glob("step-*"))
    _train(config, "--resume", "--set", f"run.steps={saved + 1}", *settings)
    assert json.loads(directory.summary.read_text())["policy_version"] == saved + 1


@pytest.mark.parametrize(("victim", "words"), [("asyncrl.learner", "learner"), ("vllm.entrypoints", "engine 0")])
def test_a_child_that_dies_is_named_with_its_last_lines(
    config: Path, directory: RunDirectory, victim: str, words: str
) -> None:
    before = _shared_memory()
    settings = ("--set", "run.steps=1000", "--set", "evaluation.before=false", "--set", "engine.restarts=0")
    with _running(config, *settings) as (run, lines):
        processes = descendants(run.pid)
        os.kill(_one(processes, victim), signal.SIGKILL)
        assert run.stdout is not None
        lines += run.stdout
        assert run.wait(timeout=60) == 1
        _wait_gone(list(processes), 1.0)
    _check_nothing_left(directory, before)
    output = "".join(lines)
    assert f"{words} was ended by signal 9; the last lines of" in output
    assert "Traceback (most recent call last)" not in output.split("asyncrl: ")[0]


def test_a_learner_of_two_ranks_trains_ends_by_name_with_one_of_them_and_goes_on_as_one_process(
    config: Path, directory: RunDirectory
) -> None:
    before = _shared_memory()
    settings = ("--set", "run.checkpoint_every_steps=1", "--set", "evaluation.samples=0")
    with _running(config, "--set", "run.steps=1000", "--set", "learner.ranks=2", *settings) as (run, lines):
        assert run.stdout is not None
        lines.append(run.stdout.readline())  # the second step: the checkpoint of the first is whole
        processes = descendants(run.pid)
        os.kill(_one(processes, "--rank 1 --ranks 2"), signal.SIGKILL)
        lines += run.stdout
        assert run.wait(timeout=60) == 1
        _wait_gone(list(processes), 1.0)
    _check_nothing_left(directory, before)
    assert "learner rank 1 of 2 was ended by signal 9; the last lines of" in "".join(lines)
    assert all(line["rank_imbalance"] >= 0 for line in read_metrics(directory))
    saved = max(int(path.name.removeprefix("step-")) for path in directory.checkpoints.glob("step-*"))
    _train(config, "--resume", "--set", f"run.steps={saved + 1}", *settings)
    summary = json.loads(directory.summary.read_text())
    assert summary["policy_version"] == saved + 1 >= 2
    assert summary["weight_syncs"] == summary["weight_syncs_verified"] > 0
    assert 0 <= summary["last_sync"]["canary_distance"] < 0.5


def test_an_engine_that_is_killed_is_started_again_and_the_run_goes_on_to_its_end(
    config: Path, directory: RunDirectory
) -> None:
    before = _shared_memory()
    settings = ("--set", "run.steps=5", "--set", "evaluation.before=false", "--set", "engine.restarts=1")
    settings += ("--set", "environment.options.episode_timeout_s=600")  # a start can take minutes on a busy machine
    with _running(config, *settings) as (run, lines):
        first = descendants(run.pid)
        os.kill(_one(first, "vllm.entrypoints"), signal.SIGKILL)
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step 3"):
                break
        processes = first | descendants(run.pid)
        lines += run.stdout
        assert run.wait(timeout=120) == 0
        _wait_gone(list(processes), 1.0)
    _check_nothing_left(directory, before)
    output = "".join(lines)
    assert "engine 0 was ended by signal 9; the last lines of" in output
    assert "starting it again, 1 of 1 times" in output
    summary = json.loads(directory.summary.read_text())
    assert summary["steps"] == 5
    assert summary["weight_syncs"] == summary["weight_syncs_verified"] == 5 - summary["versions_superseded"] > 0
    assert summary["max_staleness_trained"] <= 1
    assert {*summary["trajectories"]} <= {"completed", "truncated_length", "truncated_turns"}, "none failed of it"
