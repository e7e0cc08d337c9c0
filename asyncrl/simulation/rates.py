"""How long things take in a simulation, given by the user or measured from a run that has been."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import fmean, median

from asyncrl.errors import ConfigError
from asyncrl.recording import read_metrics
from asyncrl.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRates:
    """Seconds, tokens and shares. The defaults are those of a small model on one GPU.

    Example:
        >>> SimulationRates().with_changes(["sync_s=2", "straggler_share=0"]).sync_s
        2.0
    """

    engine_tokens_per_second: float = 10_000.0
    """Of one engine with as many requests as it takes, all together."""
    request_tokens_per_second: float = 100.0
    """Of one request, however idle the engine is."""
    completion_tokens: float = 400.0
    """Median tokens that an episode samples."""
    completion_sigma: float = 0.5
    """Of the lognormal that they follow."""
    environment_s: float = 2.0
    """Median seconds of an episode in which it samples nothing: tools, tests, sandboxes."""
    environment_sigma: float = 0.8
    """Of the lognormal that they follow."""
    straggler_share: float = 0.02
    """Of the episodes: those whose environment takes `straggler_factor` times the median."""
    straggler_factor: float = 4.0
    failure_share: float = 0.0
    """Of the episodes: those that infrastructure ends without a reward."""
    solve_share: float = 0.4
    """Of the episodes: those with reward 1; the others get 0."""
    learner_tokens_per_second: float = 20_000.0
    """Trained tokens."""
    step_overhead_s: float = 0.5
    """Seconds of a step that do not depend on its tokens."""
    sync_s: float = 0.5
    """From the end of a step to the engines' having pulled its weights."""
    sync_stall_s: float = 0.1
    """Of those, in which engines produce no token."""

    def __post_init__(self) -> None:
        """Refuse what no run can have, by the name of the rate."""
        for field in fields(self):
            value = getattr(self, field.name)
            least_open = field.name.endswith("_per_second") or field.name in ("completion_tokens", "straggler_factor")
            if not math.isfinite(value) or value < 0 or (least_open and value == 0):
                raise ConfigError(f"{field.name} must be {'> 0' if least_open else '>= 0'}, got {value} (--rate)")
            if field.name.endswith("_share") and value > 1:
                raise ConfigError(f"{field.name} must be at most 1, got {value} (--rate)")
        if self.sync_stall_s > self.sync_s:
            raise ConfigError(f"sync_stall_s = {self.sync_stall_s} is part of sync_s = {self.sync_s} (--rate)")

    def with_changes(self, assignments: list[str]) -> SimulationRates:
        """Return the rates with "name=number" put over them. Raises: ConfigError naming the rates there are."""
        known = [field.name for field in fields(self)]
        changes: dict[str, float] = {}
        for assignment in assignments:
            name, _, text = assignment.partition("=")
            if name not in known:
                raise ConfigError(f"unknown rate {name!r} (--rate); the rates are {', '.join(known)}")
            try:
                changes[name] = float(text)
            except ValueError:
                raise ConfigError(f"{name} must be a number, got {text!r} (--rate)") from None
        return replace(self, **changes)


def measured_rates(directory: RunDirectory, *, engines: int = 1) -> SimulationRates:
    """Return what the steps of a run in `directory` took; what its files do not tell keeps its default.

    Raises: ConfigError where no step was written.
    """
    steps = read_metrics(directory)
    if not steps:
        raise ConfigError(f"{directory.path} holds no steps to measure rates from (metrics.jsonl)")

    def middle(name: str) -> float:
        """Return the median over the steps that have it: a sync that ends beside a later step is in that one's line."""
        return float(median(step[name] for step in steps if name in step))

    rates, synced = SimulationRates(), [step for step in steps if "sync_seconds" in step]
    if synced:
        sync_s = middle("sync_seconds")
        rates = replace(rates, sync_s=sync_s, sync_stall_s=min(sync_s, middle("sync_stall_seconds")))
    return replace(
        rates,
        engine_tokens_per_second=max(1.0, max(s.get("generated_tokens_per_second", 0.0) for s in steps) / engines),
        completion_tokens=max(1.0, middle("completion_tokens_mean")),
        solve_share=min(1.0, max(0.0, fmean(step["solve_rate"] for step in steps))),
        learner_tokens_per_second=max(1.0, middle("tokens_trained") / max(1e-9, middle("step_seconds"))),
        step_overhead_s=0.0,
    )
