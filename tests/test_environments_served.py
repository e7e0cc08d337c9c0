"""An environment elsewhere plays as one in the program does, and a connection that breaks costs nothing but time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from sandboxes import children_of, has_groups, skip_unless_possible
from scripted import NoSandboxes, ScriptedSampler, write_chat_files

from asyncrl.cli import main as cli
from asyncrl.collecting import GroupCollector
from asyncrl.environments.served import ServedEnvironment, ServedSettings
from asyncrl.environments.service import EnvironmentService
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault, leaves
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, Trajectory, TrajectoryStatus

T = TypeVar("T")
TOKEN = "a-token-of-the-tests"

COUNTING = """
from asyncrl.rollout import MultiTurnEnvironment, RolloutSettings, StepOutcome, TaskSource
from asyncrl.types import Task


class Counting(MultiTurnEnvironment):
    name = "counting"
    settings_type = RolloutSettings
    epochs = 1

    def __init__(self, settings, *, renderer, sandboxes, seed=0):
        tasks = [Task(task_id=str(n), environment=self.name, data={"number": n}) for n in range(6)]
        super().__init__(
            renderer=renderer, tasks=TaskSource(lambda epoch: tasks, seed=seed, epochs=self.epochs),
            held_out=[Task(task_id="held out", environment=self.name)], settings=settings,
        )
        self.observed = []

    def start(self, episode):
        return [{"role": "user", "content": f"Count to {episode.task.data['number']}."}]

    async def step(self, episode, text):
        if text == "raise":
            raise ValueError("the environment has a fault")
        if len(episode.turns) < 3:
            return StepOutcome(done=False, messages=[{"role": "user", "content": "Go on."}])
        return StepOutcome(done=True, reward=float(episode.task.data["number"]))

    def observe(self, task, trajectories):
        if task.task_id == "broken":
            raise ValueError("what is this?")


class Endless(Counting):
    epochs = 0
"""


@pytest.fixture(autouse=True)
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_counting", raising=False)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


@dataclass
class InMemory:
    """A place in this program, whose connections can be broken; `up` says whether one can be made."""

    service: EnvironmentService
    nursery: trio.Nursery
    name: str = "memory"
    up: bool = True
    streams: list[Any] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[trio.abc.Stream]:
        """See `served_links.Place`."""
        if not self.up:
            raise OSError("nobody listens")
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams.append(theirs)
        self.nursery.start_soon(self.service.serve, theirs)
        async with ours:
            yield ours

    def cut(self) -> None:
        """Break the connection, as a cable that is pulled does."""
        theirs = self.streams[-1]
        theirs.send_stream.close()
        theirs.receive_stream.close()


def with_service(
    renderer: ChatRenderer,
    body: Callable[[ServedEnvironment, InMemory], Awaitable[T]],
    *,
    name: str = "my_counting:Counting",
    token: str = TOKEN,
    tmp_path: Path,
    **options: Any,
) -> T:
    """Return what `body` makes of an environment that is served in memory, under a mock clock."""
    (tmp_path / "token").write_text(token)

    async def main() -> T:
        async with trio.open_nursery() as nursery:
            place = InMemory(EnvironmentService(name, NoSandboxes(), token=TOKEN), nursery)  # type: ignore[arg-type]
            settings = ServedSettings(
                urls=("memory:1",),
                token_file=str(tmp_path / "token"),
                options={"max_turns": 4, "max_retries": 0, **options},
            )
            environment = ServedEnvironment(
                settings,
                renderer=renderer,
                sandboxes=NoSandboxes(),  # type: ignore[arg-type]
                places=[place],
            )
            await nursery.start(environment.serve, tmp_path)
            try:
                return await body(environment, place)
            finally:
                nursery.cancel_scope.cancel()

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))


async def draw(environment: ServedEnvironment) -> Task:
    await environment.wait_item()
    return environment.get_item()


def test_it_plays_as_one_in_the_program(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        assert environment.name == "counting"
        assert [task.task_id for task in environment.held_out()] == ["held out"]
        sampler = ScriptedSampler(renderer, lambda trajectory_id, number: f"turn {number}")
        told: list[Trajectory] = []
        task = await draw(environment)
        trajectories = await environment.collect_trajectories(
            task, sampler, group_id="7", group_size=3, on_trajectory=told.append
        )
        assert [t.trajectory_id for t in trajectories] == ["7-0", "7-1", "7-2"]
        assert {t.reward for t in trajectories} == {float(task.data["number"])}
        assert {t.trajectory_id: t for t in told} == {t.trajectory_id: t for t in trajectories}
        assert renderer.decode(trajectories[0].segments[0].token_ids).count("Go on.") == 2
        assert [len(prompts) for prompts in sampler.prompts.values()] == [3, 3, 3]

    with_service(renderer, body, tmp_path=tmp_path)


def test_tasks_come_to_their_end_and_go_on_from_a_state(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        beginning = environment.state()
        first = [(await draw(environment)).task_id for _ in range(3)]
        state = environment.state()
        rest = [(await draw(environment)).task_id for _ in range(3)]
        await environment.wait_item()
        with pytest.raises(StopIteration):
            environment.get_item()
        assert sorted([*first, *rest]) == [str(n) for n in range(6)]
        environment.restore(state)
        assert [(await draw(environment)).task_id for _ in range(3)] == rest
        environment.restore(beginning)
        assert [(await draw(environment)).task_id for _ in range(3)] == first

    with_service(renderer, body, tmp_path=tmp_path)


def test_all_that_was_drawn_since_a_checkpoint_can_be_drawn_again_at_once(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    """A resumed run tells its environment again what happened, and waits for nothing while it does."""

    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        state = environment.state()
        drawn = [(await draw(environment)).task_id for _ in range(30)]
        environment.restore(state)
        await environment.wait_item(30)
        environment.restore(state)
        assert [environment.get_item().task_id for _ in range(30)] == drawn

    with_service(renderer, body, name="my_counting:Endless", tmp_path=tmp_path)


def test_a_connection_that_breaks_costs_no_token_and_no_task(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Kills: tasks drawn from the start again, episodes played twice, completions sampled twice."""

    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        first = await draw(environment)

        def say(trajectory_id: str, number: int) -> str:
            if (trajectory_id, number) == ("0-1", 2) and len(place.streams) == 1:
                place.cut()
            return f"turn {number}"

        sampler = ScriptedSampler(renderer, say, seconds=1.0)
        told: list[str] = []
        trajectories = await environment.collect_trajectories(
            first, sampler, group_id="0", group_size=2, on_trajectory=lambda t: told.append(t.trajectory_id)
        )
        assert len(place.streams) == 2, "the connection was made again"
        assert [t.reward for t in trajectories] == [float(first.data["number"])] * 2
        asked = [len(prompts) for prompts in sampler.prompts.values()]
        assert sum(asked) <= 2 * 3 + 2, "only what was under way is asked again"
        assert {*told} == {"0-0", "0-1"}
        others = [(await draw(environment)).task_id for _ in range(5)]
        assert sorted([first.task_id, *others]) == [str(n) for n in range(6)]

    with_service(renderer, body, tmp_path=tmp_path)


def test_a_service_that_stays_away_fails_episodes_and_is_never_a_reward_of_0(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        task = await draw(environment)

        def say(trajectory_id: str, number: int) -> str:
            place.up = False
            place.cut()
            return "never heard"

        trajectories = await environment.collect_trajectories(
            task, ScriptedSampler(renderer, say), group_id="0", group_size=2
        )
        assert {t.status for t in trajectories} == {TrajectoryStatus.FAILED_ENVIRONMENT}
        assert {t.reward for t in trajectories} == {None}
        assert "out of reach for 60 s" in trajectories[0].detail
        assert "nobody listens" in trajectories[0].detail
        place.up = True
        again = await environment.collect_trajectories(
            task, ScriptedSampler(renderer, lambda *_: "turn"), group_id="1", group_size=2
        )
        assert [t.reward for t in again] == [float(task.data["number"])] * 2

    with_service(renderer, body, tmp_path=tmp_path)


def test_a_group_that_nobody_waits_for_ends_at_the_service_too(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        task = await draw(environment)
        sampler = ScriptedSampler(renderer, lambda *_: "slow", seconds=1e6)
        collector = GroupCollector(environment, deadline_s=5.0)
        trajectories = await collector.collect(task, sampler, group_id="0", group_size=2)
        assert {t.status for t in trajectories} == {TrajectoryStatus.FAILED_DEADLINE}
        await trio.testing.wait_all_tasks_blocked()
        assert place.service.num_groups == 0

    with_service(renderer, body, tmp_path=tmp_path)


def test_an_engine_that_fails_is_the_engines_failure(renderer: ChatRenderer, tmp_path: Path) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        sampler = ScriptedSampler(renderer, lambda *_: EngineError("no engine is left"))
        task = await draw(environment)
        for trajectory in await environment.collect_trajectories(task, sampler, group_id="0", group_size=2):
            assert trajectory.status is TrajectoryStatus.FAILED_ENGINE
            assert "no engine is left" in trajectory.detail

    with_service(renderer, body, tmp_path=tmp_path)


def test_what_the_environments_code_raises_ends_the_run_that_asked_and_not_the_service(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        task = await draw(environment)
        with pytest.raises(EnvironmentFault, match="ValueError: the environment has a fault"):
            await environment.collect_trajectories(
                task, ScriptedSampler(renderer, lambda *_: "raise"), group_id="0", group_size=1
            )
        fine = await environment.collect_trajectories(
            task, ScriptedSampler(renderer, lambda *_: "turn"), group_id="1", group_size=1
        )
        assert fine[0].reward is not None
        environment.observe(Task(task_id="broken", environment="counting"), fine)
        await trio.sleep(1.0)

    with pytest.raises(BaseExceptionGroup) as raised:
        with_service(renderer, body, tmp_path=tmp_path)
    (error,) = leaves(raised.value)
    assert isinstance(error, ConfigError)
    assert "cannot go on: it raised ValueError: what is this?" in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token": "another-token-of-them"}, "the token is wrong"),
        ({"max_turns": 0}, "max_turns must be >= 1, got 0"),
        ({"turns": 2}, "unknown option 'turns'"),
        ({"name": "my_counting:Absent"}, "has no class 'Absent'"),
    ],
)
def test_what_the_service_cannot_build_is_refused_with_its_reason(
    renderer: ChatRenderer, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    async def body(environment: ServedEnvironment, place: InMemory) -> None:
        raise AssertionError("it was built")

    with pytest.raises(BaseExceptionGroup) as raised:
        with_service(renderer, body, tmp_path=tmp_path, **changes)
    (error,) = leaves(raised.value)
    assert isinstance(error, ConfigError)
    assert words in str(error)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, 'either urls, or environment = "module:Class"'),
        ({"urls": ("a:1",), "environment": "m:C"}, 'either urls, or environment = "module:Class"'),
        ({"urls": ("a",)}, "urls must be"),
        ({"urls": ("a:x",)}, "urls must be"),
        ({"urls": ("a:1",), "python": "python3"}, "python is of a child process"),
        ({"environment": "m:C", "connect_s": 0.0}, "connect_s must be > 0"),
    ],
)
def test_settings_that_name_no_environment_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServedSettings(**settings)
    assert words in str(refused.value)


@pytest.mark.slow
def test_a_child_process_that_is_killed_is_started_again_and_none_is_left(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    before = {*children_of(os.getpid())}

    async def main() -> Sequence[Trajectory]:
        settings = ServedSettings(environment="my_counting:Counting", options={"max_turns": 4})
        environment = ServedEnvironment(settings, renderer=renderer, sandboxes=NoSandboxes())  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            with trio.fail_after(60):
                await nursery.start(environment.serve, tmp_path)
                killed = False

                def say(trajectory_id: str, number: int) -> str:
                    nonlocal killed
                    if number == 1 and not killed:
                        killed = True
                        (keeper,) = {*children_of(os.getpid())} - before
                        (child,) = children_of(keeper)
                        os.kill(child, signal.SIGKILL)
                    return f"turn {number}"

                task = await draw(environment)
                trajectories = await environment.collect_trajectories(
                    task, ScriptedSampler(renderer, say), group_id="0", group_size=2
                )
                assert killed
                nursery.cancel_scope.cancel()
        return trajectories

    assert all(trajectory.reward is not None for trajectory in trio.run(main))
    assert {*children_of(os.getpid())} == before


@pytest.mark.slow
def test_the_command_serves_runs_until_it_is_stopped(renderer: ChatRenderer, tmp_path: Path) -> None:
    skip_unless_possible("bubblewrap")
    command = [sys.executable, "-m", "asyncrl", "serve", "environment", "my_counting:Counting", "--port", "0"]
    weaker = [] if has_groups() else ["--set", "sandbox.allow_weaker=true"]
    service = subprocess.Popen(
        [*command, "--token-file", str(tmp_path / "made"), *weaker], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    said = service.stdout.readline()

    async def main() -> Sequence[Trajectory]:
        settings = ServedSettings(urls=(said.split()[-1],), token_file=str(tmp_path / "made"), options={"max_turns": 4})
        environment = ServedEnvironment(settings, renderer=renderer, sandboxes=NoSandboxes())  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            with trio.fail_after(30):
                await nursery.start(environment.serve, tmp_path)
                trajectories = await environment.collect_trajectories(
                    await draw(environment), ScriptedSampler(renderer, lambda *_: "turn"), group_id="0", group_size=2
                )
            nursery.cancel_scope.cancel()
        return trajectories

    try:
        assert said.startswith("serving environment my_counting:Counting at 127.0.0.1:")
        assert all(trajectory.reward is not None for trajectory in trio.run(main))
    finally:
        with service:
            service.send_signal(signal.SIGTERM)
        assert service.returncode == 0
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing:Here"], "No module named 'nothing'"),
        (["bugfix", "--max-groups", "-1"], "--max-groups must be >= 0, got -1"),
        (["bugfix", "--token-file", "/dev/null"], "must hold a token of at least 16 characters"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["serve", "environment", "--token-file", str(tmp_path / "made"), *arguments]) == 2
    assert words in capsys.readouterr().err
