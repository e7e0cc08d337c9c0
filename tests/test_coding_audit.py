"""An audit names tasks that were likely failed wrongly, attempts that likely passed wrongly, and groups all alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coding_tasks import CALLS, TASK
from sandboxes import cannot_sandbox, has_groups
from scripted import write_chat_files

from asyncrl.cli import main
from asyncrl.coding.audit import Attempt, Audit, audit, read_attempts
from asyncrl.coding.tasks import Checks, CodingTask, PytestChecks, ScriptChecks
from asyncrl.coding.untold import untold_names
from asyncrl.errors import ConfigError

HIDDEN = b"""
import shapes
from shapes import area as a, Circle
import pytest, math, helpers
def test_area():
    assert a(2) == 4 and math.pi and helpers.x
def test_names():
    assert Circle().radius_squared == 4 and hasattr(shapes, "PRECISION") and shapes.unit() == 1
class TestMore:
    def test_inner(self):
        assert shapes.perimeter
"""
TESTS = PytestChecks(
    tests={"test_shapes.py": HIDDEN, "helpers.py": b"x = 1\n"},
    expected=("test_shapes.py::test_area", "test_shapes.py::test_names", "test_shapes.py::TestMore::test_inner"),
)
FILES = {"shapes.py": b"def area(x): ...\ndef unit(): ...\n"}


def task_of(checks: Checks, instruction: str = "Write Circle and area.") -> CodingTask:
    return replace(TASK, files=FILES, steps=(replace(TASK.steps[0], checks=checks, instruction=instruction),))


@pytest.mark.parametrize("checks", [TESTS, ScriptChecks(files=TESTS.tests)])
def test_names_that_tests_ask_for_and_nothing_tells_are_found_by_test(checks: Checks) -> None:
    task = task_of(checks)
    assert untold_names(task, task.steps[0]) == {
        "test_shapes.py::test_names": ["PRECISION"],
        "test_shapes.py::TestMore::test_inner": ["perimeter"],
    }
    told = task_of(checks, "Write Circle, area, perimeter and PRECISION.")
    assert untold_names(told, told.steps[0]) == {}


def test_a_function_that_is_called_and_never_named_is_untold() -> None:
    task = task_of(replace(CALLS, function="Shape.volume"), "Add volume.")
    assert untold_names(task, task.steps[0]) == {"Shape.volume": ["Shape"]}


def attempt(trajectory_id: str, task_id: str = "t", reward: float = 0.0, **evidence: Any) -> Attempt:
    told = ({"solved": reward == 1.0, "reward": reward, **evidence},) if evidence else ()
    return Attempt(trajectory_id=trajectory_id, task_id=task_id, reward=reward, solved=reward == 1.0, evidence=told)


def audited(*attempts: Attempt, task: CodingTask | None = None, **more: Any) -> Audit:
    return audit(attempts, task=lambda _: task, **{"solved_elsewhere": {}, "proven": (), **more})


def test_a_task_that_nobody_solved_is_named_with_what_says_that_it_can_be() -> None:
    failed = [
        attempt(f"{n}-{m}", failed=["test_shapes.py::test_names", *(["test_shapes.py::test_area"] * m)], answer=f"{m}")
        for n in range(2)
        for m in range(2)
    ]
    (found,) = audited(
        *failed, task=task_of(TESTS), solved_elsewhere={"large": {"t"}, "small": {"u"}}, proven={"t"}
    ).failed_wrongly
    assert found.reasons == (
        "solved in large",
        "the reference passes",
        "test_shapes.py::test_names asks for PRECISION, which nothing tells",
    )
    assert (found.attempts, found.always_failing) == (4, ("test_shapes.py::test_names",))


def test_neither_few_failures_nor_a_single_success_nor_mere_failures_say_anything() -> None:
    four = [attempt(f"1-{n}", failed=["x"]) for n in range(4)]
    assert audited(*four[:3], proven={"t"}).failed_wrongly == ()
    assert audited(*four, attempt("1-4", reward=1.0, answer="a"), proven={"t"}).failed_wrongly == ()
    assert audited(*four).failed_wrongly == ()


@pytest.mark.parametrize(
    ("reward", "evidence", "says"),
    [
        (1.0, {"signs": ["literal_answers"]}, "its solution holds literal answers"),
        (1.0, {"signs": ["test_names"]}, "its solution holds test names"),
        (1.0, {"outside": ["conftest.py"]}, "it edits what the task does not allow: conftest.py"),
        (0.5, {"visible": [2, 2], "failed": ["call 3"]}, "it passes the 2 visible calls and fails 1 hidden ones"),
        (0.0, {"tampered": True}, "it tampered with its judge"),
    ],
)
def test_an_attempt_to_read_is_named_with_why(reward: float, evidence: Mapping[str, Any], says: str) -> None:
    (found,) = audited(attempt("3-1", reward=reward, **evidence)).passed_wrongly
    assert (found.trajectory_id, found.solved, found.reasons) == ("3-1", reward == 1.0, (says,))


@pytest.mark.parametrize(
    ("reward", "evidence"),
    [(0.0, {"outside": ["x"]}), (0.5, {"visible": [1, 2]}), (1.0, {"changed": ["m.py"], "answer": "a"})],
)
def test_an_honest_attempt_is_not(reward: float, evidence: Mapping[str, Any]) -> None:
    assert audited(attempt("3-1", reward=reward, **evidence)).passed_wrongly == ()


def test_groups_are_alike_by_rewards_and_by_what_was_left() -> None:
    found = audited(
        *(attempt(f"1-{n}", reward=1.0, answer="same") for n in range(3)),
        *(attempt(f"2-{n}", reward=0.0, answer=str(n)) for n in range(3)),
        *(attempt(f"3.{n}-{n}", reward=float(n), answer=str(n)) for n in range(2)),
        attempt("4-0", reward=1.0, answer="alone"),
    )
    (alike,) = found.undiffering
    assert (alike.groups, alike.equal_rewards, alike.equal_answers) == (3, 2, 1)


def record(trajectory_id: str, reward: float | None, **extras: Any) -> str:
    return json.dumps(
        {
            "trajectory_id": trajectory_id,
            "task_id": "calls",
            "reward": reward,
            "reward_parts": {} if reward is None else {"solved": float(reward == 1.0)},
            "extras": extras,
        }
    )


def test_recorded_episodes_are_read_and_what_is_none_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "version-0.jsonl"
    path.write_text(record("1-0", 0.2, evidence=[{"failed": ["a"]}]) + "\n" + record("1-1", None) + "\n" + '{"traj')
    (found,) = read_attempts(tmp_path)
    assert (found.reward, found.solved, found.evidence[0]["failed"]) == (0.2, False, ["a"])
    path.write_text(record("1-0", 0.2) + "\n[]\n")
    with pytest.raises(ConfigError, match=r"version-0.jsonl, line 2 is no recorded episode"):
        read_attempts(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="no scored episodes"):
        read_attempts(tmp_path)


@pytest.mark.slow
def test_the_command_reads_a_run_its_tasks_and_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := cannot_sandbox():
        pytest.skip(reason)
    model = write_chat_files(tmp_path / "model")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    for run, reward in (("weak", 0.25), ("strong", 1.0)):
        (tmp_path / run / "trajectories").mkdir(parents=True)
        lines = [record(f"1-{n}", reward, evidence=[{"failed": ["call 1"], "answer": str(n)}]) for n in range(4)]
        (tmp_path / run / "trajectories" / "version-0.jsonl").write_text("\n".join([*lines, ""]))
        (tmp_path / run / "config.toml").write_text(
            f'[model]\npath = "{model}"\n[environment]\nname = "coding_agent"\n[environment.options]\n'
            f'tasks = "coding_tasks:Kinds"\ncalls = "fenced"\n'
            f"max_episode_tokens = 2000\n[sandbox]\nallow_weaker = {str(not has_groups()).lower()}\n"
        )
    weak, strong = str(tmp_path / "weak"), str(tmp_path / "strong")
    assert main(["environments", "audit", weak, "--stronger", strong, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["task_id"], one["reasons"]) for one in told["failed_wrongly"]] == [("calls", [f"solved in {strong}"])]
    assert main(["environments", "audit", weak]) == 0
    said = capsys.readouterr().out
    assert "groups without differing attempts" in said
    assert "4 attempts: 0 tasks that were likely failed wrongly, 0 attempts to read, 1 tasks with groups" in said
    assert main(["environments", "audit", f"{weak}/config.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}
    for words in ([f"{weak}/config.toml", "--stronger", strong], [weak, "--set", "run.steps=1"], [str(tmp_path)]):
        assert main(["environments", "audit", *words]) == 2
