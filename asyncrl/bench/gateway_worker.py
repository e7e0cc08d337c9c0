"""The processes of `bench.gateway`: a server that answers as vLLM does after a delay, and the gateway before it.

    python -m asyncrl.bench.gateway_worker '{"kind": "engine"}'
    python -m asyncrl.bench.gateway_worker '{"kind": "gateway", "engine": "http://..."}'

Each prints a line of JSON when it answers and ends with its input. `GET /bench/usage` tells what it has used.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from typing import Any

import tokenizers
import trio
from tokenizers import decoders, models, pre_tokenizers

from asyncrl.bench.buffer import resident_bytes
from asyncrl.engines import EnginePool, EngineSettings, SamplingSettings, VLLMEngine
from asyncrl.gateway import Answer, Gateway, GatewaySettings, HTTPServer, Operating, Request, Route, Routes, json_answer
from asyncrl.gateway.http import event, event_stream, openai_error
from asyncrl.serving import listen
from asyncrl.tokens import ChatRenderer
from asyncrl.types import TokenIds

RUN_ID = "bench"
MAX_MODEL_LEN = 8192
REPLY_TOKENS = 100
_INTERVAL = 16  # tokens of one event, as [engine] stream_interval
_END = 257
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_renderer() -> ChatRenderer:
    """Return a renderer whose token i is byte i."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    spare = iter(range(0x100, 0x200))
    vocabulary = {chr(byte) if chr(byte) in letters else chr(next(spare)): byte for byte in range(256)}
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary | {token: 256 + place for place, token in enumerate(special)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return ChatRenderer(tokenizer, _TEMPLATE, end_token_ids={_END})


class FakeVLLM:
    """Answers what an `engines.VLLMEngine` asks; each completion has `REPLY_TOKENS` tokens."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._number = 0

    def routes(self) -> list[Route]:
        """Return what a run asks of a server, and how its delay is set."""
        return [
            _route("GET", "/health", self._health),
            _route("GET", "/metrics", self._health),
            _route("POST", "/collective_rpc", self._report),
            _route("POST", "/inference/v1/generate", self._generate),
            _route("POST", "/bench/delay", self._set_delay),
            _route("GET", "/bench/usage", usage),
        ]

    async def _health(self, request: Request) -> Answer:
        return json_answer({})

    async def _report(self, request: Request) -> Answer:
        return json_answer({"results": [{"run_id": RUN_ID, "version": 0, "broken": False}]})

    async def _set_delay(self, request: Request) -> Answer:
        self.delay_s = float(json.loads(await _body(request))["seconds"])
        return json_answer({})

    async def _generate(self, request: Request) -> Answer:
        await _body(request)
        self._number += 1
        text = f"{self._number} ".encode().ljust(REPLY_TOKENS - 1, b"x")
        return event_stream(_events([*text, _END], trio.current_time(), self.delay_s))


async def _events(ids: list[int], began: float, seconds: float) -> AsyncIterator[bytes]:
    """Yield a token and then so many each, as they would have been sampled, the last ones after `seconds`."""
    cuts = [0, *range(1, len(ids), _INTERVAL), len(ids)]
    for start, end in pairwise(cuts):
        entries = [{"token_id": token_id, "logprob": -0.5} for token_id in ids[start:end]]
        choice: dict[str, Any] = {"index": 0, "token_ids": ids[start:end], "logprobs": {"content": entries}}
        choice["weight_versions"] = [{"version": "0", "start": 0, "end": end}]
        choice["finish_reason"] = "stop" if end == len(ids) else None
        if seconds:
            await trio.sleep_until(began + seconds * end / len(ids))
        yield event({"choices": [choice]})
    yield b"data: [DONE]\n\n"


def _route(method: str, path: str, handler: Any) -> Route:
    return Route(method=method, path=path, handler=handler, error_body=openai_error)


async def _body(request: Request) -> bytes:
    return await request.body(max_bytes=2**26, timeout_s=60.0)


async def usage(request: Request) -> Answer:
    """Return the CPU seconds that this process has used, and the memory that it holds."""
    gc.collect()
    return json_answer({"cpu_seconds": time.process_time(), "resident_bytes": resident_bytes()})


async def _serve_engine(*, task_status: trio.TaskStatus[str]) -> None:
    listener = listen("127.0.0.1", 0, setting="port")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with trio.open_nursery() as nursery:
        await nursery.start(HTTPServer(Routes(FakeVLLM().routes()).answer).serve, listener)
        task_status.started(json.dumps({"url": url}))


async def _serve_gateway(engine_url: str, *, task_status: trio.TaskStatus[str]) -> None:
    settings = EngineSettings(max_num_seqs=8192, max_model_len=MAX_MODEL_LEN)
    engine = VLLMEngine("engine 0", engine_url, settings, SamplingSettings(), end_token_ids=(_END,), run_id=RUN_ID)
    pool = EnginePool([engine], settings)
    gateway = Gateway(make_renderer(), GatewaySettings(), temperature=1.0, max_model_len=MAX_MODEL_LEN)
    operating = Operating(gateway, pool)
    routes = [*operating.routes(), _route("GET", "/bench/usage", usage)]
    async with engine, trio.open_nursery() as nursery:
        await nursery.start(pool.serve)
        await nursery.start(operating.serve)
        listener = listen("127.0.0.1", 0, setting="port")
        await nursery.start(partial(gateway.serve, listener, routes=routes))
        # a first prompt: what is imported and compiled late is not a session's memory
        gateway.model.renderer.start([{"role": "user", "content": "x"}])
        await pool.sample(TokenIds([1]), max_tokens=REPLY_TOKENS, trajectory_id="first")
        gc.freeze()  # as a run does
        task_status.started(json.dumps({"url": gateway.url, "token": gateway.token}))


async def _main(job: dict[str, Any]) -> None:
    serve = _serve_engine if job["kind"] == "engine" else partial(_serve_gateway, job["engine"])
    async with trio.open_nursery() as nursery:
        hello = await nursery.start(serve)
        print(hello, flush=True)
        async with trio.lowlevel.FdStream(sys.stdin.fileno()) as owner:
            while await owner.receive_some():
                pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_main, json.loads(sys.argv[1]))
