"""Streams that are sent while their completion is sampled: shown piece by piece, recorded whole, and bounded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import gateway_rig
import pytest
import trio
import trio.testing
from gateway_rig import Rig, assistant, user

from asyncrl.gateway import GatewaySettings
from asyncrl.gateway.live import GrowingText
from asyncrl.gateway.settings import ToolFormat
from asyncrl.gateway.tool_calls import sure_of
from asyncrl.types import TokenIds, TrajectoryStatus

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PATHS = {
    "/v1/chat/completions": {"messages": [user("one")]},
    "/v1/completions": {"prompt": [1, 2]},
    "/v1/messages": {"messages": [user("one")], "max_tokens": 100},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"logprobs": 0}},
}


class Events:
    """The events of a stream, as they come."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> Any:
        """Return the next event's JSON; "" at the end."""
        async for line in self._lines:
            if line.startswith("data: {"):
                return json.loads(line.removeprefix("data: "))
        return ""

    async def rest(self) -> list[Any]:
        """Return all that come."""
        found = []
        while event := await self.next():
            found.append(event)
        return found


@asynccontextmanager
async def streamed(rig: Rig, path: str, **body: Any) -> AsyncIterator[Events]:
    """Yield the events of a request."""
    body = {**PATHS[path], **body, "stream": True}
    async with rig.client.stream("POST", f"{rig.session.url}{path}", json=body) as response:
        assert response.status_code == 200, await response.aread()
        yield Events(response.aiter_lines())


async def asking(rig: Rig, path: str, **body: Any) -> trio.SocketStream:
    """Return the connection of a client that has asked for a stream."""
    content = json.dumps({**PATHS[path], **body, "stream": True}).encode()
    head = f"POST /sessions/{rig.session.session_id}{path} HTTP/1.1\r\nhost: test\r\n"
    head += f"authorization: Bearer {rig.session.token}\r\ncontent-length: {len(content)}\r\n\r\n"
    host, port = rig.gateway.url.removeprefix("http://").split(":")
    stream = await trio.open_tcp_stream(host, int(port))
    await stream.send_all(head.encode() + content)
    return stream


def text_of(events: list[Any]) -> str:
    """Return what a chat's events say."""
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])


class Valve:
    """Lets a sampler go on so many times."""

    def __init__(self) -> None:
        self._may = trio.Semaphore(0)

    async def __call__(self, count: int) -> None:
        await self._may.acquire()

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self._may.release()


def mentions(event: Any, text: str) -> bool:
    return text in json.dumps(event)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_shows_what_is_sampled_before_more_is(tmp_path: Path, path: str) -> None:
    """Kills: a stream that begins when its completion is whole."""

    async def body(rig: Rig) -> None:
        valve = Valve()
        rig.sampler.step, rig.sampler.go_on = 3, valve
        async with streamed(rig, path) as events:
            sought = "abc" if path != "/inference/v1/generate" else "97, 98, 99"
            while not mentions(await events.next(), sought):
                pass
            assert rig.session.record.num_turns == 0, "the sampler waits for the valve"
            valve.open(9)
            rest = await events.rest()
        assert any(mentions(event, "stop") or mentions(event, "end_turn") for event in rest)
        (turn,) = rig.session.record.turns
        assert rig.renderer.decode(turn.completion.token_ids) == "abcdefgh"

    gateway_rig.run(tmp_path, body, replies=["abcdefgh"])


def test_pieces_add_up_to_what_is_recorded(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.step = 3
        async with streamed(rig, "/v1/chat/completions", logprobs=True, return_token_ids=True) as found:
            events = await found.rest()
        (turn,) = rig.session.record.turns
        choices = [event["choices"][0] for event in events]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        entries = [entry for choice in choices for entry in (choice.get("logprobs") or {"content": []})["content"]]
        assert ids == list(turn.completion.token_ids)
        assert [entry["logprob"] for entry in entries] == list(turn.completion.behaviour_logprobs)
        assert text_of(events) == "h\u00e4llo \u20ac you"
        assert choices[-1]["asyncrl_version"] == "3,4"
        assert len(events) > 5

    gateway_rig.run(tmp_path, body, replies=["h\u00e4llo \u20ac you"])


def test_what_was_streamed_can_be_gone_on_from(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.step = 2
        async with streamed(rig, "/v1/chat/completions") as found:
            told = text_of(await found.rest())
        await rig.chat(user("one"), assistant(told), user("two"))
        assert len(rig.session.close(reward=1.0).segments) == 1

    gateway_rig.run(tmp_path, body, replies=["first ", "second"])


def test_a_stop_string_ends_the_sampling_and_none_of_it_is_shown(tmp_path: Path) -> None:
    """Kills: text that is shown before it is known not to begin a stop string; an engine that samples on."""

    async def body(rig: Rig) -> None:
        rig.sampler.step = 3
        async with streamed(rig, "/v1/chat/completions", stop=["</end>"]) as found:
            events = await found.rest()
        assert text_of(events) == "so </e </en"
        assert events[-1]["choices"][0]["stop_reason"] == "</end>"
        (turn,) = rig.session.record.turns
        assert rig.renderer.decode(turn.completion.token_ids) == "so </e </en</end>"
        assert len(rig.sampler.asked) == 1

    gateway_rig.run(tmp_path, body, replies=["so </e </en</end> and very much more"])


def test_a_stop_string_ends_the_sampling_of_what_is_not_streamed_too(tmp_path: Path) -> None:
    """Kills: an engine that samples on to the limit for text that is cut off."""
    counts: list[int] = []

    async def body(rig: Rig) -> None:
        async def go_on(count: int) -> None:
            counts.append(count)

        rig.sampler.step, rig.sampler.go_on = 4, go_on
        reply = await rig.chat(user("one"), stop=["END"], n=2)
        assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["abcdef", "abcdef"]
        assert [rig.renderer.decode(turn.completion.token_ids) for turn in rig.session.record.turns] == [
            "abcdefEND"
        ] * 2

    gateway_rig.run(tmp_path, body, replies=["abcdefEND" + "x" * 100] * 2)
    assert max(counts) == 8


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_text_before_a_tool_call_is_shown_and_the_call_when_it_is_whole(tmp_path: Path, path: str) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.step = 4
        tools = [TOOL] if "chat" in path else [{"name": "add", "input_schema": {}}]
        async with streamed(rig, path, tools=tools) as found:
            events = await found.rest()
        assert not any(mentions(event, "tool_call>") for event in events)
        assert (
            sum(mentions(event, "input_json_delta" if "messages" in path else '"tool_calls": [') for event in events)
            == 1
        )
        if "chat" in path:
            assert text_of(events) == "I add. "
            calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]
            answered = {"role": "assistant", "content": "I add. ", "tool_calls": calls}
            await rig.chat(user("one"), answered, {"role": "tool", "content": "2", "tool_call_id": "x"}, tools=tools)
            assert len(rig.session.close(reward=1.0).segments) == 1

    # an end token in the middle: what is told leaves it out, so that only a reply that is known as it was told goes on
    gateway_rig.run(tmp_path, body, replies=[f"I </s>add. {CALL}", "done"])


def test_what_only_looked_like_a_tool_call_is_shown_in_the_end(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.step = 4
        async with streamed(rig, "/v1/chat/completions", tools=[TOOL]) as found:
            assert text_of(await found.rest()) == "see <tool_call>{no json"

    gateway_rig.run(tmp_path, body, replies=["see <tool_call>{no json"])


def test_several_choices_are_streamed_beside_each_other(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.step = 2
        async with streamed(rig, "/v1/chat/completions", n=3) as found:
            events = await found.rest()
        texts = ["", "", ""]
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
        assert sorted(texts) == ["aaaa1", "bbbb2", "cccc3"]
        assert rig.session.record.num_turns == 3

    gateway_rig.run(tmp_path, body, replies=["aaaa1", "bbbb2", "cccc3"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/inference/v1/generate"])
def test_who_leaves_a_stream_ends_its_completion_and_what_was_told_is_recorded(tmp_path: Path, path: str) -> None:
    """Kills: a completion that is sampled on for nobody; tokens that were told and are in no record."""

    async def body(rig: Rig) -> None:
        valve = Valve()
        rig.sampler.step, rig.sampler.go_on = 2, valve
        stream = await asking(rig, path)
        assert b"200" in await stream.receive_some()
        await stream.aclose()
        while rig.session.num_running:
            await trio.testing.wait_all_tasks_blocked()
            valve.open()
        (turn,) = rig.session.record.turns
        assert 2 <= len(turn.completion.token_ids) < 50
        trajectory = rig.session.close(reward=1.0)
        assert (trajectory.status, trajectory.extras) == (TrajectoryStatus.COMPLETED, {"streams_left": 1})
        assert rig.gateway.statistics().running == 0

    gateway_rig.run(tmp_path, body, replies=["x" * 1000])


@pytest.mark.slow
def test_a_client_that_stops_reading_a_stream_is_let_go_and_holds_nothing(tmp_path: Path) -> None:
    """Kills: a sender that waits for ever; an engine that waits for a client."""

    async def body(rig: Rig) -> None:
        rig.sampler.step = 8
        stalled = await asking(rig, "/v1/chat/completions", logprobs=True, n=16)
        while not rig.session.record.num_turns:
            await trio.testing.wait_all_tasks_blocked()
        assert rig.session.record.num_turns == 16, "sampled to their ends at the engine's pace"
        await trio.sleep(0.3)  # longer than the server waits for it
        taken = b""
        with suppress(trio.BrokenResourceError):
            while piece := await stalled.receive_some(2**20):
                taken += piece
        assert b"data: " in taken
        assert b"[DONE]" not in taken
        assert rig.session.num_running == 0
        await stalled.aclose()

    settings = GatewaySettings(stalled_client_s=0.1)
    gateway_rig.run(tmp_path, body, settings=settings, replies=["x" * 3000] * 16)


def test_an_engine_that_fails_in_the_middle_of_a_stream_is_told_and_masks_the_session(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.step, rig.sampler.fails_at = 3, 6
        for path in ("/v1/chat/completions", "/v1/messages"):
            rig.sampler.replies = ["abcdefghijkl"]
            async with streamed(rig, path) as found:
                events = await found.rest()
            assert mentions(events[-1]["error"], "engine 0 died")
        assert rig.gateway.statistics().refused == {503: 2}
        assert rig.session.record.num_turns == 0
        assert rig.session.close(reward=1.0).status is TrajectoryStatus.FAILED_ENGINE

    gateway_rig.run(tmp_path, body)


def test_a_stream_that_fails_before_it_begins_has_a_status(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        reply = await rig.chat(user("one"), stream=True, max_tokens=0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
        rig.session.stop("it is over")
        assert (await rig.chat(user("one"), stream=True)).status_code == 410

    gateway_rig.run(tmp_path, body)


def test_a_session_that_is_closed_in_the_middle_of_a_stream_says_so(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        valve = Valve()
        await rig.chat(user("zero"))
        rig.sampler.step, rig.sampler.go_on = 2, valve
        async with streamed(rig, "/v1/chat/completions") as found:
            await found.next()
            trajectory = rig.session.close(reward=1.0)
            assert trajectory.extras == {"unanswered_requests": 1}
            assert mentions((await found.rest())[-1], "the session is over")

    gateway_rig.run(tmp_path, body, replies=["first", "x" * 100])


@pytest.mark.parametrize("text", ["plain words", "h\u00e4 \u20ac\U0001f600!", "a<b>c", "stop", "ST", ""])
def test_whatever_the_pieces_no_text_is_lost_or_comes_twice(tmp_path: Path, text: str) -> None:
    renderer = gateway_rig.make_renderer(tmp_path)
    ids = renderer.encode(text)
    for step in range(1, 6):
        growing, told = GrowingText(renderer, stops=("STOP",)), ""
        for count in range(step, len(ids) + 1, step):
            told += growing.take(TokenIds(ids[:count]))
            assert text.startswith(told)
        assert told + growing.finish(text) == text == growing.shown


@pytest.mark.parametrize(
    ("form", "text", "sure"),
    [
        (ToolFormat.HERMES, "so <b> <tool", 7),
        (ToolFormat.HERMES, "so <tool_call>{", 3),
        (ToolFormat.LLAMA_JSON, "", 0),
        (ToolFormat.LLAMA_JSON, "<|pyth", 0),
        (ToolFormat.LLAMA_JSON, ' {"name": 1}', 0),
        (ToolFormat.LLAMA_JSON, "well {", 6),
        (ToolFormat.NONE, "<tool_call>", 11),
    ],
)
def test_only_what_cannot_become_a_tool_call_is_sure(form: ToolFormat, text: str, sure: int) -> None:
    assert sure_of(text, form) == sure
