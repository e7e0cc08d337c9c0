"""Optimizer steps per hour by the bound on staleness: the same run with and without asynchrony, one after the other.

Tasks, model, engine and learner are the real ones. Environments that answer at once leave little to hide, so the
episodes wait as [environment.latency] says, by default a median of 15 s: sandboxes that run a test suite take as long.
The same episode waits as long in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.bench.child_run import train_in_child
from asyncrl.configs import Config, load_config
from asyncrl.environments import resolve_options
from asyncrl.errors import AsyncRLError, ConfigError

_MEDIAN_S = 15.0  # so that, as in the simulation, the slowest episode of a step takes longer than engine and learner
_EPISODE_TIMEOUT_S = 900.0  # the longest of thousands of such lognormal waits is 20 times the median
_MEASURED_STEPS = 2  # the least from which a rate is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRate:
    """One run."""

    max_off_policyness: int
    steps: int
    """Measured; the first n + 1 of a run are left out, since they eat what began together at its start."""
    seconds: float
    steps_per_hour: float
    staleness_max: float
    learner_idle_share: float
    """Of the measured seconds: waiting for groups."""
    engine_idle_share: float
    """Of the measured seconds: those in which no engine had a request."""


def bench_bounds(
    config_path: Path,
    overrides: Sequence[str],
    *,
    minutes: float,
    bounds: Sequence[int],
    on_rate: Callable[[BoundRate], None] = lambda rate: None,
) -> dict[str, Any]:
    """Return each bound's rate after training for so many minutes, and the ratio of the last one's to the first one's.

    `on_rate` is told of each run as it ends: a later one may fail. Raises: AsyncRLError where a run fails, or takes too
    few steps in that time.
    """
    configs = {bound: _config(config_path, overrides, bound) for bound in bounds}  # before any of them is run
    rates = []
    for bound, config in configs.items():
        records, _ = train_in_child(config, {"run.max_minutes": minutes, "run.steps": 10**6})
        rates.append(measure(records, bound, minutes=minutes))
        on_rate(rates[-1])
    return {
        "latency": asdict(configs[bounds[0]].environment.latency),
        "groups_per_step": configs[bounds[0]].buffer.groups_per_step,
        "group_size": configs[bounds[0]].buffer.group_size,
        "runs": [asdict(rate) for rate in rates],
        "ratio": rates[-1].steps_per_hour / rates[0].steps_per_hour,
    }


def _config(path: Path, overrides: Sequence[str], bound: int) -> Config:
    """Return the configuration with a wait, and time for it, where they are not given."""
    ours = [f"environment.latency.median_s={_MEDIAN_S}", f"buffer.max_off_policyness={bound}"]
    if hasattr(resolve_options(load_config(path, overrides).environment), "episode_timeout_s"):
        ours.append(f"environment.options.episode_timeout_s={_EPISODE_TIMEOUT_S}")
    given = {override.partition("=")[0].strip() for override in overrides}
    if "buffer.max_off_policyness" in given:
        raise ConfigError("--set buffer.max_off_policyness: what is compared is given by --bounds")
    return load_config(path, [*overrides, *(each for each in ours if each.partition("=")[0] not in given)])


def measure(records: Sequence[Mapping[str, float]], bound: int, *, minutes: float) -> BoundRate:
    """Return the rate of a run's steps. Raises: AsyncRLError."""
    before, measured = records[: bound + 1], records[bound + 1 :]
    if len(measured) < _MEASURED_STEPS:
        raise AsyncRLError(
            f"{len(records)} steps in {minutes:g} minutes with max_off_policyness = {bound}, and at least "
            f"{bound + 1 + _MEASURED_STEPS} are needed: raise --minutes, or lower median_s ([environment.latency])"
        )
    seconds = measured[-1]["seconds"] - before[-1]["seconds"]

    def share(names: Sequence[str]) -> float:
        return sum(record.get(name, 0.0) for record in measured for name in names) / seconds

    return BoundRate(
        max_off_policyness=bound,
        steps=len(measured),
        seconds=seconds,
        steps_per_hour=3600.0 * len(measured) / seconds,
        staleness_max=max(record["staleness_max"] for record in measured),
        learner_idle_share=share(["learner_idle_straggler_seconds", "learner_idle_groups_seconds"]),
        engine_idle_share=share([name for name in measured[0] if name.startswith("engine_idle_")]),
    )
