"""What `asyncrl bench weight-sync` measures on: engines under load, probes that see every token, and a learner."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import httpx
import trio

from asyncrl.bench.asked_process import AskedProcess, Report, asked_process
from asyncrl.engine_processes import start_server
from asyncrl.engines import Canary, Draft, EngineSettings, SamplingSettings, VLLMEngine
from asyncrl.errors import ConfigError
from asyncrl.protocols import SyncReport
from asyncrl.types import TokenIds
from asyncrl.weight_sync import manifest_from_json

_LIMIT_S = 120.0  # of anything here that answers at all
_SETTLE_S = 0.3  # until a token has come after a sync
_WARM_UP_S = 3.0
_CANARIES = 5
_CANARY = Canary(TokenIds(range(1, 33)))  # as many tokens as a run's; which ones makes no difference to its cost


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncBench:
    """Sizes."""

    model: Path
    engines: tuple[int, ...] = (1, 2)
    """How many at once, one measurement for each."""
    requests: int = 16
    """Completions that run all the time, over all engines."""
    tokens: int = 256
    """Of one completion."""
    seconds: int = 12
    """Of one window."""
    rounds: int = 3
    learning_rate: float = 1e-5
    """How far two versions lie apart in every float32 weight."""
    threads: int = 0
    """Of each engine; 0 shares out the cores. One engine is also measured with a thread less than there are cores."""

    def __post_init__(self) -> None:
        """Refuse sizes that measure nothing, by the name of the option."""
        for name in ("requests", "tokens", "seconds", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be >= 1, got {getattr(self, name)}")
        if not self.engines or min(self.engines) < 1 or len(set(self.engines)) != len(self.engines):
            raise ConfigError(f"--engines must be different numbers >= 1, got {list(self.engines)}")
        if self.threads < 0:
            raise ConfigError(f"--threads must be >= 0, got {self.threads}")
        if not self.learning_rate > 0:
            raise ConfigError(f"--learning-rate must be > 0, got {self.learning_rate}")
        if not any(self.model.glob("*.safetensors")):
            raise ConfigError(f"--model: there is no *.safetensors in {self.model}; make one by asyncrl.pretrained")


class _Probe:
    """One request to a server, sampled without end, whose tokens are sent one by one; when each came."""

    def __init__(self, engine: VLLMEngine, max_tokens: int) -> None:
        self._engine, self._max_tokens = engine, max_tokens
        self.moments: list[float] = []
        self.has_tokens = trio.Event()

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        body = {
            "token_ids": [1, 2, 3],
            "stream": True,
            "sampling_params": {"max_tokens": self._max_tokens, "ignore_eos": True, "detokenize": False},
        }
        async with httpx.AsyncClient(base_url=self._engine.url, timeout=None, trust_env=False) as client:
            while True:
                async with client.stream("POST", "/inference/v1/generate", json=body) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            self.moments.append(trio.current_time())
                            if len(self.moments) > 1:
                                self.has_tokens.set()

    def gap(self, start: float, end: float) -> float:
        """Return the longest time without a token that touches [start, end], above the median one, in seconds."""
        gaps = self._gaps(start, end)
        return max(gaps, default=0.0) - self.step(0.0, trio.current_time())

    def step(self, start: float, end: float) -> float:
        """Return the median time between two tokens from `start` to `end`, in seconds: a decode step's."""
        return median(self._gaps(start, end))

    def _gaps(self, start: float, end: float) -> list[float]:
        pairs = itertools.pairwise([*self.moments, trio.current_time()])
        return [later - earlier for earlier, later in pairs if later >= start and earlier <= end]


@dataclass(frozen=True, slots=True)
class Scene:
    """Engines under load, each with a probe."""

    engines: Sequence[VLLMEngine]
    probes: Sequence[_Probe]
    learner: AskedProcess

    def _tokens(self) -> int:
        return sum(engine.statistics().tokens_sampled for engine in self.engines)

    def _gap(self, start: float, end: float) -> float:
        return max(probe.gap(start, end) for probe in self.probes)

    async def window(self, seconds: int, sync: Callable[[], Awaitable[Report]] | None) -> Report:
        """Return the throughput of some seconds, and of every sync in them what it took.

        One begins every second; one that is due while another is under way is left out, as a superseded version is.
        """
        syncs: list[Report] = []
        began, tokens = trio.current_time(), self._tokens()
        while trio.current_time() < began + seconds:
            if sync is not None:
                syncs.append(await sync())
            await trio.sleep_until(began + math.floor(trio.current_time() - began) + 1)
        took = trio.current_time() - began
        sampled = (self._tokens() - tokens) / took
        await trio.sleep(_SETTLE_S)
        for report in syncs:
            report["gap_seconds"] = self._gap(*report.pop("between"))
        gaps = [self._gap(began + second, began + second + 1) for second in range(int(took))]
        return {"seconds": took, "tokens_per_second": sampled, "gap_seconds": gaps, "syncs": syncs}

    async def sync(self, *, delta: bool) -> Report:
        """Publish and pull one version. `between` is when the pull began and ended."""
        published = await self.learner.ask("publish_delta" if delta else "publish")
        manifest = manifest_from_json(published["manifest"])
        pulls: list[SyncReport] = []

        async def pull(engine: VLLMEngine) -> None:
            pulls.append(await engine.pull(manifest))

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for engine in self.engines:
                nursery.start_soon(pull, engine)
        ended = trio.current_time()
        return {
            "publish_seconds": published["seconds"],
            "changed_share": published["changed_share"],
            "pull_seconds": ended - began,
            "load_cpu_seconds": fmean(pull.seconds["update.cpu"] for pull in pulls),
            "pause_seconds": max(pull.stall_seconds for pull in pulls),
            "phase_seconds": {phase: max(pull.seconds[phase] for pull in pulls) for phase in pulls[0].seconds},
            "between": (began, ended),
            "num_bytes": sum(pull.num_bytes for pull in pulls),
            "encoding": pulls[-1].encoding,
        }

    async def canaries(self) -> Report:
        """Ask the first engine for its canary, again and again, as it is asked after a sync."""
        seconds, gaps, began = [], [], trio.current_time()
        for _ in range(_CANARIES):
            await trio.sleep(_SETTLE_S)
            asked = trio.current_time()
            await self.engines[0].canary_logprobs()
            seconds.append(trio.current_time() - asked)
            await trio.sleep(_SETTLE_S)
            gaps.append(self.probes[0].gap(asked, asked + seconds[-1]))
        step = self.probes[0].step(began, trio.current_time())
        return {"seconds": seconds, "gap_seconds": gaps, "step_seconds": step}

    async def reload(self) -> Report:
        """Drain the first engine, let vLLM load a checkpoint from disk, and resume."""
        engine = self.engines[0]
        saved = await self.learner.ask("save")
        began = trio.current_time()
        await engine.control.post("/pause", None, {"mode": "wait", "clear_cache": "false"})
        drained = trio.current_time()
        await engine.control.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": saved["directory"]}}, {}
        )
        loaded = trio.current_time()
        await engine.control.post("/resume", None, {})
        ended = trio.current_time()
        await trio.sleep(_SETTLE_S)
        return {
            "save_seconds": saved["seconds"],
            "drain_seconds": drained - began,
            "load_seconds": loaded - drained,
            "seconds": ended - began,
            "gap_seconds": self.probes[0].gap(began, ended),
        }


@asynccontextmanager
async def scene(bench: WeightSyncBench, count: int, threads: int, scratch: Path) -> AsyncIterator[Scene]:
    """Start `count` engines, their load and the learner, and yield when tokens have come for a while.

    `threads` are each engine's, as `EngineSettings` has them. What they write goes to `scratch`.
    Raises: AsyncRLError, EngineError where one of them ends.
    """
    settings = EngineSettings(
        count=count,
        max_model_len=1024,
        max_num_seqs=bench.requests + 2,
        kv_cache_gib=0.5,
        threads=threads,
        stream_interval=1,
    )
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        job = {
            "model": str(bench.model),
            "run_id": run_id,
            "learning_rate": bench.learning_rate,
            "directory": str(scratch),
            "threads": 1,
        }
        learner = await stack.enter_async_context(
            asked_process("learner", "asyncrl.bench.weight_sync_learner", job, directory=scratch, limit_s=_LIMIT_S)
        )
        engines = []
        for index in range(count):
            log = scratch / f"engine-{count}-{threads}-{index}.log"
            server = await stack.enter_async_context(
                start_server(settings, index, bench.model, 0, seed=index, log_path=log)
            )
            engine = VLLMEngine(
                f"engine {index}",
                server.url,
                settings,
                SamplingSettings(),
                end_token_ids=(),
                run_id=run_id,
                canary=_CANARY,
            )
            engines.append(await stack.enter_async_context(engine))
        for engine in engines:
            await engine.wait_healthy(settings.start_timeout_s)
        probes = [_Probe(engine, bench.tokens) for engine in engines]
        async with trio.open_nursery() as nursery:
            for probe in probes:
                nursery.start_soon(probe.run)
            for place in range(bench.requests):
                nursery.start_soon(_complete, engines[place % count], place, bench.tokens)
            for probe in probes:
                await probe.has_tokens.wait()
            await trio.sleep(_WARM_UP_S)
            yield Scene(engines, probes, learner)
            nursery.cancel_scope.cancel()


async def _complete(engine: VLLMEngine, place: int, tokens: int) -> None:
    """Have completions sampled one after the other, no two of them ending together, until cancelled."""
    for count in itertools.count():
        length = max(1, tokens // 2 + (37 * place + 101 * count) % tokens)
        prompt = TokenIds([1 + (place * 7 + count * 3 + step) % 200 for step in range(32)])
        await engine.generate(Draft(prompt, max_tokens=length, trajectory_id=f"{place}-{count}"))
