"""Simulated servers for a real `engines.EnginePool`: they die, hang, slow down and come back when a test says so.

Time is trio's, as in `asyncrl.testing`. Every token that a server samples is another number, and its log-prob tells the
version that it was really sampled under: a label that lies, a token that is lost or that comes twice can be seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import trio

from asyncrl.engines.draft import Draft, Part
from asyncrl.engines.engine import EngineStatistics, RequestNotSent
from asyncrl.engines.pace import Pace
from asyncrl.errors import EngineError, WeightMismatch, WeightSyncError
from asyncrl.protocols import SyncReport
from asyncrl.testing import Rates
from asyncrl.types import FinishReason, Logprobs, PolicyVersion, TokenIds, TokenSpan, WeightManifest

_PHASE_S = 60.0  # after which a pull that hangs has failed, as `[engine] sync_timeout_s`


class FakeServer:
    """A server and its client in one: an `engines.Engine`, whose `start` is an `engines.StartServer`.

    Completions are as long as they may be, unless the stop tokens are met, which are never sampled.

    Example:
        >>> server = FakeServer("engine 0", Rates(), itertools.count())
        >>> pool = EnginePool([server], EngineSettings())                     # doctest: +SKIP
        >>> nursery.start_soon(pool.serve, {"engine 0": server.start})        # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        rates: Rates,
        tokens: Iterator[int],
        *,
        capacity: int = 8,
        stream_interval: int = 4,
        start_s: float = 30.0,
        first_version: PolicyVersion = 0,
        fixed_url: bool = False,
    ) -> None:
        """`tokens` numbers what is sampled: servers of one pool share it. `fixed_url`: it comes back where it was."""
        self.name = name
        self.url = "fake:0"
        self.version: PolicyVersion = first_version
        """What the client believes."""
        self.held: PolicyVersion = first_version
        """What the server holds."""
        self.slowness = 1.0
        """Times of tokens are multiplied by it."""
        self.hangs = False
        """While True nothing that it is asked ever ends, and it does not die of it."""
        self.readable: Callable[[WeightManifest], bool] = lambda manifest: True
        """Whether a version's file is still there."""
        self.mismatches: Callable[[WeightManifest], str] = lambda manifest: ""
        """The tensor of a version that is another than was published, if any: it then serves what it held."""
        self.sleeps = False
        """Since it was told to, and until it has pulled."""
        self.canary: Sequence[float] = ()
        """What it makes of the canary's text."""
        self.cache_use = 0.0
        """The share of its cache of keys and values that it says is used."""
        self.pull_s = rates.sync_s
        """How long a pull takes."""
        self.starts: list[tuple[int, bool]] = []
        """How it was started: (times before, whether weights had been published)."""
        self.pulled: list[PolicyVersion] = []
        self.served: list[str] = []
        """Trajectories that asked it."""
        self.delivered: list[int] = []
        """Tokens that have arrived in drafts."""
        self._rates, self._tokens, self._start_s = rates, tokens, start_s
        self._capacity, self._interval, self._first_version = capacity, stream_interval, first_version
        self._fixed_url, self._connected_to = fixed_url, self.url
        self._gone = trio.Event()
        self._end = ""
        self._answers_at = -1.0
        self._open = trio.Event()
        self._open.set()
        self._pulling = trio.Lock()
        self._running: set[trio.CancelScope] = set()
        self._broken = ""
        self._pace = Pace()
        self._completed = self._failed = self._syncs = 0

    # --- the server -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def start(self, restarts: int, published: bool) -> AsyncIterator[FakeServer]:
        """Run the server from its first weights; it answers after its starting time."""
        self.starts.append((restarts, published))
        self.url = self.url if self._fixed_url else f"fake:{len(self.starts)}"
        self._gone, self._end, self.hangs = trio.Event(), "", False
        self._answers_at = trio.current_time() + self._start_s
        self.held = self._first_version
        try:
            yield self
        finally:
            self.kill("was stopped")

    def kill(self, end: str = "was ended by signal 9") -> None:
        """End the server's process."""
        self._end = f"{self.name} {end}"
        self._gone.set()

    async def wait_exit(self) -> str:
        """See `engines.Server`."""
        await self._gone.wait()
        return self._end

    @property
    def _is_there(self) -> bool:
        return self._connected_to == self.url and not self._gone.is_set()

    async def _pass(self, seconds: float) -> None:
        """Let time pass in the server. Raises: EngineError when it dies meanwhile."""
        gone = self._gone
        if not self._is_there:
            raise EngineError(f"{self.name} does not answer: connection refused")
        with trio.move_on_after(math.inf if self.hangs else seconds):
            await gone.wait()
        if gone.is_set():
            raise EngineError(f"{self.name} does not answer: connection reset")

    # --- its client -------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """See `engines.Engine`."""
        return self._capacity

    @property
    def broken(self) -> str:
        """See `engines.Engine`."""
        return self._broken

    @property
    def seconds_per_token(self) -> float | None:
        """See `engines.Engine`."""
        known = self._pace.seconds_per_token
        if known is None or not self._running:
            return known
        return max(known, self._pace.quiet_seconds(trio.current_time()) / self._interval)

    async def connect(self, url: str, version: PolicyVersion) -> None:
        """See `engines.Engine`."""
        self._connected_to, self.version, self._broken = url, version, ""

    async def wait_healthy(self, timeout_s: float) -> None:
        """See `engines.Engine`."""
        with trio.move_on_after(timeout_s):
            if self.hangs:
                await trio.sleep_forever()
            await trio.sleep_until(max(self._answers_at, trio.current_time()))
            if self._is_there:
                return
            await trio.sleep_forever()
        raise EngineError(f"{self.name} did not become healthy in {timeout_s:g} s")

    async def check(self) -> bool:
        """See `engines.Engine`."""
        async with self._pulling:
            with trio.move_on_after(10.0):
                if self.hangs:
                    await trio.sleep_forever()
                return self._is_there and not self._broken and self.held == self.version
        return False

    async def metrics(self) -> str:
        """See `engines.Engine`."""
        if self.hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if not self._is_there:
            return ""
        return (
            f'vllm:num_requests_waiting{{engine="0"}} {len(self._running)}.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.cache_use}\n'
        )

    async def generate(self, draft: Draft) -> None:
        """See `engines.Engine`."""
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                if not self._is_there:
                    raise RequestNotSent(f"{self.name} does not answer: connection refused")
                self.served.append(draft.trajectory_id)
                await self._sample(draft)
                self._completed += 1
                return
            except EngineError:
                self._failed += 1
                raise
            finally:
                self._running.discard(scope)
        self._failed += 1
        raise EngineError(f"{self.name} is out of service")

    async def _sample(self, draft: Draft) -> None:
        while not draft.is_whole:
            length = min(self._interval if draft.token_ids else 1, draft.max_tokens - len(draft.token_ids))
            tokens, versions, began = list[int](), list[PolicyVersion](), trio.current_time()
            while len(tokens) < length:
                await self._open.wait()
                if self._broken:
                    raise EngineError(f"{self.name} is out of service: {self._broken}")
                await self._pass(self._rates.token_s * self.slowness)
                if self._open.is_set():  # a step that a sync has overtaken is taken after it
                    tokens.append(next(self._tokens))
                    versions.append(self.held)
            self._deliver(draft, tokens, versions, trio.current_time() - began)

    def _deliver(self, draft: Draft, tokens: list[int], versions: list[PolicyVersion], seconds: float) -> None:
        self.delivered += tokens
        self._pace.note(len(tokens), seconds, now=trio.current_time())
        whole = len(draft.token_ids) + len(tokens) == draft.max_tokens
        spans, start = [], 0
        for version, run in itertools.groupby(versions):
            end = start + len(list(run))
            spans.append(TokenSpan(start=start, end=end, version=version))
            start = end
        part = Part(
            token_ids=TokenIds(tokens),
            behaviour_logprobs=Logprobs([-1.0 - version for version in versions]),
            spans=tuple(spans),
            finish_reason=FinishReason.LENGTH if whole else None,
        )
        if draft.watch is not None and not whole and draft.show(part):
            part = part.ended()
        draft.take(part, self.name)

    async def sleep(self) -> None:
        """See `engines.Engine`."""
        async with self._pulling:
            await self._pass(self.pull_s)
            self._open, self.sleeps = trio.Event(), True

    async def pull(self, manifest: WeightManifest) -> SyncReport:
        """See `engines.Engine`."""
        async with self._pulling:
            if not self.sleeps:
                self._open = trio.Event()
            try:
                with trio.move_on_after(_PHASE_S) as patience:
                    await self._pass(self.pull_s)
                if patience.cancelled_caught:
                    raise EngineError(f"no answer in {_PHASE_S:g} s")
                if not self.readable(manifest):
                    raise WeightSyncError(f"{self.name}, update of version {manifest.version}: cannot map the weights")
                if tensor := self.mismatches(manifest):
                    words = f"{self.name}, report of version {manifest.version}: {tensor} has another digest"
                    raise WeightMismatch(words, tensor=tensor)
                self.held = self.version = manifest.version
                self._broken = ""
                self.pulled.append(manifest.version)
                self._syncs += 1
            except EngineError as error:
                self._broken = str(error)
                self.withdraw(self._broken)
                raise WeightSyncError(f"{self.name}, pause of version {manifest.version}: {error}") from error
            finally:
                self.sleeps = False
                self._open.set()
        return SyncReport(
            engine=self.name,
            version=manifest.version,
            verified=True,
            num_bytes=manifest.num_bytes,
            seconds={"update": self.pull_s},
            stall_seconds=self.pull_s,
        )

    async def canary_logprobs(self) -> Sequence[float]:
        """See `engines.Engine`."""
        await self._pass(self._rates.token_s)
        return self.canary

    def withdraw(self, reason: str) -> None:
        """See `engines.Engine`."""
        for scope in self._running:
            scope.cancel()

    def statistics(self) -> EngineStatistics:
        """See `engines.Engine`."""
        return EngineStatistics(
            name=self.name,
            running=len(self._running),
            begun=len(self._running),
            waiting=0,
            completed=self._completed,
            failed=self._failed,
            withdrawn=0,
            tokens_sampled=len(self.delivered),
            tokens_per_second=self._pace.tokens_per_second(trio.current_time()),
            syncs=self._syncs,
            version=self.version,
        )

    async def aclose(self) -> None:
        """See `engines.Engine`."""
