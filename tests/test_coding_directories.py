"""Task directories run as they are: unfixed they fail, and their own solutions pass, in sandboxes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harbor_directories import TASK, read, write_task
from sandboxes import cannot_contain, with_backend

from asyncrl.coding.grading import Grader
from asyncrl.coding.places import open_place
from asyncrl.coding.playing import Played, lets_go_on, play, reward_of
from asyncrl.coding.tasks import CodingTask, ScriptChecks, TaskStep
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.protocols import SandboxBackend

pytestmark = pytest.mark.slow

INSTALLING = (
    "#!/bin/bash\napt-get update && apt-get install -y curl\ncurl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh\n"
    "source $HOME/.local/bin/env\n"
    "uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 "
    "pytest --ctrf /logs/verifier/ctrf.json /tests/test_it.py -rA\n"
    "if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
)
TEST_IT = "from pathlib import Path\ndef test_it():\n    assert Path('greeting.txt').read_text() == 'hello\\n'\n"
PROVIDED = ("curl", "uv", "pytest", "pytest-json-ctrf")


def play_both(task: CodingTask, directory: Path) -> tuple[Played, Played]:
    """Return what comes of a task as it stands, and with its solution."""

    async def use(backend: SandboxBackend) -> tuple[Played, Played]:
        async with Grader(backend) as grader:
            return (
                await play(backend, grader, task, solution=False),
                await play(backend, grader, task, solution=True),
            )

    return with_backend(use, directory)


def assert_told_apart(task: CodingTask, directory: Path) -> None:
    before, after = play_both(task, directory)
    assert (before.reward, before.solved) == (0.0, False)
    assert (after.reward, after.solved) == (1.0, True)


def test_a_task_directory_fails_unfixed_and_passes_with_its_solution(tmp_path: Path) -> None:
    assert_told_apart(read(write_task(tmp_path / "task")), tmp_path)


def test_tests_that_install_run_with_what_is_said_to_be_here(tmp_path: Path) -> None:
    root = write_task(tmp_path / "task", **{"tests/test.sh": INSTALLING, "tests/test_it.py": TEST_IT})
    assert_told_apart(read(root, tests_provided=PROVIDED), tmp_path)


def test_an_image_that_would_have_pytest_is_not_needed_where_pytest_is_said_to_be_here(tmp_path: Path) -> None:
    files = {
        "environment/Dockerfile": "FROM python:3.11-slim\nRUN pip install pytest==8.4.1\nWORKDIR /app\n",
        "tests/test.sh": "pytest /tests/test_it.py -rA\necho $((!$?)) > /logs/verifier/reward.txt\n",
        "tests/test_it.py": TEST_IT,
    }
    task = read(write_task(tmp_path / "task", **files), tests_provided=("pytest",))
    assert "its image would have pytest, which only its tests find here" in task.notes
    assert_told_apart(task, tmp_path)


@pytest.mark.parametrize(("left_out", "named"), [("pytest-json-ctrf", "pytest-json-ctrf==0.3.5"), ("curl", "curl")])
def test_what_tests_want_and_nobody_has_is_the_tasks_fault(left_out: str, named: str, tmp_path: Path) -> None:
    root = write_task(tmp_path / "task", **{"tests/test.sh": INSTALLING, "tests/test_it.py": TEST_IT})
    task = read(root, tests_provided=tuple(name for name in PROVIDED if name != left_out))
    with pytest.raises(EnvironmentFault, match=f"^harbor/task: its tests want {named} installed"):
        play_both(task, tmp_path)


def test_steps_go_on_in_the_same_place_until_one_earns_too_little(tmp_path: Path) -> None:
    step = 'echo "{\\"reward\\": $(grep -c done NAME.txt)}" > /logs/verifier/reward.json\n'
    files = {
        "task.toml": '[[steps]]\nname = "a"\nmin_reward = 1\n[[steps]]\nname = "b"\n',
        "instruction.md": None,
        "tests/test.sh": None,
        "steps/a/instruction.md": "Write done to a.txt.",
        "steps/a/tests/test.sh": step.replace("NAME", "a"),
        "steps/a/workdir/setup.sh": "echo open > a.txt\n",
        "steps/a/solution/solve.sh": "echo done > a.txt\n",
        "steps/b/instruction.md": "Copy a.txt to b.txt.",
        "steps/b/workdir/b.txt": "open\n",
        "steps/b/tests/test.sh": step.replace("NAME", "b"),
        "steps/b/solution/solve.sh": "cp a.txt b.txt\n",
    }
    before, after = play_both(read(write_task(tmp_path / "task", **files)), tmp_path)
    assert (before.reward, list(before.verdicts)) == (0.0, ["a"])
    assert (after.reward, after.solved, list(after.verdicts)) == (1.0, True, ["a", "b"])


def test_steps_that_were_not_reached_count_nothing() -> None:
    step = TaskStep(instruction="", checks=ScriptChecks(files={}), min_reward={"reward": 0.5, "style": 1.0})
    task = CodingTask(task_id="t", steps=(step, step), files={})
    assert not lets_go_on(step, Verdict(reward=1.0, solved=True, rewards={"reward": 1.0}))
    assert not lets_go_on(step, Verdict(reward=0.4, solved=False, rewards={"reward": 0.4, "style": 1.0}))
    assert lets_go_on(step, Verdict(reward=0.5, solved=False, rewards={"reward": 0.5, "style": 1.0}))
    good, half = Verdict(reward=1.0, solved=True), Verdict(reward=0.5, solved=False)
    assert (reward_of(task, [good]), reward_of(task, [good, half])) == (0.5, 0.75)
    final = replace(task, last_step_counts=True)
    assert (reward_of(final, [good]), reward_of(final, [good, half])) == (0.0, 0.5)


def test_a_separate_judge_gets_the_artifacts_and_nothing_else(tmp_path: Path) -> None:
    files = {
        "task.toml": (
            'artifacts = ["out", {source = "/logs/agent", exclude = ["*.tmp"]}]\n[verifier]\n'
            'environment_mode = "separate"\n[[verifier.collect]]\ncommand = "cp out/made.txt out/collected.txt"\n'
        ),
        "tests/test.sh": (
            "seen=$(ls -d out/* other.txt /logs/agent/* /logs/artifacts/* start.txt 2>/dev/null | tr '\\n' ' ')\n"
            'wanted="out/collected.txt out/made.txt /logs/agent/log /logs/artifacts/kept start.txt "\n'
            'echo "$seen"; if [ "$(printf "%s\\n" $seen | sort)" = "$(printf "%s\\n" $wanted | sort)" ]; then\n'
            "echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
        ),
        "solution/solve.sh": (
            "mkdir out; touch out/made.txt other.txt /logs/agent/log /logs/agent/x.tmp /logs/artifacts/kept\n"
        ),
    }
    before, after = play_both(read(write_task(tmp_path / "task", **files)), tmp_path)
    assert before.reward == 0.0
    assert after.reward == 1.0, after.verdicts["1"].detail


def test_a_shared_judge_sees_all_places(tmp_path: Path) -> None:
    files = {
        "tests/test.sh": "(cat /logs/artifacts/a/number || echo 0) > /logs/verifier/reward.txt\n",
        "solution/solve.sh": (
            "mkdir /logs/artifacts/a; echo 1 > /logs/artifacts/a/number; ln -s /etc /logs/artifacts/etc\n"
        ),
    }
    _, after = play_both(read(write_task(tmp_path / "task", **files)), tmp_path)
    assert after.solved
    assert after.verdicts["1"].refused == {"/logs/artifacts/etc": "a symbolic link"}


def test_a_healthcheck_and_empty_directories_come_before_the_agent(tmp_path: Path) -> None:
    check = "[environment.healthcheck]\ncommand = 'test -d data'\ninterval_sec = 0.01\n"
    files = {
        "environment/Dockerfile": "FROM python\nWORKDIR /app\nRUN mkdir -p data\n",
        "task.toml": check,
        "solution/solve.sh": "rmdir data && echo hello > greeting.txt\n",
    }
    assert_told_apart(read(write_task(tmp_path / "task", **files)), tmp_path)
    write_task(tmp_path / "task", **{"task.toml": check.replace("data", "nowhere")})
    with pytest.raises(EnvironmentFault, match="harbor/task: the set-up of step '' failed"):
        play_both(read(tmp_path / "task"), tmp_path)


def test_tests_that_do_not_end_have_not_judged(tmp_path: Path) -> None:
    files = {"tests/test.sh": "sleep 60\n", "task.toml": "[verifier]\ntimeout_sec = 0.3\n"}
    with pytest.raises(EnvironmentFault, match="harbor/task: the tests' script was ended by its limit on wall"):
        play_both(read(write_task(tmp_path / "task", **files)), tmp_path)


@pytest.mark.parametrize("reward", ["nan", "1e999", "-inf"])
def test_a_reward_that_is_not_finite_is_none(reward: str, tmp_path: Path) -> None:
    script = "echo '{\"reward\": REWARD}' > /logs/verifier/reward.json; echo REWARD > /logs/verifier/reward.txt\n"
    files = {"tests/test.sh": script.replace("REWARD", reward)}
    with pytest.raises(EnvironmentFault, match=r"harbor/task: reward.json must hold finite numbers"):
        play_both(read(write_task(tmp_path / "task", **files)), tmp_path)


def test_a_task_without_a_solution_cannot_be_played_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="brings no reference solution; leave --solution out"):
        play_both(read(write_task(tmp_path / "task", **{"solution/solve.sh": None})), tmp_path)


# --- what an agent may leave behind ---------------------------------------------------------------------------

LEFT = {
    "links": "ln -s /etc/passwd greeting.txt; ln -s / root",
    "a socket and a pipe": "mkfifo pipe; python3 -c 'import socket as s; s.socket(s.AF_UNIX).bind(\"greeting.txt\")'",
    "a sparse file of 1 TiB": "truncate -s 1T greeting.txt || truncate -s 60M greeting.txt",
    "10^5 files": "for i in $(seq 100); do mkdir d$i; (cd d$i; seq 1000 | xargs touch) ; done",
    "names with newlines": "touch $'a\\nb' $'\\xff' '[x]' '*'; echo hello > greeting.txt",
}


@pytest.mark.parametrize("mode", ["shared", "separate"])
@pytest.mark.parametrize("what", LEFT)
def test_whatever_an_agent_leaves_gets_a_verdict(what: str, mode: str, tmp_path: Path) -> None:
    config = f'artifacts = ["/app"]\n[verifier]\nenvironment_mode = "{mode}"\n[environment]\nstorage_mb = 64\n'
    task = read(write_task(tmp_path / "task", **{"task.toml": config}))

    async def use(backend: SandboxBackend) -> Verdict:
        async with Grader(backend) as grader, await open_place(backend, task) as sandbox:
            await sandbox.exec(["bash", "-c", LEFT[what]])
            return await grader.grade(task, task.steps[0], sandbox)

    verdict = with_backend(use, tmp_path)
    assert verdict.reward == (1.0 if what == "names with newlines" else 0.0)
    if mode == "separate" and what in ("links", "a socket and a pipe"):
        assert "/app/greeting.txt" in verdict.refused


# --- the older form -------------------------------------------------------------------------------------------

COMPOSE = (
    "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n    command: [sh, -c, sleep infinity]\n"
    "    environment:\n      - TEST_DIR=${T_BENCH_TEST_DIR}\n    volumes:\n      - ${T_BENCH_TASK_LOGS_PATH}:/logs\n"
)
OLDER: dict[str, str | None] = {
    **dict.fromkeys(TASK),
    "task.yaml": "instruction: |-\n  Write hello.\nmax_agent_timeout_sec: 60\nmax_test_timeout_sec: 20\ntags: [x]\n",
    "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\nWORKDIR /app\nCOPY . .\n",
    "docker-compose.yaml": COMPOSE,
    "run-tests.sh": "#!/bin/bash\nuv init\nuv add pytest==8.4.1\nuv run pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": TEST_IT,
    "solution.sh": "echo hello > greeting.txt\n",
    "more.txt": "",
}


def test_an_older_directory_is_paid_by_its_tests_exit_code(tmp_path: Path) -> None:
    task = read(write_task(tmp_path / "task", **OLDER), tests_provided=("uv", "pytest"))
    assert set(task.files) == {"Dockerfile", "more.txt"}
    assert task.steps[0].instruction == "Write hello."
    assert_told_apart(task, tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task.yaml": "a: [1\n"}, "task.yaml is not YAML"),
        ({"task.yaml": "author: x\n"}, "task.yaml: .*missing required field `instruction`"),
        ({"run-tests.sh": None}, "it has no tests: run-tests.sh is not there"),
        ({"Dockerfile": None}, "it has no Dockerfile"),
        ({"Dockerfile": "FROM python\nRUN pip install x\n"}, "needs an image, since 'RUN pip install x'"),
        ({"docker-compose.yaml": COMPOSE + "  server:\n    image: x\n"}, "several containers"),
        ({"docker-compose.yaml": COMPOSE + "    privileged: true\n"}, "more than one plain container"),
        ({"docker-compose.yaml": "- 1"}, "several containers"),
    ],
)
def test_an_older_directory_that_cannot_run_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_task(tmp_path / "task", **{**OLDER, **changes})
    with pytest.raises(ConfigError, match="^harbor/task: .*" + says):
        read(tmp_path / "task", tests_provided=("uv", "pytest"))


# --- images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["bubblewrap", "remote"])
def test_a_task_with_an_image_is_refused_where_none_is_run(backend: str, tmp_path: Path) -> None:
    config = '[environment]\ndocker_image = "example/task:1"\nworkdir = "/app"\n'
    task = read(write_task(tmp_path / "task", **{"task.toml": config}), images=True)
    assert (task.image, task.work, task.files) == ("example/task:1", "/app", {})

    async def use(sandboxes: SandboxBackend) -> None:
        with pytest.raises(
            ConfigError, match=r"runs no images, and 'example/task:1' is wanted: set backend = .container"
        ):
            await open_place(sandboxes, task)

    with_backend(use, tmp_path, backend=backend)


@pytest.mark.skipif(bool(cannot_contain()), reason=cannot_contain() or "containers")
def test_a_task_with_an_image_runs_over_what_the_image_holds(tmp_path: Path) -> None:
    """The image holds a shell, and what the task's directory begins with, a history of it too."""
    name = "localhost/asyncrl-test-task:1"
    engine = shutil.which("podman") or shutil.which("docker")
    assert engine is not None
    root = tmp_path / "root"
    (root / "app/.git").mkdir(parents=True)
    (root / "app/seed.txt").write_text("seed\n")
    (root / "app/.git/HEAD").write_text("ref: refs/heads/solution\n")
    for folder in ("tmp", "proc", "dev", "sys", "run", "etc", "usr/bin"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    programs = [
        f"/usr/bin/{program}" for program in ("bash", "sh", "cp", "find", "rm", "cat", "sleep", "env", "printf")
    ]
    told = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for path in {*programs, *re.findall(r"(/lib\S+) \(", told)}:
        target = root / "usr" / path.removeprefix("/usr").lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), target)
    packed = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
    subprocess.run([engine, "import", "-", name], input=packed, check=True, capture_output=True)
    files = {
        "task.toml": f'[environment]\ndocker_image = "{name}"\nworkdir = "/app"\n',
        "tests/test.sh": "cat hello.txt > /logs/verifier/reward.txt && cat seed.txt\n",
        "solution/solve.sh": "cat seed.txt > /dev/null && echo 1 > hello.txt\n",
    }
    task = read(write_task(tmp_path / "task", **files), images=True)

    async def use(sandboxes: SandboxBackend) -> Played:
        async with Grader(sandboxes) as grader, await open_place(sandboxes, task) as sandbox:
            assert list(await sandbox.list()) == ["seed.txt"]
            return await play(sandboxes, grader, task, solution=True)

    try:
        assert with_backend(use, tmp_path, backend="container").solved
    finally:
        subprocess.run([engine, "rmi", "--force", name], check=False, capture_output=True)
