"""Measure speed. Every figure is compared with something measured in the same call, since machines differ.

asyncrl bench step --json step.json       seconds per optimizer step against TRL's GRPOTrainer
asyncrl bench step --without-trl
asyncrl bench async --json async.json     optimizer steps per hour, asynchronous against synchronous
asyncrl bench spikes --directory spikes     the largest importance weights by the bound on staleness, clipped and not
asyncrl bench learner --json learner.json what one forward and backward pass costs, against plain transformers
asyncrl bench weight-sync --json sync.json what new weights cost engines that generate, against a reload from disk
asyncrl bench buffer --json buffer.json   what buffer, journal and loop cost, against plain writes to the same disk
asyncrl bench atropos --json atropos.json groups a second into the server of Atropos's contract
asyncrl bench metrics --json metrics.json what watching a run costs: in a step, at a scrape, on disk, in the report
asyncrl bench sandbox --json sandbox.json what sandboxes, forks and verdicts cost, against plain processes
asyncrl bench gateway --json gateway.json what the gateway costs agents, against asking the engine directly
asyncrl bench scale --json scale.json     the wire, ranks, checkpoints, rollouts under way, each beside something plain
asyncrl bench gpu --json gpu.json         what a GPU makes of the learner: speed, memory, attention, packing, copies
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.bench.atropos import AtroposBench, bench_atropos
from asyncrl.bench.atropos import table as atropos_table
from asyncrl.bench.bounds import BoundRate, bench_bounds
from asyncrl.bench.buffer import bench_buffer
from asyncrl.bench.gateway import GatewayBench, bench_gateway
from asyncrl.bench.gateway import table as gateway_table
from asyncrl.bench.learner import bench_learner
from asyncrl.bench.learner import table as learner_table
from asyncrl.bench.learner_settings import LearnerBench
from asyncrl.bench.loop import bench_loop
from asyncrl.bench.sandbox import bench_sandbox
from asyncrl.bench.sandbox import table as sandbox_table
from asyncrl.bench.spikes import CLIPPED, UNCLIPPED, bench_spikes
from asyncrl.bench.spikes import draw as draw_spikes
from asyncrl.bench.step import bench_step
from asyncrl.bench.weight_sync import bench_weight_sync
from asyncrl.bench.weight_sync import tables as weight_sync_tables
from asyncrl.bench.weight_sync_scene import WeightSyncBench
from asyncrl.commands.arguments import add_sandbox_arguments, check_picture, sandbox_settings_of
from asyncrl.commands.bench_gpu import add_benchmark as add_gpu_benchmark
from asyncrl.commands.bench_metrics import add_benchmark as add_metrics_benchmark
from asyncrl.commands.bench_scale import add_benchmark as add_scale_benchmark
from asyncrl.errors import ConfigError

HELP = "measure speed"

_MODEL = Path("models/smollm2-135m-instruct")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    step = benches.add_parser("step", help="one optimizer step, generation included, against TRL")
    step.add_argument("--config", type=Path, default=Path("configs/demo.toml"), help="default configs/demo.toml")
    step.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="replace one setting")
    step.add_argument("--steps", type=int, default=3, help="timed steps of each trainer, after one for warm-up")
    step.add_argument("--without-trl", action="store_true", help="time asyncrl alone")
    step.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    step.set_defaults(command=_step)
    bounds = benches.add_parser(
        "async",
        help="optimizer steps per hour by the bound on staleness, with slow episodes",
        description="Trains twice, for --minutes each and the time to start: engine, learner and tasks are the real "
        "ones. Episodes wait as [environment.latency] says, by default a median of 15 s.",
    )
    bounds.add_argument("--config", type=Path, default=Path("configs/demo.toml"), help="default configs/demo.toml")
    bounds.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="replace one setting")
    bounds.add_argument("--minutes", type=float, default=8.0, metavar="M", help="of each run (default: 8)")
    bounds.add_argument(
        "--bounds",
        type=int,
        nargs="+",
        default=[0, 3],
        metavar="N",
        help="values of max_off_policyness (default: 0 3); the ratio is the last one's to the first one's",
    )
    bounds.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    bounds.set_defaults(command=_bounds)
    spikes = benches.add_parser(
        "spikes",
        help="the largest importance weights by the bound on staleness, with and without a clip",
        description="Trains once for each bound and loss. The keys of the JSON file are listed in "
        "asyncrl/bench/spikes.py; `asyncrl report` compares the runs. A picture needs matplotlib (asyncrl[plot]).",
    )
    spikes.add_argument("--config", type=Path, default=Path("configs/demo.toml"), help="default configs/demo.toml")
    spikes.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="replace one setting")
    spikes.add_argument("--steps", type=int, default=40, metavar="N", help="of each run (default: 40)")
    spikes.add_argument("--bounds", type=int, nargs="+", default=[1, 3], metavar="N", help="default 1 3")
    spikes.add_argument(
        "--losses",
        nargs="+",
        default=[CLIPPED, UNCLIPPED],
        metavar="LOSS",
        help=f"(default: {CLIPPED}, which clips the ratio, and {UNCLIPPED}, which does not)",
    )
    spikes.add_argument("--directory", type=Path, required=True, help="for the runs, which are kept; new or empty")
    spikes.add_argument("--picture", type=Path, metavar="FILE", help="draw them: .svg, .png or .pdf")
    spikes.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    spikes.set_defaults(command=_spikes)
    learner = benches.add_parser(
        "learner",
        help="forward and backward against transformers, prefix sharing, the loss's share, and how exact it is",
        description="The keys of the JSON file are listed in asyncrl/bench/learner.py. Takes about ten minutes.",
    )
    for option in fields(LearnerBench):
        flag = f"--{option.name.replace('_', '-')}"
        if option.name == "model":
            learner.add_argument(flag, type=Path, default=_MODEL, help=f"a model directory (default: {_MODEL})")
        else:
            learner.add_argument(flag, type=int, default=option.default, metavar="N", help=f"default {option.default}")
    learner.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    learner.set_defaults(command=_learner)
    sync = benches.add_parser(
        "weight-sync",
        help="new weights into engines that generate: standstill, throughput, bytes, against a reload from disk",
        description="The keys of the JSON file are listed in asyncrl/bench/weight_sync.py. Takes about eleven minutes.",
    )
    sync.add_argument("--model", type=Path, default=_MODEL, help=f"a model directory (default: {_MODEL})")
    sizes = {option.name: option.default for option in fields(WeightSyncBench)}
    sync.add_argument(
        "--engines", type=int, nargs="+", default=sizes["engines"], metavar="N", help="at once (default: 1 2)"
    )
    for name, words in (
        ("requests", "completions that run all the time, over all engines"),
        ("tokens", "of a completion, about"),
        ("seconds", "of one window"),
        ("rounds", "of windows without syncs, with whole versions, and with deltas"),
        ("threads", "of each engine; 0 shares out the cores"),
    ):
        words = f"{words} (default: {sizes[name]})"
        sync.add_argument(f"--{name}", type=int, default=sizes[name], metavar="N", help=words)
    sync.add_argument(
        "--learning-rate",
        type=float,
        default=sizes["learning_rate"],
        metavar="R",
        help="how far a step moves every weight, which decides how many a delta holds (default: 1e-5)",
    )
    sync.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    sync.set_defaults(command=_weight_sync)
    buffer = benches.add_parser("buffer", help="buffer, journal and loop: what they cost, and whether memory grows")
    buffer.add_argument(
        "--trajectories",
        type=int,
        nargs="+",
        default=[10**4, 10**5, 10**6],
        metavar="N",
        help="sizes of the buffer (default: 10000 100000 1000000; beyond half the memory, token arrays are shared)",
    )
    buffer.add_argument("--megabytes", type=int, default=128, help="written per round (default: 128)")
    buffer.add_argument("--always-records", type=int, default=200, help="synced one by one (default: 200)")
    buffer.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure (default: here)")
    buffer.add_argument("--in-flight", type=int, default=4096, metavar="N", help="episodes under way (default: 4096)")
    buffer.add_argument("--episode-seconds", type=float, default=6.0, metavar="S", help="their median (default: 6)")
    buffer.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of measuring them (default: 20)")
    buffer.add_argument("--steps", type=int, default=2000, metavar="N", help="simulated, for memory (default: 2000)")
    buffer.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    buffer.set_defaults(command=_buffer)
    atropos = benches.add_parser(
        "atropos",
        help="groups a second into the server of Atropos's contract, against the original server",
        description="The keys of the JSON file are listed in asyncrl/bench/atropos.py. Takes less than a minute.",
    )
    for option in fields(AtroposBench):
        if option.name != "against":
            flag = f"--{option.name}"
            atropos.add_argument(flag, type=int, default=option.default, metavar="N", help=f"default {option.default}")
    atropos.add_argument(
        "--against", default="", metavar="PYTHON", help="a Python that has atroposlib 0.4.0; without it asyncrl alone"
    )
    atropos.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    atropos.set_defaults(command=_atropos)
    add_metrics_benchmark(benches, _MODEL)
    add_gpu_benchmark(benches, _timed_say)
    add_scale_benchmark(benches, _timed_say)
    sandbox = benches.add_parser("sandbox", help="starts, commands, forks and verdicts, against plain processes")
    add_sandbox_arguments(sandbox)
    sandbox.add_argument("--rounds", type=int, default=50, metavar="N", help="of each measurement (default: 50)")
    sandbox.add_argument("--together", type=int, default=64, metavar="N", help="open at once (default: 64)")
    sandbox.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    sandbox.set_defaults(command=_sandbox)
    gateway = benches.add_parser(
        "gateway",
        help="latency that the gateway adds, requests a second, memory of a session, many sessions at once",
        description="The keys of the JSON file are listed in asyncrl/bench/gateway.py. Takes about a minute; no model.",
    )
    for option in fields(GatewayBench):
        flag = f"--{option.name.replace('_', '-')}"
        gateway.add_argument(flag, type=int, default=option.default, metavar="N", help=f"default {option.default}")
    gateway.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    gateway.set_defaults(command=_gateway)


def main(arguments: argparse.Namespace) -> int:
    """Never called: each benchmark has its own."""
    raise AssertionError(arguments)


def _step(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be >= 1, got {arguments.steps}")
    _check_json(arguments.json)
    report = bench_step(arguments.config, arguments.set, steps=arguments.steps, with_trl=not arguments.without_trl)
    for name in ("asyncrl", "trl"):
        if name in report:
            times = report[name]
            print(
                f"{name}: {times['mean_seconds']:.1f} s a step over {len(times['seconds'])} steps, completions of "
                f"{times['mean_completion_tokens']:.0f} tokens on average"
            )
    if "ratio" in report:
        print(f"asyncrl is {report['ratio']:.1f} times faster a step, {report['ratio_per_token']:.1f} times a token")
    _write(arguments.json, report)
    return 0


def _bounds(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.minutes < float("inf"):
        raise ConfigError(f"--minutes must be > 0, got {arguments.minutes}")
    if len({*arguments.bounds}) < max(2, len(arguments.bounds)):
        raise ConfigError(f"--bounds must be at least two different ones, got {arguments.bounds}")
    _check_json(arguments.json)
    report = bench_bounds(
        arguments.config, arguments.set, minutes=arguments.minutes, bounds=arguments.bounds, on_rate=_show_rate
    )
    print(f"{arguments.bounds[-1]} takes {report['ratio']:.2f} times the steps an hour of {arguments.bounds[0]}")
    _write(arguments.json, report)
    return 0


def _show_rate(run: BoundRate) -> None:
    print(
        f"max_off_policyness = {run.max_off_policyness}: {run.steps_per_hour:.1f} steps an hour over {run.steps} of "
        f"them; the learner waited for groups {run.learner_idle_share:.0%} of the time, the engines had nothing to do "
        f"{run.engine_idle_share:.0%}",
        flush=True,
    )


def _spikes(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be >= 1, got {arguments.steps}")
    for name in ("bounds", "losses"):
        values = getattr(arguments, name)
        if len({*values}) < len(values):
            raise ConfigError(f"--{name} must differ from each other, got {values}")
    _check_json(arguments.json)
    if arguments.picture is not None:
        check_picture(arguments.picture)
    report = bench_spikes(
        arguments.config,
        arguments.set,
        directory=arguments.directory,
        steps=arguments.steps,
        bounds=arguments.bounds,
        losses=arguments.losses,
        on_run=_show_spikes,
    )
    for loss, times in report["growth"].items():
        print(f"{loss}: the largest bound's spikes reach {times:.1f} times as far above 1 as the smallest's")
    if arguments.picture is not None:
        draw_spikes(report, arguments.picture)
        print(f"picture in {arguments.picture}")
    _write(arguments.json, report)
    return 0


def _show_spikes(run: Mapping[str, Any]) -> None:
    figures = {name: "none" if run[name] is None else f"{run[name]:.2f}" for name in _SPIKE_FIGURES}
    print(
        f"{run['loss']}, max_off_policyness = {run['max_off_policyness']}, {run['steps']} steps: largest ratio "
        f"{figures['ratio_max']} (median of the steps' {figures['ratio_max_median']}, above 2 in "
        f"{run['steps_above_2']}), gradient norm {figures['grad_norm_median']}, at most {figures['grad_norm_max']}",
        flush=True,
    )


_SPIKE_FIGURES = ("ratio_max", "ratio_max_median", "grad_norm_median", "grad_norm_max")


def _learner(arguments: argparse.Namespace) -> int:
    sizes = {option.name: getattr(arguments, option.name) for option in fields(LearnerBench)}
    _check_json(arguments.json)
    report = bench_learner(LearnerBench(**sizes), say=_timed_say())
    Console().print(learner_table(report))
    _write(arguments.json, report)
    return 0


def _weight_sync(arguments: argparse.Namespace) -> int:
    _check_json(arguments.json)
    sizes = {option.name: getattr(arguments, option.name) for option in fields(WeightSyncBench)}
    bench = WeightSyncBench(**sizes | {"engines": tuple(arguments.engines)})
    report = bench_weight_sync(bench, say=_timed_say())
    Console().print(*weight_sync_tables(report))
    _write(arguments.json, report)
    return 0


def _timed_say() -> Callable[[str], None]:
    start = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {words}", file=sys.stderr, flush=True)

    return say


def _buffer(arguments: argparse.Namespace) -> int:
    least: dict[str, float] = {"trajectories": 16, "megabytes": 1, "always_records": 1, "in_flight": 8, "steps": 100}
    least |= {"episode_seconds": 0.1, "seconds": 0.1}
    for name, lowest in least.items():
        found = getattr(arguments, name)
        if not (found := min(found) if isinstance(found, list) else found) >= lowest:  # so that NaN is refused too
            raise ConfigError(f"--{name.replace('_', '-')} must be >= {lowest}, got {found}")
    _check_json(arguments.json)
    if not arguments.directory.is_dir():
        raise ConfigError(f"--directory: there is no directory {arguments.directory}")
    report = bench_loop(  # before the others have stretched the heap
        arguments.directory,
        in_flight=arguments.in_flight,
        episode_s=arguments.episode_seconds,
        seconds=arguments.seconds,
        steps=arguments.steps,
    )
    report |= bench_buffer(
        arguments.trajectories,
        arguments.directory,
        megabytes=arguments.megabytes,
        always_records=arguments.always_records,
    )
    for cost in report["buffer"]:
        memory = f", {cost['bytes_per_token']:.1f} bytes a token" if cost["bytes_per_token"] else ", shared arrays"
        print(
            f"buffer of {cost['trajectories']} trajectories: {cost['insertions_per_second']:.0f} insertions and "
            f"{cost['takes_per_second']:.0f} takes a second{memory}"
        )
    for cost in report["journal"]:
        print(
            f"journal, fsync {cost['fsync']}: {cost['megabytes_per_second']:.0f} MB/s, {cost['ratio']:.2f} of plain "
            f"writes of the same bytes"
        )
    loop, growth = report["loop"], report["memory"]["kib_per_100_steps"]
    print(
        f"orchestrator with {loop['in_flight']:.0f} episodes under way: {loop['cpu_ms_per_trajectory']:.2f} ms of CPU "
        f"per finished one, its loop late by {loop['lag_p99_ms']:.1f} ms (p99)"
    )
    print(
        f"memory over {report['memory']['steps']} steps: {growth['slope']:+.1f} KiB per 100 steps "
        f"({growth['low']:+.1f} to {growth['high']:+.1f})"
    )
    print(f"resuming reads 1 GiB of journal in {report['resume']['seconds_per_gib']:.1f} s")
    _write(arguments.json, report)
    return 0


def _atropos(arguments: argparse.Namespace) -> int:
    sizes = {option.name: getattr(arguments, option.name) for option in fields(AtroposBench)}
    bench = AtroposBench(**sizes)
    _check_json(arguments.json)
    report = bench_atropos(bench)
    Console().print(atropos_table(report))
    for goal in report.get("goals", ()):
        print(f"{goal['value']:.1f} times the original server's groups a second (promised: {goal['limit']:g})")
    _write(arguments.json, report)
    return 0


def _sandbox(arguments: argparse.Namespace) -> int:
    settings = sandbox_settings_of(arguments.config, arguments.set)
    for name, found, most in (("rounds", arguments.rounds, 10**6), ("together", arguments.together, settings.max_open)):
        if not 1 <= found <= most:
            raise ConfigError(f"--{name} must be from 1 to {most}, got {found}")
    _check_json(arguments.json)
    report = bench_sandbox(settings, rounds=arguments.rounds, together=arguments.together)
    Console().print(sandbox_table(report))
    _write(arguments.json, report)
    return 0


def _gateway(arguments: argparse.Namespace) -> int:
    sizes = {option.name: getattr(arguments, option.name) for option in fields(GatewayBench)}
    for name, found in sizes.items():
        if not 1 <= found <= 4000:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 1 to 4000, got {found}")
    _check_json(arguments.json)
    report = bench_gateway(GatewayBench(**sizes), say=_timed_say())
    Console().print(gateway_table(report))
    _write(arguments.json, report)
    return 0


def _check_json(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json: there is no directory {path.parent}")


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"figures in {path}")
