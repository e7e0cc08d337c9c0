"""The gateway before a real vLLM server: what is recorded is what was sampled, under the weights that sampled it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import trio
from engine_rig import SETTINGS, Rig, assert_labels_tell_the_truth, run, wait_sampled
from engine_server import Server, running_server

from asyncrl.engines import SamplingSettings, VLLMEngine
from asyncrl.gateway import Gateway, GatewaySettings, cache_use_of
from asyncrl.serving import listen
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task, TokenIds

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TASK = Task(task_id="t", environment="e")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("gateway"), SETTINGS) as server:
        yield server


def test_a_conversation_across_a_weight_sync_is_recorded_token_for_token(server: Server) -> None:
    """By OpenAI's client, in a thread as its own program would be; the second turn is sampled under two versions."""

    async def body(rig: Rig) -> None:
        renderer = ChatRenderer.load(server.model_directory)
        uses = cache_use_of(rig.pool, limit=0.99)
        gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=1024, cache_use=uses)
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
            async with gateway.session(rig.pool, task=TASK, trajectory_id="7-0") as session:
                seen: list[Any] = []

                def agent() -> None:
                    with openai.OpenAI(base_url=session.base_url, api_key=session.token, max_retries=0) as client:
                        messages: list[Any] = [{"role": "user", "content": "Say something."}]
                        for length in (20, 800):
                            more = {"return_token_ids": True}
                            reply = client.chat.completions.with_raw_response.create(
                                model="x", messages=messages, max_tokens=length, logprobs=True, extra_body=more
                            )
                            seen.append((reply.headers["asyncrl-version"], reply.parse()))
                            message = seen[-1][1].choices[0].message
                            messages += [{"role": "assistant", "content": message.content}]
                            messages += [{"role": "user", "content": "More."}]

                manifest = rig.publish(2)
                async with trio.open_nursery() as beside:
                    beside.start_soon(trio.to_thread.run_sync, agent)
                    await wait_sampled(rig.engine, 37)
                    await rig.engine.pull(manifest)
                trajectory = session.close(reward=1.0)
            nursery.cancel_scope.cancel()

        assert [version for version, _ in seen] == ["1", "1,2"]
        (segment,) = trajectory.segments
        prompt = TokenIds()
        for turn, (_, reply) in zip(session.record.turns, seen, strict=True):
            prompt = TokenIds(prompt + turn.context_token_ids)
            assert reply.prompt_token_ids == list(prompt)
            assert reply.choices[0].token_ids == list(turn.completion.token_ids)
            shown = [entry.logprob for entry in reply.choices[0].logprobs.content]
            assert shown == pytest.approx(list(turn.completion.behaviour_logprobs))
            assert_labels_tell_the_truth(rig, prompt, turn.completion)
            prompt = TokenIds(prompt + turn.completion.token_ids)
        assert segment.token_ids == prompt
        assert sum(segment.loss_mask) == 820

    run(server, body)


def test_a_stream_across_a_weight_sync_comes_as_it_is_sampled_and_ends_where_the_agent_leaves(server: Server) -> None:
    async def body(rig: Rig) -> None:
        renderer = ChatRenderer.load(server.model_directory)
        gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=1024)
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
            async with gateway.session(rig.pool, task=TASK, trajectory_id="7-0") as session:
                seen: list[int] = []
                turns_then: list[int] = []

                def agent() -> None:
                    with openai.OpenAI(base_url=session.base_url, api_key=session.token, max_retries=0) as client:
                        messages: list[Any] = [{"role": "user", "content": "Say something."}]
                        events = client.chat.completions.create(
                            model="x", messages=messages, stream=True, extra_body={"return_token_ids": True}
                        )
                        with events:
                            for event in events:
                                seen.extend(getattr(event.choices[0], "token_ids", None) or ())
                                if len(seen) > 300:
                                    break
                        turns_then.append(session.record.num_turns)

                manifest = rig.publish(2)
                async with trio.open_nursery() as beside:
                    beside.start_soon(trio.to_thread.run_sync, agent)
                    await wait_sampled(rig.engine, 37)
                    await rig.engine.pull(manifest)
                while session.num_running:  # noqa: ASYNC110 - only a test waits for this
                    await trio.sleep(0.01)
                trajectory = session.close(reward=1.0)
            nursery.cancel_scope.cancel()

        assert turns_then == [0], "all of it came before the completion was whole"
        (turn,) = session.record.turns
        assert list(turn.completion.token_ids[: len(seen)]) == seen
        assert len(turn.completion.token_ids) < 900, "the engine samples for nobody"
        assert [span.version for span in turn.completion.spans][-1] == 2
        assert trajectory.extras == {"streams_left": 1}
        assert_labels_tell_the_truth(rig, turn.context_token_ids, turn.completion)
        assert rig.engine.statistics().running == 0

    run(server, body)


def test_the_engine_says_how_full_its_cache_is(server: Server) -> None:
    async def body(rig: Rig) -> None:
        uses = await cache_use_of(rig.pool, limit=0.5)._look()
        assert len(uses) == 1
        assert 0.0 <= uses[0] <= 1.0

    run(server, body)


def test_a_second_client_of_the_server_may_be_added_and_removed(server: Server) -> None:
    """Engines that run elsewhere come and go by their URL."""

    async def body(rig: Rig) -> None:
        again = VLLMEngine(
            "engine 1", server.url, SETTINGS, SamplingSettings(), end_token_ids=(), run_id=rig.run_id, version=1
        )
        async with again:
            await rig.pool.add(again)
            assert [engine.name for engine in rig.pool.statistics().engines] == ["engine-0", "engine 1"]
            rig.pool.remove("engine-0")
            completion = await rig.pool.sample(TokenIds([1, 2]), max_tokens=4, trajectory_id="t")
            assert completion.engine == "engine 1"

    run(server, body)
