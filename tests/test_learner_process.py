"""The learner as the orchestrator sees it: a real process at the other end of a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_groups import random_groups
from tiny_model import build_tiny_model

from asyncrl import wire
from asyncrl.errors import ConfigError
from asyncrl.learner.process import serve
from asyncrl.learner.settings import read_job

_TIMEOUT_S = 120.0  # far above what a step takes here; a process that hangs fails the test instead of the suite


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, dtype=torch.bfloat16)


def write_job(directory: Path, model: Path) -> Path:
    job = {
        "model": str(model),
        "run_id": "test",
        "resume_from": "",
        "temperature": 1.0,
        "max_off_policyness": 0,
        "canary": [5, 6, 7, 8],
        "weight_sync": {"transport": "filesystem", "directory": str(directory / "published")},
        "learner": {"loss": "dapo", "learning_rate": 1e-3, "threads": 1},
    }
    path = directory / "learner.json"
    path.write_text(json.dumps(job))
    return path


@contextmanager
def learner_process(settings: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(_TIMEOUT_S)
    command = [sys.executable, "-m", "asyncrl.learner", "--fd", str(theirs.fileno()), "--settings", str(settings)]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    try:
        with ours:
            yield process, ours
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(stream: socket.socket, request: wire.Message) -> Any:
    wire.send(stream, request)
    return wire.receive(stream, wire.Reply)


@pytest.mark.slow
def test_a_process_steps_publishes_saves_and_leaves_nothing_behind(model_path: Path, tmp_path: Path) -> None:
    with learner_process(write_job(tmp_path, model_path)) as (process, stream):
        hello = wire.receive(stream, wire.Reply)
        assert isinstance(hello, wire.Hello)
        assert (hello.version, hello.vocab_size) == (0, 384)
        assert len(hello.canary_logprobs) == 3
        assert max(hello.canary_logprobs) < 0
        result = ask(stream, wire.StepRequest(groups=random_groups(1))).result
        assert result.version == 1
        assert result.stepped
        manifest = ask(stream, wire.PublishRequest()).manifest
        assert manifest.version == 1
        assert len(manifest.canary_logprobs) == 3
        assert manifest.canary_logprobs != hello.canary_logprobs, "of the weights that are published"
        assert Path(manifest.location).is_file()
        names = [entry.name for entry in manifest.tensors]
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names  # tied: given once
        assert {entry.dtype for entry in manifest.tensors} == {"BF16"}
        (tmp_path / "saved").mkdir()
        files = ask(stream, wire.SaveRequest(directory=str(tmp_path / "saved"))).files
        assert {"model/model.safetensors", "model/config.json", "learner/optimizer.safetensors"} <= set(files)
        assert isinstance(ask(stream, wire.ShutdownRequest()), wire.ShutdownReply)
        assert process.wait(_TIMEOUT_S) == 0
    assert list((tmp_path / "published").iterdir()) == []


@pytest.mark.slow
def test_sigterm_removes_what_was_published(model_path: Path, tmp_path: Path) -> None:
    with learner_process(write_job(tmp_path, model_path)) as (process, stream):
        wire.receive(stream, wire.Reply)
        assert Path(ask(stream, wire.PublishRequest()).manifest.location).is_file()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(_TIMEOUT_S) == 143
    assert list((tmp_path / "published").iterdir()) == []


def serve_here(settings: Path, requests: Sequence[wire.Message]) -> tuple[int, list[Any]]:
    """Return exit code and replies of a learner in this process, whose orchestrator goes after its last request."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for request in requests:
            wire.send(ours, request)
        ours.shutdown(socket.SHUT_WR)
        code = serve(theirs, settings)
        theirs.shutdown(socket.SHUT_WR)
        return code, list(iter(lambda: wire.receive(ours, wire.Reply), None))


def test_the_end_of_the_socket_removes_what_was_published(model_path: Path, tmp_path: Path) -> None:
    code, (_, reply) = serve_here(write_job(tmp_path, model_path), [wire.PublishRequest()])
    assert code == 0
    assert isinstance(reply, wire.PublishReply)
    assert list((tmp_path / "published").iterdir()) == []


def test_a_request_that_fails_is_answered_with_what_failed(
    model_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = [wire.PublishRequest(), wire.StepRequest(groups=random_groups(1, versions=(7,))), wire.PublishRequest()]
    code, (_, _, failure) = serve_here(write_job(tmp_path, model_path), requests)
    assert code == 1
    assert isinstance(failure, wire.Failure)
    assert failure.kind == "StalenessError"
    assert "claims version 7" in failure.message
    assert "Traceback" in capfd.readouterr().err
    assert list((tmp_path / "published").iterdir()) == []


def test_a_model_without_weights_is_named_before_the_first_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    code, (failure,) = serve_here(write_job(tmp_path, tmp_path / "empty"), [])
    assert code == 1
    assert isinstance(failure, wire.Failure)
    assert failure.kind == "ConfigError"
    assert "no weights" in failure.message


@pytest.mark.parametrize(("flags", "looks"), [([], "0"), (["--own-cores"], "2000")])
def test_how_threads_wait_reaches_the_openmp_that_torch_loads(tmp_path: Path, flags: list[str], looks: str) -> None:
    command = [sys.executable, "-m", "asyncrl.learner", "--settings", str(tmp_path / "missing.json"), *flags]
    openmp = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    shown = subprocess.run(
        command, env={**openmp, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, timeout=_TIMEOUT_S
    ).stderr
    assert f"GOMP_SPINCOUNT = '{looks}'" in shown
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown


def test_a_job_file_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"model": "m", "run_id": "r", "temprature": 1.0}))
    with pytest.raises(ConfigError, match="temprature"):
        read_job(path)
    path.write_text(json.dumps({"model": "m", "run_id": "r", "learner": {"learning_rat": 1.0}}))
    with pytest.raises(ConfigError, match="learning_rat"):
        read_job(path)
    path.write_text(json.dumps({"model": "m", "run_id": "r", "learner": {"loss": "nope"}}))
    with pytest.raises(ConfigError, match="unknown loss"):
        read_job(path)
