"""The learner against plain transformers on the same tokens, prefix sharing, what a loss costs, and its numbers.

Each variant lives in a process of its own. They take turns, round by round, on the same batch, so that a busy moment
meets all of them; a ratio is the median over rounds of the ratio within a round. All processes have the same threads
and, since one computes at a time, the environment of a learner process with `own_cores = true`. A peak is the process's
largest resident memory during its first pass, above what it held with model and gradients loaded. Padding brings a few
sequences to one length that together have about as many real tokens as a microbatch of the learner.

The report, as `--json` writes it:

| key | what |
|---|---|
| settings | every size, as `asyncrl.bench.learner_settings.LearnerBench` names them |
| machine | cpu, torch, threads, has_fast_bfloat16, load_average before and after |
| ragged.learner, .padded, .alone | the learner; transformers padded; transformers one sequence at a time |
| sharing.shared, .apart | groups with a common prompt, read once a group; the same read once a completion |
| ....seconds, .cpu_seconds | a number a round |
| ....tokens_per_second | tokens of the segments over the median of seconds |
| ....peak_bytes | of the first pass |
| ....loss, .grad_norm, .num_tokens, .tokens_forwarded | what was computed; the last is the learner's alone |
| sharing.gradient_relative_difference | norm of the difference of the two whole gradients over the norm of one |
| step.seconds, .num_tokens, .num_microbatches, .metrics | one real optimizer step, its own metrics included |
| step.loss_seconds, .diagnostics_seconds | the loss's graph alone, both ways; diagnostics and top ratios alone |
| numbers.num_tokens | trained tokens of the batch that the following is about |
| numbers.logprob_bfloat16_to_float32 | nats, mean and max of how far log-probs lie from those of a float32 model |
| numbers.logprob_split, .logprob_order | the same between microbatches of a quarter, or segments in opposite order |
| numbers.gradient_split, .gradient_order | relative difference of the whole gradient for the same two |
| numbers.gradient_ranks, .ranks | the same between one learner and microbatches dealt to this many, their sums added |
| ratios | the figures that the project promises, and cpu_speed_over_padded, cpu_speed_over_alone: of CPU seconds |
| goals | name, value, limit, is_least, met of each promise |
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import trio
from rich.table import Table

from asyncrl.bench.asked_process import AskedProcess, Report, asked_process
from asyncrl.bench.learner_settings import GOALS, LearnerBench


def bench_learner(bench: LearnerBench, *, say: Callable[[str], None]) -> Report:
    """Return the report that this module describes; `say` is told what runs now."""
    return trio.run(_measure, bench, say)


async def _measure(bench: LearnerBench, say: Callable[[str], None]) -> Report:
    load_before = os.getloadavg()
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-")))
        learner = await stack.enter_async_context(_worker("learner", bench, scratch, say))
        async with _worker("padded", bench, scratch, say) as padded, _worker("alone", bench, scratch, say) as alone:
            workers = {"learner": learner, "padded": padded, "alone": alone}
            runs = {name: partial(worker.ask, "ragged") for name, worker in workers.items()}
            ragged = await _rounds(bench, runs, say)
        sharing = await _rounds(bench, {name: partial(learner.ask, name) for name in ("shared", "apart")}, say)
        say("gradients with and without sharing")
        difference = await learner.ask("sharing_gradients")
        say("log-probs and gradients in float32, in other splits, orders and ranks")
        numbers = await learner.ask("numbers")
        say(f"one optimizer step of {bench.step_tokens} tokens")
        step = await learner.ask("step")
        hello = learner.hello
    ratios = _ratios(ragged, sharing, step)
    return {
        "settings": {**asdict(bench), "model": str(bench.model)},
        "machine": {**_machine(), **hello, "load_average": [load_before[0], os.getloadavg()[0]]},
        "ragged": ragged,
        "sharing": {**sharing, **difference},
        "step": step,
        "numbers": numbers,
        "ratios": ratios,
        "goals": [goal.report(ratios[goal.name]) for goal in GOALS],
    }


def _worker(
    kind: str, bench: LearnerBench, scratch: Path, say: Callable[[str], None]
) -> contextlib.AbstractAsyncContextManager[AskedProcess]:
    say(f"loading the model: {kind}")
    job = {"kind": kind, "bench": {**asdict(bench), "model": str(bench.model)}}
    return asked_process(kind, "asyncrl.bench.learner_worker", job, directory=scratch, own_cores=True)


async def _rounds(
    bench: LearnerBench, runs: Mapping[str, Callable[[], Awaitable[Report]]], say: Callable[[str], None]
) -> Report:
    """Return each variant's figures; they take turns."""
    found: dict[str, list[Report]] = {name: [] for name in runs}
    for count in range(1, bench.rounds + 1):
        for name, run in runs.items():
            say(f"round {count} of {bench.rounds}: {name}")
            found[name].append(await run())
    return {name: _summary(reports) for name, reports in found.items()}


def _summary(reports: Sequence[Report]) -> Report:
    first = reports[0]
    seconds = [report["seconds"] for report in reports]
    return {
        **first,
        "seconds": seconds,
        "cpu_seconds": [report["cpu_seconds"] for report in reports],
        "tokens_per_second": first["num_tokens"] / median(seconds),
    }


def _ratios(ragged: Report, sharing: Report, step: Report) -> dict[str, float]:
    learner, padded, alone = (ragged[name] for name in ("learner", "padded", "alone"))
    return {
        "speed_over_padded": _times(padded, learner),
        "memory_of_padded": learner["peak_bytes"] / padded["peak_bytes"],
        "speed_over_alone": _times(alone, learner),
        "speed_of_sharing": _times(sharing["apart"], sharing["shared"]),
        "loss_share_of_step": (step["loss_seconds"] + step["diagnostics_seconds"]) / step["seconds"],
        "cpu_speed_over_padded": _times(padded, learner, "cpu_seconds"),
        "cpu_speed_over_alone": _times(alone, learner, "cpu_seconds"),
    }


def _times(slow: Report, fast: Report, unit: str = "seconds") -> float:
    """Return the median over rounds of how many times faster one was than the other in the same round."""
    return float(median(a / b for a, b in zip(slow[unit], fast[unit], strict=True)))


def _machine() -> Report:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {"cpu": cpu, "cores": os.cpu_count()}


def table(report: Report) -> Table:
    """Return the figures for a person: the variants, the promises and whether they hold, how exact the numbers are."""
    machine = report["machine"]
    shown = Table(title=f"the learner, {machine['threads']} threads, {machine['cpu']}")
    for column in ("what", "figure", "goal"):
        shown.add_column(column)
    for group, name, words in _ROWS:
        figures = report[group][name]
        peak = figures["peak_bytes"] / 2**20
        shown.add_row(words, f"{figures['tokens_per_second']:.0f} tokens/s, {peak:.0f} MiB", "")
    shown.add_section()
    for goal, row in zip(GOALS, report["goals"], strict=True):
        bound = f"{'>=' if goal.is_least else '<='} {goal.limit:g}, {'met' if row['met'] else 'MISSED'}"
        shown.add_row(goal.words, f"{row['value']:.3g}", bound)
    shown.add_section()
    for words, value in _numbers(report):
        shown.add_row(words, value, "")
    return shown


_ROWS = (
    ("ragged", "learner", "ragged: the learner"),
    ("ragged", "padded", "ragged: transformers, padded"),
    ("ragged", "alone", "ragged: transformers, one at a time"),
    ("sharing", "shared", "groups: prompts shared"),
    ("sharing", "apart", "groups: nothing shared"),
)


def _numbers(report: Report) -> list[tuple[str, str]]:
    numbers = report["numbers"]

    def both(name: str) -> str:
        return f"{numbers[name]['mean']:.2g}, {numbers[name]['max']:.2g} nats"

    return [
        ("log-probs to float32's: mean, max", both("logprob_bfloat16_to_float32")),
        ("log-probs, other split: mean, max", both("logprob_split")),
        ("log-probs, other order: mean, max", both("logprob_order")),
        ("gradient, other split", f"{numbers['gradient_split']:.2g}"),
        ("gradient, other order", f"{numbers['gradient_order']:.2g}"),
        (f"gradient, {numbers['ranks']} ranks", f"{numbers['gradient_ranks']:.2g}"),
        ("gradient, prompts shared", f"{report['sharing']['gradient_relative_difference']:.2g}"),
    ]
