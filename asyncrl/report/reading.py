"""A run directory as it lies there, still written, crashed or whole: what is wrong with it is said, not raised."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.recording import WARM_START
from asyncrl.run_directory import RunDirectory, is_running

_SHOWN_TRAJECTORIES = 12  # spread over the run; each is up to 60 kB of the page
_SHOWN_WITHOUT_TOKENS = 6  # of a run that kept texts alone
_TEXT_LIMIT = 20_000  # characters of such a text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report shows of one run."""

    name: str
    path: Path
    state: str
    """Running, finished, or how it ended otherwise; in words."""
    steps: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl about rollouts."""
    warm_steps: Sequence[Mapping[str, Any]]
    spikes: Sequence[Mapping[str, Any]]
    trajectories: Sequence[Mapping[str, Any]]
    """Lines of tokens.jsonl; or, where there are none, lines of trajectories/ with their whole `text`."""
    evaluations: Sequence[Mapping[str, Any]]
    counters: Mapping[str, Any]
    moment: str
    config: str
    """The text of config.toml."""
    machine: Mapping[str, Any]
    problems: Sequence[str] = field(default_factory=tuple)
    """What could not be read, or is no number, each in a sentence."""

    def values(self, key: str) -> list[float]:
        """Return a metric by step, NaN where a step has none or it is no finite number."""
        return [_finite(step.get(key)) for step in self.steps]

    def has(self, key: str) -> bool:
        """Tell whether any step has a finite value of a metric."""
        return any(not math.isnan(value) for value in self.values(key))

    @property
    def numbers(self) -> list[int]:
        """The optimizer steps, as numbered in the run."""
        return [int(step["step"]) for step in self.steps]


def read_run(path: Path, *, name: str = "") -> RunData:
    """Return what lies in a run directory. Raises: ConfigError where it is none."""
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise ConfigError(f"{path} is no run directory: it holds no config.toml")
    problems: list[str] = []
    running = is_running(directory)
    metrics = _lines(directory.metrics, problems, running=running, needs=("step", "version"))
    steps = [line for line in metrics if line.get("phase") != WARM_START]
    status = _json(directory.status, problems)
    summary = None if running else _json(directory.summary, problems)
    counters = status.get("counters", {}) if status else {}
    problems += _strange_numbers(steps)
    return RunData(
        name=name or path.resolve().name,
        path=path,
        state=_state(running=running, finished=summary is not None, status=status, steps=steps),
        steps=steps,
        warm_steps=[line for line in metrics if line.get("phase") == WARM_START],
        spikes=_lines(directory.spikes, problems, running=running, needs=("step", "tokens")),
        trajectories=_trajectories(directory, problems, running=running),
        evaluations=counters.get("evaluations", []),
        counters=counters,
        moment=str(status.get("moment", "")) if status else "",
        config=directory.config.read_text(encoding="utf-8", errors="replace"),
        machine=(_json(directory.machine, problems) or {}) if directory.machine.exists() else {},
        problems=problems,
    )


def _state(
    *, running: bool, finished: bool, status: Mapping[str, Any] | None, steps: Sequence[Mapping[str, Any]]
) -> str:
    taken = f"{len(steps)} steps" if len(steps) != 1 else "1 step"
    if running:
        return f"running, {taken} so far"
    if finished:
        return f"{(status or {}).get('phase') or 'finished'}, {taken}"
    return f"ended without a summary after {taken}: it crashed or was killed"


def _lines(path: Path, problems: list[str], *, running: bool, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a file's lines that are whole and hold what is needed; count the others among the problems."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    *whole, rest = text.split("\n")
    if rest and not running:
        problems.append(f"{path.name}: the last line was torn off in the middle, and is left out")
    found, broken = [], 0
    for line in whole:
        try:
            value = json.loads(line)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict) and all(key in value for key in needs):
            found.append(value)
        else:
            broken += 1
    if broken:
        problems.append(f"{path.name}: {broken} of {len(whole)} lines could not be read, and are left out")
    return found


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.name} could not be read, and is left out")
        return None
    return value


def _strange_numbers(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each metric that was no finite number somewhere."""
    found: dict[str, list[int]] = {}
    for step in steps:
        for key, value in step.items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                found.setdefault(key, []).append(int(step["step"]))
        if step.get("grad_norm_nonfinite"):
            found.setdefault("grad_norm", []).append(int(step["step"]))
    return [
        f"{key} was not a finite number in {len(at)} step{'s' * (len(at) > 1)} ({_some(at)})"
        for key, at in sorted(found.items())
    ]


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"{shown}, ..." if len(numbers) > 5 else shown


def _trajectories(directory: RunDirectory, problems: list[str], *, running: bool) -> list[dict[str, Any]]:
    """Return trajectories that are spread over the run, token by token where they were written down so."""
    by_token = _lines(directory.tokens, problems, running=running, needs=("step", "segments"))
    if by_token:
        kinds = [[line for line in by_token if (line.get("why") == "in turn") == turn] for turn in (True, False)]
        chosen = [line for lines in kinds for line in _spread(lines, _SHOWN_TRAJECTORIES // 2)]
        return sorted(chosen, key=lambda line: int(line["step"]))
    files = sorted(directory.trajectories.glob("version-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    found = []
    for path in _spread(files, _SHOWN_WITHOUT_TOKENS):
        lines = _lines(path, problems, running=running, needs=("trajectory_id", "text"))
        found += [line | {"text": [text[:_TEXT_LIMIT] for text in line["text"]]} for line in lines[:1]]
    return found


def _spread(items: Sequence[Any], number: int) -> list[Any]:
    """Return at most `number` of the items, evenly spaced, first and last among them."""
    if len(items) <= number:
        return list(items)
    return [items[round(place * (len(items) - 1) / (number - 1))] for place in range(number)]


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
