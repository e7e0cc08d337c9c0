"""Agents of OpenRLHF's form and functions of slime's: as the page shows them, and where they fail."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from scripted import END, NoSandboxes, Reply, ScriptedSampler, write_chat_files
from tree import ROOT

from asyncrl.collecting import GroupCollector
from asyncrl.dynamic_sampling import FILTERED, is_filtered
from asyncrl.environments.loading import EnvironmentSettings, load_environment
from asyncrl.errors import ConfigError, EngineError
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Group, Task, Trajectory, TrajectoryStatus

PAGE = (ROOT / "asyncrl" / "environments" / "ENVIRONMENTS.md").read_text(encoding="ascii")
ROWS = [{"id": "sum", "prompt": "What is 2 + 2?", "answer": "4"}]
Script = Callable[[str, int], Reply]


def block(language: str, sign: str) -> str:
    """Return the page's block of a language that holds a text."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (one,) = [text for text in found if sign in text]
    return one


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The page's two modules, importable, and its file of questions where it looks for it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = {}
    for name in ("my_openrlhf", "my_slime"):
        (tmp_path / f"{name}.py").write_text(block("python", f"# {name}.py"))
        monkeypatch.delitem(sys.modules, name, raising=False)
        found[name] = importlib.import_module(name)
    return found


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


def settings(name: str, **changes: Any) -> EnvironmentSettings:
    """Return the page's settings of an adapter, and changes."""
    table = tomllib.loads(block("toml", f'name = "{name}"'))["environment"]
    return EnvironmentSettings(name=name, options={**table["options"], "held_out_percent": 0, **changes})


def play(renderer: ChatRenderer, script: Script, name: str, **changes: Any) -> Sequence[Trajectory]:
    """Return a group of two, collected as a run does."""
    environment = load_environment(settings(name, **changes), renderer=renderer, sandboxes=NoSandboxes(), seed=0)  # type: ignore[arg-type]

    async def main() -> Sequence[Trajectory]:
        sampler = ScriptedSampler(renderer, script)
        collector = GroupCollector(environment)
        with trio.fail_after(30):
            return await collector.collect(environment.get_item(), sampler, group_id="0", group_size=2)

    return trio.run(main)


def sampled(trajectory: Trajectory) -> list[int]:
    """Return the tokens that are trained on."""
    (segment,) = trajectory.segments
    return [token_id for token_id, one in zip(segment.token_ids, segment.loss_mask, strict=True) if one]


# --- OpenRLHF -------------------------------------------------------------------------------------------------


def test_an_agent_of_openrlhf_is_played_turn_by_turn(modules: dict[str, ModuleType], renderer: ChatRenderer) -> None:
    def script(trajectory_id: str, number: int) -> str:
        return "It is 4." if trajectory_id == "0-0" or number else "5"

    right, second = play(renderer, script, "openrlhf")
    assert (right.reward, right.num_turns, right.reward_parts) == (1.0, 1, {"scores": 1.0})
    assert (second.reward, second.num_turns) == (0.5, 2)
    assert [turn.reward for turn in second.segments[0].turns] == [0.0, 0.5]
    assert sampled(second) == [*renderer.encode("5"), END, *renderer.encode("It is 4."), END]
    text = renderer.decode(second.segments[0].token_ids, keep_special=True)
    assert text == "<|user|>What is 2 + 2?</s>\n<|assistant|>5</s>\nThat is wrong. Once more: It is 4.</s>"


def test_an_agent_of_openrlhf_reads_plain_text_where_told(
    modules: dict[str, ModuleType], renderer: ChatRenderer
) -> None:
    found = play(renderer, lambda trajectory_id, number: "4", "openrlhf", apply_chat_template=False)
    assert renderer.decode(found[0].segments[0].token_ids) == "What is 2 + 2?4"


def test_limits_of_an_agent_of_openrlhf_are_told_by_its_status(
    modules: dict[str, ModuleType], renderer: ChatRenderer
) -> None:
    def wrong(trajectory_id: str, number: int) -> str:
        return "5"

    assert [t.status for t in play(renderer, wrong, "openrlhf", max_turns=1)] == [TrajectoryStatus.TRUNCATED_TURNS] * 2
    found = play(renderer, wrong, "openrlhf", max_episode_tokens=40)
    assert [(t.status, t.num_turns) for t in found] == [(TrajectoryStatus.TRUNCATED_LENGTH, 1)] * 2
    found = play(renderer, lambda trajectory_id, number: "4" * 40, "openrlhf")
    assert [(t.status, t.truncated) for t in found] == [(TrajectoryStatus.TRUNCATED_LENGTH, True)] * 2
    found = play(renderer, wrong, "openrlhf", max_episode_tokens=5)
    assert "leaves no room" in found[0].detail


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"rewards": "good", "done": True}, "step returned 'good' for 'rewards'"),
        ({"rewards": float("nan"), "done": True}, "must be finite"),
        ({"rewards": [0.5, 0.5], "done": True}, "no number"),
        ({"rewards": 0.0, "done": False}, "the text 'environment_feedback'"),
        (None, "step must return a mapping"),
    ],
)
def test_what_an_agent_of_openrlhf_returns_wrongly_masks_its_episode(
    modules: dict[str, ModuleType], renderer: ChatRenderer, said: Any, complaint: str
) -> None:
    async def step(self: Any, states: Any) -> Any:
        return said

    modules["my_openrlhf"].AgentInstance.step = step  # type: ignore[attr-defined]
    for trajectory in play(renderer, lambda trajectory_id, number: "4", "openrlhf"):
        assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.FAILED_ENVIRONMENT, None)
        assert complaint in trajectory.detail


# --- slime ----------------------------------------------------------------------------------------------------


def test_functions_of_slime_lead_an_episode(modules: dict[str, ModuleType], renderer: ChatRenderer) -> None:
    def script(trajectory_id: str, number: int) -> str:
        return "It is 4." if trajectory_id == "0-0" else "5" * 40

    right, cut = play(renderer, script, "slime")
    assert (right.reward, right.status) == (1.0, TrajectoryStatus.COMPLETED)
    assert sampled(right) == [*renderer.encode("It is 4."), END]
    assert (cut.reward, cut.status, len(sampled(cut))) == (0.0, TrajectoryStatus.TRUNCATED_LENGTH, 32)
    assert not is_filtered(Group(group_id=0, task=Task(task_id="a", environment="slime"), trajectories=(right, cut)))


def test_a_group_that_a_filter_does_not_keep_says_why(modules: dict[str, ModuleType], renderer: ChatRenderer) -> None:
    found = play(renderer, lambda trajectory_id, number: "4", "slime")
    assert [t.extras for t in found] == [{FILTERED: "all rewards are equal"}] * 2
    assert is_filtered(Group(group_id=0, task=Task(task_id="a", environment="slime"), trajectories=tuple(found)))
    assert [t.extras for t in play(renderer, lambda trajectory_id, number: "4", "slime", filter="")] == [{}, {}]


def test_what_was_put_between_what_was_sampled_is_context(
    modules: dict[str, ModuleType], renderer: ChatRenderer
) -> None:
    async def generate(args: Any, sample: Any, parameters: Any) -> Any:
        prompt = list(renderer.encode(sample.prompt))
        for word in (" then: ", ""):
            output = await args.generate({"text": renderer.decode(prompt), "sampling_params": parameters})
            prompt += output["output_ids"][:-1]  # without the end token, which would end the whole
            prompt += renderer.encode(word)
        sample.tokens, sample.response_length = prompt, len(prompt) - len(renderer.encode(sample.prompt))
        return sample

    modules["my_slime"].generate = generate  # type: ignore[attr-defined]
    found = play(renderer, lambda trajectory_id, number: "45"[number], "slime", filter="", reward="my_slime:reward")
    assert [sampled(t) for t in found] == [[*b"45"]] * 2
    assert [t.extras for t in found] == [{"unsampled_tokens": len(" then: ")}] * 2


@pytest.mark.parametrize(
    ("change", "complaint", "status"),
    [
        ({"status": "aborted"}, "aborted", TrajectoryStatus.FAILED_ENGINE),
        ({"status": "failed"}, "the sample failed", TrajectoryStatus.FAILED_ENVIRONMENT),
        ({"response_length": 99}, "response_length must be from 1 to", TrajectoryStatus.FAILED_ENVIRONMENT),
        ({"loss_mask": [1]}, "loss_mask has 1 entries", TrajectoryStatus.FAILED_ENVIRONMENT),
        ({"tokens": [5, 6, 7], "response_length": 2}, "nothing was sampled here", TrajectoryStatus.FAILED_ENVIRONMENT),
        ({"label": None}, "reward raised TypeError", TrajectoryStatus.FAILED_ENVIRONMENT),
    ],
)
def test_a_sample_that_cannot_be_used_is_masked_with_its_reason(
    modules: dict[str, ModuleType],
    renderer: ChatRenderer,
    change: dict[str, Any],
    complaint: str,
    status: TrajectoryStatus,
) -> None:
    ours = modules["my_slime"].generate

    async def generate(args: Any, sample: Any, parameters: Any) -> Any:
        sample = await ours(args, sample, parameters)
        for name, value in change.items():
            setattr(sample, name, value)
        return sample

    modules["my_slime"].generate = generate  # type: ignore[attr-defined]
    for trajectory in play(renderer, lambda trajectory_id, number: "4", "slime"):
        assert (trajectory.status, trajectory.reward) == (status, None)
        assert complaint in trajectory.detail


@pytest.mark.parametrize("name", ["openrlhf", "slime"])
def test_an_engine_that_fails_is_asked_again_and_never_a_reward_of_0(
    modules: dict[str, ModuleType], renderer: ChatRenderer, name: str
) -> None:
    calls: list[str] = []

    def script(trajectory_id: str, number: int) -> Reply:
        calls.append(trajectory_id)
        return EngineError("gone") if trajectory_id == "0-1" or number == 0 else "4"

    saved, lost = play(renderer, script, name, max_retries=1)
    assert (saved.reward, lost.reward, lost.status) == (1.0, None, TrajectoryStatus.FAILED_ENGINE)
    assert calls.count("0-1") == 2


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("openrlhf", {"agent": "my_openrlhf:Nobody"}, "has no function 'Nobody'"),
        ("openrlhf", {"max_turns": 0}, "max_turns must be >= 1"),
        ("openrlhf", {"input_key": "question"}, "question must be text or a list"),
        ("slime", {"generate": "my_slime"}, "generate must be"),
        ("slime", {"input_key": "question"}, "question is missing"),
        ("slime", {"episode_timeout_s": 0.0}, "episode_timeout_s must be > 0"),
        ("slime", {"held_out_percent": 100}, "leaves nothing of the 1 lines"),
    ],
)
def test_what_was_typed_wrong_is_named(
    modules: dict[str, ModuleType], renderer: ChatRenderer, name: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment(settings(name, **changes), renderer=renderer, sandboxes=NoSandboxes(), seed=0)  # type: ignore[arg-type]
