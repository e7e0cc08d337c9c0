"""What a run writes down while it goes: metrics.jsonl, spikes.jsonl, tokens.jsonl, status.json, trajectories, and
summary.json.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import trio

from asyncrl.guards import Alarm
from asyncrl.progress import Progress, moment
from asyncrl.protocols import StepResult
from asyncrl.run import Run
from asyncrl.run_directory import RunDirectory
from asyncrl.spikes import shown_line, spike_line
from asyncrl.status import EvaluationResult, RunStatus
from asyncrl.timeline import Timeline
from asyncrl.types import Group, PolicyVersion, TokenIds

WARM_START = "warm_start"
"""The `phase` of a line of metrics.jsonl that is about demonstrations; the others say "rollouts"."""

_LAST_STEPS = 200  # that are kept in memory for who looks at the run while it goes: half a megabyte
_STATUS_EVERY_S = 1.0  # at most, while groups finish; with thousands of episodes each would cost more than they do


class RunRecorder:
    """Writes to the run directory and shows on the console. A `run.Recorder`.

    Files with a line a step are cut back to the resumed version first, whatever was killed when.
    """

    def __init__(
        self,
        directory: RunDirectory,
        progress: Progress,
        decode: Callable[[TokenIds], str],
        *,
        version: PolicyVersion,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        decode_all: Callable[[Sequence[int]], str] | None = None,
        timeline: Timeline | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`version` is that of the checkpoint which the run goes on from, or 0.

        `sampling` is written down with the tokens that stand out, whose text is what `decode_all` returns: special
        tokens included.
        `wall_clock` dates what is written, in seconds since 1970; it may jump, and nothing else goes by it.
        """
        self._directory = directory
        self._progress = progress
        self._decode = decode
        self._decode_all = decode_all or (lambda token_ids: decode(TokenIds(token_ids)))
        self._sampling = dict(sampling)
        self._timeline = timeline
        self._wall_clock = wall_clock
        self._run: Run | None = None
        self._last_steps = deque[Mapping[str, float]](maxlen=_LAST_STEPS)
        self._last_spikes = deque[Mapping[str, Any]](maxlen=_LAST_STEPS)
        self._generated = (0.0, 0.0)
        self._status_due = 0.0
        for path in (directory.metrics, directory.spikes, directory.tokens, directory.guards):
            _cut_back(path, version)
        self._last_steps.extend(read_metrics(directory)[-_LAST_STEPS:])
        self._last_spikes.extend(token for line in read_spikes(directory)[-_LAST_STEPS:] for token in _largest(line))
        directory.summary.unlink(missing_ok=True)  # of before a resume: it must not speak for what follows

    def watch(self, run: Run) -> None:
        """Write about this run from now on."""
        self._run = run
        self._generated = (run.status.seconds_before, run.status.tokens_generated)
        self._write_status()

    def group(self, group: Group) -> None:
        """Append a finished group's episodes, decoded, to the file of the step it was admitted in."""
        if self._timeline is not None:
            self._timeline.group(group)
        path = self._directory.trajectories / f"version-{group.admitted_version}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            for trajectory in group.trajectories:
                line = {
                    "trajectory_id": trajectory.trajectory_id,
                    "task_id": trajectory.task_id,
                    "environment": trajectory.environment,
                    "status": trajectory.status,
                    "reward": trajectory.reward,
                    "reward_parts": trajectory.reward_parts,
                    "turns": trajectory.num_turns,
                    "versions": sorted({span.version for s in trajectory.segments for span in s.spans}),
                    "text": [self._decode(segment.token_ids) for segment in trajectory.segments],
                    "detail": trajectory.detail,
                    "extras": trajectory.extras,
                }
                file.write(json.dumps(line) + "\n")
        if trio.current_time() >= self._status_due:
            self._write_status()

    def step(self, record: Mapping[str, float], result: StepResult) -> None:
        """Append a step's line and show it."""
        if self._timeline is not None:
            self._timeline.step(record, result)
        seconds, generated = record["seconds"], record["tokens_generated"]
        before_s, before = self._generated
        rate = (generated - before) / max(seconds - before_s, 1e-9)
        self._generated = (seconds, generated)
        line = {**record, "generated_tokens_per_second": rate}
        self._append_metrics(line, phase="rollouts")
        self._last_steps.append(line)
        step = int(record["step"])
        spikes = spike_line(result, step=step, decode=self._decode_all, sampling=self._sampling)
        with self._directory.spikes.open("ab") as file:
            file.write(spikes)
        self._last_spikes.extend(_largest(json.loads(spikes)))
        if result.shown:
            with self._directory.tokens.open("ab") as file:
                file.write(shown_line(result, step=step, decode=self._decode_all))
        self._progress.step(line)
        self._write_status()

    def warm_step(self, record: Mapping[str, float]) -> None:
        """Append the line of a step on demonstrations and show it."""
        self._append_metrics(record, phase=WARM_START)
        self._progress.warm_step(record)
        self._write_status()

    def _append_metrics(self, record: Mapping[str, float], *, phase: str) -> None:
        with self._directory.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": phase, **record, "time": self._wall_clock()}) + "\n")

    def phase(self) -> None:
        """Write down what the run does now."""
        if self._timeline is not None and self._run is not None:
            self._timeline.phase(self._run.status.phase, self._run.status.waiting_for)
        self._write_status()

    def alarm(self, alarm: Alarm) -> None:
        """Append what a guard saw and did to guards.jsonl, and show it for good."""
        version = self._run.status.version if self._run else 0
        line = {"version": version, **asdict(alarm), "time": self._wall_clock()}
        with self._directory.guards.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._progress.alarm(alarm, pid=os.getpid())

    def stalled(self, chain: Sequence[str]) -> None:
        """Show who waits for whom, for good."""
        self._progress.stalled(chain)
        self._write_status()

    def evaluation(self, result: EvaluationResult) -> None:
        """Show a measurement; its tokens are not counted into the next step's rate."""
        if self._run is not None:
            self._generated = (self._run.seconds, self._run.status.tokens_generated)
        self._progress.evaluation(result)
        self._write_status()

    def _write_status(self) -> None:
        if self._run is not None:
            self._status_due = trio.current_time() + _STATUS_EVERY_S
            self._directory.write_json(self._directory.status, self.status())

    def status(self) -> dict[str, Any]:
        """Return what status.json holds, as of this moment."""
        assert self._run is not None, "status() after watch()"
        status = self._run.status
        return {
            "pid": os.getpid(),
            "time": self._wall_clock(),
            "phase": status.phase,
            "moment": moment(self._run),
            "straggler_group": self._run.learner_idle.straggler,
            "waiting": self._run.explain(),
            "counters": status.counters() | {"seconds": self._run.seconds},
            "accounting": self._run.ledger.statement().as_dict(),
            "selection": status.selection.report(),
            "journal": asdict(journal) if (journal := self._run.journal.statistics()) else None,
            "last_step": dict(status.last_step),
        }

    def last_steps(self) -> Sequence[Mapping[str, float]]:
        """Return the lines of the last steps on rollouts, oldest first."""
        return tuple(self._last_steps)

    def last_spikes(self) -> Sequence[Mapping[str, Any]]:
        """Return each of the last steps' token with the largest ratio, as spikes.jsonl holds it, oldest step first."""
        return tuple(self._last_spikes)

    def finish(self, run: Run, *, wall_seconds: float) -> dict[str, Any]:
        """Write summary.json and return it."""
        summary = summarise(run.status, wall_seconds=wall_seconds, unfinished=run.num_unfinished, seconds=run.seconds)
        self._directory.write_json(self._directory.summary, summary)
        self._write_status()
        return summary


def summarise(status: RunStatus, *, wall_seconds: float, seconds: float, unfinished: int) -> dict[str, Any]:
    """Return the run in figures: rates from 0 to 1, times in seconds."""
    measured = status.evaluations
    evaluation = {
        "before": next((r.solve_rate for r in measured if r.version == 0), None),
        "after_warm_start": next((r.solve_rate for r in measured if r.version == status.warm_start.get("steps")), None),
        "after": next((r.solve_rate for r in reversed(measured) if r.version == status.version > 0), None),
        "tasks": measured[0].num_tasks if measured else 0,
        "samples": measured[-1].num_samples if measured else 0,
        "failed": sum(result.num_failed for result in measured),
    }
    return {
        "steps": status.steps,
        "policy_version": status.version,
        "warm_start": dict(status.warm_start),
        "wall_seconds": wall_seconds,
        "training_seconds": seconds,
        "tokens_generated": status.tokens_generated,
        "tokens_trained": status.tokens_trained,
        "max_staleness_trained": status.max_staleness_trained,
        "max_importance_ratio": status.max_importance_ratio,
        "weight_syncs": status.weight_syncs,
        "weight_syncs_verified": status.weight_syncs_verified,
        "weight_sync_bytes": dict(status.weight_sync_bytes),
        "weight_sync_chain_breaks": dict(status.weight_sync_chain_breaks),
        "versions_superseded": status.versions_superseded,
        "last_sync": dict(status.last_sync),
        "generation_stall_seconds": status.generation_stall_seconds,
        "requests_moved": status.requests_moved,
        "tokens_carried": status.tokens_carried,
        "trajectories": dict(status.trajectories),
        "groups_trained": status.groups_trained,
        "groups_reused": status.groups_reused,
        "groups_dropped": dict(status.groups_dropped),
        "groups_unfinished": unfinished,
        "steps_skipped": status.steps_skipped,
        "eval": evaluation,
    }


def read_metrics(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the steps on rollouts, without lines that are torn: of a run that was killed, or that still writes."""
    return [line for line in _read_lines(directory.metrics) if line.get("phase") != WARM_START]


def read_warm_start(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the steps on demonstrations, as `read_metrics` does."""
    return [line for line in _read_lines(directory.metrics) if line.get("phase") == WARM_START]


def read_spikes(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the lines of `asyncrl.spikes.spike_line`, as `read_metrics` does."""
    return _read_lines(directory.spikes)


def read_tokens(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the lines of `asyncrl.spikes.shown_line`, as `read_metrics` does."""
    return _read_lines(directory.tokens)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with suppress(ValueError):  # a power failure leaves zeros; `asyncrl report` counts such lines
            found.append(json.loads(line))
    return found


def _largest(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the token with the largest ratio of a line of spikes.jsonl, with its step; none where none was kept."""
    chosen = [token for token in line.get("tokens", []) if token["by"].get("ratio") == 1]
    return [{"step": line["step"], **token} for token in chosen]


def _cut_back(path: Path, version: PolicyVersion) -> None:
    """Leave only the lines of steps up to `version`, in one replacement: a kill here loses nothing."""
    if not path.exists():
        return
    partial = path.with_suffix(".tmp")
    kept = (line for line in _read_lines(path) if line["version"] <= version)
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    partial.replace(path)
