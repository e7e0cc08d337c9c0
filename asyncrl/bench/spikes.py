"""How far the largest importance weight goes by the bound on staleness, with and without a clip in the loss.

The same run for each bound and loss, one after the other, in directories that are kept; then a picture of the largest
ratio of every step with the gradient's norm below it. Tasks, model, engine and learner are the real ones.

The JSON file holds `runs`, each with: max_off_policyness, loss, directory, steps, staleness_mean; ratio_max (of the
run), ratio_max_median, ratio_max_p90 (of the steps' largest); steps_above_2, steps_above_5 (whose largest is above);
grad_norm_median, grad_norm_max; seq_ess_min; causes (likely cause -> steps whose largest ratio has it);
solve_rate_last (mean of the last fifth). `growth` holds, by loss, how many times further from 1 the ratio_max_median of
the largest bound lies than that of the smallest.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from asyncrl.bench.child_run import call
from asyncrl.configs import Config, dump_config, load_config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.recording import read_metrics, read_spikes
from asyncrl.run_directory import RunDirectory

CLIPPED, UNCLIPPED = "dapo", "importance_sampling"
_STYLES = ("-", "--", ":", "-.")


def bench_spikes(
    config_path: Path,
    overrides: Sequence[str],
    *,
    directory: Path,
    steps: int,
    bounds: Sequence[int],
    losses: Sequence[str],
    on_run: Callable[[Mapping[str, Any]], None] = lambda run: None,
) -> dict[str, Any]:
    """Return each run's figures after training for so many steps below `directory`; `on_run` hears of each as it ends.

    Raises: ConfigError for a directory that is in use; AsyncRLError where a run fails, or takes no step.
    """
    configs = _configs(config_path, overrides, steps=steps, bounds=bounds, losses=losses)  # before any of them is run
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--directory {directory} is not empty: the runs are kept there, so take another one")
    runs = []
    for (loss, bound), config in configs.items():
        run = RunDirectory(directory / f"{loss}-bound-{bound}")
        _train(config, run)
        records = read_metrics(run)
        if not records:
            raise AsyncRLError(f"{run.path} took no step in the time it had")
        figures = measure(records, read_spikes(run))
        runs.append({"max_off_policyness": bound, "loss": loss, "directory": str(run.path), **figures})
        on_run(runs[-1])
    return {"steps": steps, "runs": runs, "growth": growth(runs)}


def _configs(
    path: Path, overrides: Sequence[str], *, steps: int, bounds: Sequence[int], losses: Sequence[str]
) -> dict[tuple[str, int], Config]:
    given = {override.partition("=")[0].strip() for override in overrides}
    for key in ("buffer.max_off_policyness", "learner.loss", "run.directory", "run.steps"):
        if key in given:
            raise ConfigError(f"--set {key} is what this benchmark sets by itself: leave it out")
    return {
        (loss, bound): load_config(
            path,
            [*overrides, f"buffer.max_off_policyness={bound}", f'learner.loss="{loss}"', f"run.steps={steps}"],
        )
        for loss, bound in product(losses, bounds)
    }


def _train(config: Config, run: RunDirectory) -> None:
    run.path.parent.mkdir(parents=True, exist_ok=True)
    path = run.path.with_suffix(".toml")
    path.write_text(dump_config(config), encoding="utf-8")
    sets = {"run.directory": f'"{run.path.resolve()}"', "run.checkpoint_every_steps": 0, "run.keep_checkpoints": 1}
    arguments = [argument for name, value in sets.items() for argument in ("--set", f"{name}={value}")]
    call([sys.executable, "-m", "asyncrl", "train", str(path), *arguments], f"asyncrl, {run.path.name}")


def measure(records: Sequence[Mapping[str, Any]], spikes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run's steps and of the lines of its spikes.jsonl; None of what no step had."""
    largest = _known(records, "importance_ratio_max")
    norms, ess = _known(records, "grad_norm"), _known(records, "seq_ess_frac")
    solved, staleness = _known(records, "solve_rate"), _known(records, "staleness_mean")
    tokens = (token for line in spikes for token in line["tokens"] if token["by"].get("ratio") == 1)
    return {
        "steps": len(records),
        "staleness_mean": fmean(staleness) if staleness else None,
        "ratio_max": max(largest, default=None),
        "ratio_max_median": median(largest) if largest else None,
        "ratio_max_p90": sorted(largest)[math.ceil(0.9 * len(largest)) - 1] if largest else None,
        "steps_above_2": sum(value > 2 for value in largest),
        "steps_above_5": sum(value > 5 for value in largest),
        "grad_norm_median": median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "seq_ess_min": min(ess, default=None),
        "causes": dict(Counter(token["cause"] for token in tokens).most_common()),
        "solve_rate_last": fmean(solved[-max(1, len(solved) // 5) :]) if solved else None,
    }


def growth(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return loss -> how many times further from 1 the largest bound's median largest ratio is than the smallest's."""
    found = {}
    for loss in dict.fromkeys(run["loss"] for run in runs):
        ours = sorted((r for r in runs if r["loss"] == loss), key=lambda r: int(r["max_off_policyness"]))
        first, last = ours[0]["ratio_max_median"], ours[-1]["ratio_max_median"]
        if len(ours) > 1 and first is not None and last is not None and first > 1:
            found[loss] = (last - 1) / (first - 1)
    return found


def _known(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [value for record in records if (value := record.get(key)) is not None and math.isfinite(value)]


def draw(report: Mapping[str, Any], picture: Path) -> None:
    """Write the picture: largest ratio of every step above, gradient norm below; a colour a bound, a style a loss."""
    from matplotlib.figure import Figure

    from asyncrl.report.drawing import log_axis, steps_axis

    bounds = sorted({run["max_off_policyness"] for run in report["runs"]})
    losses = list(dict.fromkeys(run["loss"] for run in report["runs"]))
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for run in report["runs"]:
        records = read_metrics(RunDirectory(Path(run["directory"])))
        style = {"color": f"C{bounds.index(run['max_off_policyness'])}", "linewidth": 1.3}
        style["linestyle"] = _STYLES[losses.index(run["loss"]) % len(_STYLES)]
        label = f"{run['loss']}, max_off_policyness = {run['max_off_policyness']}"
        for panel, key in ((above, "importance_ratio_max"), (below, "grad_norm")):
            values = [record.get(key) or math.nan for record in records]
            panel.plot([record["step"] for record in records], values, label=label, **style)
    for panel, title in ((above, "largest importance ratio of the step"), (below, "gradient norm, before clipping")):
        log_axis(panel)
        panel.set_title(title, loc="left", fontsize=10)
        panel.grid(alpha=0.3)
    steps_axis(below, range(1, 1 + max(run["steps"] for run in report["runs"])))
    above.legend(fontsize=8, frameon=False)
    figure.savefig(picture)
