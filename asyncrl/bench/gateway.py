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
      sessions, answered, refused, seconds
      kib_per_session_running     memory of the gateway's process, its connections to both sides included
      kib_per_session_idle        the same when their requests are answered, tokens and log-probs left out
    ratios, goals       what the project promises, and whether it is kept
"""

from __future__ import annotations

import math
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
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
    Goal(name="answered_together", words="sessions answered at once", limit=2000, is_least=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBench:
    """Sizes of the measurement."""

    sessions: int = 64
    """Conversations at once."""
    turns: int = 6
    """Of a conversation."""
    engine_ms: int = 500
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
                say(f"{sizes.together} sessions at once")  # first: the heap has not been stretched yet
                together = await _together(scene, sizes)
                say(f"latency of {sizes.sessions} conversations")
                latency = await _latency(scene, sizes)
                say("throughput")
                throughput = await _throughput(scene, sizes)
    ratios = {
        "added_median_ms": latency["added"]["median_ms"],
        "added_p99_ms": latency["added"]["p99_ms"],
        "kib_per_session": together["kib_per_session_idle"],
        "answered_together": float(together["answered"]),
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
    for _ in range(sizes.turns):
        started = time.perf_counter()
        response = await scene.client.post(url, json={"messages": messages}, headers=headers)
        taken_ms.append(1000 * (time.perf_counter() - started))
        if response.status_code != 200:
            raise AsyncRLError(f"the gateway answered {response.status_code}: {response.text[:500]}")
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": _MORE}]


async def _talk_directly(scene: _Scene, sizes: GatewayBench, taken_ms: list[float]) -> None:
    ids = list(_QUESTION.encode())
    for _ in range(sizes.turns):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": REPLY_TOKENS, "logprobs": 0}}
        started = time.perf_counter()
        response = await scene.client.post(f"{scene.engine}/inference/v1/generate", json=body)
        taken_ms.append(1000 * (time.perf_counter() - started))
        assert response.text.endswith("data: [DONE]\n\n")
        ids = [*ids, *range(REPLY_TOKENS), *_MORE.encode()]


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
    """Let every session have one request under way at the same time: the engine answers when all have come."""
    hold_s = 2.0 + sizes.together / 200  # longer than all of them take to come, on a slow core
    await scene.delay(hold_s)
    before = await scene.usage()
    opened = [await scene.open() for _ in range(sizes.together)]
    statuses: list[int] = []
    lengths: list[int] = []

    async def ask(number: int) -> None:
        url, headers = opened[number]
        body = {"messages": [{"role": "user", "content": _QUESTION}], "return_token_ids": True}
        response = await scene.client.post(url, json=body, headers=headers)
        statuses.append(response.status_code)
        if response.status_code == 200:
            found = response.json()
            lengths.append(len(found["prompt_token_ids"]) + len(found["choices"][0]["token_ids"]))

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(sizes.together):
            nursery.start_soon(ask, number)
        await trio.sleep(0.8 * hold_s)
        running = await scene.usage()
        in_flight = sizes.together - len(statuses)
    seconds, after = time.perf_counter() - started, await scene.usage()
    tokens = sum(lengths) * _TOKEN_BYTES
    return {
        "sessions": sizes.together,
        "in_flight": in_flight,
        "answered": statuses.count(200),
        "refused": len(statuses) - statuses.count(200),
        "seconds": seconds,
        "kib_per_session_running": (running["resident_bytes"] - before["resident_bytes"]) / sizes.together / 1024,
        "kib_per_session_idle": (after["resident_bytes"] - before["resident_bytes"] - tokens) / sizes.together / 1024,
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
    found.add_row("sessions at once", f"{together['answered']} of {together['sessions']} answered")
    found.add_row(
        "memory of a session",
        f"{together['kib_per_session_running']:.1f} KiB running, {together['kib_per_session_idle']:.1f} KiB idle",
    )
    for goal in report["goals"]:
        sign = ">=" if goal["is_least"] else "<="
        found.add_row(f"{goal['name']} {sign} {goal['limit']:g}", "kept" if goal["met"] else "missed")
    return found
