"""What the gateway costs, against asking the engine directly in the same call.

Three processes: a server that answers as vLLM does after a delay, the gateway before it with a run's own pool and
client, and the agents. Keys of the report:

    latency             per request at `sessions` conversations at once, in milliseconds
      engine_ms           the engine's own delay
      direct, gateway     median and 99th percentile of what a request takes
      added               the gateway's median, and its 99th percentile, above the direct median
    throughput          as many conversations against an engine without a delay
      requests_per_second, requests_per_cpu_second (of the gateway's process)
    together            sessions with a request each under way at once
      sessions, in_flight (seen at the same moment), answered, seconds
      kib_per_session_idle        memory of the gateway's process for a session that has taken a turn and keeps its
                                  connection; tokens and log-probs left out
      kib_per_session_running     the same with a request under way: its connection to the engine and tokens included
    ratios, goals       what the project promises, and whether it is kept
"""

from __future__ import annotations

import math
import re
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import trio
from rich.table import Table

from asyncrl.bench.asked_process import asked_process
from asyncrl.bench.gateway_worker import REPLY_TOKENS
from asyncrl.bench.goals import Goal
from asyncrl.errors import AsyncRLError

_ROUNDS = 3  # of asking directly and through the gateway, in turn: what else runs on the machine meets both
_LIMIT_S = 120.0
_QUESTION = "What is the answer? " * 20
_MORE = "Then go on. " * 10
_TOKEN_BYTES = 8  # an id and a log-prob

GOALS = (
    Goal(name="added_median_ms", words="ms added to a request, median", limit=2.0, is_least=False),
    Goal(name="added_p99_ms", words="ms added to a request, 99th percentile", limit=10.0, is_least=False),
    Goal(name="kib_per_session", words="KiB of an open session besides its tokens", limit=64.0, is_least=False),
    Goal(name="together", words="sessions with a request under way at one moment", limit=2000, is_least=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBench:
    """Sizes of the measurement."""

    sessions: int = 64
    """Conversations at once."""
    turns: int = 4
    """Of a conversation."""
    engine_ms: int = 1000
    """That the engine takes for a completion."""
    together: int = 2000
    """Sessions with a request each under way at once."""


@dataclass(frozen=True, slots=True)
class _Scene:
    client: httpx.AsyncClient
    engine: str
    gateway: str
    headers: dict[str, str]

    async def delay(self, seconds: float) -> None:
        await self._get(self.client.post(f"{self.engine}/bench/delay", json={"seconds": seconds}))

    async def usage(self) -> dict[str, float]:
        found: dict[str, float] = await self._get(self.client.get(f"{self.gateway}/bench/usage"))
        return found

    async def open(self) -> tuple[str, dict[str, str]]:
        """Open a session; return where it is asked, and its headers."""
        body = {"deadline_s": 3600}
        found = await self._get(self.client.post(f"{self.gateway}/sessions", json=body, headers=self.headers))
        return f"{found['base_url']}/chat/completions", {"authorization": f"Bearer {found['token']}"}

    async def _get(self, reply: Awaitable[httpx.Response]) -> Any:
        response = await reply
        if response.status_code != 200:
            raise AsyncRLError(f"the benchmark was answered {response.status_code}: {response.text[:500]}")
        return response.json()


def bench_gateway(sizes: GatewayBench, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the report described above. Raises: AsyncRLError where a process ends, or answers what it should not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * sizes.together + 256  # connections of one process, and some to spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, wanted), hard), hard))
    return trio.run(_bench, sizes, say)


async def _bench(sizes: GatewayBench, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        directory, worker = Path(scratch), "asyncrl.bench.gateway_worker"
        async with asked_process("engine", worker, {"kind": "engine"}, directory=directory, limit_s=_LIMIT_S) as engine:
            job = {"kind": "gateway", "engine": engine.hello["url"]}
            async with (
                asked_process("gateway", worker, job, directory=directory, limit_s=_LIMIT_S) as gateway,
                httpx.AsyncClient(timeout=_LIMIT_S, trust_env=False, limits=_limits()) as client,
            ):
                headers = {"authorization": f"Bearer {gateway.hello['token']}"}
                scene = _Scene(client, engine.hello["url"], gateway.hello["url"], headers)
                say(f"latency of {sizes.sessions} conversations")
                latency = await _latency(scene, sizes)
                say("throughput")
                throughput = await _throughput(scene, sizes)
                say(f"{sizes.together} sessions at once")
                together = await _together(scene, sizes)
    ratios = {
        "added_median_ms": latency["added"]["median_ms"],
        "added_p99_ms": latency["added"]["p99_ms"],
        "kib_per_session": together["kib_per_session_idle"],
        "together": float(together["in_flight"]),
    }
    return {
        "latency": latency,
        "throughput": throughput,
        "together": together,
        "ratios": ratios,
        "goals": [goal.report(ratios[goal.name]) for goal in GOALS],
    }


def _limits() -> httpx.Limits:
    return httpx.Limits(max_connections=None, max_keepalive_connections=None)


# --- latency --------------------------------------------------------------------------------------------------


async def _latency(scene: _Scene, sizes: GatewayBench) -> dict[str, Any]:
    await scene.delay(sizes.engine_ms / 1000)
    direct, through = list[float](), list[float]()
    for number in range(_ROUNDS + 1):
        asked, talked = list[float](), list[float]()
        await _converse(sizes, partial(_talk_directly, scene, sizes, asked))
        await _converse(sizes, partial(_talk, scene, sizes, talked))
        if number:  # the first round warms up
            direct += asked
            through += talked
    ours, theirs = _summary(through), _summary(direct)
    return {
        "sessions": sizes.sessions,
        "requests": len(through),
        "engine_ms": sizes.engine_ms,
        "direct": theirs,
        "gateway": ours,
        "added": {
            "median_ms": ours["median_ms"] - theirs["median_ms"],
            "p99_ms": ours["p99_ms"] - theirs["median_ms"],
        },
    }


async def _converse(sizes: GatewayBench, talk: Callable[[], Awaitable[None]]) -> None:
    """Let as many agents talk beside each other, each begun a little after the other: none waits in step with them."""
    step_s = sizes.engine_ms / 1000 / sizes.sessions

    async def late(number: int) -> None:
        await trio.sleep(number * step_s)
        await talk()

    async with trio.open_nursery() as nursery:
        for number in range(sizes.sessions):
            nursery.start_soon(late, number)


async def _talk(scene: _Scene, sizes: GatewayBench, taken_ms: list[float]) -> None:
    url, headers = await scene.open()
    messages = [{"role": "user", "content": _QUESTION}]
    async with _connected(url, headers) as asked:
        for _ in range(sizes.turns):
            seconds, answer = await asked.post({"messages": messages})
            taken_ms.append(1000 * seconds)
            message = msgspec.json.decode(answer)["choices"][0]["message"]
            messages += [message, {"role": "user", "content": _MORE}]


async def _talk_directly(scene: _Scene, sizes: GatewayBench, taken_ms: list[float]) -> None:
    ids = list(_QUESTION.encode())
    async with _connected(f"{scene.engine}/inference/v1/generate", {}) as asked:
        for _ in range(sizes.turns):
            body = {"token_ids": ids, "sampling_params": {"max_tokens": REPLY_TOKENS, "logprobs": 0}}
            seconds, answer = await asked.post(body)
            taken_ms.append(1000 * seconds)
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-100:]
            ids = [*ids, *range(REPLY_TOKENS), *_MORE.encode()]


class _Asked:
    """One agent's connection. It reads no more of HTTP than where an answer ends: a whole client takes longer for a
    request than the gateway, and what it takes would be measured."""

    def __init__(self, stream: trio.SocketStream, path: str, headers: Mapping[str, str]) -> None:
        self._stream = stream
        lines = [f"POST {path} HTTP/1.1", "host: bench", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join([*lines, "content-length: "]).encode()

    async def post(self, body: Any) -> tuple[float, bytes]:
        """Return the seconds until the answer was there, and its body as it came. Raises: AsyncRLError."""
        content = msgspec.json.encode(body)
        started = time.perf_counter()
        await self._stream.send_all(self._head + b"%d\r\n\r\n" % len(content) + content)
        answer = b""
        while not _is_whole(answer):
            piece = await self._stream.receive_some()
            if not piece:
                raise AsyncRLError(f"the benchmark's connection broke off after {answer[:500]!r}")
            answer += piece
        seconds = time.perf_counter() - started
        head, _, found = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise AsyncRLError(f"the benchmark was answered {answer[:500]!r}")
        return seconds, found


def _is_whole(answer: bytes) -> bool:
    head, _, found = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return len(found) == int(length[1]) if length else answer.endswith(b"\r\n0\r\n\r\n")


@asynccontextmanager
async def _connected(url: str, headers: Mapping[str, str]) -> AsyncIterator[_Asked]:
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    async with await trio.open_tcp_stream(place.hostname, place.port) as stream:
        yield _Asked(stream, place.path, headers)


def _summary(times_ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {"median_ms": statistics.median(ordered), "p99_ms": ordered[math.ceil(0.99 * len(ordered)) - 1]}


# --- throughput -----------------------------------------------------------------------------------------------


async def _throughput(scene: _Scene, sizes: GatewayBench) -> dict[str, Any]:
    await scene.delay(0.0)
    taken = list[float]()
    before, started = await scene.usage(), time.perf_counter()
    await _converse(sizes, partial(_talk, scene, sizes, taken))
    seconds, after = time.perf_counter() - started, await scene.usage()
    cpu_seconds = after["cpu_seconds"] - before["cpu_seconds"]
    return {
        "requests": len(taken),
        "requests_per_second": len(taken) / seconds,
        "requests_per_cpu_second": len(taken) / cpu_seconds,
        "cpu_ms_per_request": 1000 * cpu_seconds / len(taken),
    }


# --- many at once ---------------------------------------------------------------------------------------------


async def _together(scene: _Scene, sizes: GatewayBench) -> dict[str, Any]:
    """Open sessions that take a turn and keep their connections, then let all of them ask at the same time."""
    hold_s = 5.0 + sizes.together / 50  # longer than all of them take to come, on a slow core
    before = await scene.usage()
    opened = [await scene.open() for _ in range(sizes.together)]
    few = trio.CapacityLimiter(sizes.sessions)
    counts = {"begun": 0, "answered": 0, "tokens": 0}
    go_on, over = trio.Event(), trio.Event()

    async def talk(number: int) -> None:
        async with _connected(*opened[number]) as asked:
            messages = [{"role": "user", "content": _QUESTION}]
            async with few:
                answer = msgspec.json.decode((await asked.post({"messages": messages, "return_token_ids": True}))[1])
            counts["tokens"] += len(answer["prompt_token_ids"]) + len(answer["choices"][0]["token_ids"])
            counts["begun"] += 1
            await go_on.wait()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": _MORE}]
            await asked.post({"messages": messages})
            counts["answered"] += 1
            await over.wait()

    async def wait_all(name: str) -> None:
        while counts[name] < sizes.together:  # noqa: ASYNC110 - a benchmark may look now and then
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        await scene.delay(0.0)
        for number in range(sizes.together):
            nursery.start_soon(talk, number)
        await wait_all("begun")
        idle = await scene.usage()
        await scene.delay(hold_s)
        started = time.perf_counter()
        go_on.set()
        await trio.sleep(0.8 * hold_s)
        running, in_flight = await scene.usage(), sizes.together - counts["answered"]
        await wait_all("answered")
        seconds = time.perf_counter() - started
        over.set()
    grown = idle["resident_bytes"] - before["resident_bytes"] - counts["tokens"] * _TOKEN_BYTES
    return {
        "sessions": sizes.together,
        "in_flight": in_flight,
        "answered": counts["answered"],
        "seconds": seconds,
        "kib_per_session_idle": grown / sizes.together / 1024,
        "kib_per_session_running": (running["resident_bytes"] - before["resident_bytes"]) / sizes.together / 1024,
    }


def table(report: dict[str, Any]) -> Table:
    """Return the figures, for a person."""
    found = Table(title="what the gateway costs", show_header=False)
    latency, throughput, together = report["latency"], report["throughput"], report["together"]
    for name in ("direct", "gateway", "added"):
        times = latency[name]
        found.add_row(
            f"{name}, {latency['sessions']} sessions", f"{times['median_ms']:.2f} ms, p99 {times['p99_ms']:.2f} ms"
        )
    found.add_row("requests a second of CPU", f"{throughput['requests_per_cpu_second']:.0f}")
    found.add_row(
        "sessions at once", f"{together['in_flight']} under way at one moment, {together['answered']} answered"
    )
    found.add_row(
        "memory of a session",
        f"{together['kib_per_session_running']:.1f} KiB running, {together['kib_per_session_idle']:.1f} KiB idle",
    )
    for goal in report["goals"]:
        sign = ">=" if goal["is_least"] else "<="
        found.add_row(f"{goal['name']} {sign} {goal['limit']:g}", "kept" if goal["met"] else "missed")
    return found
