"""One agent's side of an episode: literal tokens, limits, and what stands for it when infrastructure fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
from scripted import ScriptedSampler, write_chat_files

from asyncrl.boundary import boundary
from asyncrl.conversation import Conversation
from asyncrl.errors import EngineError, EnvironmentFault
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, TrajectoryStatus

T = TypeVar("T")
TASK = Task(task_id="t", environment="talk")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(write_chat_files(tmp_path_factory.mktemp("model")))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def talk(
    renderer: ChatRenderer,
    body: Callable[[Conversation], Awaitable[T]],
    *,
    says: str = "yes",
    fails: bool = False,
    max_tokens: int = 16,
    max_episode_tokens: int | None = None,
) -> T:
    async def main() -> T:
        sampler = ScriptedSampler(renderer, lambda *_: EngineError("gone") if fails else says)
        return await body(
            Conversation(
                renderer,
                sampler,
                task=TASK,
                trajectory_id="0-0",
                max_tokens=max_tokens,
                max_episode_tokens=max_episode_tokens,
            )
        )

    return trio.run(main)


def test_turns_follow_each_other_as_the_template_writes_them_and_only_replies_are_trained_on(
    renderer: ChatRenderer,
) -> None:
    async def body(side: Conversation) -> Conversation:
        assert await side.ask(user("a?")) == "yes"
        assert await side.ask(user("b?"), reply_prefix="oh ") == "oh yes"
        return side

    side = talk(renderer, body)
    trajectory = side.trajectory(reward=0.5, agent="one", reward_parts={"part": 0.5})
    (segment,) = trajectory.segments
    assert segment.token_ids == side.token_ids
    text = renderer.decode(segment.token_ids, keep_special=True)
    assert text == "<|user|>a?</s>\n<|assistant|>yes</s>\n<|user|>b?</s>\n<|assistant|>oh yes</s>"
    assert sum(segment.loss_mask) == 2 * (len("yes") + 1)
    assert (trajectory.reward, trajectory.agent, trajectory.num_turns) == (0.5, "one", 2)
    assert trajectory.status is TrajectoryStatus.COMPLETED


def test_a_reply_that_was_cut_says_so_and_what_has_no_room_is_not_asked(renderer: ChatRenderer) -> None:
    async def body(side: Conversation) -> Conversation:
        assert await side.ask(user("a?")) == "ye"
        assert await side.ask(user("b?" * 20)) is None
        return side

    trajectory = talk(renderer, body, max_tokens=2, max_episode_tokens=40).trajectory(reward=0.0)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_LENGTH
    assert trajectory.truncated
    assert trajectory.num_turns == 1

    async def too_long(side: Conversation) -> None:
        with pytest.raises(EnvironmentFault, match="leaves no room below 8"):
            await side.ask(user("a?" * 20))

    talk(renderer, too_long, max_episode_tokens=8)


def test_what_infrastructure_ended_has_no_reward(renderer: ChatRenderer) -> None:
    async def body(side: Conversation) -> None:
        async with boundary() as caught:
            await side.ask(user("a?"))
        assert caught.status is not None
        failed = side.failure(caught.status, caught.detail, agent="one")
        assert (failed.reward, failed.status) == (None, TrajectoryStatus.FAILED_ENGINE)
        assert "gone" in failed.detail

    talk(renderer, body, fails=True)
