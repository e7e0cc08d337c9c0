"""Sessions: what is recorded, by whom it may be asked for, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import gateway_rig
import pytest
import trio
from gateway_rig import Rig, assistant, user

from asyncrl.errors import EngineError
from asyncrl.gateway import GatewaySettings
from asyncrl.types import TokenIds, TrajectoryStatus


def test_a_chat_goes_on_from_the_sampled_ids(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        first = await rig.chat(user("one"), return_token_ids=True)
        answer = first.json()["choices"][0]
        second = await rig.chat(user("one"), answer["message"], user("two"), return_token_ids=True)
        seen = first.json()["prompt_token_ids"] + answer["token_ids"]
        assert second.json()["prompt_token_ids"][: len(seen)] == seen
        trajectory = rig.session.close(reward=1.0)
        (segment,) = trajectory.segments
        sampled = answer["token_ids"] + second.json()["choices"][0]["token_ids"]
        assert [t for t, trained in zip(segment.token_ids, segment.loss_mask, strict=True) if trained] == sampled
        assert [(s.end - s.start, s.version) for s in segment.spans] == [(3, 3), (3, 4), (4, 3), (5, 4)]
        assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.COMPLETED, 1.0)
        assert (trajectory.task_id, trajectory.trajectory_id, trajectory.num_turns) == ("add", "7-0", 2)

    gateway_rig.run(tmp_path, body, replies=["first", "a second"])


def test_a_reply_is_never_tokenised_again(tmp_path: Path) -> None:
    """A sampler whose ids are not those that its text would be encoded to: the record keeps the ids."""

    async def body(rig: Rig) -> None:
        reply = await rig.chat(user("one"))
        odd = rig.session.record.turns[0].completion.token_ids
        assert "</s>" not in reply.json()["choices"][0]["message"]["content"]
        await rig.chat(user("one"), reply.json()["choices"][0]["message"], user("two"))
        assert list(odd) == list(rig.sampler.asked[1][len(rig.sampler.asked[0]) :][: len(odd)])
        rendered = rig.renderer.start([user("one"), reply.json()["choices"][0]["message"], user("two")])
        assert rendered != rig.sampler.asked[1]

    # an end token in the middle: text that is shown leaves it out, and encoding the text would lose it
    gateway_rig.run(tmp_path, body, replies=["fi</s>rst"])


def test_a_rewritten_history_begins_a_segment(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        await rig.chat(user("one"))
        await rig.chat(user("one"), assistant("another reply"), user("two"))
        trajectory = rig.session.close(reward=0.5)
        assert len(trajectory.segments) == 2
        assert trajectory.num_sampled_tokens == sum(len(turn.completion.token_ids) for turn in rig.session.record.turns)
        assert trajectory.segments[1].token_ids[: len(rig.sampler.asked[1])] == rig.sampler.asked[1]

    gateway_rig.run(tmp_path, body)


def test_two_conversations_of_a_session_keep_a_segment_each(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        said = {"a": [user("a")], "b": [user("b")]}
        for name in ("a", "b", "a", "b"):
            reply = await rig.chat(*said[name])
            said[name] += [reply.json()["choices"][0]["message"], user("more")]
        assert len(rig.session.close(reward=0.0).segments) == 2

    gateway_rig.run(tmp_path, body)


def test_each_of_several_choices_is_trained_on_once_and_can_be_gone_on_from(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        reply = await rig.chat(user("one"), n=3)
        choices = reply.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        await rig.chat(user("one"), choices[1]["message"], user("two"))
        trajectory = rig.session.close(reward=1.0)
        texts = [rig.renderer.decode(segment.token_ids) for segment in trajectory.segments]
        shown = [choice["message"]["content"] for choice in choices]
        assert sorted(shown) == ["x1", "x2", "x3"]
        assert all(sum(reply in text for text in texts) == 1 for reply in [*shown, "x4"])
        assert any(shown[1] in text and "x4" in text for text in texts)
        assert len(texts) == 3
        assert trajectory.num_turns == 4

    gateway_rig.run(tmp_path, body, replies=["x1", "x2", "x3", "x4"])


def test_ids_that_extend_what_was_recorded_join_it(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        first = (await rig.post("/v1/completions", {"prompt": [1, 2, 3], "return_token_ids": True})).json()
        seen = [1, 2, 3, *first["choices"][0]["token_ids"]]
        await rig.post("/v1/completions", {"prompt": [*seen, 9]})
        await rig.post("/v1/completions", {"prompt": [1, 2, 4]})
        segments = rig.session.close(reward=1.0).segments
        assert len(segments) == 2
        assert list(segments[0].token_ids[: len(seen) + 1]) == [*seen, 9]

    gateway_rig.run(tmp_path, body)


def test_sessions_cannot_see_each_other(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.gateway.session(rig.sampler, task=gateway_rig.TASK, trajectory_id="7-1") as other:
            theirs = await rig.client.post(f"{other.url}/v1/completions", json={"prompt": [1]})
            assert theirs.status_code == 401
            by_key = await rig.client.post(f"{rig.gateway.url}/v1/completions", json={"prompt": [1]})
            assert by_key.status_code == 200
            assert (rig.session.record.num_turns, other.record.num_turns) == (1, 0)
            headers = {"authorization": "Bearer nothing"}
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate", "/tokenize"):
                refused = await rig.client.post(f"{rig.gateway.url}{path}", json={}, headers=headers)
                assert refused.status_code == 401, path
            assert (await rig.client.get(f"{rig.gateway.url}/v1/models", headers=headers)).status_code == 401

    gateway_rig.run(tmp_path, body)


def test_a_session_that_does_not_exist_is_404_and_one_that_is_over_410(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        wrong = await rig.client.post(f"{rig.gateway.url}/sessions/0000/v1/completions", json={"prompt": [1]})
        assert wrong.status_code == 404
        assert wrong.json()["error"]["code"] == "no_session"
        rig.session.close(reward=1.0)
        late = await rig.post("/v1/completions", {"prompt": [1]})
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_over")

    gateway_rig.run(tmp_path, body)


@pytest.mark.slow
def test_requests_end_at_the_deadline_and_what_was_recorded_can_be_graded(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with rig.gateway.session(
            rig.sampler, task=gateway_rig.TASK, trajectory_id="7-1", deadline_s=0.3
        ) as session:
            headers = {"authorization": f"Bearer {session.token}"}
            url = f"{session.url}/v1/completions"
            assert (await rig.client.post(url, json={"prompt": [1]}, headers=headers)).status_code == 200
            rig.sampler.hold = trio.Event()
            late = await rig.client.post(url, json={"prompt": [1]}, headers=headers)
            assert late.status_code == 410
            assert "deadline of 0.3 s" in late.json()["error"]["message"]
            trajectory = session.close(reward=0.5, status=TrajectoryStatus.TIMED_OUT)
            assert (trajectory.reward, trajectory.num_turns) == (0.5, 1)

    gateway_rig.run(tmp_path, body)


@pytest.mark.parametrize("recovers", [False, True])
def test_an_engine_failure_is_no_reward_unless_the_agent_went_on(tmp_path: Path, recovers: bool) -> None:
    async def body(rig: Rig) -> None:
        assert (await rig.chat(user("one"))).status_code == 200
        failed = await rig.chat(user("two"))
        assert failed.status_code == 503
        assert failed.headers["retry-after"]
        if recovers:
            assert (await rig.chat(user("two"))).status_code == 200
        trajectory = rig.session.close(reward=0.0)
        assert trajectory.reward == (0.0 if recovers else None)
        assert trajectory.status.failed is not recovers
        assert recovers or "all engines are gone" in trajectory.detail

    gateway_rig.run(tmp_path, body, replies=["ok", EngineError("all engines are gone"), "ok"])


def test_a_session_that_sampled_nothing_earns_nothing(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        trajectory = rig.session.close(reward=0.0)
        assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.FAILED_ENVIRONMENT, None)

    gateway_rig.run(tmp_path, body)


def test_what_a_client_did_not_wait_for_is_not_recorded(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.hold = trio.Event()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.chat, user("one"))
                await rig.sampler.begun.wait()
                scope.cancel()
        while rig.session.num_running:  # noqa: ASYNC110 - until the server has seen the end of the connection
            await trio.sleep(0.01)
        rig.sampler.hold = None
        await rig.chat(user("one"))
        assert rig.session.record.num_turns == 1

    gateway_rig.run(tmp_path, body)


def test_a_truncated_last_reply_is_said(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        reply = await rig.chat(user("one"), max_tokens=2)
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        trajectory = rig.session.close(reward=1.0)
        assert (trajectory.status, trajectory.truncated) == (TrajectoryStatus.TRUNCATED_LENGTH, True)

    gateway_rig.run(tmp_path, body)


def test_too_many_requests_of_a_session_are_told_to_wait(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.hold = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.chat, user("one"))
            await rig.sampler.begun.wait()
            refused = await rig.chat(user("two"))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            rig.sampler.hold.set()

    gateway_rig.run(tmp_path, body, settings=GatewaySettings(max_session_requests=1))


def test_stop_strings_end_what_is_recorded_and_shown(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        reply = await rig.chat(user("one"), stop=["</a>", "END"], return_token_ids=True)
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
            "four",
            "stop",
            "</a>",
        )
        assert rig.renderer.decode(choice["token_ids"]) == "four</a>"
        (turn,) = rig.session.record.turns
        assert turn.completion.token_ids == TokenIds(choice["token_ids"])
        assert turn.completion.spans[-1].end == len(choice["token_ids"])
        second = await rig.chat(user("one"), choice["message"], user("two"), return_token_ids=True)
        assert second.json()["prompt_token_ids"][len(reply.json()["prompt_token_ids"]) :][: len("four</a>")] == list(
            b"four</a>"
        )

    gateway_rig.run(tmp_path, body, replies=["four</a> and more END"])
