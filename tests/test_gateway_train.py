"""A whole run that trains an agent which was written with OpenAI's client and knows nothing of asyncrl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tiny_model import build_tiny_model

from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = """
[run]
name = "agent"
directory = "{directory}"
steps = 2

[model]
path = "{model}"

[environment]
name = "agent"

[environment.options]
command = "{python} {agent}"
path = "{tasks}"
reward = "agent_rewards:evenness"
held_out_percent = 0
episode_timeout_s = 120

[buffer]
max_off_policyness = 1
groups_per_step = 1
group_size = 4

[engine]
max_model_len = 256
max_num_seqs = 16
dtype = "float32"
kv_cache_gib = 0.1

[learner]
dtype = "float32"
learning_rate = 1e-3

[evaluation]
samples = 0
"""

REWARDS = """
def evenness(result, row):
    answer = (result.directory / "answer.txt").read_text()
    return {"reward": sum(ord(letter) % 2 == 0 for letter in answer) / 12, "exit_code": result.exit_code}
"""


def test_an_unmodified_agent_is_trained_for_two_steps(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / f"run_{os.getpid()}")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": str(n), "question": f"Even, {n}?"}) + "\n" for n in range(4)))
    (tmp_path / "agent_rewards.py").write_text(REWARDS)
    config = tmp_path / "agent.toml"
    config.write_text(
        CONFIG.format(
            directory=directory.path,
            model=build_tiny_model(tmp_path / "model"),
            python=sys.executable,
            agent=Path(__file__).parent / "small_agent.py",
            tasks=tasks,
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", str(config)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gateway at http://127.0.0.1:" in done.stdout
    assert not (directory.path / "gateway.json").exists()
    summary = json.loads(directory.summary.read_text())
    assert summary["steps"] == 2
    assert summary["max_staleness_trained"] <= 1
    assert set(summary["trajectories"]) <= {"completed", "truncated_length"}
    steps = read_metrics(directory)
    assert all(step["turns_mean"] == 2.0 for step in steps)
    # both turns of an episode are one segment, trained on as they were sampled
    assert abs(steps[0]["importance_ratio_max"] - 1.0) < 0.02
    assert summary["tokens_trained"] == sum(step["tokens_trained"] for step in steps) > 0


def test_a_model_is_served_without_a_run_and_its_sessions_become_trajectories(tmp_path: Path) -> None:
    config, access, done = tmp_path / "serve.toml", tmp_path / "access.json", tmp_path / "done.jsonl"
    config.write_text(
        CONFIG.format(
            directory=tmp_path / "unused",
            model=build_tiny_model(tmp_path / "model"),
            python=sys.executable,
            agent="unused",
            tasks="unused",
        ).replace('name = "agent"\n\n[environment.options]', 'name = "bugfix"\n\n[unused]')
    )
    text = config.read_text()
    config.write_text(text[: text.index("[unused]")] + text[text.index("[buffer]") :])
    server = subprocess.Popen(
        [
            *f"{sys.executable} -m asyncrl serve gateway --set engine.max_model_len=1024".split(),
            config,
            "--access-file",
            access,
            "--trajectories",
            done,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    with server.stdout:
        try:
            said = ""
            while "serving" not in said:
                line = server.stdout.readline()
                assert line, said
                said += line
            assert access.stat().st_mode & 0o777 == 0o600
            known = json.loads(access.read_text())
            headers = {"authorization": f"Bearer {known['token']}"}
            with httpx.Client(base_url=known["url"], headers=headers, trust_env=False, timeout=60) as client:
                session = client.post("/sessions", json={"task_id": "a"}).json()
                own = {"authorization": f"Bearer {session['token']}"}
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
                reply = client.post(f"{session['base_url']}/chat/completions", json=body, headers=own)
                assert (reply.status_code, reply.headers["asyncrl-version"]) == (200, "0")
                assert client.get("/engines").json()["engines"][0]["health"] == "serving"
                client.post(f"/sessions/{session['session_id']}/close", json={"reward": 1.0})
            (trajectory,) = map(json.loads, done.read_text().splitlines())
            assert (trajectory["task_id"], trajectory["reward"]) == ("a", 1.0)
            assert sum(trajectory["segments"][0]["loss_mask"]) == reply.json()["usage"]["completion_tokens"]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
    assert not access.exists()
