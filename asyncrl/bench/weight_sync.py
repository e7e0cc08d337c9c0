"""New weights into real vLLM engines that generate: how long they stand still, what it costs, against a reload.

Engines are servers of the model, with the flags of a run. `requests` completions run all the time; a further one, whose
tokens are sent one by one, tells when no token came (every request of a server advances in the same decode step). The
learner is a process of its own (`weight_sync_learner`), which does nothing but publish. Windows take turns, round by
round: no sync; whole versions, one every second, or every other one where a sync takes longer; the same with deltas. A
busy moment so meets all three, and a ratio is the median over rounds of the ratio within a round. A window of deltas
begins when a chain of them has begun, as it does once in a run. At the end of the first measurement an engine is
drained, reloaded from disk by vLLM itself and resumed.

Two layouts are measured. Engines that decode with all cores share them with the learner, with whoever asks for tokens,
and with their own loading: each second of a processor that one of these takes, the others lack, and what is lost so
says more about the number of cores than about syncs. So one engine is also measured "apart", with a thread less than
there are cores: publishing, loading and asking have a core then, and what is lost is what a sync costs generation. The
goals of throughput are judged there.

The report, as `--json` writes it:

| key | what |
|---|---|
| settings | every size, as `WeightSyncBench` names them |
| machine | cores, load_average before and after |
| num_bytes | of one version |
| copy_seconds | of a plain copy of as many bytes in memory, median, beside the same load; one a round |
| engines.N.none, .full, .delta | N engines: no syncs, whole versions, deltas |
| apart.none, .full, .delta | one engine with a core to spare, with the same keys: |
| ....tokens_per_second, .seconds | one a round; the latter of a window |
| ....gap_seconds | longest time without a token in each second, above the median one; this is there without syncs too |
| ....syncs | a list of what each sync took: |
| ....syncs[].publish_seconds | what the learner gives to it |
| ....syncs[].pull_seconds | from then until every engine has the version and goes on |
| ....syncs[].load_cpu_seconds | of a processor, on the thread that loads beside the decode steps; a mean over engines |
| ....syncs[].pause_seconds | in which the engines were paused; the longest |
| ....syncs[].phase_seconds | of each part of the pull, by its name; those within the load begin with "update." |
| ....syncs[].gap_seconds | in which no token came, above the median time between two; the longest of the engines |
| ....syncs[].num_bytes | that the engines read, all together |
| ....syncs[].changed_share | of the weights' values, between two versions |
| canary | five of them under load, without syncs: seconds and gap_seconds of each, step_seconds (median decode step) |
| reload | drain, reload and resume of one engine: save_seconds, drain_seconds, load_seconds, seconds, gap_seconds |
| ratios.pause_over_copy, .gap_over_copy | one engine, whole versions, medians; the gap less that without syncs |
| ratios.throughput_full, .throughput_delta | tokens a second of N = 1, with syncs over without |
| ratios.syncs_per_second_full, .syncs_per_second_delta | the rate that was reached |
| ratios.lost_seconds_full, .lost_seconds_delta | of generation (N = 1), for each sync |
| ratios.interval_full, .interval_delta | seconds from sync to sync that would leave 0.95 of the throughput, by that |
| ratios.throughput_full_apart and so on | these eight of the engine with a core to spare |
| ratios.canary_over_step | time without a token that a canary adds, over a decode step's, medians |
| ratios.delta_bytes | bytes of a delta over a whole version's |
| ratios.publish_over_copy | what a sync costs the learner |
| ratios.pull_of_N_over_one | time of a pull by N engines at once |
| ratios.reload_over_gap | time without a token of the reload over that of a sync |
| goals | name, value, limit, is_least, met of each promise |
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import trio
from rich.table import Table

from asyncrl.bench.asked_process import Report
from asyncrl.bench.goals import Goal
from asyncrl.bench.weight_sync_scene import Scene, WeightSyncBench, scene

_THROUGHPUT_GOAL = 0.95
_SYNCS_TO_BEGIN_A_CHAIN = 2  # a whole version, after those without deltas, and the first delta on top of it

GOALS = (
    Goal(name="pause_over_copy", words="pause over a plain copy", limit=2.0, is_least=False),
    Goal(name="gap_over_copy", words="time without a token over a plain copy", limit=2.0, is_least=False),
    *(
        Goal(
            name=f"throughput_{kind}_apart",
            words=f"throughput with {words} a second over none, a core to spare",
            limit=_THROUGHPUT_GOAL,
            is_least=True,
        )
        for kind, words in (("full", "a whole version"), ("delta", "a delta"))
    ),
)


def bench_weight_sync(bench: WeightSyncBench, *, say: Callable[[str], None]) -> Report:
    """Return the report that this module describes; `say` is told what runs now."""
    return trio.run(_measure, bench, say)


async def _measure(bench: WeightSyncBench, say: Callable[[str], None]) -> Report:
    load_before = os.getloadavg()
    report: Report = {"copy_seconds": [], "engines": {}}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        for count in bench.engines:
            where = f"{count} engine{'s' * (count > 1)}"
            say(f"{where}: starting")
            async with scene(bench, count, bench.threads, Path(scratch)) as stage:
                report["engines"][str(count)] = await _windows(bench, stage, report, where, say)
                if count == bench.engines[0]:
                    say("canaries")
                    report["canary"] = await stage.canaries()
                    say("drain, reload from disk, resume")
                    report["reload"] = await stage.reload()
        apart = max(1, len(os.sched_getaffinity(0)) - 1)
        if (bench.engines[0], bench.threads) == (1, apart):
            report["apart"] = report["engines"]["1"]
        else:
            say("1 engine with a core to spare: starting")
            async with scene(bench, 1, apart, Path(scratch)) as stage:
                report["apart"] = await _windows(bench, stage, report, "1 engine with a core to spare", say)
    ratios = _ratios(bench, report)
    return {
        "settings": {**asdict(bench), "model": str(bench.model)},
        "machine": {"cores": os.cpu_count(), "load_average": [load_before[0], os.getloadavg()[0]]},
        **report,
        "ratios": ratios,
        "goals": [goal.report(ratios[goal.name]) for goal in GOALS],
    }


async def _windows(
    bench: WeightSyncBench, stage: Scene, report: Report, where: str, say: Callable[[str], None]
) -> Report:
    kinds: dict[str, Callable[[], Awaitable[Report]] | None] = {
        "none": None,
        "full": partial(stage.sync, delta=False),
        "delta": partial(stage.sync, delta=True),
    }
    await stage.sync(delta=True)  # the first makes the engines' shadows and copies
    found: dict[str, list[Report]] = {kind: [] for kind in kinds}
    for count in range(1, bench.rounds + 1):
        copied = await stage.learner.ask("copy")
        report["copy_seconds"].append(copied["seconds"])
        report["num_bytes"] = copied["num_bytes"]
        for kind, sync in kinds.items():
            say(f"{where}, round {count} of {bench.rounds}: {kind}")
            for _ in range(_SYNCS_TO_BEGIN_A_CHAIN if kind == "delta" else 0):
                await stage.sync(delta=True)
            found[kind].append(await stage.window(bench.seconds, sync))
    return {
        kind: {
            "tokens_per_second": [window["tokens_per_second"] for window in windows],
            "seconds": [window["seconds"] for window in windows],
            "gap_seconds": [gap for window in windows for gap in window["gap_seconds"]],
            "syncs": [sync for window in windows for sync in window["syncs"]],
        }
        for kind, windows in found.items()
    }


def _ratios(bench: WeightSyncBench, report: Report) -> dict[str, float]:
    first = report["engines"][str(bench.engines[0])]
    copy = median(report["copy_seconds"])
    gap = max(0.0, _median(first["full"], "gap_seconds") - median(first["none"]["gap_seconds"]))
    ratios = {
        "pause_over_copy": _median(first["full"], "pause_seconds") / copy,
        "gap_over_copy": gap / copy,
        "canary_over_step": median(report["canary"]["gap_seconds"]) / report["canary"]["step_seconds"],
        "delta_bytes": _median(first["delta"], "num_bytes") / _median(first["full"], "num_bytes"),
        "publish_over_copy": _median(first["full"], "publish_seconds") / copy,
        "reload_over_gap": report["reload"]["gap_seconds"] / _median(first["full"], "gap_seconds"),
    }
    for kind in ("full", "delta"):
        for windows, layout in ((first, ""), (report["apart"], "_apart")):
            lost = _lost_seconds(windows, kind)
            ratios[f"throughput_{kind}{layout}"] = _throughput(windows, kind)
            ratios[f"lost_seconds_{kind}{layout}"] = lost
            ratios[f"interval_{kind}{layout}"] = lost / (1.0 - _THROUGHPUT_GOAL)
            ratios[f"syncs_per_second_{kind}{layout}"] = len(windows[kind]["syncs"]) / sum(windows[kind]["seconds"])
    for count in bench.engines[1:]:
        more = report["engines"][str(count)]
        pulls = [_median(engines["full"], "pull_seconds") for engines in (more, first)]
        ratios[f"pull_of_{count}_over_{bench.engines[0]}"] = pulls[0] / pulls[1]
        ratios[f"throughput_full_{count}"] = _throughput(more, "full")
        ratios[f"throughput_delta_{count}"] = _throughput(more, "delta")
    return ratios


def _median(window: Mapping[str, Any], name: str) -> float:
    return float(median(sync[name] for sync in window["syncs"]))


def _throughput(windows: Mapping[str, Any], kind: str) -> float:
    pairs = zip(windows[kind]["tokens_per_second"], windows["none"]["tokens_per_second"], strict=True)
    return float(median(with_syncs / without for with_syncs, without in pairs))


def _lost_seconds(windows: Mapping[str, Any], kind: str) -> float:
    """Return how many seconds of generation each sync has cost, over all rounds."""
    rounds = zip(
        windows[kind]["tokens_per_second"], windows["none"]["tokens_per_second"], windows[kind]["seconds"], strict=True
    )
    lost = sum((1.0 - with_syncs / without) * took for with_syncs, without, took in rounds)
    return float(lost / len(windows[kind]["syncs"]))


def tables(report: Report) -> tuple[Table, Table]:
    """Return the figures for a person: what a sync took; the promises and whether they hold."""
    copy_ms = 1e3 * median(report["copy_seconds"])
    shown = Table(title=f"weight sync, {report['num_bytes'] / 1e6:.0f} MB; a plain copy takes {copy_ms:.0f} ms")
    for column in ("engines", "syncs", "tok/s", "pause ms", "gap ms", "pull s", "publish s", "MB"):
        shown.add_column(column, justify="right")
    for count, windows in [*report["engines"].items(), ("1, apart", report["apart"])]:
        for kind, window in windows.items():
            rate = f"{fmean(window['tokens_per_second']):.0f}"
            if not window["syncs"]:
                shown.add_row(count, kind, rate, "", f"{1e3 * median(window['gap_seconds']):.0f}", "", "", "")
                continue
            shown.add_row(
                count,
                kind,
                rate,
                f"{1e3 * _median(window, 'pause_seconds'):.0f}",
                f"{1e3 * _median(window, 'gap_seconds'):.0f}",
                f"{_median(window, 'pull_seconds'):.2f}",
                f"{_median(window, 'publish_seconds'):.2f}",
                f"{_median(window, 'num_bytes') / 1e6:.1f}",
            )
    reload = report["reload"]
    shown.add_row("1", "reload", "", "", f"{1e3 * reload['gap_seconds']:.0f}", f"{reload['seconds']:.2f}", "", "")
    promises = Table()
    for column in ("promise", "figure", "goal", "met"):
        promises.add_column(column)
    for goal, words in zip(report["goals"], (goal.words for goal in GOALS), strict=True):
        bound = f"{'>=' if goal['is_least'] else '<='} {goal['limit']:g}"
        promises.add_row(words, f"{goal['value']:.3g}", bound, "yes" if goal["met"] else "NO")
    ratios, apart = report["ratios"], report["apart"]
    for words, value in (
        ("syncs a second that were reached: whole versions", ratios["syncs_per_second_full_apart"]),
        ("the same: deltas", ratios["syncs_per_second_delta_apart"]),
        ("seconds of generation that a whole version costs", ratios["lost_seconds_full_apart"]),
        ("the same: a delta", ratios["lost_seconds_delta_apart"]),
        ("processor seconds of its load: whole version", _median(apart["full"], "load_cpu_seconds")),
        ("the same: delta", _median(apart["delta"], "load_cpu_seconds")),
        ("throughput with a whole version a second, cores shared", ratios["throughput_full"]),
        ("the same: delta", ratios["throughput_delta"]),
        ("time without a token for a canary, in decode steps", ratios["canary_over_step"]),
    ):
        promises.add_row(words, f"{value:.2g}", "", "")
    return shown, promises
