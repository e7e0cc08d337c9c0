"""The faces, as the official clients and what is known of others speak to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import gateway_rig
import httpx
import openai
import pytest
import trio
from gateway_rig import Rig, assistant, user

from asyncrl.gateway import ForeignSampling, GatewaySettings

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
CALL = 'Wait. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


async def with_openai(rig: Rig, work: Callable[[openai.OpenAI], Any]) -> Any:
    """Run work with OpenAI's client, which knows nothing but a URL and a key."""

    def run() -> Any:
        with openai.OpenAI(base_url=rig.session.base_url, api_key=rig.session.token, max_retries=0) as client:
            return work(client)

    return await trio.to_thread.run_sync(run)


async def with_anthropic(rig: Rig, work: Callable[[anthropic.Anthropic], Any]) -> Any:
    """Run work with Anthropic's client."""

    def run() -> Any:
        with anthropic.Anthropic(base_url=rig.session.url, api_key=rig.session.token, max_retries=0) as client:
            return work(client)

    return await trio.to_thread.run_sync(run)


def test_openai_chat(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        reply = await with_openai(
            rig,
            lambda client: client.chat.completions.create(
                model="any",
                messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
                temperature=1.0,
                max_completion_tokens=50,
                logprobs=True,
                top_logprobs=1,
                extra_body={"return_token_ids": True},
            ),
        )
        choice = reply.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("hello", "stop")
        ids = [*b"hello", 257]
        assert choice.token_ids == ids
        assert reply.prompt_token_ids == list(rig.sampler.asked[0])
        assert [entry.logprob for entry in choice.logprobs.content] == [-0.25 - i / 64 for i in range(6)]
        assert [entry.token for entry in choice.logprobs.content] == [*"hello", "</s>"]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(rig.sampler.asked[0]), 6)
        assert rig.sampler.asked_with[0]["max_tokens"] == 50

    gateway_rig.run(tmp_path, body, replies=["hello"])


def test_openai_chat_streamed(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        def work(client: openai.OpenAI) -> list[Any]:
            return list(
                client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    stream_options={"include_usage": True},
                    n=2,
                    extra_body={"return_token_ids": True},
                )
            )

        events = await with_openai(rig, work)
        for index in (0, 1):
            choices = [c for e in events for c in e.choices if c.index == index]
            text = "".join(c.delta.content or "" for c in choices)
            ids = [token for c in choices for token in getattr(c, "token_ids", None) or []]
            assert text in ("one", "two")
            assert rig.renderer.decode(ids) == text
            assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
        assert events[0].prompt_token_ids == list(rig.sampler.asked[0])
        assert events[-1].usage.completion_tokens == 8
        assert rig.session.record.num_turns == 2

    gateway_rig.run(tmp_path, body, replies=["one", "two"])


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools_go_in_and_calls_come_out(tmp_path: Path, stream: bool) -> None:
    async def body(rig: Rig) -> None:
        def work(client: openai.OpenAI) -> Any:
            messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            asked = {"model": "any", "messages": messages, "tools": [TOOL]}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    events.until_done()
                    first = events.get_final_completion()
            else:
                first = client.chat.completions.create(**asked)
            message = first.choices[0].message
            (call,) = message.tool_calls
            assert first.choices[0].finish_reason == "tool_calls"
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
            assert message.content == "Wait."
            sent = message.model_dump(exclude_none=True, exclude={"parsed"})
            for one in sent["tool_calls"]:
                one["function"].pop("parsed_arguments", None)
            messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            return client.chat.completions.create(**asked)

        second = await with_openai(rig, work)
        assert second.choices[0].message.content == "3."
        assert "adds" in rig.renderer.decode(rig.sampler.asked[0])
        (segment,) = rig.session.close(reward=1.0).segments
        assert rig.renderer.decode(segment.token_ids).endswith("tool: 3assistant: 3.")

    gateway_rig.run(tmp_path, body, replies=[CALL, "3."])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": }</tool_call>',
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        "<tool_call>" + "[" * 5000,
        f'{CALL} and <tool_call>{{"name": "add", "arg',
    ],
)
def test_a_tool_call_that_is_not_json_stays_text(tmp_path: Path, text: str) -> None:
    async def body(rig: Rig) -> None:
        reply = (await rig.chat(user("1 + 2?"), tools=[TOOL], max_tokens=6000 if len(text) < 4000 else 3000)).json()
        choice = reply["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert text.startswith(choice["message"]["content"])
        again = await rig.chat(user("1 + 2?"), choice["message"], user("what?"), tools=[TOOL])
        assert again.status_code == 200
        assert len(rig.session.close(reward=0.0).segments) == 1

    gateway_rig.run(tmp_path, body, replies=[text])


def test_a_call_in_the_history_whose_arguments_are_no_json_is_survived(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{not json"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reply = await rig.chat(user("hi"), message, {"role": "tool", "tool_call_id": "x", "content": "?"}, tools=[TOOL])
        assert reply.status_code == 200
        assert "{not json" in rig.renderer.decode(rig.sampler.asked[0])

    gateway_rig.run(tmp_path, body)


def test_tools_are_refused_where_the_template_cannot_show_them(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        refused = await rig.chat(user("hi"), tools=[TOOL])
        assert (refused.status_code, "tool_format" in refused.text) == (400, True)
        forced = await rig.chat(user("hi"), tools=[TOOL], tool_choice="required")
        assert forced.status_code == 400
        assert (await rig.chat(user("hi"), tools=[TOOL], tool_choice="none")).status_code == 200

    plain = "{% for m in messages %}<|user|>{{ m['content'] }}</s>{% endfor %}<|assistant|>"
    gateway_rig.run(tmp_path, body, template=plain)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_completions(tmp_path: Path, stream: bool) -> None:
    async def body(rig: Rig) -> None:
        def work(client: openai.OpenAI) -> list[Any]:
            found = client.completions.create(
                model="any",
                prompt="say",
                logprobs=1,
                stop="!",
                stream=stream,
                extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
            )
            return [choice for event in found for choice in event.choices] if stream else found.choices

        (choice,) = await with_openai(rig, work)
        assert (choice.text, choice.finish_reason) == ("hi", "stop")
        assert choice.token_ids == [*b"hi!"]
        assert choice.prompt_token_ids == [*b"say"]
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in b"hi!"]
        assert choice.logprobs.token_logprobs == [-0.25, -0.25 - 1 / 64, -0.25 - 2 / 64]

    gateway_rig.run(tmp_path, body, replies=["hi! and more"])


def test_several_prompts_are_answered_in_order(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        reply = (await rig.post("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2})).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert [list(ids) for ids in rig.sampler.asked] == [[1, 2], [1, 2], [3], [3]]
        assert len(rig.session.close(reward=1.0).segments) == 4

    gateway_rig.run(tmp_path, body)


def test_openai_models_and_version_header(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        (model,) = await with_openai(rig, lambda client: list(client.models.list()))
        assert (model.id, model.max_model_len) == ("policy", gateway_rig.MAX_MODEL_LEN)
        assert (await rig.chat(user("hi"))).headers["asyncrl-version"] == "3,4"
        assert (await rig.client.get(f"{rig.gateway.url}/health")).status_code == 200

    gateway_rig.run(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_with_tools(tmp_path: Path, stream: bool) -> None:
    async def body(rig: Rig) -> None:
        def work(client: anthropic.Anthropic) -> Any:
            messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            tool = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
            asked: dict[str, Any] = {"model": "any", "max_tokens": 200, "messages": messages, "tools": [tool]}
            asked["system"] = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]

            def ask() -> Any:
                if not stream:
                    return client.messages.create(**asked)
                with client.messages.stream(**asked) as events:
                    return events.get_final_message()

            first = ask()
            assert first.stop_reason == "tool_use"
            text, call = first.content
            assert (text.text, call.name, call.input) == ("Wait.", "add", {"a": 1, "b": 2})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
            content = [block.model_dump(exclude_none=True) for block in first.content]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
            return ask()

        second = await with_anthropic(rig, work)
        assert (second.content[0].text, second.stop_reason) == ("3.", "end_turn")
        assert second.usage.output_tokens == 3
        (segment,) = rig.session.close(reward=1.0).segments
        said = rig.renderer.decode(segment.token_ids)
        assert "system: be brief" in said
        assert said.endswith("tool: 3assistant: 3.")

    gateway_rig.run(tmp_path, body, replies=[CALL, "3."])


def test_anthropic_stop_sequences_and_errors(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        asked: dict[str, Any] = {"model": "any", "messages": [user("hi")]}
        reply = await with_anthropic(
            rig, lambda client: client.messages.create(**asked, max_tokens=99, stop_sequences=["END"])
        )
        assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "END", "a")
        refused = await rig.post("/v1/messages", asked)
        assert refused.status_code == 400
        assert refused.json()["error"] == {"type": "invalid_request_error", "message": "max_tokens must be given"}

        def too_hot(client: anthropic.Anthropic) -> None:
            client.messages.create(**asked, max_tokens=9, extra_body={"temperature": 0.5})

        with pytest.raises(anthropic.BadRequestError):
            await with_anthropic(rig, too_hot)

    gateway_rig.run(tmp_path, body, replies=["aEND"])


def test_generate_as_environments_of_atropos_ask_it(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        asked = {
            "prompt": {"prompt_token_ids": [50, 43, 50]},
            "logprobs": 0,
            "n": 2,
            "max_tokens": 16,
            "temperature": 1.0,
            "stop": ["</a>"],
        }
        reply = (await rig.post("/generate", asked)).json()
        assert reply["text"] == ["4", "4"]
        assert reply["prompt_token_ids"] == [50, 43, 50]
        assert reply["finish_reasons"] == ["stop", "stop"]
        assert reply["token_ids"][0] == [*b"4</a>"]
        assert [list(token[0]) for token in reply["logprobs"][0]] == [[str(token)] for token in b"4</a>"]
        assert reply["logprobs"][1][0][0] == {str(ord("4")): -0.25}
        scoring = await rig.post("/generate", {"prompt": "2", "prompt_logprobs": 1, "max_tokens": 1})
        assert scoring.status_code == 400

    gateway_rig.run(tmp_path, body, replies=["4</a>", "4</a>"])


def test_inference_generate_tells_the_versions(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        asked = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 0, "temperature": 1}}
        (choice,) = (await rig.post("/inference/v1/generate", asked)).json()["choices"]
        assert choice["token_ids"] == [*b"abc"]
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 3},
        ]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.25, -0.25 - 1 / 64, -0.25 - 2 / 64]

    gateway_rig.run(tmp_path, body, replies=["abcdef"])


def test_tokenize_and_back(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        found = (await rig.post("/tokenize", {"prompt": "abc"})).json()
        assert (found["tokens"], found["count"]) == ([*b"abc"], 3)
        assert found["max_model_len"] == gateway_rig.MAX_MODEL_LEN
        chat = (await rig.post("/tokenize", {"messages": [user("hi")]})).json()
        assert chat["tokens"] == list(rig.renderer.start([user("hi")]))
        assert (await rig.post("/detokenize", {"tokens": [*b"abc"]})).json() == {"prompt": "abc"}

    gateway_rig.run(tmp_path, body)


FOREIGN: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"frequency_penalty": 0.5},
    {"logit_bias": {"5": 1}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"a_word_nobody_knows": 1},
]


@pytest.mark.parametrize("parameter", FOREIGN, ids=lambda parameter: next(iter(parameter)))
def test_what_cannot_be_trained_on_is_refused_or_ignored_and_said(tmp_path: Path, parameter: dict[str, Any]) -> None:
    (name,) = parameter

    async def refusing(rig: Rig) -> None:
        refused = await rig.chat(user("hi"), **parameter)
        assert refused.status_code == 400
        assert name in refused.json()["error"]["message"]
        assert rig.sampler.asked == []

    async def ignoring(rig: Rig) -> None:
        reply = await rig.chat(user("hi"), **parameter)
        assert (reply.status_code, reply.headers["asyncrl-ignored"]) == (200, name)
        assert rig.session.close(reward=1.0).extras["ignored_parameters"] == {name: 1}

    gateway_rig.run(tmp_path, refusing)
    gateway_rig.run(tmp_path, ignoring, settings=GatewaySettings(foreign_sampling=ForeignSampling.IGNORE))


def test_what_changes_nothing_is_accepted(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        neutral = {"temperature": 1, "top_p": 1.0, "top_k": -1, "seed": 3, "user": "me", "presence_penalty": 0}
        reply = await rig.chat(user("hi"), **neutral, logit_bias={}, response_format={"type": "text"}, stop=None)
        assert reply.status_code == 200
        assert "asyncrl-ignored" not in reply.headers

    gateway_rig.run(tmp_path, body)


def test_an_overflow_is_said_as_openai_and_vllm_say_it(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        def work(client: openai.OpenAI) -> None:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 5000}])

        with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
            await with_openai(rig, work)
        nearly = await rig.post("/v1/completions", {"prompt": [1] * 4090, "max_tokens": 100})
        assert nearly.status_code == 200
        assert rig.sampler.asked_with[0]["max_tokens"] == 6

    gateway_rig.run(tmp_path, body)


def test_a_long_text_is_tokenised_beside_the_loop_and_alike(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        text = "word " * 10_000
        found = (await rig.post("/tokenize", {"prompt": text})).json()["tokens"]
        assert found == list(text.encode())

    gateway_rig.run(tmp_path, body)


def test_assistant_messages_that_were_never_sampled_are_context(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        await rig.chat(user("example"), assistant("shown, not sampled"), user("now you"))
        (segment,) = rig.session.close(reward=1.0).segments
        assert sum(segment.loss_mask) == len("reply 1") + 1

    gateway_rig.run(tmp_path, body)


def test_an_unknown_path_and_a_wrong_verb_are_said(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        assert (await rig.client.get(f"{rig.gateway.url}/nothing")).status_code == 404
        wrong: httpx.Response = await rig.client.get(f"{rig.session.url}/v1/chat/completions")
        assert (wrong.status_code, "POST" in wrong.text) == (405, True)

    gateway_rig.run(tmp_path, body)
