"""What the page on tasks tells people to type exists, and what it shows loads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from harbor_directories import write_task
from tree import ROOT

from asyncrl.cli import main
from asyncrl.coding.bundled import TASK_SETS, load_task_set, resolve_task_options
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.task_files import MAX_FILE_BYTES
from asyncrl.configs import load_config

PATH = ROOT / "asyncrl" / "coding" / "TASKS.md"
PAGE = PATH.read_text(encoding="ascii")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_of_the_page_parse(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    assert words[0] == ".venv/bin/asyncrl"
    with pytest.raises(SystemExit) as ended:
        main([*words[1:], "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in words[2:] if word.startswith("--"))


def test_the_configuration_of_the_page_loads_and_asks_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "run.toml"
    path.write_text(text)
    options = load_config(path).environment.options
    for number in range(3):
        write_task(tmp_path / "my_tasks" / f"task-{number}")
    monkeypatch.chdir(tmp_path)
    assert len(load_task_set(options["tasks"], options["task_options"], seed=0).all_ids()) == 3


def test_sets_links_options_and_figures_of_the_page_are_there() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(TASK_SETS)
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (PATH.parent / target).exists(), target
    settings = resolve_task_options("harbor", {"path": "x"})
    assert isinstance(settings, HarborSettings)
    named = set(re.findall(r"`(\w+_\w+|images)(?: = \w+)?`", PAGE))
    for name in (
        "base_images",
        "images",
        "tests_provided",
        "max_memory_mb",
        "timeout_multiplier",
        "max_agent_timeout_s",
    ):
        assert name in named
        assert hasattr(settings, name)
    assert f"{MAX_FILE_BYTES >> 20} MiB" in PAGE
