"""Several engines behind one `Sampler` and one `WeightPuller`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from asyncrl.engines.vllm import EngineStatistics, VLLMEngine
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.protocols import SyncReport
from asyncrl.types import Completion, PolicyVersion, TokenIds, WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """The engines' statistics, and their sums."""

    engines: tuple[EngineStatistics, ...]

    @property
    def running(self) -> int:
        """Requests in the engines."""
        return sum(engine.running for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place or for a sync to end."""
        return sum(engine.waiting for engine in self.engines)

    @property
    def tokens_sampled(self) -> int:
        """Since the start."""
        return sum(engine.tokens_sampled for engine in self.engines)


class EnginePool:
    """Samples from several engines; the requests of one trajectory prefer one of them, for its prefix cache."""

    def __init__(self, engines: Sequence[VLLMEngine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)

    def statistics(self) -> PoolStatistics:
        """Return what the engines are doing."""
        return PoolStatistics(engines=tuple(engine.statistics() for engine in self.engines))

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that any engine in service holds."""
        versions = [engine.version for engine in self.engines if not engine.broken]
        return min(versions, default=min(engine.version for engine in self.engines))

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return when all engines answer. Raises: EngineError of the first that does not."""
        failures: list[EngineError] = []

        async def wait(engine: VLLMEngine) -> None:
            try:
                await engine.wait_healthy(timeout_s)
            except EngineError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for engine in self.engines:
                nursery.start_soon(wait, engine)
        if failures:
            raise failures[0]

    async def sample(
        self, token_ids: TokenIds, *, max_tokens: int, trajectory_id: str, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Return one completion; see `protocols.Sampler`. An engine that fails is passed over for this request.

        Raises: EngineError of the preferred engine, when none could answer.
        """
        first = zlib.crc32(trajectory_id.encode()) % len(self.engines)
        order = self.engines[first:] + self.engines[:first]
        failure: EngineError | None = None
        for engine in sorted(order, key=lambda engine: bool(engine.broken)):
            try:
                return await engine.sample(
                    token_ids, max_tokens=max_tokens, trajectory_id=trajectory_id, stop_token_ids=stop_token_ids
                )
            except EngineError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Bring every engine to the manifest's version, all at once; one that fails is sent it once more.

        Raises: WeightSyncError naming every engine that failed twice, after all have ended.
        """
        reports: dict[str, SyncReport] = {}
        failures: dict[str, WeightSyncError] = {}

        async def pull(engine: VLLMEngine) -> None:
            try:
                reports[engine.name] = await engine.pull(manifest)
            except WeightSyncError:
                try:
                    reports[engine.name] = await engine.pull(manifest)
                except WeightSyncError as error:
                    failures[engine.name] = error

        async with trio.open_nursery() as nursery:
            for engine in self.engines:
                nursery.start_soon(pull, engine)
        if failures:
            raise WeightSyncError("; ".join(str(error) for error in failures.values()))
        return [reports[engine.name] for engine in self.engines]

    async def aclose(self) -> None:
        """Close the connections; the servers go on."""
        for engine in self.engines:
            await engine.aclose()
