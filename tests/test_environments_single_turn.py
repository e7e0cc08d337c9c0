"""Prompts from a file and a reward function: what is asked, what is paid, what is refused, what is masked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from scripted import NoSandboxes, ScriptedSampler, write_chat_files

from asyncrl.environments.single_turn import SingleTurnEnvironment, SingleTurnSettings
from asyncrl.errors import ConfigError
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Trajectory, TrajectoryStatus

REWARDS = """
import time


def length(reply, row):
    return {"reward": len(reply) == row["letters"], "letters": len(reply)}


async def loved(reply, row):
    return "love" in reply


def broken(reply, row):
    return 1 / 0


def silent(reply, row):
    return {"letters": 1}


def endless(reply, row):
    time.sleep(3)
    return 1.0


def infinite(reply, row):
    return float("inf")


def wordy(reply, row):
    return "good"
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def play(
    renderer: ChatRenderer, path: Path, reward: str, *, says: str = "hello", **options: Any
) -> Sequence[Trajectory]:
    """Return a group of two of the file's first task."""
    settings = SingleTurnSettings(path=path, reward=reward, **{"held_out_percent": 0, **options})
    environment = SingleTurnEnvironment(settings, renderer=renderer, sandboxes=NoSandboxes())

    async def main() -> Sequence[Trajectory]:
        sampler = ScriptedSampler(renderer, lambda trajectory_id, number: says)
        task = environment.all_tasks()[0]
        return await environment.collect_trajectories(task, sampler, group_id="0", group_size=2)

    return trio.run(main)


def test_a_reply_is_paid_what_the_function_says_with_its_parts(
    renderer: ChatRenderer, rewards: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "Say hello.", "letters": 5})
    first, second = play(renderer, path, f"{rewards}:length")
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert first.reward_parts == {"letters": 5.0}
    assert first.status is TrajectoryStatus.COMPLETED
    (prefixed, _) = play(renderer, path, f"{rewards}:length", says="lo", reply_prefix="hel")
    assert prefixed.reward == 1.0
    assert sum(prefixed.segments[0].loss_mask) == 3, "the prefix is not trained on; the end token is"


def test_messages_are_asked_as_they_stand_and_the_function_may_be_async(
    renderer: ChatRenderer, rewards: str, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Speak."}]
    path = write(tmp_path / "rows.jsonl", {"id": "kind", "messages": messages})
    (first, _) = play(renderer, path, f"{rewards}:loved", says="I love it", system="unused")
    assert (first.reward, first.task_id) == (1.0, "kind")
    text = renderer.decode(first.segments[0].token_ids, keep_special=True)
    assert text.startswith("<|system|>Be kind.</s>")
    assert "unused" not in text


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("broken", "broken raised ZeroDivisionError: division by zero"),
        ("silent", "returned no 'reward' among ['letters']"),
        ("infinite", "returned inf for 'reward', which must be finite"),
        ("wordy", "returned 'good' for 'reward', no number"),
        ("endless", "grading took longer than 0.05 s"),
    ],
)
def test_a_function_that_fails_masks_the_episode_and_is_no_reward_of_0(
    renderer: ChatRenderer, rewards: str, tmp_path: Path, function: str, words: str
) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "Say hello."})
    for trajectory in play(renderer, path, f"{rewards}:{function}", max_retries=0, grading_timeout_s=0.05):
        assert trajectory.reward is None
        assert trajectory.status is TrajectoryStatus.FAILED_ENVIRONMENT
        assert words in trajectory.detail


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"question": "?"}], {}, "line 1: prompt must be text, or messages a list"),
        ([{"prompt": "a"}, {"messages": []}], {}, "line 2: messages must be a list of"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], {}, "line 2: 1 was there before"),
        ([], {}, "holds no tasks"),
        ([{"prompt": "a"}], {"held_out_percent": 100}, "leaves nothing of the 1 lines"),
        ([{"prompt": "a"}], {"held_out_percent": 101}, "held_out_percent must be from 0 to 100, got 101"),
        ([{"prompt": "a"}], {"max_turns": 2}, "max_turns must be 1 here, got 2"),
        ([{"prompt": "a"}], {"reward": "length"}, 'reward must be "package.module:function"'),
        ([{"prompt": "a"}], {"reward": "my_rewards:absent"}, "my_rewards has no function 'absent'"),
        ([{"prompt": "a"}], {"reward": "no_such_module:x"}, "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_line_or_setting(
    renderer: ChatRenderer, rewards: str, tmp_path: Path, rows: list[Any], options: dict[str, Any], words: str
) -> None:
    path = write(tmp_path / "rows.jsonl", *rows)
    reward = options.pop("reward", f"{rewards}:length")
    with pytest.raises(ConfigError) as refused:
        play(renderer, path, reward, **options)
    assert words in str(refused.value)


def test_the_split_goes_by_the_ids_alone(renderer: ChatRenderer, rewards: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "id": f"q{n}"} for n in range(100)]
    settings = {"reward": f"{rewards}:length", "held_out_percent": 20}

    def split(path: Path) -> tuple[set[str], set[str]]:
        environment = SingleTurnEnvironment(
            SingleTurnSettings(path=path, **settings), renderer=renderer, sandboxes=NoSandboxes()
        )
        held_out = {task.task_id for task in environment.held_out()}
        return held_out, {task.task_id for task in environment.training_tasks(0)}

    held_out, trained = split(write(tmp_path / "a.jsonl", *rows))
    assert split(write(tmp_path / "b.jsonl", *reversed(rows))) == (held_out, trained)
    assert 10 < len(held_out) < 30
    assert not held_out & trained
