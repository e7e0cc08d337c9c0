"""An environment is found by name, and what its options cannot be is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted import NoSandboxes, write_chat_files

from asyncrl.environments import ENVIRONMENTS, EnvironmentSettings, load_environment, resolve_options
from asyncrl.environments.bugfix import BugFixSettings
from asyncrl.environments.loading import environment_class
from asyncrl.errors import ConfigError
from asyncrl.protocols import Environment, SandboxBackend
from asyncrl.rollout import Episode, MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Task


class Outside:
    """An environment that is not ours."""

    name = "outside"

    def __init__(self, settings: Any, *, renderer: Any, sandboxes: Any, seed: int) -> None:
        self.seed = seed


def load(settings: EnvironmentSettings, directory: Path, seed: int = 0) -> Environment:
    renderer = ChatRenderer.load(write_chat_files(directory))
    return load_environment(settings, renderer=renderer, sandboxes=NoSandboxes(), seed=seed)


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_every_name_of_the_table_is_a_class(name: str) -> None:
    assert environment_class(name).name == name


def test_an_environment_may_be_named_by_its_module_and_class(tmp_path: Path) -> None:
    environment = load(EnvironmentSettings(name="asyncrl.environments.bugfix:BugFixEnvironment"), tmp_path)
    assert environment.name == "bugfix"
    with pytest.raises(ConfigError, match="must have get_item"):
        load(EnvironmentSettings(name=f"{__name__}:Outside"), tmp_path)


def test_options_become_the_environments_own_settings() -> None:
    options = resolve_options(EnvironmentSettings(options={"max_turns": 3, "partial_weight": 0}))
    assert options == BugFixSettings(max_turns=3, partial_weight=0.0)
    path = resolve_options(EnvironmentSettings(name="humanevalfix", options={"path": "a/b.jsonl"})).path
    assert path == Path("a/b.jsonl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "bugfx"}, "did you mean 'bugfix'"),
        ({"name": "nowhere.at.all:Thing"}, "nowhere"),
        ({"name": "asyncrl.environments.bugfix:Thing"}, "no class 'Thing'"),
        ({"options": {"max_turn": 1}}, "did you mean 'max_turns'"),
        ({"options": {"max_turns": "two"}}, r"max_turns = 'two'"),
        ({"options": {"max_turns": 0}}, "max_turns must be >= 1"),
        ({"name": "humanevalfix"}, "needs path"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvironmentSettings(**settings)


class Twins(MultiTurnEnvironment):
    """Has two tasks of one id, where its options say."""

    name = "twins"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings(RolloutSettings):
        """See `Twins`."""

        where: str = ""

    settings_type = Settings

    def __init__(self, settings: Settings, *, renderer: ChatRenderer, sandboxes: SandboxBackend, seed: int) -> None:
        tasks, twice = (
            [Task(task_id=name, environment="twins") for name in "ab"],
            Task(task_id="b", environment="twins"),
        )
        super().__init__(
            renderer=renderer,
            tasks=TaskSource(lambda epoch: [*tasks, *[twice] * (settings.where == "training")], seed=seed),
            held_out=[*tasks, *[twice] * (settings.where == "held-out")],
        )

    def start(self, episode: Episode) -> Sequence[Message]:
        return []

    async def step(self, episode: Episode, text: str) -> StepOutcome:
        return StepOutcome(done=True, reward=0.0)


@pytest.mark.parametrize("where", ["training", "held-out"])
def test_two_tasks_of_one_id_are_refused_by_that_id(tmp_path: Path, where: str) -> None:
    load(EnvironmentSettings(name=f"{__name__}:Twins"), tmp_path)
    with pytest.raises(ConfigError, match=f"1 of the {where} tasks have an id that another one has, 'b'"):
        load(EnvironmentSettings(name=f"{__name__}:Twins", options={"where": where}), tmp_path)


def following(environment: Environment, count: int) -> list[Task]:
    return [environment.get_item() for _ in range(count)]


@pytest.mark.slow
def test_an_environment_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    environment, restored = load(EnvironmentSettings(), tmp_path), load(EnvironmentSettings(), tmp_path)
    following(environment, 100)
    restored.restore(environment.state())
    assert following(restored, 20) == following(environment, 20)


@pytest.mark.slow
def test_held_out_tasks_are_the_same_for_every_seed_and_never_asked(tmp_path: Path) -> None:
    one, other = load(EnvironmentSettings(), tmp_path, seed=1), load(EnvironmentSettings(), tmp_path, seed=2)
    assert one.held_out() == other.held_out()
    functions = {task.data["function"] for task in one.held_out()}
    assert not functions & {task.data["function"] for task in following(one, 100)}
    assert following(one, 5) != following(other, 5)


def test_tasks_end_after_the_epochs_that_were_asked_for(tmp_path: Path) -> None:
    environment = load(EnvironmentSettings(options={"epochs": 1}), tmp_path)
    with pytest.raises(StopIteration):
        following(environment, 1000)


@pytest.mark.slow
def test_naming_environments_loads_none_of_them() -> None:
    program = "import sys, asyncrl.environments; print([m for m in sys.modules if 'bugfix' in m or m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
