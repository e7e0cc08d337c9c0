"""One pull of one version by one vLLM server: its phases in the one order that labels exactly, each with a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from asyncrl.engines.control import PROGRESS, REPORT, ControlRoutes
from asyncrl.engines.nap import Nap
from asyncrl.engines.settings import EngineSettings, KVOnSync
from asyncrl.errors import WeightMismatch, WeightSyncError
from asyncrl.protocols import SyncReport
from asyncrl.types import WeightManifest
from asyncrl.weight_sync import manifest_to_json
from asyncrl.weight_sync.reports import check_reports


class SyncedServer(Protocol):
    """The server that is synced."""

    name: str
    control: ControlRoutes

    @property
    def settings(self) -> EngineSettings:
        """What becomes of running requests' keys and values, and how long one phase of a sync may take."""
        ...

    @property
    def is_sampling(self) -> bool:
        """Whether requests run, as far as is known here."""
        ...

    @property
    def nap(self) -> Nap | None:
        """Its sleep, where it sleeps: it wakes with the new weights."""
        ...

    def end_nap(self) -> None:
        """Note that it is awake."""
        ...

    def hold_requests(self) -> None:
        """Send no new request until the sync is over."""
        ...

    def withdraw_unbegun(self) -> None:
        """Take back the requests that have not begun: they would begin under other weights than their salt names."""
        ...


_IDLE_WAIT_S = 0.05  # that a server without requests waits for its loading thread: what a new request may lose by it


class Sync:
    """One pull by one engine: its phases, each with a deadline."""

    def __init__(self, engine: SyncedServer, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._engine = engine
        self._seconds: dict[str, float] = {}
        self._stall_s = 0.0
        self._reports: Sequence[Mapping[str, Any]] = ()
        self._num_bytes = 0

    async def run(self) -> None:
        """Go through the phases. Raises: WeightSyncError naming engine, phase and how much had been loaded."""
        engine, version = self._engine, str(self.manifest.version)
        if engine.nap is not None:
            await self._phase("wake", "/wake_up", params={"tags": "weights"})  # it stays paused
        await self._phase("start", "/start_weight_update")
        await self._send()
        paused = await self._pause()
        await self._phase("finish", "/finish_weight_update", {"weight_version": version})
        self._check(await self._phase("report", "/collective_rpc", REPORT))
        if engine.settings.kv_on_sync is KVOnSync.RECOMPUTE and engine.nap is None:
            await self._phase("recompute", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        engine.withdraw_unbegun()
        await self._resume()
        self._stall_s = trio.current_time() - paused

    async def _pause(self) -> float:
        """Let no token be produced; return since when none is."""
        if self._engine.nap is not None:
            return self._engine.nap.since
        mode = "wait" if self._engine.settings.kv_on_sync is KVOnSync.FINISH else "keep"
        self._engine.hold_requests()
        await self._phase("pause", "/pause", params={"mode": mode, "clear_cache": "false"})
        return trio.current_time()

    async def _resume(self) -> None:
        if self._engine.nap is None:
            await self._phase("resume", "/resume")
            return
        status = (await self._phase("wake", "/wake_up", params={"tags": "kv_cache"})).get("status")
        if status != "awake":
            raise WeightSyncError(
                f"{self._engine.name}, wake of version {self.manifest.version}: it says that it is {status!r}"
            )
        self._engine.end_nap()

    async def _send(self) -> None:
        """Have the version verified and loaded beside the running weights while tokens come.

        A server that decodes answers after its step, so the questions need no pace of their own. One that does not is
        asked to answer when there is something to say.
        """
        update = {"update_info": {"manifest": manifest_to_json(self.manifest)}}
        await self._phase("update", "/update_weights", update)
        last, since = 0, trio.current_time()
        while True:
            wait_s = 0.0 if self._engine.is_sampling else _IDLE_WAIT_S
            answer = await self._phase("update", "/collective_rpc", {**PROGRESS, "kwargs": {"wait_s": wait_s}})
            ranks = answer["results"]
            if any(rank["has_failed"] for rank in ranks):
                await self._phase("update", "/update_weights", {"update_info": {}})  # which raises what was wrong
            if all(rank["is_over"] for rank in ranks):
                break
            loaded = sum(rank["num_bytes"] for rank in ranks)
            self._num_bytes = min(rank["num_bytes"] for rank in ranks)
            now = trio.current_time()
            if loaded > last:
                last, since = loaded, now
            elif now > since + self._engine.settings.sync_timeout_s:
                raise self._too_slow("update", "no progress")
        self._num_bytes = self.manifest.num_bytes

    async def _phase(
        self, phase: str, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> Any:
        started = trio.current_time()
        try:
            with trio.fail_after(self._engine.settings.sync_timeout_s):
                answer = await self._engine.control.post(path, body, params or {})
        except trio.TooSlowError:
            raise self._too_slow(phase, "no answer") from None
        except WeightSyncError as error:
            words = f"{self._where(phase)}: {error}; {self._loaded(phase)}"
            if phase == "update" and (tensor := await self._mismatched()):
                raise WeightMismatch(words, tensor=tensor) from error
            raise WeightSyncError(words) from error
        self._seconds[phase] = self._seconds.get(phase, 0.0) + trio.current_time() - started
        return answer

    def _where(self, phase: str) -> str:
        return f"{self._engine.name}, {phase} of version {self.manifest.version}"

    def _too_slow(self, phase: str, what: str) -> WeightSyncError:
        return WeightSyncError(
            f"{self._where(phase)}: {what} in {self._engine.settings.sync_timeout_s:g} s ([engine] sync_timeout_s); "
            f"{self._loaded(phase)}"
        )

    async def _mismatched(self) -> str:
        """Return the tensor for which a rank has just refused the update; empty where it was for another reason."""
        with trio.move_on_after(self._engine.settings.sync_timeout_s):
            reports = await self._engine.control.reports()
            return next((report["mismatched"] for report in reports if report["mismatched"]), "")
        return ""

    def _loaded(self, phase: str) -> str:
        """Return in words how much of the version is in the engine when `phase` fails."""
        more = "at least " if phase == "update" else ""
        num_bytes = min(self._num_bytes, self.manifest.num_bytes)  # of an adapter, what is made of it is more
        return f"{more}{num_bytes} of {self.manifest.num_bytes} bytes loaded"

    def _check(self, answer: Any) -> None:
        """Compare what every rank of the engine computed itself with the manifest."""
        self._reports = answer["results"]
        check_reports(self.manifest, self._reports, self._engine.name)
        for report in self._reports:
            for part, seconds in report["seconds"].items():
                self._seconds[f"update.{part}"] = max(seconds, self._seconds.get(f"update.{part}", 0.0))

    def report(self) -> SyncReport:
        """Return what it took."""
        return SyncReport(
            engine=self._engine.name,
            version=self.manifest.version,
            verified=True,  # `_check` has raised otherwise
            num_bytes=sum(report["num_bytes"] for report in self._reports),
            seconds=self._seconds,
            stall_seconds=self._stall_s,
            encoding="full" if any(report["encoding"] == "full" for report in self._reports) else "delta",
            chain_break=next((report["chain_break"] for report in self._reports if report["chain_break"]), ""),
        )
