"""New weights on their way into the engines, beside the steps that follow.

    step v -> v+1 -- publish v+1 -- step v+1 -> v+2 -- publish v+2 -- ...
                        `-- engines pull v+1 --> slots are freed

The learner waits for the files that it replaces and for nothing else. Each engine goes from what it holds to the newest
version, so that one which is overtaken is skipped, and counted. STALENESS.md proves that the bound holds however far
the engines are behind: what was trained on keeps its slots until they have pulled it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import fmean

import trio

from asyncrl.buffers import Gate, GroupBuffer
from asyncrl.errors import WeightSyncError
from asyncrl.idle import EngineIdle
from asyncrl.protocols import Learner, SyncReport, WeightPuller
from asyncrl.run_journal import RunJournal
from asyncrl.status import RunStatus
from asyncrl.types import PolicyVersion, WeightManifest


class WeightSyncs:
    """Publishes the learner's weights, follows them into the engines, and frees slots when they are there."""

    def __init__(
        self,
        learner: Learner,
        engines: WeightPuller,
        *,
        buffer: GroupBuffer,
        gate: Gate,
        journal: RunJournal,
        idle: EngineIdle,
        status: RunStatus,
        max_off_policyness: int,
    ) -> None:
        self._learner = learner
        self._engines = engines
        self._buffer = buffer
        self._gate = gate
        self._journal = journal
        self._idle = idle
        self._status = status
        self._max_off_policyness = max_off_policyness
        self._published = buffer.version
        self._pulled = trio.Event()
        self._ended: list[Mapping[str, float]] = []
        self._nursery: trio.Nursery | None = None

    @property
    def published(self) -> PolicyVersion:
        """The newest version that engines may pull."""
        return self._published

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Let pulls go on while the body runs; those that have not ended with it are given up.

        Raises (in an exception group): WeightSyncError when one fails, which ends the body.
        """
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    async def make_room(self) -> Collection[PolicyVersion]:
        """Wait until a published version may be replaced; return what `publish` must keep. Raises: WeightSyncError."""
        return await self._engines.make_room()

    async def publish(self, keep: Collection[PolicyVersion]) -> WeightManifest:
        """Make the learner's weights available; return when it may go on, while the engines pull.

        Raises: LearnerError.
        """
        assert self._nursery is not None, "publish inside `under_way`"
        began = trio.current_time()
        manifest = await self._learner.publish(keep=keep)
        self._journal.note_weights(  # before the pull: tokens of the new version come at once
            {manifest.version: manifest.digest},
            forget_before=manifest.version - self._max_off_policyness - 1,
        )
        self._published = manifest.version
        self._nursery.start_soon(self._follow, manifest, began)
        return manifest

    async def wait_pulled(self) -> None:
        """Return when every engine holds the newest published version."""
        while self._buffer.version < self._published:
            await self._pulled.wait()

    async def _follow(self, manifest: WeightManifest, began: float) -> None:
        with self._idle.sync() as add_stall:
            reports = await self._engines.pull_all(manifest)
            own = [report for report in reports if report.version == manifest.version]  # a later one's count there
            add_stall(max((report.stall_seconds for report in own), default=0.0))
        _check(manifest, reports)
        self._count(own, superseded=bool(reports) and not own, seconds=trio.current_time() - began)
        held = min((report.version for report in reports), default=manifest.version)
        if held > self._buffer.version:  # a call for a later version may return first
            used_up = self._buffer.pulled(held)
            self._status.expired_reuse += used_up.num_expired
            self._gate.release(used_up.group_ids)
            self._pulled.set()
            self._pulled = trio.Event()

    def _count(self, reports: Sequence[SyncReport], *, superseded: bool, seconds: float) -> None:
        self._status.versions_superseded += superseded
        self._status.count_sync(reports)
        if reports:
            sync: dict[str, float] = {
                "seconds": seconds,
                "stall_seconds": max(report.stall_seconds for report in reports),
                "bytes": sum(report.num_bytes for report in reports),
            }
            distances = [report.canary_distance for report in reports if report.canary_distance is not None]
            if distances:
                sync["canary_distance"] = max(distances)
            self._status.last_sync = sync
            self._ended.append(sync)

    def lap(self) -> dict[str, float]:
        """Return figures of the syncs that have ended since the last call; their times are means, and absent if none
        has ended.
        """
        ended, self._ended = self._ended, []
        figures: dict[str, float] = {"syncs": len(ended), "sync_bytes": sum(sync["bytes"] for sync in ended)}
        if ended:
            figures |= {f"sync_{name}": fmean(sync[name] for sync in ended) for name in ("seconds", "stall_seconds")}
        if heard := [sync["canary_distance"] for sync in ended if "canary_distance" in sync]:
            figures["canary_distance"] = max(heard)
        return figures


def _check(manifest: WeightManifest, reports: Sequence[SyncReport]) -> None:
    for report in reports:
        if report.version < manifest.version or not report.verified:
            raise WeightSyncError(
                f"{report.engine} holds version {report.version} (verified: {report.verified}) after the sync of "
                f"version {manifest.version}"
            )
