"""Agents by base URL: shell commands and functions that know nothing of asyncrl, run and graded an episode each."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import gateway_rig
import pytest
import trio
from gateway_rig import Scripted
from scripted import NoSandboxes

from asyncrl.environments.agent import AgentEnvironment, AgentSettings
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault
from asyncrl.gateway import Gateway, GatewaySettings
from asyncrl.serving import listen
from asyncrl.types import Task, Trajectory, TrajectoryStatus

MY_CODE = """
import httpx
import trio


def words(result, row):
    assert result.directory.is_dir()
    return {"reward": result.replies == tuple(row.get("expected", ["reply 1"])), "output": len(result.output)}


def found(result, row):
    return (result.directory / "found.txt").read_text() == row["question"]


def returned(result, row):
    return result.returned


def half(result, row):
    return 0.5


def broken(result, row):
    return 1 / 0


async def ask_twice(row, *, base_url, api_key):
    async with httpx.AsyncClient(headers={"authorization": "Bearer " + api_key}, trust_env=False) as client:
        messages = [{"role": "user", "content": row["question"]}]
        for _ in range(2):
            reply = await client.post(base_url + "/chat/completions", json={"messages": messages})
            if reply.status_code != 200:
                return 0.25
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    return len(messages)


async def ask_for_ever(row, *, base_url, api_key):
    await ask_twice(row, base_url=base_url, api_key=api_key)
    await trio.sleep_forever()


def asks_nothing(row, *, base_url, api_key):
    return 1.0


def raises(row, *, base_url, api_key):
    raise KeyError("the agent's own mistake")
"""

ASK = (
    "import json, os, urllib.request as r\n"
    "task = json.load(open('task.json'))\n"
    "q = r.Request(os.environ['OPENAI_BASE_URL'] + '/completions', json.dumps({'prompt': task['question']}).encode(),"
    " {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
    "print(json.load(r.build_opener(r.ProxyHandler({})).open(q))['choices'][0]['text'])\n"
    "open('found.txt', 'w').write(task['question'])\n"
)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_agents.py").write_text(MY_CODE)
    (tmp_path / "ask.py").write_text(ASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)
    rows = [{"id": "one", "question": "2 + 2?"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def settings(code: Path, **changes: Any) -> AgentSettings:
    given = {"path": code / "tasks.jsonl", "reward": "my_agents:words", "held_out_percent": 0, **changes}
    if "function" not in given:
        given.setdefault("command", f"{sys.executable} -S {code / 'ask.py'}")
    return AgentSettings(**given)


def play(
    code: Path,
    chosen: AgentSettings,
    *,
    replies: Sequence[str | Exception] = (),
    group_size: int = 1,
    change: Callable[[Scripted], None] = lambda sampler: None,
    seen: Callable[[AgentEnvironment, Scripted], Awaitable[None]] | None = None,
) -> Sequence[Trajectory]:
    """Play one group of the first task."""
    renderer = gateway_rig.make_renderer(code)
    result: list[Trajectory] = []

    async def main() -> None:
        environment = AgentEnvironment(chosen, renderer=renderer, sandboxes=NoSandboxes())
        gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=500)
        environment.use_gateway(gateway)
        sampler = Scripted(renderer, list(replies))
        change(sampler)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
                if seen is not None:
                    nursery.start_soon(seen, environment, sampler)
                result.extend(
                    await environment.collect_trajectories(
                        environment.get_item(), sampler, group_id="4", group_size=group_size
                    )
                )
                nursery.cancel_scope.cancel()
        assert gateway.statistics().sessions == 0

    trio.run(main)
    return result


@pytest.mark.slow
def test_a_command_is_run_an_episode_and_graded_by_what_it_left(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(code))
    found = play(code, settings(code, reward="my_agents:found"), group_size=3)
    assert [(t.trajectory_id, t.reward, t.status) for t in found] == [
        (f"4-{n}", 1.0, TrajectoryStatus.COMPLETED) for n in range(3)
    ]
    assert all(len(t.segments) == 1 and t.extras["exit_code"] == 0 for t in found)
    assert not list(code.glob("asyncrl-agent-*"))


@pytest.mark.slow
def test_the_reward_function_sees_output_and_replies(code: Path) -> None:
    (trajectory,) = play(code, settings(code))
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"output": len("reply 1")})


@pytest.mark.slow
def test_a_command_that_ends_badly_is_graded_as_it_stands(code: Path) -> None:
    (trajectory,) = play(code, settings(code, command=f"{sys.executable} -S {code / 'ask.py'}; exit 3"))
    assert (trajectory.reward, trajectory.extras["exit_code"]) == (1.0, 3)


@pytest.mark.slow
def test_a_command_that_asks_nothing_is_masked_with_its_last_words(code: Path) -> None:
    (trajectory,) = play(code, settings(code, command="echo I have lost my way; exit 3", max_retries=0))
    assert (trajectory.reward, trajectory.status) == (None, TrajectoryStatus.FAILED_ENVIRONMENT)
    assert "exit code 3" in trajectory.detail
    assert "I have lost my way" in trajectory.detail


@pytest.mark.slow
def test_a_command_that_is_out_of_time_is_ended_and_graded_as_it_stands(code: Path) -> None:
    mark = f"sleep 98{code.name[-1]}765"
    chosen = settings(
        code, command=f"{sys.executable} -S {code / 'ask.py'}; {mark} & {mark}", episode_timeout_s=1.5, max_retries=0
    )
    (trajectory,) = play(code, chosen)
    assert (trajectory.reward, trajectory.status) == (1.0, TrajectoryStatus.TIMED_OUT)
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in running if mark.replace(" ", "\0").encode() in line]


def test_a_function_is_an_agent_too(code: Path) -> None:
    chosen = settings(code, function="my_agents:ask_twice", reward="my_agents:returned")
    (trajectory,) = play(code, chosen)
    assert (trajectory.reward, trajectory.num_turns, len(trajectory.segments)) == (5.0, 2, 1)


def test_turns_beyond_the_limit_are_refused_and_the_episode_says_so(code: Path) -> None:
    chosen = settings(code, function="my_agents:ask_twice", reward="my_agents:returned", max_turns=1)
    (trajectory,) = play(code, chosen)
    assert (trajectory.reward, trajectory.status) == (0.25, TrajectoryStatus.TRUNCATED_TURNS)


def test_replies_are_no_longer_than_the_environment_says(code: Path) -> None:
    asked: list[Scripted] = []
    chosen = settings(code, function="my_agents:ask_twice", reward="my_agents:returned", max_tokens=5)
    play(code, chosen, change=asked.append)
    assert [one["max_tokens"] for one in asked[0].asked_with] == [5, 5]


@pytest.mark.slow
def test_a_function_that_is_out_of_time_is_graded_as_it_stands(code: Path) -> None:
    chosen = settings(
        code, function="my_agents:ask_for_ever", reward="my_agents:half", episode_timeout_s=0.2, max_retries=0
    )
    (trajectory,) = play(code, chosen)
    assert (trajectory.reward, trajectory.status) == (0.5, TrajectoryStatus.TIMED_OUT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"function": "my_agents:raises"}, "raises raised KeyError"),
        ({"function": "my_agents:asks_nothing"}, "has sampled nothing"),
        ({"function": "my_agents:ask_twice", "reward": "my_agents:broken"}, "broken raised ZeroDivisionError"),
    ],
)
def test_what_a_users_code_does_wrong_masks_the_episode(code: Path, changes: dict[str, Any], words: str) -> None:
    (trajectory,) = play(code, settings(code, **changes, max_retries=0))
    assert (trajectory.reward, trajectory.status) == (None, TrajectoryStatus.FAILED_ENVIRONMENT)
    assert words in trajectory.detail


@pytest.mark.slow
def test_an_engine_failure_is_retried_and_never_a_reward(code: Path) -> None:
    lost = EngineError("all engines are gone")
    chosen = settings(code, function="my_agents:ask_twice", reward="my_agents:returned", max_retries=1)
    (again,) = play(code, chosen, replies=["a", lost, "b", "c"])
    assert (again.reward, again.extras["retries"], again.extras["discarded_tokens"]) == (5.0, 1, 2)
    (masked,) = play(code, chosen, replies=["a", lost, "b", lost])
    assert (masked.reward, masked.status) == (None, TrajectoryStatus.FAILED_ENGINE)
    assert "all engines are gone" in masked.detail


@pytest.mark.slow
def test_no_more_agents_run_at_once_than_may(code: Path) -> None:
    most: list[int] = []

    async def look(environment: AgentEnvironment, sampler: Scripted) -> None:
        while True:
            await sampler.begun.wait()
            most.append(environment._running.borrowed_tokens)
            await trio.sleep(0.001)

    chosen = settings(code, function="my_agents:ask_twice", reward="my_agents:returned", max_running=2)
    assert len(play(code, chosen, group_size=6, seen=look)) == 6
    assert max(most) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": ""}, "either command or function"),
        ({"command": "x", "function": "my_agents:raises"}, "either command or function"),
        ({"reward": "my_agents:nothing"}, "no function 'nothing'"),
        ({"function": "nothing"}, "function must be"),
        ({"max_running": 0}, "max_running must be >= 1"),
        ({"episode_timeout_s": float("inf")}, "episode_timeout_s must be"),
        ({"held_out_percent": 101}, "held_out_percent must be"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(code: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(code, **changes)


def test_without_a_gateway_nothing_is_played(code: Path) -> None:
    async def main() -> None:
        renderer = gateway_rig.make_renderer(code)
        environment = AgentEnvironment(settings(code), renderer=renderer, sandboxes=NoSandboxes())
        task = Task(task_id="one", environment="agent")
        await environment.collect_trajectories(task, Scripted(renderer), group_id="0", group_size=1)

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main)
    assert caught.group_contains(EnvironmentFault, match="needs a gateway")
