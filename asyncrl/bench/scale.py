"""What grows with a cluster, each figure beside something measured in the same call. Keys of the report:

wire            messages (there and back), frames (of 256 bytes, one way), batches (frames of a step's records) and
                records (the same with encoding and decoding) between two processes: the rate, the plain socket's,
                and their ratio
hand_over       a batch from the orchestrator until its records are in 2 ranks: seconds, plain_seconds (the same
                bytes to both over plain sockets), num_bytes, tokens
learner         one_process, ranks: step_seconds, save_seconds, resume_seconds, num_bytes of the checkpoint,
                plain_write_seconds and plain_read_seconds of as many bytes on the same disk
  overhead        of FSDP2 on 2 gloo ranks of one thread, over one process of two threads: of the seconds of a step
  save_seconds_per_gb, resume_seconds_per_gb    of the one process and of the ranks; resuming builds the learner
                from the checkpoint, as a run that goes on does
in_flight       rollouts under way at one moment: kib_per_rollout besides tokens (ids, log-probs), kib_of_tokens,
                cpu_ms_per_turn of the loop from a rollout's start to its second request, kib_per_task of a bare
                    trio task
requests        to a stand-in for an engine over HTTP: per second, per second of the asking process's CPU
ratios, goals   what the project promises, and whether it is kept
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from rich.table import Table

from asyncrl.bench.asked_process import asked_process
from asyncrl.bench.scale_settings import GOALS, ScaleBench
from asyncrl.bench.scale_wire import bench_wire

_GB = 1e9


def bench_scale(bench: ScaleBench, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the report described above. Raises: AsyncRLError where a process of it ends."""
    say("the wire against a plain socket")
    wire = bench_wire(frames=bench.frames, megabytes=bench.megabytes, rounds=bench.rounds, groups=bench.groups)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=bench.directory) as scratch:
        report = {"wire": wire} | trio.run(_bench, bench, Path(scratch), say)
    ratios = {f"wire_{name}": wire[name]["ratio"] for name in ("messages", "frames")}
    ratios |= {"wire_megabytes": wire["batches"]["ratio"], "kib_per_rollout": report["in_flight"]["kib_per_rollout"]}
    return report | {"ratios": ratios, "goals": [goal.report(ratios[goal.name]) for goal in GOALS]}


async def _bench(bench: ScaleBench, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    return await _flight(bench, directory, say) | (await _ranks(bench, directory, say) if bench.parameters else {})


async def _flight(bench: ScaleBench, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    job: dict[str, Any] = {"rollouts": bench.rollouts, "requests": bench.requests, "directory": str(directory)}
    module, engine_module = "asyncrl.bench.scale_flight", "asyncrl.bench.gateway_worker"
    async with asked_process("engine", engine_module, {"kind": "engine"}, directory=directory) as engine:
        job["engine"] = engine.hello["url"]
        async with asked_process("rollouts", module, job, directory=directory) as flight:
            say(f"{bench.rollouts} bare tasks, and as many rollouts under way")
            tasks = await flight.ask("tasks")
            report: dict[str, Any] = {"in_flight": await flight.ask("rollouts") | tasks}
            if bench.requests:
                say(f"{bench.requests} requests to an engine")
                report["requests"] = await flight.ask("requests")
    return report


async def _ranks(bench: ScaleBench, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    job = {"groups": bench.groups, "parameters": bench.parameters, "steps": bench.steps, "directory": str(directory)}
    async with asked_process("ranks", "asyncrl.bench.scale_ranks", job, directory=directory) as ranks:
        say("a batch handed over to two ranks")
        hand_over = await ranks.ask("hand_over")
        say(f"{bench.steps} steps, a checkpoint and resuming: one process of two threads")
        alone = await ranks.ask("one_process")
        say("the same on two ranks of one thread")
        both = await ranks.ask("ranks")
    sides = {"one_process": alone, "ranks": both}
    learner: dict[str, Any] = {**sides, "overhead": both["step_seconds"] / alone["step_seconds"] - 1.0}
    for name in ("save", "resume"):
        learner[f"{name}_seconds_per_gb"] = {
            side: found[f"{name}_seconds"] / found["num_bytes"] * _GB for side, found in sides.items()
        }
    return {"hand_over": hand_over, "learner": learner}


def table(report: Mapping[str, Any]) -> Table:
    """Return the figures beside what they were measured against."""
    found = Table("what", "measured", "beside it")
    wire = report["wire"]
    for name, unit in (("messages", "per_second"), ("frames", "per_second")):
        each = wire[name]
        found.add_row(
            f"{name} a second",
            f"{each[unit]:,.0f}",
            f"{each['ratio']:.2f} of a plain socket's {each[f'plain_{unit}']:,.0f}",
        )
    for name in ("batches", "records"):
        each, unit = wire[name], "megabytes_per_second"
        found.add_row(
            f"{name}, MB/s",
            f"{each[unit]:,.0f}",
            f"{each['ratio']:.2f} of a plain socket's {each[f'plain_{unit}']:,.0f}",
        )
    flight = report["in_flight"]
    found.add_row(
        f"KiB of a rollout, {flight['in_flight']:,.0f} under way",
        f"{flight['kib_per_rollout']:.1f} and {flight['kib_of_tokens']:.1f} of tokens",
        f"{flight['kib_per_task']:.1f} of a bare task",
    )
    found.add_row("CPU of a turn, ms", f"{flight['cpu_ms_per_turn']:.2f}", "")
    if requests := report.get("requests"):
        found.add_row(
            "requests to an engine a second",
            f"{requests['requests_per_second']:,.0f}",
            f"{requests['requests_per_cpu_second']:,.0f} a second of CPU",
        )
    if learner := report.get("learner"):
        hand_over = report["hand_over"]
        found.add_row(
            f"a batch of {hand_over['tokens']:,} tokens to 2 ranks, ms",
            f"{1000 * hand_over['seconds']:.0f}",
            f"{1000 * hand_over['plain_seconds']:.0f} for the plain bytes",
        )
        found.add_row(
            "a step of 2 ranks, s",
            f"{learner['ranks']['step_seconds']:.2f}",
            f"{learner['one_process']['step_seconds']:.2f} of one process: {learner['overhead']:+.0%}",
        )
        for name, plain in (("save", "plain_write"), ("resume", "plain_read")):
            for side, words in (("one_process", "1 process"), ("ranks", "2 ranks")):
                seconds = learner[side][f"{plain}_seconds"] / learner[side]["num_bytes"] * _GB
                found.add_row(
                    f"{name} a checkpoint, {words}, s per GB",
                    f"{learner[f'{name}_seconds_per_gb'][side]:.1f}",
                    f"{seconds:.1f} for a plain file",
                )
    return found
