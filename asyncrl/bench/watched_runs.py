"""Everything that watches a run on against all of it off: real runs in turns, by the processor time of their steps.

Two runs never sample the same completions, so that a step's time is told from the work in it by least squares:

    seconds of processor = a * tokens sampled + b * tokens learned from + c * tokens only forwarded + d + e * watched

over the steps of all runs. Processor time, of the run and of all its processes, is what other programs on the same
cores change least; on cores of its own a run on a CPU takes as much longer as it takes more of it.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio

from asyncrl.bench.timing import Report
from asyncrl.configs import Config, dump_config
from asyncrl.errors import AsyncRLError
from asyncrl.guards import GuardSettings, actions
from asyncrl.metrics.sampling import child_pids
from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory

_SCRAPE_EVERY_S = 5.0  # a third of the usual interval
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_LAST_LINES = 15
_ON = {"learner.diagnostics": "true", "metrics.serve": "true", "metrics.page": "true"}
_OFF = {
    "learner.diagnostics": "false",
    "metrics.serve": "false",
    "metrics.events_mib": "0",
    **{f"guards.{name}": "off" for name in actions(GuardSettings())},
    "guards.controller": "off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From one step's end to the next one's."""

    watched: bool
    cpu_seconds: float
    """Of the run and all its processes."""
    seconds: float
    sampled: float
    """Tokens."""
    learned: float
    """Tokens of the segments that have a gradient."""
    forwarded: float
    """Tokens of those that have none."""


def bench_runs(config: Config, *, pairs: int, steps: int, on_run: Callable[[str], None] = lambda words: None) -> Report:
    """Return what watching adds to a step, over `pairs` of runs of so many measured steps each.

    The order changes from pair to pair, so that what drifts is on both sides. Raises: AsyncRLError where a run fails.
    """
    stretches: list[Stretch] = []
    for number in range(pairs):
        for watched in (True, False) if number % 2 == 0 else (False, True):
            found = trio.run(_train, config, steps, watched)
            mean = statistics.fmean(stretch.cpu_seconds for stretch in found)
            on_run(f"everything {'on' if watched else 'off'}: {mean:.1f} s of processor a step")
            stretches += found
    return compare(stretches)


def compare(stretches: Sequence[Stretch]) -> Report:
    """Return the share of a step's processor time that watching adds, with its interval of 95 %.

    Raises: AsyncRLError where there are too few steps to tell it from their work.
    """
    rows = np.array([[s.sampled, s.learned, s.forwarded, 1.0, float(s.watched)] for s in stretches])
    rows /= np.maximum(np.abs(rows).max(axis=0), 1.0)  # tokens are thousands, and the last column is 0 or 1
    taken = np.array([s.cpu_seconds for s in stretches])
    rank = int(np.linalg.matrix_rank(rows))  # less than all where a kind of work is in no step
    if len(rows) <= rank or np.linalg.matrix_rank(rows[:, :-1]) == rank:
        raise AsyncRLError(f"{len(rows)} steps are too few to tell watching from their work: raise --steps or --pairs")
    fitted, *_ = np.linalg.lstsq(rows, taken, rcond=None)
    rest = taken - rows @ fitted
    variance = float(rest @ rest) / (len(rows) - rank)
    deviation = math.sqrt(variance * np.linalg.pinv(rows.T @ rows)[-1, -1])
    off = statistics.fmean(s.cpu_seconds for s in stretches if not s.watched)
    extra, margin = float(fitted[-1]) / off, 1.96 * deviation / off
    return {
        "steps": len(rows),
        "cpu_share": extra,
        "cpu_share_low": extra - margin,
        "cpu_share_high": extra + margin,
        "cpu_seconds_on": statistics.fmean(s.cpu_seconds for s in stretches if s.watched),
        "cpu_seconds_off": off,
        "seconds_on": statistics.fmean(s.seconds for s in stretches if s.watched),
        "seconds_off": statistics.fmean(s.seconds for s in stretches if not s.watched),
    }


async def _train(config: Config, steps: int, watched: bool) -> list[Stretch]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        path, directory = Path(scratch) / "bench.toml", RunDirectory(Path(scratch) / "run")
        path.write_text(dump_config(config), encoding="utf-8")
        settings = {
            "run.directory": str(directory.path),
            "run.steps": steps + 1,  # the first one pays for the start
            "run.max_minutes": 0,
            "run.checkpoint_every_steps": 0,
            "evaluation.samples": 0,
            **(_ON if watched else _OFF),
        }
        sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "asyncrl", "train", str(path), *sets]
        cpu = await _cpu_after_steps(command)
        return _stretches(read_metrics(directory), cpu, watched=watched)


async def _cpu_after_steps(command: Sequence[str]) -> list[float]:
    """Run a training, scrape it where it serves, and return its processor time as of each step that it prints."""
    found: list[float] = []
    lines: list[str] = []
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process: trio.Process = await nursery.start(partial(start, command, env=environment))
        assert process.stdout is not None
        rest = b""
        async for chunk in process.stdout:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in (part.decode(errors="replace") for part in whole):
                lines.append(line)
                if served := re.search(r"http://\S+/metrics", line):
                    nursery.start_soon(_scrape, served[0])
                if line.startswith("step "):
                    found.append(cpu_seconds(process.pid))
        await process.wait()
        nursery.cancel_scope.cancel()
    if process.returncode:
        last = "\n".join(lines[-_LAST_LINES:])
        raise AsyncRLError(f"asyncrl exited with code {process.returncode}; its last lines:\n{last}")
    return found


async def _scrape(url: str) -> None:
    """Read a run's metrics and its page as Prometheus and a person would, until cancelled."""
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        while True:
            try:
                for address in (url, url.removesuffix("metrics")):
                    (await client.get(address)).raise_for_status()
            except httpx.TransportError:
                pass  # the port is open before it is served, and closed before the run has ended
            await trio.sleep(_SCRAPE_EVERY_S)


def cpu_seconds(pid: int) -> float:
    """Return the processor time so far of a process and all below it, those that it has waited for included."""
    total, waiting = 0.0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            fields = Path(f"/proc/{one}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        total += _TICK_S * sum(map(int, fields[11:15]))
        waiting += child_pids(one)
    return total


def _stretches(records: Sequence[Mapping[str, Any]], cpu: Sequence[float], *, watched: bool) -> list[Stretch]:
    assert len(records) == len(cpu), (len(records), len(cpu))
    found = []
    for (before, then), (record, now) in pairwise(zip(records, cpu, strict=True)):
        idle = record["num_segments_idle"] / record["num_segments"]
        found.append(
            Stretch(
                watched=watched,
                cpu_seconds=now - then,
                seconds=record["seconds"] - before["seconds"],
                sampled=record["tokens_generated"] - before["tokens_generated"],
                learned=record["tokens_batch"] * (1 - idle),
                forwarded=record["tokens_batch"] * idle,
            )
        )
    return found
