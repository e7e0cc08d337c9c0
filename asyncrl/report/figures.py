"""The pictures of a report: what was learned, how far off-policy it was, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from asyncrl.idle import ENGINE_CAUSES, LEARNER_CAUSES
from asyncrl.report.drawing import COLOURS, axes, legend, line, log_axis, steps_axis, svg
from asyncrl.report.intervals import means, rates, window_of
from asyncrl.report.reading import RunData
from asyncrl.solve_rates import wilson
from asyncrl.spikes import Cause

_MAX_STALENESS_SHOWN = 8  # of the stack by staleness; what is older is one more part


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture and its words."""

    name: str
    title: str
    note: str
    """What it shows, and how to read it."""
    svg: str


def learned(runs: Sequence[RunData]) -> list[Picture]:
    """Return what the runs solved and earned, and how long their answers were."""
    window = window_of(max(len(run.steps) for run in runs))
    smoothed = f"mean of {window} steps" if window > 1 else "by step"
    found = []
    if _any(runs, "solve_rate"):
        figure, (panel,) = axes()
        for run, colour in _coloured(runs):
            band = rates(run.values("solve_rate"), run.values("num_trajectories"), window)
            _banded(panel, run, band, colour)
            _held_out(panel, run, colour)
        panel.set_ylim(0.0, max(0.05, min(1.0, panel.get_ylim()[1])))
        steps_axis(panel, _steps(runs))
        legend(panel)
        note = (
            f"Episodes of training that were solved ({smoothed}); dots are the held-out tasks. Shaded and barred: 95 % "
            "Wilson intervals, as if episodes were independent, which those of one task are not quite."
        )
        found.append(Picture(name="solved", title="Solve rate", note=note, svg=svg(figure, "solved")))
    if _any(runs, "reward_mean"):
        figure, (panel,) = axes()
        for run, colour in _coloured(runs):
            band = means(run.values("reward_mean"), run.values("reward_std"), run.values("num_trajectories"), window)
            _banded(panel, run, band, colour)
        steps_axis(panel, _steps(runs))
        legend(panel)
        note = f"Mean reward of an episode ({smoothed}), with its 95 % interval."
        found.append(Picture(name="reward", title="Reward", note=note, svg=svg(figure, "reward")))
    found += _lines(
        runs,
        "lengths",
        "Length of answers",
        "Sampled tokens of an episode: mean, and dashed the 95th percentile of a segment.",
        (("completion_tokens_mean", "-"), ("length_p95", "--")),
        bottom=True,
    )
    found += _lines(
        runs,
        "truncated",
        "Cut at the limit, and repeating itself",
        "Share of episodes with a completion that was cut at the limit on tokens; dashed, the share of 3-grams that a "
        "completion has said before.",
        (("truncated_share", "-"), ("repetition_mean", "--")),
        bottom=True,
    )
    found += _lines(
        runs,
        "entropy",
        "Entropy",
        "Of the policy at the trained tokens, in nats. At a tenth of where it began it has stopped exploring.",
        (("entropy", "-"),),
        bottom=True,
    )
    return found


def off_policy(runs: Sequence[RunData]) -> list[Picture]:
    """Return ratios, what they leave of the batch, and how stale tokens were."""
    found = []
    if _any(runs, "importance_ratio_max") or _any(runs, "grad_norm"):
        figure, (above, below) = axes(2, height=3.9)
        for run, colour in _coloured(runs):
            line(
                above, run.numbers, _positive(run.values("importance_ratio_max")), colour, _label(runs, run, "largest")
            )
            if len(runs) == 1:
                for place, share in enumerate(("p99", "p95", "p50"), start=1):
                    values = _positive(run.values(f"importance_ratio_{share}"))
                    line(above, run.numbers, values, COLOURS[place], share.replace("p", "") + " %")
            line(below, run.numbers, _positive(run.values("grad_norm")), colour)
            _mark_not_finite(below, run)
        log_axis(above)
        log_axis(below)
        above.set_ylabel("importance ratio")
        below.set_ylabel("gradient norm")
        steps_axis(below, _steps(runs))
        legend(above)
        note = (
            "Policy over behaviour probability of a token, before any clip, and below it the gradient's norm before "
            "clipping: where a spike above has one below it, a token that weighs too much has moved the weights. A red "
            "cross is a step whose gradient was not finite and that was skipped."
        )
        found.append(Picture(name="ratio", title="Importance ratio and gradient", note=note, svg=svg(figure, "ratio")))
    found += _lines(
        runs,
        "ess",
        "Effective sample size",
        "Share of the batch that its weights leave: of tokens, and dashed of whole sequences, which falls first.",
        (("ess_token", "-"), ("seq_ess_frac", "--")),
        bottom=True,
    )
    found += _lines(
        runs,
        "mismatch",
        "Divergence, and engine mismatch",
        "k3 estimate of KL from behaviour to policy, in nats a token; dashed, the same at staleness 0, where the "
        "weights are equal and only engine and learner differ. Below 1e-6 nothing is drawn.",
        (("kl_k3", "-"), ("mismatch_k3", "--")),
        log=True,
    )
    found += _staleness(runs)
    found += _clipped(runs)
    found += _spikes(runs)
    return found


def timing(runs: Sequence[RunData]) -> list[Picture]:
    """Return where the time went, and what weight syncs cost."""
    found = []
    if any(run.steps for run in runs):
        found += _shares(runs, "learner", "Where the learner's time went", _learner_parts)
        found += _shares(runs, "engines", "Where the engines' time went", _engine_parts)
    found += _lines(
        runs,
        "seconds",
        "Seconds of a step",
        "The learner's step, and dashed its wait for groups before it.",
        (("step_seconds", "-"), ("learner_idle_groups_seconds", "--")),
        bottom=True,
    )
    found += _lines(
        runs,
        "sync",
        "Weight syncs",
        "Seconds from the end of a step until the engines hold its weights; dashed, how long they produced nothing.",
        (("sync_seconds", "-"), ("sync_stall_seconds", "--")),
        log=True,
        joined=True,
    )
    found += _lines(
        runs,
        "throughput",
        "Throughput",
        "Tokens a second: sampled by the engines; dashed, forwarded and backwarded by the learner while it steps.",
        (("generated_tokens_per_second", "-"), ("tokens_per_second", "--")),
        bottom=True,
    )
    return found


# --- single pictures ----------------------------------------------------------------------------------------------


def _lines(
    runs: Sequence[RunData],
    name: str,
    title: str,
    note: str,
    metrics: Sequence[tuple[str, str]],
    *,
    log: bool = False,
    bottom: bool = False,
    joined: bool = False,
) -> list[Picture]:
    """Return a picture of metrics by step, each in its own line style; none where no run has any of them.

    `bottom`: the axis begins at 0. `joined`: a step without a value is no gap, because not every step has one.
    """
    if not any(_any(runs, key) for key, _ in metrics):
        return []
    figure, (panel,) = axes()
    for run, colour in _coloured(runs):
        for key, style in metrics:
            values = run.values(key)
            label = _label(runs, run, "") if (key, style) == metrics[0] else ""
            steps = run.numbers
            if joined:
                known = [place for place, value in enumerate(values) if not math.isnan(value)]
                steps, values = [steps[place] for place in known], [values[place] for place in known]
            line(panel, steps, _positive(values) if log else values, colour, label, linestyle=style)
    if log:
        log_axis(panel)
    if bottom:
        panel.set_ylim(0.0, 1.06 * max(panel.dataLim.y1, 1e-9))
    steps_axis(panel, _steps(runs))
    if len(runs) > 1:
        legend(panel)
    return [Picture(name=name, title=title, note=note, svg=svg(figure, name))]


def _staleness(runs: Sequence[RunData]) -> list[Picture]:
    found: list[Picture] = []
    for run in runs:
        ages = sorted({int(key.rsplit("_", 1)[1]) for step in run.steps for key in step if _is_count(key)})
        if not ages:
            continue
        shown, rest = ages[:_MAX_STALENESS_SHOWN], ages[_MAX_STALENESS_SHOWN:]
        counts = [[_count(step, age) for step in run.steps] for age in shown]
        names = [str(age) for age in shown]
        if rest:
            counts.append([sum(_count(step, age) for age in rest) for step in run.steps])
            names.append(f"{rest[0]} and more")
        totals = [sum(column) or math.nan for column in zip(*counts, strict=True)]
        shares = [[n / total for n, total in zip(row, totals, strict=True)] for row in counts]
        figure, (panel,) = axes(grid="y")
        if len(run.steps) > 1:
            panel.stackplot(run.numbers, shares, labels=names, colors=COLOURS, alpha=0.85, linewidth=0)
        else:
            _stacked_bar(panel, run.numbers[0], shares, names)
        panel.set_ylim(0.0, 1.0)
        panel.set_ylabel("share of trained tokens")
        steps_axis(panel, run.numbers)
        legend(panel, columns=9)
        found.append(
            Picture(
                name=f"staleness{len(found)}",
                title="Staleness" + (f": {run.name}" if len(runs) > 1 else ""),
                note="Optimizer steps between the weights that sampled a token and those that it was trained into.",
                svg=svg(figure, f"staleness{len(found)}"),
            )
        )
    return found


def _stacked_bar(panel: Axes, at: float, shares: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    bottom = 0.0
    for share, name, colour in zip(shares, names, COLOURS, strict=False):
        panel.bar(at, share[0], bottom=bottom, color=colour, label=name, width=0.6)
        bottom += share[0]


def _is_count(key: str) -> bool:
    return key.startswith("staleness_tokens_") and key.rsplit("_", 1)[1].isdigit()


def _count(step: Mapping[str, float], age: int) -> float:
    return float(step.get(f"staleness_tokens_{age}") or 0.0)


def _clipped(runs: Sequence[RunData]) -> list[Picture]:
    return _lines(
        runs,
        "clipped",
        "Clipped tokens",
        "Share of tokens whose gradient the upper bound zeroes, and dashed the lower one.",
        (("clip_fraction_high", "-"), ("clip_fraction_low", "--")),
        bottom=True,
    )


_CAUSE_COLOURS = dict(
    zip(Cause, ("#ef4444", "#14b8a6", "#94a3b8", "#ec4899", "#8b5cf6", "#f59e0b", "#10b981", "#3b82f6"), strict=True)
)


def _spikes(runs: Sequence[RunData]) -> list[Picture]:
    found: list[Picture] = []
    for run in runs:
        points: dict[Cause, list[tuple[float, float]]] = {}
        for kept in run.spikes:
            for token in kept["tokens"]:
                if "ratio" in token.get("by", {}) and token.get("ratio") is not None:
                    points.setdefault(Cause(token["cause"]), []).append((kept["step"], max(token["ratio"], 1e-9)))
        if not points:
            continue
        figure, (panel,) = axes()
        for cause in Cause:
            if cause in points:
                x, y = zip(*points[cause], strict=True)
                words = cause.value.replace("_", " ")
                panel.plot(
                    x, y, "o", markersize=3.2, alpha=0.75, markeredgewidth=0, color=_CAUSE_COLOURS[cause], label=words
                )
        log_axis(panel)
        panel.set_ylabel("importance ratio")
        steps_axis(panel, [kept["step"] for kept in run.spikes])
        legend(panel, columns=5)
        found.append(
            Picture(
                name=f"spikes{len(found)}",
                title="The largest ratios by likely cause" + (f": {run.name}" if len(runs) > 1 else ""),
                note="The six largest of every step. Each is shown with its context below.",
                svg=svg(figure, f"spikes{len(found)}"),
            )
        )
    return found


Parts = Callable[[RunData], tuple[dict[str, float], str]]


def _shares(runs: Sequence[RunData], name: str, title: str, parts: Parts) -> list[Picture]:
    """Return horizontal bars, one a run, of the shares of its time."""
    figure, (panel,) = axes(height=0.95 + 0.42 * len(runs), grid="x")
    colours: dict[str, str] = {}
    for row, run in enumerate(runs):
        seconds, _ = parts(run)
        total, left = sum(seconds.values()) or 1.0, 0.0
        for part, value in seconds.items():
            if value / total < 0.002:
                continue
            new = part not in colours
            colour = colours.setdefault(part, COLOURS[len(colours) % len(COLOURS)])
            share = value / total
            panel.barh(row, share, left=left, color=colour, height=0.62, label=part if new else None)
            if share > 0.07:
                panel.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", color="white", fontsize=8)
            left += share
    panel.set_yticks(range(len(runs)), [_short(run.name) for run in runs] if len(runs) > 1 else [""] * len(runs))
    panel.set_ylim(len(runs) - 0.5, -0.5)
    panel.set_xlim(0.0, 1.0)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend(panel, columns=4)
    return [Picture(name=name, title=title, note=parts(runs[0])[1], svg=svg(figure, name))]


def _learner_parts(run: RunData) -> tuple[dict[str, float], str]:
    words = {"straggler": "waits for one group", "groups": "waits for groups", "sync": "waits for a pull"}
    words |= {"evaluation": "evaluating", "saving": "saving"}
    parts = {"stepping": _sum(run, "step_seconds"), "publishing": _sum(run, "publish_seconds")}
    parts |= {words[cause]: _sum(run, f"learner_idle_{cause}_seconds") for cause in LEARNER_CAUSES}
    return parts, "The learner trains while it steps; all else is waiting, by what it waits for."


def _engine_parts(run: RunData) -> tuple[dict[str, float], str]:
    words = {"no_slot": "the gate lets no group in", "sync": "new weights", "no_requests": "nobody asks"}
    idle = {words[cause]: _sum(run, f"engine_idle_{cause}_seconds") for cause in ENGINE_CAUSES}
    sampling = max(0.0, _span(run) - sum(idle.values()))
    return {"sampling": sampling, **idle}, "Engines sample while any request is under way; all else is idle, by cause."


def _span(run: RunData) -> float:
    """Return the seconds of training that the lines tell of."""
    seconds = [value for value in run.values("seconds") if not math.isnan(value)]
    return seconds[-1] if seconds else 0.0


# --- what they share ----------------------------------------------------------------------------------------------


def _coloured(runs: Sequence[RunData]) -> list[tuple[RunData, str]]:
    return [(run, COLOURS[place % len(COLOURS)]) for place, run in enumerate(runs)]


def _any(runs: Sequence[RunData], key: str) -> bool:
    return any(run.has(key) for run in runs)


def _steps(runs: Sequence[RunData]) -> list[int]:
    return [number for run in runs for number in run.numbers]


def _label(runs: Sequence[RunData], run: RunData, alone: str) -> str:
    return _short(run.name) if len(runs) > 1 else alone


def _short(name: str) -> str:
    """Return a name that fits beside a picture, without what matplotlib would take for mathematics."""
    name = name if len(name) <= 28 else f"{name[:13]}...{name[-12:]}"
    return name.replace("$", r"\$").lstrip("_") or "run"


def _banded(
    panel: Axes, run: RunData, band: tuple[Sequence[float], Sequence[float], Sequence[float]], colour: str
) -> None:
    value, low, high = band
    line(panel, run.numbers, value, colour, _short(run.name))
    panel.fill_between(run.numbers, low, high, color=colour, alpha=0.16, linewidth=0)


def _held_out(panel: Axes, run: RunData, colour: str) -> None:
    """Draw the measurements of the held-out tasks at their versions, with their intervals."""
    for result in run.evaluations:
        rate, number = result.get("solve_rate"), result.get("num_samples", 0)
        if rate is None or not math.isfinite(rate):
            continue
        low, high = result.get("interval") or wilson(rate * number, number)
        panel.errorbar(
            result["version"],
            rate,
            yerr=[[max(0.0, rate - low)], [max(0.0, high - rate)]],
            fmt="o",
            markersize=4.5,
            capsize=2.5,
            linewidth=1.0,
            color=colour,
        )


def _mark_not_finite(panel: Axes, run: RunData) -> None:
    at = [int(step["step"]) for step in run.steps if step.get("grad_norm_nonfinite")]
    for step in at:
        panel.plot(step, 0.94, "x", color="#ef4444", markersize=5, transform=panel.get_xaxis_transform())


def _positive(values: Sequence[float]) -> list[float]:
    """Return the values that a log axis can show; the others are gaps."""
    return [value if value > 0 else math.nan for value in values]


def _sum(run: RunData, key: str) -> float:
    return sum(value for value in run.values(key) if not math.isnan(value))
