"""The page: what the template is given. Everything that a model, a task or a user wrote is escaped by it."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from asyncrl import __version__
from asyncrl.report.drawing import COLOURS
from asyncrl.report.figures import learned, off_policy, timing
from asyncrl.report.reading import RunData
from asyncrl.spikes import WORDS, Cause, visible

_SPIKES = 5  # by each measure, of a run
_LOG_RATIO_EDGES = (-0.5, -0.2, -0.05, 0.05, 0.2, 0.5)
_RATIO_KEYS = ("below 0.61", "to 0.82", "to 0.95", "about 1", "to 1.22", "to 1.65", "above")
_ADVANTAGE_EDGES = (-1.5, -0.5, -1e-6, 1e-6, 0.5, 1.5)
_ADVANTAGE_KEYS = ("below -1.5", "to -0.5", "to 0", "0", "to 0.5", "to 1.5", "above")


def render(runs: Sequence[RunData]) -> str:
    """Return the HTML page about the runs."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, undefined=jinja2.StrictUndefined
    )
    nothing = "No step has been taken yet, so there is nothing to draw."
    groups = [
        ("learned", "What was learned", learned(runs), nothing),
        ("off-policy", "How far off-policy", off_policy(runs), nothing),
        ("time", "Where the time went", timing(runs), nothing),
    ]
    sections = [("runs", "Runs"), *((anchor, title) for anchor, title, *_ in groups)]
    sections += [("spikes", "Spikes"), ("trajectories", "Trajectories"), ("configuration", "Configuration")]
    return environment.get_template("report.html.jinja").render(
        style=(here / "style.css").read_text(encoding="utf-8"),
        runs=[_of_run(run, COLOURS[place % len(COLOURS)]) for place, run in enumerate(runs)],
        groups=groups,
        sections=sections,
        ratio_keys=_RATIO_KEYS,
        advantage_keys=_ADVANTAGE_KEYS,
        differing=_differing(runs) if len(runs) > 1 else [],
        version=__version__,
    )


def _of_run(run: RunData, colour: str) -> dict[str, Any]:
    return {
        "data": run,
        "colour": colour,
        "facts": _facts(run),
        "spikes": _spikes(run),
        "trajectories": [_trajectory(line) for line in run.trajectories],
        "machine": _machine(run.machine),
    }


# --- a run in figures -----------------------------------------------------------------------------------------------


def _facts(run: RunData) -> list[tuple[str, str]]:
    counters, facts = run.counters, []
    measured = [result for result in run.evaluations if result.get("solve_rate") is not None]
    if measured:
        first, last = measured[0], measured[-1]
        words = f"{first['solve_rate']:.3f} at version {first['version']}"
        if last is not first:
            words += f", {last['solve_rate']:.3f} at version {last['version']}"
        facts.append(("held-out tasks solved", words))
    solved = [value for value in run.values("solve_rate") if not math.isnan(value)]
    if solved:
        facts.append(("solved in training", f"{solved[0]:.3f} in the first step, {solved[-1]:.3f} in the last"))
    for name, key, form in (
        ("largest ratio", "importance_ratio_max", "{:.3g}"),
        ("largest staleness", "staleness_max", "{:.0f} optimizer steps"),
        ("gradient norm, largest", "grad_norm", "{:.3g}"),
    ):
        values = [value for value in run.values(key) if not math.isnan(value)]
        if values:
            facts.append((name, form.format(max(values))))
    if run.has("seconds"):
        facts.append(("training time", _duration(max(v for v in run.values("seconds") if not math.isnan(v)))))
    if counters.get("tokens_generated"):
        trained = counters.get("tokens_trained", 0)
        facts.append(("tokens generated, trained on", f"{counters['tokens_generated']:,}, {trained:,}"))
    if counters.get("steps_skipped"):
        facts.append(("steps skipped", str(counters["steps_skipped"])))
    ended = counters.get("trajectories") or {}
    if ended:
        facts.append(("episodes", ", ".join(f"{number} {status}" for status, number in sorted(ended.items()))))
    dropped = counters.get("groups_dropped") or {}
    if dropped:
        words = ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items()))
        facts.append(("groups not trained on", words))
    if counters.get("weight_syncs"):
        facts.append(("syncs, verified", f"{counters['weight_syncs']}, {counters.get('weight_syncs_verified', 0)}"))
    return facts


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for name, value in machine.items():
        if name == "memory_bytes" and isinstance(value, int):
            found.append(("memory", f"{value / 2**30:.1f} GiB"))
        elif isinstance(value, dict):
            found.append((name, ", ".join(f"{key} {item}" for key, item in value.items())))
        else:
            found.append((name, str(value)))
    return found


# --- spikes -----------------------------------------------------------------------------------------------------------


def _spikes(run: RunData) -> list[dict[str, Any]]:
    rows = [{"step": line["step"], **token} for line in run.spikes for token in line["tokens"]]
    by_ratio = sorted(rows, key=lambda row: (row["ratio"] is not None, -(row["ratio"] or 0.0)))[:_SPIKES]
    by_weight = sorted(rows, key=lambda r: (r["influence_share"] is not None, -(r["influence_share"] or 0.0)))[:_SPIKES]
    chosen = by_ratio + [row for row in by_weight if row not in by_ratio]
    return [row | _words(row) | {key: visible(row[key]) for key in ("before", "text", "after")} for row in chosen]


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    turn = "" if row["turn"] is None else f", turn {row['turn'] + 1}"
    engine = f", {row['engine']}" if row["engine"] else ""
    ended = f", ended by {row['finish_reason']}" if row["finish_reason"] else ""
    share, ratio = row["influence_share"], row["ratio"]
    return {
        "ratio_words": "ratio not finite" if ratio is None else f"ratio {ratio:.3g}",
        "share_words": "not a finite share" if share is None else f"{share:.1%}",
        "cause_words": WORDS[Cause(row["cause"])],
        "origin": (
            f"probability {_probability(row['behaviour_logprob'])} when sampled, "
            f"{_probability(row['policy_logprob'])} when trained on; advantage {_number(row['advantage'])}; version "
            f"{row['version']}, {row['staleness']} steps old; token {row['position_in_turn']} of its reply{turn}{ended}"
            f"{engine}; {row['environment']}, task {row['task_id']}, trajectory {row['trajectory_id']}"
        ),
    }


def _probability(logprob: float | None) -> str:
    return "not finite" if logprob is None else f"{math.exp(min(logprob, 0.0)):.3g}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


# --- trajectories -----------------------------------------------------------------------------------------------------


def _trajectory(line: Mapping[str, Any]) -> dict[str, Any]:
    reward = line.get("reward")
    tags = [f"reward {reward:.3g}" if isinstance(reward, int | float) else "no reward", str(line.get("status", ""))]
    if "step" in line:
        tags.insert(0, f"step {line['step']}")
    if line.get("why") == "largest ratio":
        tags.append("holds the step's largest ratio")
    if "text" in line:  # tokens were not written down
        texts = [{"kind": "read", "text": visible(text)} for text in line["text"]]
        return {"title": _title(line), "tags": tags, "parts": texts}
    parts: list[dict[str, Any]] = []
    for number, segment in enumerate(line["segments"]):
        if number:
            parts.append({"kind": "rule", "text": "the context was rewritten here: what follows is a new segment"})
        parts += [_part(run, int(line.get("version", 0)) - 1) for run in segment]
    if line.get("left_out"):
        parts.append({"kind": "rule", "text": f"{line['left_out']} more sampled tokens were not written down"})
    if not parts:
        parts.append({"kind": "rule", "text": "no token was sampled"})
    return {"title": _title(line), "tags": tags, "parts": parts}


def _title(line: Mapping[str, Any]) -> str:
    return f"{line.get('task_id', '')}, trajectory {line['trajectory_id']}"


def _part(run: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return a run of tokens; `version` is that of the weights that were updated."""
    if "tokens" not in run:
        return {"kind": "read", "text": visible(run["text"])}
    turn = "sampled" if run["turn"] is None else f"turn {run['turn'] + 1}"
    versions = sorted({token[3] for token in run["tokens"]})
    under = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    title = f"{turn}: {len(run['tokens'])} tokens under {under}"
    return {"kind": "sampled", "title": title, "tokens": [_token(token, version) for token in run["tokens"]]}


def _token(token: Sequence[Any], version: int) -> tuple[str, str, str]:
    """Return (classes, words, text) of a token."""
    text, ratio, advantage, sampled = token
    by_ratio = "x" if ratio is None else bisect(_LOG_RATIO_EDGES, math.log(max(ratio, 1e-9)))
    by_advantage = "x" if advantage is None else bisect(_ADVANTAGE_EDGES, advantage)
    age = version - sampled
    words = f"ratio {_number(ratio)}, advantage {_number(advantage)}, {age} step{'s' * (age != 1)} old"
    return f"r{by_ratio} a{by_advantage}", words, visible(text)


# --- configuration ----------------------------------------------------------------------------------------------------


def _differing(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return (setting, its value in each run) of what the runs do not share."""
    tables = [_flat(_parsed(run.config)) for run in runs]
    keys = sorted({key for table in tables for key in table})
    rows = [(key, [str(table.get(key, "-")) for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
