"""`asyncrl simulate --cluster`: what clusters would do, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from asyncrl.errors import ConfigError
from asyncrl.simulation.cluster import Prediction, gains, predict, rates_of_cluster
from asyncrl.simulation.forecast import Forecast, simulate
from asyncrl.simulation.shapes import ClusterShape, read_cluster, sections

_SAYS_NOTHING = 0.02  # times the steps: what the drawn lengths of groups may do by themselves


def settings_help() -> str:
    """Return the sections of a file and what they mean, as lines for --help."""
    lines = ["sections of a --cluster file (a setting without a default must be given):"]
    for name, words, rows in sections():
        lines += ["", f"  [{name}]  {words}"]
        lines += [f"    {setting} ({default or 'no default'}): {what}" for setting, default, what in rows]
    return "\n".join([*lines, "", "  [buffer]  as in a run's configuration"])


def show_clusters(paths: Sequence[Path], overrides: list[str], *, replay: int, as_json: bool) -> int:
    """Print what the clusters of the files would do, beside `replay` steps of the real loop; return the exit code."""
    shapes = {path.stem: read_cluster(path, overrides) for path in paths}
    if len(shapes) < len(paths):
        raise ConfigError(f"--cluster: two files have one name: {' '.join(map(str, paths))}")
    found = {name: predict(shape) for name, shape in shapes.items()}
    helped = {name: gains(shape) for name, shape in shapes.items()}
    replayed = {name: _replay(shape, replay) for name, shape in shapes.items()} if replay else {}
    if as_json:
        report = {
            name: {"predicted": asdict(found[name]), "gains": helped[name]}
            | ({"replayed": asdict(replayed[name])} if replay else {})
            for name in shapes
        }
        print(json.dumps(report, indent=2))
        return 0
    rows = {name: _rows(shapes[name], found[name], helped[name], replayed.get(name)) for name in shapes}
    _print(rows)
    for name, prediction in found.items():
        print(f"\n{name}: seconds that a step needs of each part")
        for load in prediction.loads:
            print(f"  {load.part:17} {load.seconds:8.1f}  {load.words}")
    return 0


def _replay(shape: ClusterShape, steps: int) -> Forecast:
    """Run the real loop on the cluster as it is between failures."""
    lasting = replace(shape, failures=replace(shape.failures, gpu_hours_between=1e15))
    engines = shape.engines
    return simulate(
        shape.buffer, rates_of_cluster(lasting), steps=steps, engines=engines.count, engine_slots=engines.max_num_seqs
    )


def _rows(
    shape: ClusterShape, found: Prediction, helped: Mapping[str, float], replayed: Forecast | None
) -> dict[str, str]:
    first, second = found.bottleneck, found.next_bottleneck
    engines = shape.engines
    rows = {
        "GPUs": f"{found.gpus:,}: {engines.count:,} engines of {engines.gpus_each}, {shape.learner.ranks:,} ranks",
        "steps an hour": f"{found.steps_per_hour:.1f}",
        "a step takes": f"{found.period_s:.1f} s",
    }
    if replayed is not None:
        rows["steps an hour, real loop"] = f"{replayed.steps_per_hour:.1f} over {replayed.steps} steps"
    rows |= {
        "first bottleneck": f"{first.part}, {first.seconds:.1f} s a step",
        "next bottleneck": f"{second.part}, {second.seconds:.1f} s a step",
        "staleness": f"mean {found.staleness_mean:.2f}, at most {found.staleness_max}",
        "tokens a second": f"{found.sampled_tokens_per_second:,.0f} sampled, {found.read_tokens_per_second:,.0f} read",
        "an episode": f"{found.episode_s:.0f} s, longest of a step {found.longest_episode_s:.0f} s",
        "rollouts": f"{found.rollouts_running:,.0f} run, {found.rollouts_admitted:,} admitted",
        "weight sync": f"{found.publish_s:.1f} s publishing, {found.sync_s:.1f} s pulling",
    }
    parts = ("engines", "learner", "sandboxes", "orchestrator", "rollout processes")
    rows |= {
        f"idle: {part}": f"{found.idle_shares[part]:.0%}" if part in found.idle_shares else "none there"
        for part in parts
    }
    rows |= {
        "failures a day": f"{found.failures_per_day:.1f}, {found.lost_share:.1%} of all time lost",
        "checkpoints": f"best every {found.best_checkpoint_every_steps:,} steps, now "
        f"{shape.failures.checkpoint_every_steps}",
    }
    return rows | {words: _gain(gain) for words, gain in helped.items()}


def _gain(times: float) -> str:
    return "no change" if abs(times - 1.0) < _SAYS_NOTHING else f"{times:.2f} times the steps"


def _print(columns: Mapping[str, Mapping[str, str]]) -> None:
    """Print a table that is as wide as it needs to be: it is read in a terminal, a page, or a file."""
    table = Table("", *columns, box=box.MARKDOWN)
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    for name in names:
        table.add_row(name, *(rows.get(name, "") for rows in columns.values()))
    console = Console(width=10_000, color_system=None)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))
