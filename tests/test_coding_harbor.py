"""Harbor task directories, unmodified: what is read of them, and what is refused with which words."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from harbor_directories import TASK, checks_of, read, write_task

from asyncrl.coding.sets.dockerfile import NeedsImageError, Recipe, installed_packages, read_dockerfile
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.harbor_tasks import HarborTasks
from asyncrl.coding.sets.task_files import MAX_FILE_BYTES, TaskFiles
from asyncrl.errors import ConfigError


def test_a_directory_becomes_a_task(tmp_path: Path) -> None:
    task = read(write_task(tmp_path / "greet"))
    (step,) = task.steps
    checks = checks_of(step)
    assert task.task_id == "harbor/greet"
    assert step.instruction == "Write hello to greeting.txt.\n"
    assert (task.work, task.files, task.variables) == ("/app", {"start.txt": b"begin\n"}, {"NAME": "world"})
    assert set(task.places) == {"/logs/agent", "/logs/artifacts"}
    assert set(checks.files) == {"test.sh"}
    assert checks.submitted is None
    assert (step.agent_timeout_s, checks.timeout_s, step.name) == (60.0, 20.0, "")
    assert step.reference is not None
    assert step.reference.script == "solve.sh"
    assert any("network" in note for note in task.notes)


def test_neither_tests_nor_solution_are_among_what_the_agent_finds(tmp_path: Path) -> None:
    task = read(write_task(tmp_path / "t", **{"environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY . .\n"}))
    assert set(task.files) == {"Dockerfile", "start.txt"}


def test_timeouts_are_bounded_and_then_multiplied(tmp_path: Path) -> None:
    write_task(tmp_path)
    task = read(tmp_path, timeout_multiplier=2.0, max_agent_timeout_s=40.0, max_verifier_timeout_s=15.0)
    assert task.steps[0].agent_timeout_s == 80.0
    assert checks_of(task.steps[0]).timeout_s == 30.0


def test_sizes_are_bounded_and_a_cut_is_said(tmp_path: Path) -> None:
    write_task(tmp_path, **{"task.toml": '[environment]\nmemory = "1G"\nstorage_mb = 4096\n'})
    task = read(tmp_path, max_storage_mb=100)
    assert task.limits.memory_bytes == 2**30
    assert task.limits.disk_bytes == 100 * 2**20
    assert any("storage_mb = 4096 and gets 100" in note for note in task.notes)


def test_fields_that_the_format_does_not_have_are_told_of(tmp_path: Path) -> None:
    write_task(tmp_path, **{"task.toml": "colour = 1\n[environment]\ncpu = 2\n[verifier.environment]\nworkdirs = 1\n"})
    told = [note for note in read(tmp_path).notes if "the format does not" in note]
    assert [note.split()[2].strip(",") for note in told] == [
        "colour",
        "environment.cpu",
        "verifier.environment.workdirs",
    ]


def test_variables_of_this_machine_are_read_only_where_they_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    env = '[environment.env]\nKEY = "${A_KEY}"\nMODE = "${A_MODE:-quick}"\nPLAIN = "a ${A_KEY}"\n'
    write_task(tmp_path, **{"task.toml": env})
    with pytest.raises(ConfigError, match=r"\$\{A_KEY\} of this machine, which may not be read: .*host_variables"):
        read(tmp_path)
    task = read(tmp_path, host_variables=("A_KEY",))
    assert task.variables == {"NAME": "world", "KEY": "secret", "MODE": "quick", "PLAIN": "a ${A_KEY}"}
    write_task(tmp_path, **{"task.toml": '[solution.env]\nX = "${NOT_THERE}"\n'})
    with pytest.raises(ConfigError, match="is not set"):
        read(tmp_path, host_variables=("NOT_THERE",))


def test_several_steps(tmp_path: Path) -> None:
    config = (
        'multi_step_reward_strategy = "final"\n[agent]\ntimeout_sec = 30\n[verifier.env]\nA = "1"\n'
        '[[steps]]\nname = "one"\nmin_reward = 0.5\n'
        '[[steps]]\nname = "two"\nmin_reward = {style = 1}\nagent = {timeout_sec = 5}\nverifier = {env = {B = "2"}}\n'
    )
    write_task(
        tmp_path,
        **{
            "task.toml": config,
            "instruction.md": None,
            "steps/one/instruction.md": "First.",
            "steps/one/workdir/setup.sh": "touch made\n",
            "steps/one/solution/solve.sh": "true\n",
            "steps/two/instruction.md": "Second.",
            "steps/two/tests/test.sh": "echo 2\n",
        },
    )
    task = read(tmp_path)
    one, two = task.steps
    assert task.last_step_counts
    assert (one.name, one.instruction, dict(one.min_reward)) == ("one", "First.", {"reward": 0.5})
    assert "bash setup.sh" in one.setup
    assert set(one.files) == {"setup.sh"}
    assert (one.agent_timeout_s, two.agent_timeout_s, dict(two.min_reward)) == (30.0, 5.0, {"style": 1.0})
    assert checks_of(one).files["test.sh"] == TASK["tests/test.sh"].encode()
    assert checks_of(two).files["test.sh"] == b"echo 2\n"
    assert checks_of(two).variables == {"A": "1", "B": "2"}
    assert two.reference is None


def test_a_separate_verifier_sees_the_declared_artifacts(tmp_path: Path) -> None:
    config = (
        'artifacts = ["out.txt", {source = "/logs/agent/log", exclude = ["*.tmp"]}]\n[verifier]\n'
        'environment_mode = "separate"\n[[verifier.collect]]\ncommand = "date > out.txt"\n'
    )
    task = read(write_task(tmp_path, **{"task.toml": config}))
    checks = checks_of(task.steps[0])
    assert checks.submitted == ("/logs/artifacts", "out.txt", "/logs/agent/log")
    assert checks.excluded == ("/logs/agent/log/*.tmp", "/logs/agent/log/*/*.tmp")
    assert checks.beside == task.files
    assert len(checks.collect) == 1


def test_a_separate_verifier_may_have_a_dockerfile_of_its_own(tmp_path: Path) -> None:
    files = {
        "task.toml": "[verifier.environment]\nworkdir = '/app'\n",
        "tests/Dockerfile": "FROM python\nCOPY test.sh /tests/\nCOPY answer.txt /app/\nWORKDIR /app\n",
        "tests/answer.txt": "42",
    }
    checks = checks_of(read(write_task(tmp_path, **files)).steps[0])
    assert checks.beside == {"answer.txt": b"42"}
    assert "test.sh" in checks.files


# --- what is refused ------------------------------------------------------------------------------------------

REFUSED = {
    "no tests": ({"tests/test.sh": None}, "it has no tests: write tests/test.sh"),
    "no instruction": ({"instruction.md": None}, "instruction.md cannot be read: No such file"),
    "no environment": ({"environment/Dockerfile": None}, "neither environment/Dockerfile nor docker_image"),
    "bad toml": ({"task.toml": "= 3"}, "task.toml is not TOML"),
    "wrong type": ({"task.toml": "[verifier]\ntimeout_sec = 'x'\n"}, r"Expected `float`, got `str` - at `\$.verifier"),
    "not finite": ({"task.toml": "[agent]\ntimeout_sec = nan\n"}, "agent.timeout_sec must be finite, got nan"),
    "windows": ({"task.toml": "[environment]\nos = 'windows'\n"}, "it wants windows"),
    "gpus": ({"task.toml": "[environment]\ngpus = 1\n"}, "GPUs"),
    "servers": ({"task.toml": "[[environment.mcp_servers]]\nname = 'x'\n"}, "MCP servers"),
    "image": ({"task.toml": "[environment]\ndocker_image = 'a/b:1'\n"}, "needs the image a/b:1: set images = true"),
    "compose": ({"environment/docker-compose.yaml": ""}, "several containers"),
    "build": (
        {"environment/Dockerfile": "FROM python\nRUN make all\n"},
        "needs an image, since 'RUN make all' must be",
    ),
    "directory": ({"environment/Dockerfile": "FROM python\nWORKDIR /app\nRUN mkdir /data\n"}, "makes /data, outside"),
    "root": ({"environment/Dockerfile": "FROM python\n"}, "its working directory is '/'"),
    "elsewhere": (
        {"environment/Dockerfile": "FROM python\nCOPY start.txt /srv/\nWORKDIR /app"},
        "copies to /srv/start",
    ),
    "installing": ({"tests/test.sh": "pip install numpy\n"}, r"install things \(test.sh line 1: pip install numpy\)"),
    "cloning": ({"tests/test.sh": "git clone x\n"}, r"install things \(test.sh line 1: git clone x\)"),
    "step": ({"task.toml": "[[steps]]\nname = 'a'\n"}, "has a step 'a', and there is no directory steps/a/"),
    "mode": ({"task.toml": "[verifier]\nenvironment_mode = 'odd'\n"}, "must be one of shared, separate, got 'odd'"),
    "strategy": ({"task.toml": "multi_step_reward_strategy = 'best'\n"}, "must be one of mean, final, got 'best'"),
    "ignoring": ({"tests/.harborignore": "*\n!test.sh\n"}, "begin with '!' are not understood"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_task_that_cannot_run_here_is_refused_by_its_id(case: str, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    write_task(tmp_path / "greet", **changes)
    with pytest.raises(ConfigError, match="^harbor/greet: .*" + says):
        HarborTasks(HarborSettings(path=tmp_path / "greet"))


def test_what_is_refused_may_be_left_out_by_name(tmp_path: Path) -> None:
    write_task(tmp_path / "a" / "good")
    write_task(tmp_path / "bad", **{"tests/test.sh": None})
    with pytest.raises(ConfigError, match="harbor/bad: it has no tests"):
        HarborTasks(HarborSettings(path=tmp_path))
    tasks = HarborTasks(HarborSettings(path=tmp_path, skip_refused=True, held_out_percent=0))
    assert tasks.all_ids() == tasks.training_ids(0) == ["harbor/a/good"]
    assert list(tasks.refused) == ["harbor/bad"]


def test_a_folder_without_any_task_that_can_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of its directories has a task.toml or a task.yaml"):
        HarborTasks(HarborSettings(path=tmp_path))
    with pytest.raises(ConfigError, match="is no directory"):
        HarborTasks(HarborSettings(path=tmp_path / "none"))
    write_task(tmp_path / "bad", **{"tests/test.sh": None})
    with pytest.raises(ConfigError, match="none of the 1 tasks"):
        HarborTasks(HarborSettings(path=tmp_path, skip_refused=True))


def test_the_split_goes_by_the_ids_alone(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path / f"task-{number}")
    tasks = HarborTasks(HarborSettings(path=tmp_path, held_out_percent=50))
    held_out = set(tasks.held_out_ids())
    assert 0 < len(held_out) < 12
    assert held_out.isdisjoint(tasks.training_ids(0))
    assert held_out | set(tasks.training_ids(1)) == set(tasks.all_ids())
    with pytest.raises(ConfigError, match="are held out: lower held_out_percent"):
        HarborTasks(HarborSettings(path=tmp_path, held_out_percent=100)).training_ids(0)


def test_nothing_outside_the_directory_is_read(tmp_path: Path) -> None:
    root = write_task(tmp_path / "greet")
    (tmp_path / "secret").write_text("x")
    for place in ("environment/link", "tests/link", "solution/link"):
        (root / place).symlink_to(tmp_path / "secret")
        with pytest.raises(ConfigError, match=r"harbor/greet: .*link leads out of the task's directory, to .*secret"):
            read(root)
        (root / place).unlink()
    (root / "solution/link").symlink_to("solve.sh")  # one that stays inside is a file like any other
    assert read(root).steps[0].reference.files["link"] == TASK["solution/solve.sh"].encode()  # type: ignore[union-attr]


def test_files_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    root = write_task(tmp_path / "greet")
    place = root / "solution/odd"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(place))
        with pytest.raises(ConfigError, match=r"odd (is neither a file nor a directory|cannot be read)"):
            read(root)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(ConfigError, match="odd is neither a file nor a directory: remove it"):
        read(root)
    place.unlink()
    with place.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match=rf"odd has {2**40} bytes, allowed are {MAX_FILE_BYTES}"):
        read(root)
    place.unlink()
    (root / "solution/a\nb").write_text("")
    with pytest.raises(ConfigError, match=r"a\\nb' has a name that cannot be shown"):
        read(root)


def test_ignored_files_of_the_tests_do_not_come_along(tmp_path: Path) -> None:
    write_task(
        tmp_path, **{"tests/.harborignore": "*.md\ndata/\n", "tests/a.md": "", "tests/data/b": "", "tests/c": ""}
    )
    assert set(checks_of(read(tmp_path).steps[0]).files) == {"test.sh", "c"}


# --- Dockerfiles ----------------------------------------------------------------------------------------------

CONTEXT = TaskFiles(files={"a.py": b"A", "data/b.txt": b"B", "data/deep/c.txt": b"C"}, executable={"a.py"})


def recipe(lines: str) -> Recipe:
    return read_dockerfile("FROM python:3.12\n" + lines, CONTEXT, has_package=lambda name: name in ("git", "curl"))


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("WORKDIR /app\nCOPY a.py ./", {"/app/a.py"}),
        ("WORKDIR /app\nWORKDIR src\nCOPY a.py main.py", {"/app/src/main.py"}),
        ("COPY data /x", {"/x/b.txt", "/x/deep/c.txt"}),
        ("COPY data/*.txt /x/", {"/x/b.txt"}),
        ('COPY --chown=1:1 ["a.py", "data", "/x/"]', {"/x/a.py", "/x/b.txt", "/x/deep/c.txt"}),
        ("ARG P=/y\nENV Q=${P}/z\nCOPY a.py $Q/", {"/y/z/a.py"}),
        ("ADD a.py /x/", {"/x/a.py"}),
    ],
)
def test_copied_files_land_where_docker_puts_them(lines: str, files: set[str]) -> None:
    assert set(recipe(lines).files) == files


def test_variables_and_directories_of_a_dockerfile() -> None:
    found = recipe(
        'ENV A=1 B="two words"\nENV OLD the rest\nWORKDIR /app\nCOPY a.py .\nRUN mkdir -p data x && chmod +x a.py'
    )
    assert found.variables == {"A": "1", "B": "two words", "OLD": "the rest"}
    assert found.directories == {"/app", "/app/data", "/app/x"}


@pytest.mark.parametrize(
    "lines",
    [
        "RUN apt-get update && apt-get install -y --no-install-recommends git \\\n curl && rm -rf /var/lib/apt/lists/*",
        "# a comment\nCMD [\"bash\"]\nLABEL a=b\nEXPOSE 80\nUSER root\nENTRYPOINT []",
        "RUN set -eux; DEBIAN_FRONTEND=noninteractive apt-get -o A=B install git",
    ],
)  # fmt: skip
def test_what_provably_changes_nothing_is_passed_over(lines: str) -> None:
    assert recipe(lines).files == {}


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get install -y git nginx",
        "RUN pip install pytest",
        "RUN echo hello > /app/x",
        "RUN curl -LsSf x | sh",
        "RUN <<EOF\ntrue\nEOF",
        "RUN rm -rf /app",
        "RUN chmod +x /elsewhere",
        "COPY --from=build /x /y",
        "COPY missing.txt /x",
        "COPY ../x /x",
        "ADD https://example.com/x /x",
        "ADD data.tar.gz /x",
        'ENTRYPOINT ["./serve"]',
        "VOLUME /data",
        "FROM python AS second",
    ],
)
def test_everything_else_must_be_built(line: str) -> None:
    with pytest.raises(NeedsImageError):
        recipe(line)


def test_python_packages_that_are_said_to_be_here_need_not_be_installed() -> None:
    line = "FROM public.ecr.aws/docker/library/ubuntu:24.04\nRUN apt-get install -y python3-pip && "
    line += "pip install --no-cache-dir --break-system-packages pytest==8.4.1 pytest_json_ctrf==0.3.5\n"
    given = ("pytest", "pytest-json-ctrf", "python3-pip")
    found = read_dockerfile(line, TaskFiles(), provided=given, has_package=lambda name: False)
    assert found.provided == {"pytest", "pytest-json-ctrf"}
    for left_out in given:
        rest = [name for name in given if name != left_out]
        with pytest.raises(NeedsImageError):
            read_dockerfile(line, TaskFiles(), provided=rest, has_package=lambda name: False)
    with pytest.raises(NeedsImageError):
        read_dockerfile("FROM python\nRUN pip install -r pytest", TaskFiles(), provided=given)


def test_only_bare_systems_stand_for_themselves() -> None:
    with pytest.raises(NeedsImageError, match="it is FROM swebench/x:latest, for which this machine"):
        read_dockerfile("FROM swebench/x:latest", TaskFiles())
    read_dockerfile("FROM docker.io/library/ubuntu:24.04@sha256:0", TaskFiles())
    read_dockerfile("FROM mine:5000/os:1", TaskFiles(), base_images=("mine:5000/os",))


def test_installed_packages_are_told_from_removed_ones(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Package: git\nStatus: install ok installed\nArchitecture: amd64\n\n"
        "Package: nginx\nStatus: deinstall ok config-files\n\n"
    )
    assert installed_packages(str(status)) == {"git"}
    assert installed_packages(str(tmp_path / "none")) == frozenset()
