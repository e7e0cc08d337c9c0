"""Settings, the command line, and the client against a scripted server: nothing that cannot be right is believed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio

from asyncrl.engines import EnginePool, EngineSettings, KVOnSync, SamplingSettings, VLLMEngine, command, free_port
from asyncrl.errors import ConfigError, EngineError, WeightSyncError
from asyncrl.protocols import Sampler
from asyncrl.types import FinishReason, TensorEntry, TokenIds, WeightManifest
from asyncrl.weight_sync import combined_digest

# --- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0.9}, r"top_p must be 1: got 0\.9.*importance ratio is biased"),
        ({"top_k": 20}, r"top_k must be 0 \(off\): got 20.*importance ratio is biased"),
        ({"temperature": 0.0}, r"temperature must be > 0"),
        ({"temperature": -1.0}, r"temperature must be > 0"),
        ({"temperature": float("nan")}, r"temperature must be > 0"),
    ],
)
def test_sampling_that_would_bias_the_ratio_is_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplingSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": ("localhost:8000",)}, r"urls must begin with http:// or https://, got 'localhost:8000'"),
        ({"port": 70000}, "port must be from 0 to 65535, got 70000"),
        ({"max_model_len": 0}, "max_model_len must be from 16"),
        ({"max_num_seqs": 0}, "max_num_seqs must be from 1"),
        ({"kv_cache_gib": -1.0}, "kv_cache_gib must be from 0"),
        ({"threads": -1}, "threads must be from 0"),
        ({"niceness": 20}, "niceness must be from 0 to 19"),
        ({"request_timeout_s": 0.0}, r"request_timeout_s must be > 0 seconds, got 0\.0"),
        ({"dtype": "int4"}, "dtype must be one of bfloat16, float16, float32, auto, got 'int4'"),
        ({"extra": {"seed": 1}}, r"extra may not set seed \(\[engine\]\); \[run\] seed"),
        ({"extra": {"logprobs-mode": "raw_logprobs"}}, "extra may not set logprobs-mode.*ratios need"),
    ],
)
def test_an_engine_setting_that_cannot_be_used_is_refused_with_its_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineSettings(**settings)


def test_the_command_line_turns_on_what_training_needs() -> None:
    argv, environment = command(EngineSettings(kv_cache_gib=0.5, threads=2), "/models/m", 8123)
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in {
        "--model": "/models/m",
        "--port": "8123",
        "--host": "127.0.0.1",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--kv-cache-memory-bytes": str(2**29),
    }.items():
        assert argv[argv.index(flag) + 1] == value
    assert "--enable-scale-out" in argv
    assert json.loads(argv[argv.index("--weight-transfer-config") + 1]) == {"backend": "asyncrl"}
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert int(command(EngineSettings(), "m", 1)[1]["OMP_NUM_THREADS"]) >= 1


def test_further_arguments_are_passed_as_vllm_names_them() -> None:
    extra = {"tensor_parallel_size": 2, "trust_remote_code": True, "enable_chunked_prefill": False, "x": {"a": 1}}
    argv, _ = command(EngineSettings(extra=extra), "m", 1)
    assert argv[-6:] == [
        "--tensor-parallel-size",
        "2",
        "--trust-remote-code",
        "--no-enable-chunked-prefill",
        "--x",
        '{"a": 1}',
    ]


def test_a_free_port_can_be_listened_on() -> None:
    assert 0 < free_port() < 65536


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


GOOD = stream_of(event([7], [-0.5], None), event([8, 9], [-0.25, 3e-5], "stop", [("0", 0, 2), ("1", 2, 3)]))


@dataclass
class Script:
    """What the server answers by path, and what it was asked."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    hold: trio.Event | None = None
    """Where set, generation waits for it after its headers."""

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
                status, answer = script.answer(path.partition("?")[0])
                await stream.send_all(f"HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n".encode())
                if script.hold is not None and "generate" in path:
                    await script.hold.wait()
                await stream.send_all(answer)
                await stream.aclose()
                return
    except trio.BrokenResourceError:
        return  # the client gave up


@asynccontextmanager
async def scripted(script: Script, **changes: Any) -> AsyncIterator[VLLMEngine]:
    """Yield a client of a server that answers by the script."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, partial(_serve, script), 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        settings = EngineSettings(max_model_len=64, **{"max_num_seqs": 2, **changes})
        async with VLLMEngine(
            "engine-0", f"http://127.0.0.1:{port}", settings, SamplingSettings(), end_token_ids=(2,)
        ) as engine:
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


def test_a_completion_is_put_together_from_its_events() -> None:
    script = Script(answers={GENERATE: (200, GOOD)})

    async def body(engine: VLLMEngine) -> None:
        completion = await engine.sample(PROMPT, max_tokens=5, trajectory_id="t", stop_token_ids=(9,))
        assert list(completion.token_ids) == [7, 8, 9]
        assert list(completion.behaviour_logprobs) == [-0.5, -0.25, 0.0], "rounding above 0 is 0"
        assert [(span.start, span.end, span.version) for span in completion.spans] == [(0, 2, 0), (2, 3, 1)]
        assert completion.finish_reason is FinishReason.STOP
        assert isinstance(engine, Sampler)

    run(script, body)
    asked = script.asked[0][1]
    assert asked["token_ids"] == [3, 4]
    parameters = asked["sampling_params"]
    assert parameters["stop_token_ids"] == [2, 9]
    assert parameters["max_tokens"] == 5
    assert parameters["ignore_eos"] is True
    assert "seed" not in parameters


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (500, b'{"error": {"message": "EngineCore died\\nand more"}}', "engine-0 answers 500: EngineCore died$"),
        (403, b"forbidden", "engine-0 answers 403: forbidden"),
        (200, stream_of({"error": {"message": "out of memory"}}), "engine-0 failed a request: .*out of memory"),
        (200, stream_of(), "ended a completion with no reason"),
        (200, stream_of(event([7], [-0.5], None)), "ended a completion with no reason"),
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
            await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")
        assert engine.statistics().failed == 1
        assert engine.statistics().running == 0

    run(Script(answers={GENERATE: (status, answer)}), body)


def test_a_log_prob_of_another_token_is_refused() -> None:
    wrong = event([7], [-0.5], "stop", [("0", 0, 1)])
    wrong["choices"][0]["token_ids"] = [8]

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match="1 log-probs for 1 other tokens"):
            await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")

    run(Script(answers={GENERATE: (200, stream_of(wrong))}), body)


def test_nobody_listening_is_an_engine_error() -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with VLLMEngine("engine-0", url, EngineSettings(), SamplingSettings(), end_token_ids=()) as engine:
            with pytest.raises(EngineError, match=r"engine-0 at http.* does not answer"):
                await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")
            with pytest.raises(EngineError, match=r"did not become healthy in 0\.3 s"):
                await engine.wait_healthy(0.3)

    trio.run(main)


@pytest.mark.parametrize(
    ("path", "flag"),
    [
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


def test_a_request_that_takes_too_long_ends_with_the_setting_and_frees_its_place() -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(
            EngineError, match=r"took more than 0.05 s .* \(\[engine\] request_timeout_s; trajectory t\)"
        ):
            await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")
        assert engine.statistics().running == engine.statistics().waiting == 0

    run(Script(answers={GENERATE: (200, GOOD)}, hold=trio.Event()), body, request_timeout_s=0.05)


def test_no_more_requests_run_than_the_engine_has_places_for() -> None:
    async def body(engine: VLLMEngine) -> None:
        async with trio.open_nursery() as nursery:
            for place in range(5):
                nursery.start_soon(_ask, engine, place)
            while len(script.asked) < 2:
                await trio.lowlevel.checkpoint()
            statistics = engine.statistics()
            assert (statistics.running, statistics.waiting) == (2, 3)
            assert script.hold is not None
            script.hold.set()
        assert engine.statistics().completed == 5

    async def _ask(engine: VLLMEngine, place: int) -> None:
        await engine.sample(PROMPT, max_tokens=5, trajectory_id=f"t-{place}")

    script = Script(answers={GENERATE: (200, GOOD)}, hold=trio.Event())
    run(script, body)


# --- weight sync against the script ---------------------------------------------------------------------------


def manifest(version: int = 1) -> WeightManifest:
    """Return a manifest of one small tensor."""
    entries = (TensorEntry(name="a", dtype="F32", shape=(1,), offset=0, num_bytes=4, digest="00"),)
    return WeightManifest(
        run_id="run", version=version, transport="t", location="/l", tensors=entries, digest=combined_digest(entries)
    )


def report(version: int, digest: str, broken: str = "") -> bytes:
    """Return what two ranks say that they hold."""
    one = {"run_id": "run", "version": version, "digest": digest, "num_bytes": 4, "seconds": {}, "broken": broken}
    return json.dumps({"results": [one, one]}).encode()


def control(script: Script) -> list[str]:
    """Return the control routes that were called, in order."""
    return [path.partition("?")[0] for path, _ in script.asked if path != GENERATE]


def test_a_pull_goes_through_its_phases_in_the_one_order_that_labels_exactly() -> None:
    script = Script(answers={"/collective_rpc": (200, report(1, manifest().digest))})

    async def body(engine: VLLMEngine) -> None:
        done = await engine.pull(manifest())
        assert done.verified
        assert done.num_bytes == 4
        assert list(done.seconds) == ["pause", "start", "update", "finish", "report", "resume"]
        assert engine.version == 1

    run(script, body)
    assert control(script) == [
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc", "/resume",
    ]  # fmt: skip
    assert script.asked[0][0] == "/pause?mode=keep&clear_cache=false"
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
    assert script.asked[0][0] == paused
    assert [path for path, _ in script.asked].count("/reset_prefix_cache?reset_running_requests=true") == extra


def test_an_engine_that_computed_another_digest_is_put_out_of_service() -> None:
    script = Script(answers={"/collective_rpc": (200, report(1, "other")), GENERATE: (200, GOOD)})

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightSyncError, match=r"engine-0 rank 0 says that it holds .*'other'"):
            await engine.pull(manifest())
        assert "it holds 1" in engine.broken
        with pytest.raises(EngineError, match="engine-0 is out of service"):
            await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")
        script.answers["/collective_rpc"] = (200, report(2, manifest(2).digest))
        await engine.pull(manifest(2))
        assert engine.broken == ""
        await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")

    run(script, body)
    assert "/resume" in control(script)


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
        with pytest.raises(WeightSyncError, match=r"^engine-0, update of version 1: version 1 lacks a$"):
            await engine.pull(manifest())
        assert engine.broken == ""
        await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")

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
                pytest.raises(WeightSyncError, match=r"mute, pause of version 1: no answer in 0\.05"),
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
                await engine.sample(PROMPT, max_tokens=5, trajectory_id="t")
            failures.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not script.asked:
                await trio.lowlevel.checkpoint()
            with pytest.raises(WeightSyncError):
                await engine.pull(manifest())

    run(script, body)
    assert "out of service" in failures[0]


# --- the pool -------------------------------------------------------------------------------------------------


def test_a_pool_passes_a_failed_engine_over_and_keeps_a_trajectory_on_one() -> None:
    good, bad = Script(answers={GENERATE: (200, GOOD)}), Script(answers={GENERATE: (500, b"gone")})

    async def main() -> None:
        with trio.fail_after(20):
            async with scripted(good) as first, scripted(bad) as second:
                pool = EnginePool([first, second])
                for place in range(6):
                    for _ in range(2):
                        await pool.sample(PROMPT, max_tokens=5, trajectory_id=f"t-{place}")
                assert pool.statistics().tokens_sampled == 36
                assert pool.statistics().running == pool.statistics().waiting == 0
                good.answers[GENERATE] = (500, b"gone too")
                with pytest.raises(EngineError, match="gone"):
                    await pool.sample(PROMPT, max_tokens=5, trajectory_id="t")

    trio.run(main)
    assert len(bad.asked) > 0
    assert len(good.asked) >= 12


def test_a_pool_sends_weights_once_more_and_then_names_who_failed() -> None:
    good = Script(answers={"/collective_rpc": (200, report(1, manifest().digest))})
    bad = Script(answers={"/pause": (500, b"no"), "/collective_rpc": (200, report(0, ""))})

    async def main() -> None:
        with trio.fail_after(20):
            async with scripted(good) as first, scripted(bad) as second:
                second.name = "engine-1"
                with pytest.raises(WeightSyncError, match=r"^engine-1, pause of version 1: no$"):
                    await EnginePool([first, second]).pull_all(manifest())
                assert (first.version, second.version) == (1, 0)
                bad.answers = {"/collective_rpc": (200, report(1, manifest().digest))}
                reports = await EnginePool([first, second]).pull_all(manifest())
                assert [each.engine for each in reports] == ["engine-0", "engine-1"]

    trio.run(main)
    assert control(bad).count("/pause") == 3
