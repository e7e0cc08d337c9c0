"""The client against a scripted server: nothing that cannot be right is believed, nothing that arrived is lost.

Long because one script of a server, and the client that asks it, serve every test; other tests import both.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio

from asyncrl.engines import (
    Canary,
    Draft,
    EngineSettings,
    KVOnSync,
    RequestNotSent,
    RequestRefused,
    SamplingSettings,
    VLLMEngine,
    free_port,
)
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.types import Completion, FinishReason, TensorEntry, TokenIds, WeightManifest
from asyncrl.weight_sync import combined_digest

# --- a scripted server ----------------------------------------------------------------------------------------


def stream_of(*events: dict[str, Any]) -> bytes:
    """Return server-sent events as vLLM sends them."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def event(tokens: Sequence[int], logprobs: Sequence[float], reason: str | None, spans: Any = None) -> dict[str, Any]:
    """Return one event with one choice."""
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
    spans = spans if spans is None else [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
    choice = {
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": spans,
    }
    return {"choices": [choice]}


FIRST = event([7], [-0.5], None, [("0", 0, 1)])
GOOD = stream_of(FIRST, event([8, 9], [-0.25, 3e-5], "stop", [("0", 0, 2), ("1", 2, 3)]))


@dataclass
class Script:
    """What the server answers by path, and what it was asked."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    shown: set[bytes] = field(default_factory=set)
    """The keys that came with what was asked; b"" for none."""
    hold: trio.Event | None = None
    """Where set, generation waits for it after its headers."""
    dies: bool = False
    """True where the server's connection breaks after the answer, before the end of the response."""

    def answer(self, path: str) -> tuple[int, bytes]:
        return self.answers.get(path, (200, b"{}"))


async def _serve(script: Script, stream: trio.SocketStream) -> None:
    data = b""
    try:
        async for chunk in stream:
            data += chunk
            head, found, body = data.partition(b"\r\n\r\n")
            lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line]
            if found and len(body) >= sum(lengths):
                path = head.split()[1].decode()
                script.asked.append((path, json.loads(body) if body else {}))
                keys = [
                    line.partition(b": ")[2] for line in head.split(b"\r\n") if line[:14].lower() == b"authorization:"
                ]
                script.shown |= {*keys} or {b""}
                status, answer = script.answer(path.partition("?")[0])
                hold = script.hold  # now: what it is may go by the path
                length = f"Content-Length: {len(answer) + 1}\r\n" if script.dies else ""
                await stream.send_all(f"HTTP/1.1 {status} X\r\nConnection: close\r\n{length}\r\n".encode())
                if hold is not None and "generate" in path:
                    await hold.wait()
                await stream.send_all(answer)
                await stream.aclose()
                return
    except trio.BrokenResourceError:
        return  # the client gave up


@asynccontextmanager
async def scripted(
    script: Script, canary: Canary | None = None, token: str = "", **changes: Any
) -> AsyncIterator[VLLMEngine]:
    """Yield a client of a server that answers by the script."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, partial(_serve, script), 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        settings = EngineSettings(max_model_len=64, **{"max_num_seqs": 2, **changes})
        url, sampling = f"http://127.0.0.1:{port}", SamplingSettings()
        engine = VLLMEngine("engine-0", url, settings, sampling, end_token_ids=(2,), canary=canary, token=token)
        async with engine:
            yield engine
        nursery.cancel_scope.cancel()


def run(script: Script, body: Callable[[VLLMEngine], Any], **changes: Any) -> None:
    """Run a test body against the scripted server."""

    async def main() -> None:
        with trio.fail_after(20):
            async with scripted(script, **changes) as engine:
                await body(engine)

    trio.run(main)


GENERATE = "/inference/v1/generate"
PROMPT = TokenIds([3, 4])


def draft_of(max_tokens: int = 5, stop_token_ids: Sequence[int] = ()) -> Draft:
    """Return a request of the prompt."""
    return Draft(PROMPT, max_tokens=max_tokens, trajectory_id="t", stop_token_ids=stop_token_ids)


async def sample(engine: VLLMEngine, **options: Any) -> Completion:
    """Return what the engine makes of the prompt, without a pool."""
    draft = draft_of(**options)
    await engine.generate(draft)
    return draft.completion()


def test_a_completion_is_put_together_from_its_events() -> None:
    script = Script(answers={GENERATE: (200, GOOD)})

    async def body(engine: VLLMEngine) -> None:
        completion = await sample(engine, stop_token_ids=(9,))
        assert list(completion.token_ids) == [7, 8, 9]
        assert list(completion.behaviour_logprobs) == [-0.5, -0.25, 0.0], "rounding above 0 is 0"
        assert [(span.start, span.end, span.version) for span in completion.spans] == [(0, 2, 0), (2, 3, 1)]
        assert completion.finish_reason is FinishReason.STOP

    run(script, body)
    asked = script.asked[0][1]
    assert asked["token_ids"] == [3, 4]
    parameters = asked["sampling_params"]
    assert parameters["stop_token_ids"] == [2, 9]
    assert parameters["max_tokens"] == 5
    assert parameters["stream_interval"] == EngineSettings().stream_interval == 16
    assert parameters["ignore_eos"] is True
    assert "seed" not in parameters


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (500, b'{"error": {"message": "EngineCore died\\nand more"}}', "engine-0 answers 500: EngineCore died$"),
        (403, b"forbidden", "engine-0 answers 403: forbidden"),
        (200, stream_of({"error": {"message": "out of memory"}}), "engine-0 failed a request: .*out of memory"),
        (200, stream_of(), "ended a completion with no reason"),
        (200, stream_of(FIRST), "ended a completion with no reason"),
        (200, stream_of(event([7], [-0.5], None)), r"labels 1 tokens with the versions \[\]"),
        (200, stream_of(event([7], [-0.5], "abort", [("0", 0, 1)])), "ended a completion with abort"),
        (200, stream_of(event([7], [0.1], "stop", [("0", 0, 1)])), r"log-prob 0\.1 for token 0"),
        (200, stream_of(event([7], [-9999.0], "stop", [("0", 0, 1)])), r"log-prob -9999\.0 for token 0"),
        (200, stream_of(event([7], [-0.5], "stop", None)), r"labels 1 tokens with the versions \[\]"),
        (200, stream_of(event([7, 8], [-0.5] * 2, "stop", [("0", 0, 1)])), "labels 2 tokens"),
        (200, stream_of(event([7, 8], [-0.5] * 2, "stop", [("0", 0, 1), ("1", 0, 2)])), "labels 2 tokens"),
        (200, stream_of(event([7], [-0.5], "stop", [("default", 0, 1)])), r"\('default', 0, 1\)"),
        (200, b'data: {"choices": 3}\n\n', "answers what is not a completion"),
    ],
)
def test_an_answer_that_cannot_be_right_is_an_engine_error(status: int, answer: bytes, words: str) -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match=words):
            await sample(engine)
        assert engine.statistics().failed == 1
        assert engine.statistics().running == 0

    run(Script(answers={GENERATE: (status, answer)}), body)


def test_a_log_prob_of_another_token_is_refused() -> None:
    wrong = event([7], [-0.5], "stop", [("0", 0, 1)])
    wrong["choices"][0]["token_ids"] = [8]

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match="1 log-probs for 1 other tokens"):
            await sample(engine)

    run(Script(answers={GENERATE: (200, stream_of(wrong))}), body)


def test_nobody_listening_is_an_engine_error() -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with VLLMEngine("engine-0", url, EngineSettings(), SamplingSettings(), end_token_ids=()) as engine:
            with pytest.raises(EngineError, match=r"engine-0 at http.* does not answer"):
                await sample(engine)
            with pytest.raises(EngineError, match=r"did not become healthy in 0\.3 s"):
                await engine.wait_healthy(0.3)

    trio.run(main)


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/resume", "VLLM_SERVER_DEV_MODE=1"),
        ("/update_weight_version", "VLLM_SERVER_DEV_MODE=1"),
        ("/init_weight_transfer_engine", "--weight-transfer-config"),
        ("/collective_rpc", "--worker-extension-cls"),
        (GENERATE, "--enable-scale-out"),
    ],
)
def test_a_server_without_what_a_run_needs_is_refused_with_the_flag(path: str, flag: str) -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match=rf"{path} answers 404 \(no such route\)\. It needs {flag}"):
            await engine.wait_healthy(5)

    run(Script(answers={path: (404, b"no such route")}), body)


def test_a_server_whose_other_engines_are_silent_is_refused_with_what_to_take_instead() -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match=r"of its 4 ranks 2 say what they hold\. .*name each by urls"):
            await engine.wait_healthy(5)

    reports = report(5, "").replace(b'"run"', b'"another"')
    answers = {"/get_world_size": (200, b'{"world_size": 4}'), "/collective_rpc": (200, reports)}
    run(Script(answers=answers), body)


def test_a_server_that_asks_for_another_token_is_refused_at_once() -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match=r"engine-0 at http.* asks for another token \(token_file, \[engine\]\)"):
            await engine.wait_healthy(5)

    run(Script(answers={"/health": (401, b"the engine's token is missing or wrong")}), body)


@pytest.mark.parametrize(("token", "shown"), [("secret", b"Bearer secret"), ("", b"")])
def test_a_servers_token_goes_with_everything_that_is_asked_of_it(token: str, shown: bytes) -> None:
    async def body(engine: VLLMEngine) -> None:
        await engine.wait_healthy(5)
        await sample(engine)

    script = Script(answers={GENERATE: (200, GOOD)})
    run(script, body, token=token)
    assert {"/health", "/resume", GENERATE} <= {path for path, _ in script.asked}
    assert script.shown == {shown}


def test_a_request_that_takes_too_long_ends_with_the_setting_and_frees_its_place() -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(
            EngineError, match=r"took more than 0.05 s .* \(\[engine\] request_timeout_s; trajectory t\)"
        ):
            await sample(engine)
        assert engine.statistics().running == engine.statistics().waiting == 0

    run(Script(answers={GENERATE: (200, GOOD)}, hold=trio.Event()), body, request_timeout_s=0.05)


def test_a_stream_that_breaks_off_leaves_what_has_arrived_with_log_probs_and_versions() -> None:
    """Kills: keeping only whole completions; labels that come with the last event alone."""
    second = event([8, 9], [-0.25, -1.0], None, [("0", 0, 2), ("1", 2, 3)])
    torn = json.dumps(event([10], [-1.0], None, [("0", 0, 2), ("1", 2, 4)]))[:40].encode()
    whole = stream_of(FIRST, second).removesuffix(b"data: [DONE]\n\n")
    script = Script(answers={GENERATE: (200, whole + b"data: " + torn)}, dies=True)

    async def body(engine: VLLMEngine) -> None:
        draft = draft_of()
        with pytest.raises(EngineError, match=r"engine-0 at .* does not answer") as caught:
            await engine.generate(draft)
        assert not isinstance(caught.value, RequestNotSent), "it has run there"
        assert list(draft.context()) == [3, 4, 7, 8, 9]
        assert list(draft.behaviour_logprobs) == [-0.5, -0.25, -1.0]
        assert [(span.start, span.end, span.version) for span in draft.spans] == [(0, 2, 0), (2, 3, 1)]
        assert not draft.is_whole
        assert engine.statistics().tokens_sampled == 3

        script.dies, script.answers[GENERATE] = False, (200, stream_of(event([5], [-2.0], "stop", [("1", 0, 1)])))
        await engine.generate(draft)
        completion = draft.completion()
        assert list(completion.token_ids) == [7, 8, 9, 5]
        assert [(span.start, span.end, span.version) for span in completion.spans] == [(0, 2, 0), (2, 4, 1)]
        asked = script.asked[-1][1]
        assert asked["token_ids"] == [3, 4, 7, 8, 9]
        assert asked["sampling_params"]["max_tokens"] == 2

    run(script, body)


def test_a_completion_that_was_whole_before_its_server_died_is_whole() -> None:
    async def body(engine: VLLMEngine) -> None:
        completion = await sample(engine)
        assert list(completion.token_ids) == [7, 8, 9]

    run(Script(answers={GENERATE: (200, GOOD)}, dies=True), body)


def test_what_a_server_streamed_before_it_failed_is_kept_unless_it_cannot_be_right() -> None:
    error = {"error": {"message": "EngineCore died"}}

    async def body(engine: VLLMEngine) -> None:
        draft = draft_of()
        with pytest.raises(EngineError, match=r"failed a request: .*EngineCore died"):
            await engine.generate(draft)
        assert list(draft.token_ids) == [7]
        script.answers[GENERATE] = (200, stream_of(event([8], [0.5], None, [("0", 0, 1)]), error))
        with pytest.raises(EngineError, match=r"log-prob 0\.5"):
            await engine.generate(draft)
        assert list(draft.token_ids) == [7], "nothing of an answer that cannot be right"

    script = Script(answers={GENERATE: (200, stream_of(FIRST, error))})
    run(script, body)


def test_whether_the_request_or_the_engine_is_at_fault_can_be_told() -> None:
    script = Script()

    async def body(engine: VLLMEngine) -> None:
        for status, kind in ((400, RequestRefused), (500, EngineError), (403, EngineError)):
            script.answers[GENERATE] = (status, b"no")
            with pytest.raises(EngineError) as caught:
                await sample(engine)
            assert type(caught.value) is kind
        with pytest.raises(RequestRefused, match="leaves no room in max_model_len = 64"):
            await engine.generate(Draft(TokenIds([1] * 64), max_tokens=1, trajectory_id="t"))
        await engine.connect(f"http://127.0.0.1:{free_port()}", 0)
        with pytest.raises(RequestNotSent):
            await sample(engine)

    run(script, body)


def test_a_draft_that_moves_near_the_end_of_the_context_stops_where_it_would_have() -> None:
    async def body(engine: VLLMEngine) -> None:
        draft = Draft(TokenIds([1] * 60), max_tokens=40, trajectory_id="t")
        with pytest.raises(EngineError):
            await engine.generate(draft)
        with pytest.raises(EngineError):
            await engine.generate(draft)
        assert [body["sampling_params"]["max_tokens"] for _, body in script.asked] == [4, 3]

    script = Script(answers={GENERATE: (200, stream_of(FIRST))})
    run(script, body)


def test_an_engine_is_believed_to_be_sound_only_while_it_holds_what_it_should() -> None:
    script = Script(answers={"/collective_rpc": (200, report(0, ""))})

    async def body(engine: VLLMEngine) -> None:
        assert await engine.check()
        for wrong in (report(1, ""), report(0, "", broken="half"), report(0, "").replace(b'"run"', b'"other"'), b"{}"):
            script.answers["/collective_rpc"] = (200, wrong)
            assert not await engine.check()
        await engine.connect(f"http://127.0.0.1:{free_port()}", 0)
        assert not await engine.check()

    run(script, body)


def test_a_server_that_this_run_has_had_before_is_not_attached_again() -> None:
    """It may be paused after a sync that failed: a probe would wait for ever, and a pull mends it."""

    async def body(engine: VLLMEngine) -> None:
        await engine.wait_healthy(5)

    script = Script(answers={"/collective_rpc": (200, report(3, ""))})
    run(script, body)
    assert [path for path, _ in script.asked] == ["/health", "/collective_rpc"]


# --- weight sync against the script ---------------------------------------------------------------------------


def manifest(version: int = 1) -> WeightManifest:
    """Return a manifest of one small tensor."""
    entries = (TensorEntry(name="a", dtype="F32", shape=(1,), offset=0, num_bytes=4, digest="00"),)
    return WeightManifest(
        run_id="run", version=version, transport="t", location="/l", tensors=entries, digest=combined_digest(entries)
    )


def report(version: int, digest: str, broken: str = "") -> bytes:
    """Return what two ranks say that they hold."""
    one = {
        "run_id": "run", "version": version, "digest": digest, "digests": ["00"], "mismatched": "", "broken": broken,
        "encoding": "full", "num_bytes": 4, "chain_break": "", "seconds": {},
        "is_over": True, "has_failed": False,  # of the update, so that the same answer does for that question
    }  # fmt: skip
    return json.dumps({"results": [one, one]}).encode()


def control(script: Script) -> list[str]:
    """Return the control routes that were called, in order."""
    return [path.partition("?")[0] for path, _ in script.asked if path != GENERATE]


def test_a_pull_goes_through_its_phases_in_the_one_order_that_labels_exactly() -> None:
    script = Script(answers={"/collective_rpc": (200, report(1, manifest().digest))})

    async def body(engine: VLLMEngine) -> None:
        done = await engine.pull(manifest())
        assert done.verified
        assert done.num_bytes == 8, "of both ranks"
        assert list(done.seconds) == ["start", "update", "pause", "finish", "report", "resume"]
        assert engine.version == 1

    run(script, body)
    assert control(script) == [
        "/start_weight_update", "/update_weights", "/collective_rpc",
        "/pause", "/finish_weight_update", "/collective_rpc", "/resume",
    ]  # fmt: skip
    assert script.asked[3][0] == "/pause?mode=keep&clear_cache=false"
    assert dict(script.asked)["/finish_weight_update"] == {"weight_version": "1"}


@pytest.mark.parametrize(
    ("mode", "paused", "extra"),
    [
        (KVOnSync.FINISH, "/pause?mode=wait&clear_cache=false", 0),
        (KVOnSync.RECOMPUTE, "/pause?mode=keep&clear_cache=false", 1),
    ],
)
def test_what_becomes_of_keys_and_values_is_a_setting(mode: KVOnSync, paused: str, extra: int) -> None:
    script = Script(answers={"/collective_rpc": (200, report(1, manifest().digest))})

    async def body(engine: VLLMEngine) -> None:
        await engine.pull(manifest())

    run(script, body, kv_on_sync=mode)
    assert paused in [path for path, _ in script.asked]
    assert [path for path, _ in script.asked].count("/reset_prefix_cache?reset_running_requests=true") == extra


def test_an_engine_that_computed_another_digest_is_put_out_of_service() -> None:
    script = Script(answers={"/collective_rpc": (200, report(1, "other")), GENERATE: (200, GOOD)})

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightSyncError, match=r"engine-0 rank 0 says that it holds .*'other'"):
            await engine.pull(manifest())
        assert "it holds 1" in engine.broken
        with pytest.raises(EngineError, match="engine-0 is out of service"):
            await sample(engine)
        script.answers["/collective_rpc"] = (200, report(2, manifest(2).digest))
        await engine.pull(manifest(2))
        assert engine.broken == ""
        await sample(engine)

    run(script, body)
    assert "/resume" in control(script)


@dataclass
class _Loading(Script):
    """A server whose two ranks load: of each question how far they are, the bytes loaded and what is over or failed."""

    stages: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, bytes]:
        if path != "/collective_rpc" or self.asked[-1][1]["method"] != "asyncrl_weight_progress":
            return super().answer(path)
        stage = self.stages.pop(0) if len(self.stages) > 1 else self.stages[0]
        if stage["has_failed"]:
            self.answers["/update_weights"] = (500, b'{"error":{"message":"version 1 lacks a"}}')
        rank = {"num_bytes": 0, "is_over": True, "has_failed": False}
        return 200, json.dumps({"results": [rank, {**rank, **stage}]}).encode()

    @property
    def waits(self) -> list[float]:
        """What was asked to be waited for, of each question."""
        return [body["kwargs"]["wait_s"] for _, body in self.asked if body.get("method") == "asyncrl_weight_progress"]


def stage(num_bytes: int, *, is_over: bool = False, has_failed: bool = False) -> dict[str, Any]:
    return {"num_bytes": num_bytes, "is_over": is_over, "has_failed": has_failed}


@pytest.mark.parametrize("busy", [False, True])
def test_a_server_is_paused_when_the_last_rank_has_loaded_and_one_that_decodes_is_not_made_to_wait(busy: bool) -> None:
    script = _Loading(
        answers={"/collective_rpc": (200, report(1, manifest().digest)), GENERATE: (200, GOOD)},
        stages=[stage(0), stage(2), stage(4, is_over=True)],
        hold=trio.Event(),
    )

    async def body(engine: VLLMEngine) -> None:
        async with trio.open_nursery() as nursery:
            if busy:
                nursery.start_soon(sample, engine)
                while not script.asked:
                    await trio.lowlevel.checkpoint()
            await engine.pull(manifest())
            nursery.cancel_scope.cancel()

    run(script, body)
    assert script.waits == [0.0 if busy else 0.05] * 3
    assert control(script)[1:6] == ["/update_weights", *["/collective_rpc"] * 3, "/pause"]


def test_what_a_rank_found_while_it_loaded_is_asked_for_and_the_server_is_not_paused() -> None:
    script = _Loading(
        answers={"/collective_rpc": (200, report(0, ""))}, stages=[stage(2), stage(2, is_over=True, has_failed=True)]
    )

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightSyncError, match=r"^engine-0, update of version 1: version 1 lacks a; at least 0"):
            await engine.pull(manifest())

    run(script, body)
    assert "/pause" not in control(script)


def test_a_load_that_gets_no_further_ends_at_its_deadline_though_the_server_answers() -> None:
    script = _Loading(answers={"/collective_rpc": (200, report(0, ""))}, stages=[stage(1), stage(2)])

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightSyncError, match=r"engine-0, update of version 1: no progress in 0\.05 s"):
            await engine.pull(manifest())

    run(script, body, sync_timeout_s=0.05)
    assert len(script.waits) > 2


def test_a_refused_update_leaves_the_engine_serving_what_it_held() -> None:
    refusal = b'{"error":{"message":"Worker failed with error \'version 1 lacks a\', please check the stack trace"}}'
    script = Script(
        answers={
            "/update_weights": (500, refusal),
            "/collective_rpc": (200, report(0, "")),
            GENERATE: (200, GOOD),
        }
    )

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightSyncError, match=r"^engine-0, update of version 1: version 1 lacks a; at least 0"):
            await engine.pull(manifest())
        assert engine.broken == ""
        await sample(engine)

    run(script, body)
    assert control(script)[-1] == "/resume"


def test_a_phase_without_an_answer_ends_at_its_deadline_with_its_name() -> None:
    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")  # accepts and says nothing
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        settings = EngineSettings(sync_timeout_s=0.05)
        async with listener, VLLMEngine("mute", url, settings, SamplingSettings(), end_token_ids=()) as engine:
            with (
                trio.fail_after(5),
                pytest.raises(WeightSyncError, match=r"mute, start of version 1: no answer in 0\.05 .*; 0 of 4 bytes"),
            ):
                await engine.pull(manifest())
            assert "no one knows what" in engine.broken

    trio.run(main)


def test_requests_of_an_engine_that_cannot_be_trusted_fail_instead_of_hanging() -> None:
    script = Script(answers={"/collective_rpc": (200, report(1, "other")), GENERATE: (200, GOOD)}, hold=trio.Event())
    failures: list[str] = []

    async def body(engine: VLLMEngine) -> None:
        async def ask() -> None:
            with pytest.raises(EngineError) as caught:
                await sample(engine)
            failures.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not script.asked:
                await trio.lowlevel.checkpoint()
            with pytest.raises(WeightSyncError):
                await engine.pull(manifest())

    run(script, body)
    assert "out of service" in failures[0]
