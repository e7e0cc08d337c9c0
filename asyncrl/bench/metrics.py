"""What watching a run costs: in the learner's step, in the loop, at a scrape, on disk, and in the report.

Keys of the JSON file: `step` (seconds of a learner's step on real text, of which `watching_seconds` go into
diagnostics and attribution), `loop` (seconds of one step's counting, microseconds of one update), `scrape`
(milliseconds, series and bytes), `spikes` (bytes of 100 steps), `report` (seconds and bytes of that many steps), `runs`
(of real runs with everything on and with everything off: steps, the share of processor time that it adds to a step with
its interval of 95 %, and seconds of processor and of the clock a step), `ratios` and `goals`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trio
import trio.testing
from prometheus_client import CollectorRegistry, generate_latest

from asyncrl.bench.learner_batches import Text, ragged_groups, ragged_lengths
from asyncrl.bench.metrics_settings import GOALS, MetricsBench
from asyncrl.bench.timing import Report
from asyncrl.bench.watched_runs import bench_runs
from asyncrl.buffers import BufferSettings
from asyncrl.checkpoint import CheckpointStore
from asyncrl.configs import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.attribution import extreme_tokens, token_by_token
from asyncrl.learner.model import load_model
from asyncrl.learner.optimizer import Optimizer
from asyncrl.learner.report import attribute, diagnose
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.step import Stepper
from asyncrl.metrics import Source, collector
from asyncrl.protocols import StepResult
from asyncrl.report import read_run, render
from asyncrl.run import Limits, Parts, Run
from asyncrl.run_directory import RunDirectory
from asyncrl.spikes import spike_line
from asyncrl.status import RunStatus
from asyncrl.tallies import Tallies
from asyncrl.testing import FakeEngine, FakeEnvironment, FakeLearner, MemoryRecorder, Rates
from asyncrl.types import Group

_UPDATES = 9  # of one scored episode in `Tallies.count_group`: six counters, a status and two histograms
_SPIKE_STEPS = 100


def bench_metrics(bench: MetricsBench, config: Config | None = None) -> Report:
    """Return all figures; those of real runs where there is a `config` for them.

    Raises: ConfigError where the model is missing; AsyncRLError where a run fails.
    """
    if not (bench.model / "config.json").is_file():
        raise ConfigError(f"--model {bench.model} is no model directory: make demo prepares the usual one")
    step, result, groups = _step(bench)
    loop = _loop(groups, result)
    scrape = _scrape(bench, groups, result)
    spikes = len(spike_line(result, step=1, decode=str, sampling={"temperature": 1.0})) * _SPIKE_STEPS
    report = _report(bench, result)
    runs = None if config is None else bench_runs(config, pairs=bench.pairs, steps=bench.steps, on_run=_say)
    ratios = {
        **({} if runs is None else {"on_of_off": runs["cpu_share"]}),
        "watching_of_step": step["watching_seconds"] / step["seconds"],
        "scrape_ms": scrape["median_ms"],
        "update_us": loop["update_us"],
        "spikes_mb": spikes / 1e6,
        "report_s": report["seconds"],
        "report_mb": report["bytes"] / 1e6,
    }
    return {
        "step": step,
        "loop": loop,
        "scrape": scrape,
        "spikes": {"bytes": spikes, "steps": _SPIKE_STEPS},
        "report": report,
        "runs": runs,
        "ratios": ratios,
        "goals": [goal.report(ratios[goal.name]) for goal in GOALS if goal.name in ratios],
    }


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _step(bench: MetricsBench) -> tuple[Report, StepResult, Sequence[Group]]:
    """Return a step's seconds and what watching takes of them, a step's result, and its groups."""
    lengths = ragged_lengths(bench.segments, shortest=bench.shortest, longest=bench.longest)
    groups = ragged_groups(Text(bench.model), lengths, prompt_tokens=bench.prompt_tokens)
    settings = LearnerSettings(loss="dapo", baseline="none", scale="none")
    model = load_model(bench.model, dtype=torch.bfloat16, device=torch.device("cpu"))
    stepper = Stepper(model, Optimizer(model.tensors(), settings), settings, max_off_policyness=1 << 20)
    taken: list[float] = []
    result = stepper.step(groups)
    for _ in range(bench.rounds):
        began = time.perf_counter()
        result = stepper.step(groups)
        taken.append(time.perf_counter() - began)
    selection = stepper._select(groups)
    influence = torch.zeros(selection.batch.num_tokens, dtype=torch.float64)
    _, records, whole = stepper.accumulate(selection.batch, stepper._split(selection.batch), influence=influence)

    def watch() -> None:
        diagnose(whole, records, selection, settings)
        attribute(whole, selection)
        extreme_tokens(whole, influence, selection)
        token_by_token(whole, influence, selection)

    watching = _median(watch, bench.rounds)
    tokens = selection.batch.num_tokens
    return {"seconds": statistics.median(taken), "watching_seconds": watching, "num_tokens": tokens}, result, groups


def _loop(groups: Sequence[Group], result: StepResult) -> Report:
    """Return what counting costs the orchestrator."""
    tallies = Tallies()
    episodes = sum(len(group.trajectories) for group in groups)

    def count() -> None:
        for group in groups:
            tallies.count_group(group)

    counting = _median(count, 20)
    return {
        "group_seconds": counting,
        "step_seconds": _median(lambda: tallies.count_trained(groups, result), 20),
        "updates": _UPDATES * episodes,
        "update_us": 1e6 * counting / (_UPDATES * episodes),
    }


def _scrape(bench: MetricsBench, groups: Sequence[Group], result: StepResult) -> Report:
    """Return what a scrape of a run with so many environments takes."""

    async def main() -> Report:
        run = _run(Path(scratch))
        for index in range(bench.environments):
            for group in groups:
                named = tuple(replace(t, environment=f"environment {index}") for t in group.trajectories)
                renamed = replace(group, trajectories=named)
                run.status.count_group(renamed)
                run.status.tallies.count_trained([renamed], result)
        run.status.last_step = result.metrics
        registry = CollectorRegistry()
        registry.register(collector(Source(run=run)))
        text = generate_latest(registry)
        median = _median(lambda: generate_latest(registry), bench.scrapes)
        series = sum(not line.startswith(b"#") for line in text.splitlines())
        return {"median_ms": 1000 * median, "series": series, "bytes": len(text)}

    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        return trio.run(main, clock=trio.testing.MockClock())


def _run(directory: Path) -> Run:
    rates = Rates()
    engine = FakeEngine(rates, random.Random(0))
    environment = FakeEnvironment(rates, random.Random(1))
    return Run(
        Parts(environment=environment, sampler=engine, learner=FakeLearner(rates), engines=engine),
        BufferSettings(),
        Limits(steps=1),
        recorder=MemoryRecorder(),
        checkpoints=CheckpointStore(directory, keep=1),
        status=RunStatus(),
        stop=trio.Event(),
    )


def _report(bench: MetricsBench, result: StepResult) -> Report:
    """Return what the page of a long run takes; its steps are one real step's figures, again and again."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        directory = RunDirectory(Path(scratch))
        directory.config.write_text('[run]\nname = "bench"\n', encoding="utf-8")
        with directory.metrics.open("w", encoding="utf-8") as metrics, directory.spikes.open("wb") as spikes:
            for step in range(1, bench.report_steps + 1):
                record: dict[str, Any] = {
                    **result.metrics,
                    "phase": "rollouts",
                    "step": step,
                    "version": step,
                    "seconds": 20.0 * step,
                    "time": 20.0 * step,
                    "step_seconds": 10.0,
                    "solve_rate": 0.5,
                    "tokens_generated": 3000 * step,
                    "generated_tokens_per_second": 150.0,
                }
                metrics.write(json.dumps(record) + "\n")
                spikes.write(spike_line(result, step=step, decode=str, sampling={}))
        began = time.perf_counter()
        page = render([read_run(directory.path)]).encode("utf-8", errors="replace")
        return {"seconds": time.perf_counter() - began, "bytes": len(page), "steps": bench.report_steps}


def _median(call: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
