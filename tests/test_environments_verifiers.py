"""Environments of verifiers 0.4, unmodified, in a process of their own, behind the real gateway."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import gateway_rig
import pytest
import trio
from gateway_rig import Scripted
from scripted import NoSandboxes
from tree import ROOT
from verifiers_python import MODULES, verifiers_python

from asyncrl.configs import dump_config, load_config
from asyncrl.environments import resolve_options
from asyncrl.environments.verifiers import VerifiersEnvironment, VerifiersSettings
from asyncrl.errors import ConfigError, EngineError
from asyncrl.gateway import Gateway, GatewaySettings
from asyncrl.serving import listen
from asyncrl.types import TokenIds, TrajectoryStatus

PAGE = (ROOT / "asyncrl" / "environments" / "VERIFIERS.md").read_text(encoding="ascii")
Body = Callable[[VerifiersEnvironment, Scripted], Awaitable[None]]


def play(directory: Path, chosen: VerifiersSettings, body: Body, *, max_model_len: int = 4000) -> Path:
    """Run a test body with an environment that is reached, and a sampler; return the process's log."""
    renderer = gateway_rig.make_renderer(directory)

    async def main() -> None:
        environment = VerifiersEnvironment(chosen, renderer=renderer, sandboxes=NoSandboxes())
        gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=max_model_len)
        environment.use_gateway(gateway)
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                await nursery.start(environment.serve, directory)
                await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
                await body(environment, Scripted(renderer))
                nursery.cancel_scope.cancel()
        assert gateway.statistics().sessions == 0

    trio.run(main)
    return directory / "verifiers.log"


def settings(taskset: str, **options: Any) -> VerifiersSettings:
    return VerifiersSettings(
        taskset=taskset, python=verifiers_python(), **{"held_out_percent": 0, "max_retries": 0, **options}
    )


async def group(
    environment: VerifiersEnvironment, sampler: Scripted, replies: Sequence[str | Exception] = (), *, task: int = 0
) -> Any:
    """Return the only trajectory of a group."""
    sampler.replies += replies
    number = len(sampler.asked)
    (found,) = await environment.collect_trajectories(
        environment.all_tasks()[task], sampler, group_id=str(number), group_size=1
    )
    return found


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MODULES))


@pytest.mark.slow  # imports verifiers in another process, and starts a chat program for each episode
def test_a_single_turn_is_played_paid_and_cut_where_it_is(tmp_path: Path) -> None:
    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        assert [task.task_id for task in environment.training_tasks(0)] == ["sum-1", "sum-2", "sum-3"]
        right = await group(environment, sampler, ["4"], task=1)
        assert (right.reward, right.status, right.num_turns) == (1.0, TrajectoryStatus.COMPLETED, 1)
        assert right.reward_parts == {"right": 0.75, "short": 0.25, "letters": 1.0}
        (segment,) = right.segments
        prompt = sampler.renderer.decode(sampler.asked[0])
        assert prompt.index("Add.") < prompt.index("What is 2 + 2?")
        assert segment.token_ids[len(sampler.asked[0]) :] == TokenIds([ord("4"), 257])
        assert [(span.start - len(sampler.asked[0]), span.version) for span in segment.spans] == [(0, 3), (1, 4)]

        wrong = await group(environment, sampler, ["twelve"])
        assert (wrong.reward, wrong.status) == (0.0, TrajectoryStatus.COMPLETED)
        cut = await group(environment, sampler, ["a reply that is longer than it may be"])
        assert (cut.reward, cut.status, cut.truncated) == (0.0, TrajectoryStatus.TRUNCATED_LENGTH, True)

        broken = await group(environment, sampler, ["broken"])
        assert (broken.reward, broken.segments, broken.status) == (None, (), TrajectoryStatus.FAILED_ENVIRONMENT)
        assert "the judge is asleep" in broken.detail
        endless = await group(environment, sampler, ["endless"])
        assert (endless.reward, endless.status) == (None, TrajectoryStatus.FAILED_ENVIRONMENT)
        assert "right is nan" in endless.detail
        slow = await group(environment, sampler, ["slow"])
        assert (slow.reward, slow.status) == (None, TrajectoryStatus.FAILED_ENVIRONMENT)
        assert "graded without right, short (scoring_timeout)" in slow.detail

        lost = await group(environment, sampler, [EngineError("all engines are gone")] * 20)
        assert (lost.reward, lost.status) == (None, TrajectoryStatus.FAILED_ENGINE)

    config = {"taskset": {"last": 3}, "agent": {"timeout": {"scoring": 5}}}
    play(tmp_path, settings("vf_sums", max_tokens=16, config=config), body)


@pytest.mark.slow
def test_turns_join_into_one_segment_and_a_limit_on_them_is_recognised(tmp_path: Path) -> None:
    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        assert len(environment.all_tasks()) == 3  # of a task set without end
        found = await group(environment, sampler, ["4", "9", "5"])
        assert (found.reward, found.status, found.num_turns) == (1 / 3, TrajectoryStatus.COMPLETED, 3)
        (segment,) = found.segments
        assert [
            bytes(segment.token_ids[turn.start : turn.end]) for turn in segment.turns if turn.end - turn.start == 1
        ] == []
        assert [sampler.renderer.decode(segment.token_ids[turn.start : turn.end]) for turn in segment.turns] == [
            "4",
            "9",
            "5",
        ]
        text = sampler.renderer.decode(segment.token_ids)
        assert text.index("Guess my number.") < text.index("larger") < text.index("smaller")

        stopped = await group(environment, sampler, ["4", "9", "7"])
        assert (stopped.reward, stopped.status, stopped.num_turns) == (0.0, TrajectoryStatus.TRUNCATED_TURNS, 3)

        full = await group(environment, sampler, ["3" * 100])
        assert (full.reward, full.status, full.num_turns) == (0.0, TrajectoryStatus.TRUNCATED_LENGTH, 1)

    chosen = settings("vf_guessing", num_tasks=3, config={"turns": 5, "agent": {"max_turns": 3}})
    play(tmp_path, chosen, body, max_model_len=150)


@pytest.mark.slow
def test_tools_are_offered_called_and_answered(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "till_price", "arguments": {"fruit": "pear", "count": 2}}</tool_call>'

    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        found = await group(environment, sampler, [call, "10"])
        assert (found.reward, found.status, found.num_turns) == (1.0, TrajectoryStatus.COMPLETED, 2)
        (segment,) = found.segments
        text = sampler.renderer.decode(segment.token_ids)
        assert "Return what so many pieces of a fruit cost." in text
        assert text.index(call) < text.rindex("10")

    play(tmp_path, settings("vf_shop", max_tokens=200), body)


@pytest.mark.slow
def test_a_harness_that_dies_of_a_full_context_is_cut_and_graded(tmp_path: Path) -> None:
    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        assert [task.task_id for task in environment.all_tasks()] == ["one-0", "one-1"]  # their names are the same
        found = await group(environment, sampler, ["yes" * 20])
        assert (found.reward, found.status, found.num_turns) == (1.0, TrajectoryStatus.TRUNCATED_LENGTH, 1)
        whole = await group(environment, sampler, ["no", "yes"])
        assert (whole.reward, whole.status, whole.num_turns) == (1.0, TrajectoryStatus.COMPLETED, 2)
        assert len(whole.segments) == 1

    play(tmp_path, settings("vf_plain"), body, max_model_len=110)


@pytest.mark.slow
def test_the_page_shows_what_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_taskset.py").write_text(code)
    (tmp_path / "run.toml").write_text(f"[model]\npath = 'model'\n{config}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH")
    python = Path(".venv-verifiers/bin/python")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {verifiers_python()} "$@"\n')
    python.chmod(0o755)
    chosen = resolve_options(load_config(tmp_path / "run.toml").environment)

    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        assert len(environment.all_tasks()) == 40
        assert 0 < len(environment.held_out()) < 20
        found = await group(environment, sampler, ["It is 14."], task=6)
        assert (found.reward, found.task_id) == (1.0, "6")

    play(tmp_path, chosen, body)


def process_of_this_test() -> int:
    """Return the id of the process that plays: the child of a keeper that this process has started."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    running = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    named = [pid for pid, command in running.items() if b"verifiers_process.py" in command and b"keeper" not in command]
    (found,) = [pid for pid in named if parent(parent(pid)) == os.getpid()]
    return found


@pytest.mark.slow
def test_the_process_is_started_again_and_its_episodes_with_it(tmp_path: Path) -> None:
    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        sampler.hold = trio.Event()
        results: list[Any] = []

        async def one() -> None:
            results.append(await group(environment, sampler, ["yes"] * 3))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await sampler.begun.wait()
            os.kill(process_of_this_test(), signal.SIGKILL)
            sampler.hold.set()
        (found,) = results
        assert (found.reward, found.extras["retries"]) == (1.0, 1)

    play(tmp_path, settings("vf_plain", max_retries=1), body)


def test_a_configuration_names_the_environment_in_short_or_as_any_other(tmp_path: Path) -> None:
    path, model = tmp_path / "run.toml", "[model]\npath = 'model'\n"
    short = f"{model}[environment]\nverifiers = 'vf_sums'\n[environment.options]\nnum_tasks = 2\n"
    path.write_text(short)
    config = load_config(path)
    assert resolve_options(config.environment) == VerifiersSettings(taskset="vf_sums", num_tasks=2)
    path.write_text(dump_config(config))
    assert load_config(path) == config
    for twice in (f"{model}[environment]\nverifiers = 'a'\nname = 'verifiers'\n", f"{short}taskset = 'b'\n"):
        path.write_text(twice)
        with pytest.raises(ConfigError, match="names the environment: leave out name and taskset"):
            load_config(path)


def test_a_python_without_verifiers_is_refused_with_what_to_install(tmp_path: Path) -> None:
    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        raise AssertionError("it was played")

    with pytest.raises(BaseExceptionGroup) as caught:
        play(tmp_path, VerifiersSettings(taskset="vf_sums", python=sys.executable), body)
    assert caught.group_contains(ConfigError, match=r"-m pip install 'verifiers==0.4.\*' uv")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taskset", "options", "words"),
    [
        ("vf_nothing", {}, "vf_nothing"),
        ("vf_guessing", {}, "has no end: say how many to take"),
        ("vf_sums", {"config": {"taskset": {"fist": 3}}}, "fist"),
        ("vf_sums", {"held_out_percent": 100}, "leaves nothing of the 4 tasks"),
    ],
)
def test_environments_that_cannot_be_played_are_refused(
    taskset: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    async def body(environment: VerifiersEnvironment, sampler: Scripted) -> None:
        raise AssertionError("it was played")

    with pytest.raises(BaseExceptionGroup) as caught:
        play(tmp_path, settings(taskset, **options), body)
    assert caught.group_contains(ConfigError, match=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"taskset": ""}, "taskset must name a module"),
        ({"python": "/no/such/python"}, "no program that can be run"),
        ({"max_running": 0}, "max_running must be >= 1"),
        ({"start_s": float("inf")}, "start_s must be > 0 and finite"),
        ({"config": {"taskset": {"id": "other"}}}, "config.taskset must be settings of 'vf_sums'"),
        ({"held_out_percent": 101}, "held_out_percent must be"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VerifiersSettings(**{"taskset": "vf_sums", **options})
