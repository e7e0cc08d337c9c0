"""HumanEvalFix files: read by path, refused by line, graded by their own asserts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandboxes import cannot_sandbox, has_groups, with_backend
from scripted import ScriptedSampler, write_chat_files

from asyncrl.cli import main
from asyncrl.coding.bundled import load_task_set
from asyncrl.demonstrations import read_demonstrations
from asyncrl.environments.humanevalfix import HumanEvalFixEnvironment, HumanEvalFixSettings, read_tasks
from asyncrl.environments.validate import validate
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxBackend
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Trajectory, TrajectoryStatus


def record(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "task_id": f"Python/{number}",
        "declaration": "from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n",
        "canonical_solution": "    return sum(numbers)\n",
        "buggy_solution": "    return sum(numbers) + 1\n",
        "entry_point": "total",
        "docstring": "Return the sum.\n>>> total([1, 2])\n3",
        "test": "\ndef check(total):\n    assert total([1, 2]) == 3\n    assert total([]) == 0\n\ncheck(total)",
        "example_test": "def check(total):\n    assert total([1, 2]) == 3, total([1, 2])\ncheck(total)\n",
    } | changes


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_a_file_is_a_set_of_coding_tasks_too(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", *(record(number) for number in range(10)))
    tasks = load_task_set("humanevalfix", {"path": str(path), "held_out_percent": 50}, seed=0)
    held_out, trained = set(tasks.held_out_ids()), set(tasks.training_ids(0))
    assert held_out
    assert held_out.isdisjoint(trained)
    assert held_out | trained == set(tasks.all_ids()) == {f"humanevalfix/Python/{number}" for number in range(10)}
    task = tasks.task("humanevalfix/Python/3")
    assert b"sum(numbers) + 1" in task.files["solution.py"]
    with pytest.raises(ConfigError, match=r"all 10 tasks in .* are held out: lower held_out_percent"):
        load_task_set("humanevalfix", {"path": str(path), "held_out_percent": 100}, seed=0)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


def test_a_file_is_read_into_tasks(tmp_path: Path) -> None:
    first, second = read_tasks(write(tmp_path / "f.jsonl", record(0), record(1)))
    assert (first.task_id, second.task_id) == ("humanevalfix/Python/0", "humanevalfix/Python/1")
    assert first.data["source"].endswith("return sum(numbers) + 1\n")
    assert first.data["reference"].endswith("return sum(numbers)\n")
    assert first.data["preamble"].strip() == "from typing import List"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 3 is not JSON"),
        ("[]", r"line 3 must be a JSON object"),
        (json.dumps(record(9, test=None)), r"line 3: test must be text"),
        (json.dumps({"task_id": "x"}), r"line 3: declaration must be text"),
        (json.dumps(record(9, entry_point="other")), r"line 3: declaration does not define 'other'"),
        (json.dumps(record(0)), r"line 3: humanevalfix/Python/0 was there before"),
    ],
)
def test_a_broken_line_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "f.jsonl", record(0))
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        read_tasks(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tasks(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="holds no tasks"):
        read_tasks(write(tmp_path / "f.jsonl"))


def play(renderer: ChatRenderer, directory: Path, script: Callable[[str, int], str]) -> Trajectory:
    found: list[Trajectory] = []
    settings = HumanEvalFixSettings(path=write(directory / "f.jsonl", record()), held_out_percent=0)

    async def body(backend: SandboxBackend) -> None:
        environment = HumanEvalFixEnvironment(settings, renderer=renderer, sandboxes=backend)
        sampler = ScriptedSampler(renderer, script)
        task = environment.get_item()
        found.extend(await environment.collect_trajectories(task, sampler, group_id="1", group_size=1))

    with_backend(body, directory)
    return found[0]


@pytest.mark.slow
def test_a_reply_need_not_repeat_the_imports(renderer: ChatRenderer, tmp_path: Path) -> None:
    fixed = "def total(numbers: List[int]) -> int:\n    return sum(numbers)\n```"
    trajectory = play(renderer, tmp_path, lambda trajectory_id, turn: fixed)
    assert (trajectory.reward, trajectory.status) == (1.0, TrajectoryStatus.COMPLETED)


@pytest.mark.slow
def test_a_failing_example_is_shown_and_the_last_attempt_is_graded(renderer: ChatRenderer, tmp_path: Path) -> None:
    def script(trajectory_id: str, turn: int) -> str:
        return "def total(numbers):\n    return 4\n```"

    trajectory = play(renderer, tmp_path, script)
    assert (trajectory.reward, trajectory.num_turns) == (0.0, 2)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TURNS
    assert "The examples fail: AssertionError: 4" in renderer.decode(trajectory.segments[0].token_ids)


@pytest.mark.slow
def test_leaving_early_is_not_passing(renderer: ChatRenderer, tmp_path: Path) -> None:
    leaving = "def total(numbers):\n    raise SystemExit(0)\n```"
    assert play(renderer, tmp_path, lambda trajectory_id, turn: leaving).reward == 0.0


@pytest.mark.slow
def test_tasks_that_cannot_be_trained_on_are_told_apart(renderer: ChatRenderer, tmp_path: Path) -> None:
    good = record(0)
    passes_unfixed = record(1, buggy_solution=good["canonical_solution"] + "    # unchanged\n")
    never_passes = record(2, canonical_solution="    return 7\n")
    settings = HumanEvalFixSettings(path=write(tmp_path / "f.jsonl", good, passes_unfixed, never_passes))

    async def body(backend: SandboxBackend) -> None:
        environment = HumanEvalFixEnvironment(settings, renderer=renderer, sandboxes=backend)
        seen: list[str] = []
        verdicts = await validate(environment, backend, report=lambda verdict: seen.append(verdict.task_id))
        assert [verdict.good for verdict in verdicts] == [True, False, False]
        assert [str(problem) for problem in verdicts[1].problems] == ["the unfixed code passes"]
        assert [str(problem) for problem in verdicts[2].problems] == ["the reference passes 0 of 3 times"]
        assert sorted(seen) == [verdict.task_id for verdict in verdicts]

    with_backend(body, tmp_path)


@pytest.mark.slow
def test_the_command_writes_the_solutions_of_the_training_tasks_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    model = write_chat_files(tmp_path / "model")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    tasks = write(tmp_path / "f.jsonl", *(record(n, docstring=f"Number {n}.") for n in range(30)))
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{model}"\n[environment]\nname = "humanevalfix"\n'
        f'[environment.options]\npath = "{tasks}"\n[sandbox]\nallow_weaker = {str(not has_groups()).lower()}\n'
    )
    out = tmp_path / "demonstrations.jsonl"
    command = ["environments", "demonstrations", str(config), "--out", str(out)]
    assert main(command) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"{len(lines)} demonstrations in {out}" in capsys.readouterr().out
    shown = {int(line["messages"][0]["content"].split("Number ")[1].split(".")[0]) for line in lines}
    environment = HumanEvalFixEnvironment(
        HumanEvalFixSettings(path=tasks),
        renderer=ChatRenderer.load(model),
        sandboxes=None,  # type: ignore[arg-type]
    )
    held_out = {int(task.task_id.split("/")[-1]) for task in environment.held_out()}
    assert held_out
    assert shown == set(range(30)) - held_out
    assert "return sum(numbers)\n```" in lines[0]["messages"][1]["content"]
    assert len(read_demonstrations(out, ChatRenderer.load(model), max_tokens=1000).segments) == len(lines)
    assert main([*command, "--limit", "2"]) == 0
    assert len(out.read_text().splitlines()) == 2
    assert main([*command, "--limit", "0"]) == 2
    assert main([*command, "--set", "environment.name=bugfix", "--set", "environment.options={}"]) == 0
    parity = "environment.name=parity_environment:ParityEnvironment"
    assert main([*command, "--set", parity, "--set", "environment.options={}"]) == 2


@pytest.mark.slow
def test_the_command_refuses_bad_tasks_by_id_and_a_run_can_leave_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    model = write_chat_files(tmp_path / "model")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    tasks = write(tmp_path / "f.jsonl", record(0), record(1, canonical_solution="    return 7\n"))
    kept, config = tmp_path / "kept.jsonl", tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{model}"\n[environment]\nname = "humanevalfix"\n'
        f'[environment.options]\npath = "{tasks}"\nheld_out_percent = 0\n'
        f"[sandbox]\nallow_weaker = {str(not has_groups()).lower()}\n"
    )
    command = ["environments", "validate", str(config), "--keep", str(kept)]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "1 of 2 tasks hold" in said
    assert said.splitlines()[-1] == "refused: humanevalfix/Python/1"
    assert main([*command, "--json"]) == 1
    verdicts = json.loads(capsys.readouterr().out)
    assert [v["problems"] for v in verdicts] == [
        [],
        [{"fault": "reference_fails", "detail": "the reference passes 0 of 3 times", "step": ""}],
    ]
    settings = HumanEvalFixSettings(path=tasks, held_out_percent=0, leave_out=kept)
    renderer = ChatRenderer.load(model)
    environment = HumanEvalFixEnvironment(settings, renderer=renderer, sandboxes=None)  # type: ignore[arg-type]
    assert {environment.get_item().task_id for _ in range(4)} == {"humanevalfix/Python/0"}
    assert len(environment.all_tasks()) == 2
    assert main([*command[:-1], str(tmp_path / "missing" / "file")]) == 2
    assert "verdicts cannot be written to" in capsys.readouterr().err
