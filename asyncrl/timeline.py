"""When things happened in a run: events.jsonl, which `asyncrl trace` makes a trace of.

A line is [kind, track, began, seconds, facts], times in seconds on the orchestrator's clock, written when the thing has
ended; a "begin" line ties that clock to a date each time that the run is started. The newest are kept: of two files of
half the limit, the older one is dropped when the newer one is full. What a resumed run does again is there twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import trio

from asyncrl.protocols import Sampler, StepResult, SyncReport, Watch, WeightPuller
from asyncrl.run import Parts
from asyncrl.types import Completion, Group, PolicyVersion, TokenIds, WeightManifest

_BUFFER_BYTES = 1 << 16
_FLUSH_EVERY_S = 1.0  # what a kill may take
_STEP_METRICS = (
    *("loss", "grad_norm", "importance_ratio_max", "staleness_max", "reward_mean", "solve_rate", "tokens_trained"),
    *("seconds_packing", "seconds_forward_backward", "seconds_optimizer"),
)


class EventKind(StrEnum):
    """Of a line."""

    BEGIN = "begin"
    PHASE = "phase"
    """What the learner's side did."""
    STEP = "step"
    """An optimizer step's figures; no time of its own."""
    REQUEST = "request"
    """An engine's completion; the track is the trajectory's id."""
    GROUP = "group"
    SANDBOX = "sandbox"
    """A sandbox's start, or a command in it; the track is the sandbox's id."""
    SYNC = "sync"
    """One engine's pull of one version; the track is the engine."""


class Timeline:
    """Writes down when things happened; closed by `with`. Nothing is written where it may hold no byte.

    Example:
        >>> Timeline(Path("events.jsonl"), max_bytes=0).note(EventKind.PHASE, "stepping", 0.0, 1.0)
    """

    def __init__(self, path: Path, *, max_bytes: int, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._max_bytes = max_bytes // 2
        self._wall_clock = wall_clock
        self._buffer = bytearray()
        self._due = 0.0
        self._size = path.stat().st_size if path.exists() else 0
        self._encoder = msgspec.json.Encoder()
        self._pulled: dict[str, PolicyVersion] = {}
        self._phase: tuple[str, str, float] | None = None

    def __enter__(self) -> Timeline:
        now = trio.current_time()
        self.note(EventKind.BEGIN, "", now, 0.0, {"time": self._wall_clock()})
        self._due = now + _FLUSH_EVERY_S
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._phase is not None:
            self.phase("", "")
        self.flush()

    def note(
        self, kind: EventKind, track: str, began: float, seconds: float, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Write down something that has ended."""
        if not self._max_bytes:
            return
        line = [kind, track, round(began, 6), round(seconds, 6), facts or {}]
        self._buffer += self._encoder.encode(line) + b"\n"
        now = began + seconds
        if len(self._buffer) >= _BUFFER_BYTES or now >= self._due:
            self._due = now + _FLUSH_EVERY_S
            self.flush()

    def flush(self) -> None:
        """Hand what was noted to the system."""
        if not self._buffer:
            return
        if self._size and self._size + len(self._buffer) > self._max_bytes:
            self._path.replace(older(self._path))
            self._size = 0
        with self._path.open("ab") as file:
            file.write(self._buffer)
        self._size += len(self._buffer)
        self._buffer.clear()

    # --- what happens in a run ------------------------------------------------------------------------------------

    def phase(self, phase: str, waiting_for: str) -> None:
        """Note what the learner's side does from now on."""
        now = trio.current_time()
        if self._phase is not None:
            if self._phase[:2] == (phase, waiting_for):
                return
            before, words, began = self._phase
            self.note(EventKind.PHASE, before, began, now - began, {"waiting_for": words} if words else None)
        self._phase = (phase, waiting_for, now) if phase else None

    def step(self, record: Mapping[str, float], result: StepResult) -> None:
        """Note a step's figures."""
        facts = {key: value for key in _STEP_METRICS if (value := record.get(key)) is not None}
        facts |= {"step": int(record["step"]), "version": result.version, "stepped": result.stepped}
        self.note(EventKind.STEP, "", trio.current_time(), 0.0, facts)

    def request(self, trajectory_id: str, began: float, completion: Completion) -> None:
        """Note a completion; what of its time was not the engine's it has waited for a place."""
        seconds = trio.current_time() - began
        facts = {
            "engine": completion.engine,
            "tokens": len(completion.token_ids),
            "versions": sorted({span.version for span in completion.spans}),
            "finish": completion.finish_reason,
            "waited": round(max(0.0, seconds - completion.seconds), 6),
        }
        self.note(EventKind.REQUEST, trajectory_id, began, seconds, facts)

    def group(self, group: Group) -> None:
        """Note a finished group and how its episodes ended."""
        facts = {
            "task": group.task.task_id,
            "environment": group.task.environment,
            "version": group.admitted_version,
            "episodes": {
                t.trajectory_id: [t.status, t.reward, round(t.seconds, 6), t.num_turns] for t in group.trajectories
            },
        }
        self.note(
            EventKind.GROUP, str(group.group_id), group.admitted_at, trio.current_time() - group.admitted_at, facts
        )

    def sandbox(self, sandbox_id: str, what: str, began: float, outcome: str) -> None:
        """Note a sandbox's start, or a command in it, that has just ended."""
        facts = {"what": what, "outcome": outcome}
        self.note(EventKind.SANDBOX, sandbox_id, began, trio.current_time() - began, facts)

    def sync(self, reports: Sequence[SyncReport], began: float) -> None:
        """Note each engine's pull, once: calls that wait for one another return the same reports."""
        for report in reports:
            if self._pulled.get(report.engine, -1) < report.version:
                self._pulled[report.engine] = report.version
                facts = {
                    "version": report.version,
                    "bytes": report.num_bytes,
                    "encoding": report.encoding,
                    "verified": report.verified,
                    "stall_seconds": round(report.stall_seconds, 6),
                    "phases": {name: round(seconds, 6) for name, seconds in report.seconds.items()},
                }
                self.note(EventKind.SYNC, report.engine, began, trio.current_time() - began, facts)

    def watch(self, parts: Parts) -> Parts:
        """Return the parts, requests and pulls of theirs written down."""
        if not self._max_bytes:
            return parts
        return replace(parts, sampler=_WatchedSampler(parts.sampler, self), engines=_WatchedPuller(parts.engines, self))


def older(path: Path) -> Path:
    """Return where the older half of the events lies."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class _WatchedSampler:
    """A `Sampler` whose completions are written down."""

    def __init__(self, sampler: Sampler, timeline: Timeline) -> None:
        self._sampler = sampler
        self._timeline = timeline

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """See `protocols.Sampler`."""
        began = trio.current_time()
        completion = await self._sampler.sample(
            token_ids, max_tokens=max_tokens, trajectory_id=trajectory_id, stop_token_ids=stop_token_ids, watch=watch
        )
        self._timeline.request(trajectory_id, began, completion)
        return completion


class _WatchedPuller:
    """A `WeightPuller` whose pulls are written down."""

    def __init__(self, engines: WeightPuller, timeline: Timeline) -> None:
        self._engines = engines
        self._timeline = timeline

    async def make_room(self) -> Collection[PolicyVersion]:
        """See `protocols.WeightPuller`."""
        return await self._engines.make_room()

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """See `protocols.WeightPuller`."""
        began = trio.current_time()
        reports = await self._engines.pull_all(manifest)
        self._timeline.sync(reports, began)
        return reports


def read_events(path: Path) -> list[list[Any]]:
    """Return the events that are kept, oldest first, without torn lines, of a run that was killed or still writes."""
    found = []
    for file in (older(path), path):
        with suppress(FileNotFoundError):
            for line in file.read_bytes().split(b"\n")[:-1]:
                with suppress(msgspec.DecodeError):
                    found.append(msgspec.json.decode(line))
    return [event for event in found if isinstance(event, list) and len(event) == 5]
