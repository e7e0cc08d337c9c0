"""Who watches a completion hears of every token that stays, of none that may not, and may end it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from engine_fleet import PROMPT, Fleet
from engine_fleet import run as run_fleet
from test_canary import _answer, _manifest, _run, _script, _Singing
from test_engine import GENERATE, event, stream_of

from asyncrl.engines import Draft, EngineSettings, SamplingSettings, VLLMEngine
from asyncrl.errors import EngineError, WeightMismatch
from asyncrl.protocols import Progress
from asyncrl.types import FinishReason, TokenIds


class Watcher:
    """Notes what it hears, and ends a completion that has so many tokens."""

    def __init__(self, until: int = 1000) -> None:
        self.heard: list[list[int]] = []
        self.last: Progress | None = None
        self._until = until

    def __call__(self, progress: Progress) -> bool:
        self.heard.append(list(progress.token_ids))
        self.last = progress
        return len(progress.token_ids) >= self._until


class Pieces:
    """A server that sends its events one after the other, each when it is told to."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._events = events
        self.may = trio.Semaphore(0)
        self.left = trio.Event()
        """Set when the client has closed its connection."""

    async def serve(self, stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, stream, nursery.cancel_scope)
            for each in self._events:
                await self.may.acquire()
                data = b"data: " + json.dumps(each).encode() + b"\n\n"
                await stream.send_all(b"%x\r\n%s\r\n" % (len(data), data))
            await stream.send_all(b"0\r\n\r\n")

    async def _watch(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        await stream.receive_some()
        self.left.set()
        scope.cancel()


def run(events: Sequence[dict[str, Any]], body: Callable[[VLLMEngine, Pieces], Awaitable[None]]) -> None:
    """Run a test body with a client of a server that sends these events."""

    async def main() -> None:
        server = Pieces(events)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                (listener,) = await nursery.start(partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1"))
                url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
                async with VLLMEngine(
                    "engine-0", url, EngineSettings(), SamplingSettings(), end_token_ids=()
                ) as engine:
                    await body(engine, server)
                nursery.cancel_scope.cancel()

    trio.run(main)


FIRST = event([7], [-0.5], None, [("0", 0, 1)])
SECOND = event([8, 9], [-0.25, -1.0], None, [("0", 0, 2), ("1", 2, 3)])
LAST = event([10], [-2.0], "stop", [("0", 0, 2), ("1", 2, 4)])


def draft_of(watcher: Watcher) -> Draft:
    return Draft(TokenIds([3]), max_tokens=9, trajectory_id="t", watch=watcher)


def test_each_event_is_heard_before_the_next_one_comes() -> None:
    watcher = Watcher()

    async def body(engine: VLLMEngine, server: Pieces) -> None:
        draft = draft_of(watcher)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, draft)
            for heard in ([7], [7, 8, 9]):
                server.may.release()
                while watcher.heard[-1:] != [heard]:
                    await trio.testing.wait_all_tasks_blocked()
                assert not draft.token_ids
            server.may.release()
        assert watcher.last is not None
        assert list(watcher.last.token_ids) == list(draft.token_ids)
        assert list(watcher.last.behaviour_logprobs) == list(draft.behaviour_logprobs)
        assert watcher.last.spans == tuple(draft.spans)

    run([FIRST, SECOND, LAST], body)


def test_who_has_heard_enough_ends_the_completion_and_frees_its_place() -> None:
    """Kills: a server that samples on for nobody; a completion that lacks what was heard."""

    async def body(engine: VLLMEngine, server: Pieces) -> None:
        draft = draft_of(Watcher(until=3))
        server.may.release()
        server.may.release()
        await engine.generate(draft)
        await server.left.wait()
        completion = draft.completion()
        assert list(completion.token_ids) == [7, 8, 9]
        assert completion.finish_reason is FinishReason.STOP
        assert [(span.start, span.end, span.version) for span in completion.spans] == [(0, 2, 0), (2, 3, 1)]
        statistics = engine.statistics()
        assert (statistics.completed, statistics.failed, statistics.running) == (1, 0, 0)

    run([FIRST, SECOND, LAST], body)


def test_what_was_heard_stays_when_what_follows_cannot_be_right() -> None:
    """Kills: tokens that an agent has seen, and that the next engine samples otherwise."""
    wrong = event([8], [0.5], None, [("0", 0, 2)])

    async def body(engine: VLLMEngine, server: Pieces) -> None:
        watcher = Watcher()
        draft = draft_of(watcher)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(EngineError, match=r"log-prob 0\.5 for token 1"):
                    await engine.generate(draft)

            nursery.start_soon(ask)
            server.may.release()
            while not watcher.heard:
                await trio.testing.wait_all_tasks_blocked()
            server.may.release()
        assert watcher.heard == [[7]]
        assert list(draft.token_ids) == [7]
        assert not draft.is_whole

    run([FIRST, wrong], body)


@pytest.mark.parametrize("sings", [True, False])
def test_what_the_canary_may_disown_is_not_heard_before_its_verdict(sings: bool) -> None:
    """Kills: an agent that has seen tokens of wrong weights, which are in no record."""
    whole = event([7, 8, 9], [-0.5, -0.25, -1.0], "stop", [("0", 0, 2), ("1", 2, 3)])
    script: _Singing = _script(**{GENERATE: (200, stream_of(whole))})
    script.canary = script.canary if sings else _answer(-5.0, -5.0)

    async def body(engine: VLLMEngine) -> None:
        watcher = Watcher()
        draft = draft_of(watcher)

        async def ask() -> None:
            try:
                await engine.generate(draft)
            except EngineError:
                assert not sings

        async def pull() -> None:
            try:
                await engine.pull(_manifest())
            except WeightMismatch:
                assert not sings

        async with trio.open_nursery() as nursery:
            script.hold_canary, script.hold_request = trio.Event(), trio.Event()
            nursery.start_soon(ask)
            while not script.asked:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(pull)
            while not script.heard:
                await trio.lowlevel.checkpoint()
            script.hold_request.set()
            while not watcher.heard:
                await trio.lowlevel.checkpoint()
            assert watcher.heard == [[7, 8]]
            script.hold_canary.set()
        assert list(draft.token_ids) == ([7, 8, 9] if sings else [7, 8])
        assert watcher.heard == [[7, 8]], "the last tokens come with the completion"

    _run(script, body)


def test_what_an_engine_sampled_before_it_died_is_heard_once_and_the_next_one_goes_on_behind_it() -> None:
    async def body(fleet: Fleet) -> None:
        watcher = Watcher(until=14)

        async def ask() -> None:
            completion = await fleet.pool.sample(PROMPT, max_tokens=20, trajectory_id="t-0", watch=watcher)
            fleet.completions["t-0"] = completion
            fleet.everything.append(completion)

        fleet.nursery.start_soon(ask)
        await trio.sleep(10.5)
        (home,) = (server for server in fleet.servers if server.served)
        home.kill()
        await fleet.wait_idle(1)
        completion = fleet.completions["t-0"]
        assert [len(heard) for heard in watcher.heard] == [1, 5, 9, 13, 17]
        assert watcher.heard[-1] == list(completion.token_ids)
        assert all(heard == watcher.heard[-1][: len(heard)] for heard in watcher.heard)
        assert completion.finish_reason is FinishReason.STOP
        assert len(completion.engine.split(", ")) == 2

    run_fleet(body)
