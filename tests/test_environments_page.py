"""What the page on environments shows is what runs: its files, classes and configurations, played to the end."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import trio
from scripted import NoSandboxes, Reply, ScriptedSampler, write_chat_files
from tree import ROOT

from asyncrl.cli import main
from asyncrl.collecting import GroupCollector
from asyncrl.configs.loader import build
from asyncrl.environments.loading import EnvironmentSettings, load_environment
from asyncrl.errors import EngineError
from asyncrl.protocols import Environment
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Trajectory, TrajectoryStatus

PAGE = (ROOT / "asyncrl" / "environments" / "ENVIRONMENTS.md").read_text(encoding="ascii")


def blocks(language: str) -> list[str]:
    """Return the page's blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The page's Python files by name, importable."""
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for block in blocks("python"):
        name = re.match(r"# (\w+)\.py\n", block)
        assert name is not None, f"a block without a file name: {block[:60]}"
        (tmp_path / f"{name[1]}.py").write_text(block)
        monkeypatch.delitem(sys.modules, name[1], raising=False)
        found[name[1]] = importlib.import_module(name[1])
    return found


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


def play(
    environment: Environment, renderer: ChatRenderer, script: Callable[[str, int], Reply], size: int = 2
) -> Sequence[Trajectory]:
    """Return the next task's group, collected as a run does."""

    async def main() -> Sequence[Trajectory]:
        collector = GroupCollector(environment)
        sampler = ScriptedSampler(renderer, script)
        return await collector.collect(environment.get_item(), sampler, group_id="0", group_size=size)

    return trio.run(main)


def load(name: str, renderer: ChatRenderer, **options: object) -> Environment:
    settings = EnvironmentSettings(name=name, options=options)
    return load_environment(settings, renderer=renderer, sandboxes=NoSandboxes(), seed=0)


def test_the_page_is_ascii_and_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "asyncrl" / "environments" / target).is_file(), target
    headings = {
        re.sub(r"[^a-z -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^## (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([a-z-]+)\)", PAGE)) <= headings


def test_questions_and_a_reward_function(
    modules: dict[str, ModuleType], renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(blocks("json")[0])
    table = tomllib.loads(blocks("toml")[0])["environment"]
    environment = load(table["name"], renderer, **{**table["options"], "held_out_percent": 0, "epochs": 1})
    answers = {"sum-1": "17 + 25 = 42.", "sum-2": "It is 12."}
    for _ in answers:
        trajectories = play(environment, renderer, lambda trajectory_id, number: "17 + 25 = 42.")
        expected = float(trajectories[0].task_id == "sum-1")
        assert [t.reward for t in trajectories] == [expected] * 2
        assert trajectories[0].reward_parts == {"numbers": 3.0}


def test_turns(modules: dict[str, ModuleType], renderer: ChatRenderer) -> None:
    environment = load("my_guessing:Guessing", renderer, max_turns=6)
    told: list[str] = []
    guesses = [16, 24, 28, 30, 31, 32]

    def halve(trajectory_id: str, number: int) -> str:
        return str(guesses[number])

    for trajectory in play(environment, renderer, halve):
        told.append(renderer.decode(trajectory.segments[0].token_ids))
        number = int(trajectory.task_id)
        expected = 1.0 / (guesses.index(number) + 1) if number in guesses else 0.0
        assert trajectory.reward == expected
        assert told[-1].count("My number is") == (guesses.index(number) if number in guesses else 5)


def test_tools(modules: dict[str, ModuleType], renderer: ChatRenderer) -> None:
    environment = load("my_shop:Shop", renderer)
    script = [
        '<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>',
        '<tool_call>{"name": "price", "arguments": {"fruit": "kiwi"}}</tool_call>',
        '<tool_call>{"name": "basket", "arguments": {"fruits": ["pear"]}}</tool_call>',
        "That is all.",
    ]
    for trajectory in play(environment, renderer, lambda trajectory_id, number: script[number]):
        told = renderer.decode(trajectory.segments[0].token_ids)
        assert told.index("\n5\n") < told.index("error: there is no 'kiwi'") < told.index("1 in the basket")
        assert trajectory.reward == 5 / int(trajectory.task_id)
        assert (trajectory.extras["tool_calls"], trajectory.extras["malformed"]) == (3, 0)


def test_two_ways_to_speak_in_one_run(modules: dict[str, ModuleType], renderer: ChatRenderer) -> None:
    (table,) = [tomllib.loads(block)["environment"] for block in blocks("toml") if '"mixed"' in block]
    environment = load(table["name"], renderer, **table["options"])
    seen: dict[str, str] = {}
    while len(seen) < 2:
        (first, *_) = play(environment, renderer, lambda trajectory_id, number: "Nothing.")
        seen[first.environment] = renderer.decode(first.segments[0].token_ids, keep_special=True)
    assert seen["chat"].startswith("<|user|>Guess my number")
    assert "<|" not in seen["text"]
    assert seen["text"].startswith("Call a tool with JSON")


def test_two_sides_of_a_game_are_two_agents_of_one_group(
    modules: dict[str, ModuleType], renderer: ChatRenderer
) -> None:
    environment = load("my_nim:Nim", renderer)

    def three_at_a_time(trajectory_id: str, number: int) -> Reply:
        if trajectory_id == "0-7":
            return EngineError("the engine is gone")
        return "4" if trajectory_id == "0-2" else "3"

    trajectories = play(environment, renderer, three_at_a_time, size=3)
    assert [t.trajectory_id for t in trajectories] == [f"0-{n}" for n in range(8)]
    assert [t.agent for t in trajectories[:2]] == ["player 0", "player 1"]
    assert [t.reward for t in trajectories] == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, None, None]
    assert {t.status for t in trajectories[6:]} == {TrajectoryStatus.FAILED_ENGINE}
    first, second = trajectories[:2]
    assert renderer.decode(first.segments[0].token_ids).count("There are") == 2
    assert sum(second.segments[0].loss_mask) == 2 * len("3") + 2, "its own replies and their end tokens"


def test_commands_and_configurations_of_the_page_are_taken(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(blocks("json")[0])
    for block in blocks("toml"):
        table = tomllib.loads(block)
        build(EnvironmentSettings, table["environment"])
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line)
        assert words[0] == "asyncrl"
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert all(word in said for word in words if word.startswith("--"))
