"""A real pool over simulated servers, and what must hold of all that comes out of it.

Every fake token is another number and its log-prob tells the version that it was sampled under (`testing_engines`), so
what came out is compared with what the servers delivered.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from asyncrl.engines import EnginePool, EngineSettings, EngineStatistics, Health
from asyncrl.errors import EngineError
from asyncrl.protocols import SyncReport
from asyncrl.testing import Rates
from asyncrl.testing_engines import FakeServer
from asyncrl.types import Completion, TensorEntry, TokenIds, WeightManifest
from asyncrl.weight_sync import combined_digest

RATES = Rates(token_s=1.0, sync_s=5.0)
PROMPT = TokenIds([3, 4])
START_S = 30.0


def manifest(version: int) -> WeightManifest:
    """Return a manifest of one small tensor."""
    entries = (TensorEntry(name="a", dtype="F32", shape=(1,), offset=0, num_bytes=4, digest="00"),)
    return WeightManifest(
        run_id="run", version=version, transport="t", location="/l", tensors=entries, digest=combined_digest(entries)
    )


@dataclass
class Fleet:
    """A pool of fake servers and what came of it."""

    servers: list[FakeServer]
    pool: EnginePool
    nursery: trio.Nursery
    settings: EngineSettings
    completions: dict[str, Completion] = field(default_factory=dict)
    """The last of each trajectory."""
    everything: list[Completion] = field(default_factory=list)
    failures: dict[str, EngineError] = field(default_factory=dict)
    reports: list[list[SyncReport]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def ask(self, *trajectory_ids: str, max_tokens: int = 20) -> None:
        """Send one request for each id."""
        for trajectory_id in trajectory_ids:
            self.nursery.start_soon(self.sample, trajectory_id, max_tokens)

    async def sample(self, trajectory_id: str, max_tokens: int) -> None:
        """Send one request and keep what comes of it."""
        try:
            completion = await self.pool.sample(PROMPT, max_tokens=max_tokens, trajectory_id=trajectory_id)
            self.completions[trajectory_id] = completion
            self.everything.append(completion)
        except EngineError as error:
            self.failures[trajectory_id] = error

    async def pull(self, version: int) -> None:
        """Sync one version."""
        self.reports.append(list(await self.pool.pull_all(manifest(version))))

    def health(self) -> list[Health]:
        """Return the engines' health."""
        return [engine.health for engine in self.engines()]

    def engines(self) -> tuple[EngineStatistics, ...]:
        """Return the engines' statistics."""
        return self.pool.statistics().engines

    async def wait_idle(self, number: int) -> None:
        """Return when so many requests have ended."""
        # only a test waits for this, so nobody offers an event for it
        while len(self.everything) + len(self.failures) < number:  # noqa: ASYNC110
            await trio.sleep(1.0)


def run(body: Callable[[Fleet], Awaitable[None]], *, count: int = 2, remote: bool = False, **changes: Any) -> Fleet:
    """Run a test body over a served pool, then hold what came out against what was delivered."""
    capacity = changes.pop("capacity", 8)
    result: list[Fleet] = []

    async def main() -> None:
        numbers = itertools.count(100)
        servers = [
            FakeServer(f"engine {index}", RATES, numbers, capacity=capacity, start_s=START_S, fixed_url=remote)
            for index in range(count)
        ]
        settings = EngineSettings(**{"restarts": 3, "outage_timeout_s": 600.0, **changes})
        pool = EnginePool(servers, settings)
        starts = {} if remote else {server.name: server.start for server in servers}
        async with trio.open_nursery() as services:
            async with trio.open_nursery() as nursery:
                fleet = Fleet(servers=servers, pool=pool, nursery=nursery, settings=settings)
                result.append(fleet)
                await services.start(partial(pool.serve, starts, say=fleet.said.append))
                await body(fleet)
            services.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    check_nothing_is_lost(result[0])
    return result[0]


def check_nothing_is_lost(fleet: Fleet) -> None:
    """Every token that arrived is in exactly one completion, under the version that really sampled it."""
    arrived = Counter(token for server in fleet.servers for token in server.delivered)
    kept = Counter(token for completion in fleet.everything for token in completion.token_ids)
    assert max(arrived.values(), default=1) == 1
    assert kept == arrived or fleet.failures, "tokens of requests that failed are lost with them"
    assert kept <= arrived
    for completion in fleet.everything:
        assert [span.start for span in completion.spans[1:]] == [span.end for span in completion.spans[:-1]]
        assert (completion.spans[0].start, completion.spans[-1].end) == (0, len(completion.token_ids))
        for span in completion.spans:
            assert {*completion.behaviour_logprobs[span.start : span.end]} == {-1.0 - span.version}, completion


def fails(body: Callable[[Fleet], Awaitable[None]], kind: type[Exception], **changes: Any) -> str:
    """Return the words of the one error that ends the body's run."""
    with pytest.raises(BaseExceptionGroup) as caught:
        run(body, **changes)
    matched, rest = caught.value.split(kind)
    assert matched is not None
    assert rest is None, rest
    error: BaseException = matched
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
