"""`asyncrl environments list|show|run`: what there is, what a task holds, and what comes of it without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harbor_directories import write_task
from sandboxes import cannot_sandbox, has_groups

from asyncrl.cli import main
from asyncrl.coding.bundled import TASK_SETS
from asyncrl.environments import ENVIRONMENTS

WEAK = [] if has_groups() else ["--set", "sandbox.allow_weaker=true"]


def test_environments_and_task_sets_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*ENVIRONMENTS, *TASK_SETS):
        assert any(line.startswith(f"  {name}: ") and len(line) > 40 for line in lines), name
    assert main(["environments", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"environments": ENVIRONMENTS, "task_sets": dict(TASK_SETS)}


def test_a_set_shows_its_ids_what_it_refused_and_one_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "greet")
    write_task(tmp_path / "bad", **{"tests/test.sh": None})
    tasks = ["--tasks", f"harbor:{tmp_path}", "--set", "tasks.skip_refused=true"]
    assert main(["environments", "show", *tasks]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "harbor/greet"
    assert main(["environments", "show", *tasks, "harbor/greet"]) == 0
    said = capsys.readouterr().out
    for part in (
        "Write hello to greeting.txt.",
        "start.txt (6 bytes)",
        "test.sh",
        "solve.sh",
        "note: it may count on a",
    ):
        assert part in said
    assert main(["environments", "show", *tasks]) == 0
    assert "refused: harbor/bad: it has no tests" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(bool(cannot_sandbox()), reason=cannot_sandbox() or "sandboxes")
def test_a_task_is_run_as_it_stands_and_with_its_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["environments", "run", "--tasks", f"harbor:{write_task(tmp_path / 'greet')}", *WEAK, "harbor/greet"]
    assert main(run) == 1
    assert "harbor/greet as it stands" in capsys.readouterr().out
    assert main([*run, "--solution", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["task_id"], told["reward"], told["solved"], told["solution"]) == ("harbor/greet", 1.0, True, True)
    assert told["verdicts"]["1"]["rewards"] == {"reward": 1.0}
    alone = ["environments", "run", str(tmp_path / "greet"), *WEAK]
    assert main(alone) == 1
    assert main([*alone, "--solution"]) == 0
    assert main(["environments", "run", "templates/add-0-0", "--solution", *WEAK]) == 0
    assert "templates/add-0-0 with its reference" in capsys.readouterr().out


def test_a_task_alone_says_where_it_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments", "show", str(write_task(tmp_path / "greet"))]) == 0
    assert "Write hello to greeting.txt." in capsys.readouterr().out
    assert main(["environments", "run", "greet"]) == 2
    assert "'greet' alone is no task: give a task's directory, an id that begins" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(bool(cannot_sandbox()), reason=cannot_sandbox() or "sandboxes")
def test_what_cannot_be_judged_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "greet", **{"tests/test.sh": "true\n"})
    run = ["environments", "run", "--tasks", f"harbor:{tmp_path}", *WEAK, "harbor/greet"]
    assert main(run) == 1
    assert "harbor/greet: the tests' script wrote neither reward.json nor reward.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--tasks", "harbour:x", "t"], "unknown task set 'harbour:x'|task set 'harbour:x'"),
        (["run", "--tasks", "harbor:nowhere", "t"], "nowhere is no directory"),
        (["run", "--tasks", "harbor", "t"], "needs path"),
        (["run", "t"], "'t' alone is no task: .* or a configuration or --tasks"),
        (["show", "--tasks", "harbor:x", "configs/demo.toml", "t"], "either a configuration or --tasks"),
        (["show", "--tasks", "templates", "--set", "tasks.colour=1"], "colour"),
        (["show", "--tasks", "templates", "--set", "learner.x=1"], "learner.x=1"),
        (["show", "--tasks", "templates", "templates/clam-0-0"], "no task 'templates/clam-0-0'.*did you mean"),
    ],
)
def test_what_was_typed_wrong_is_told(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments", *words]) == 2
    assert re.search(says, capsys.readouterr().err)
