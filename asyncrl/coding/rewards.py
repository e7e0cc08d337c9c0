"""What an agent's work is paid: a solution, hidden checks beyond those that the untouched files pass, and its conduct.

Of one step, with p the checks that pass now and b those that passed before anything was done, n in all:
solved is 1 where all pass, and partial = max(0, p - b) / (n - b); of a script that writes one number, the same of the
number between what it wrote before and 1. A task of several steps has the mean over its steps, those that were not
reached counted as nothing, or what its last step has where the task says so.

reward = solved + partial_weight * (partial where not solved) + checks_weight * what the checks say themselves
         + format_weight * format + solved * (brevity_weight * brevity + length_weight * shortness)

Each term is also kept by itself, as `paid_...`, so that a step can say which of them the reward's variance comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from asyncrl.coding.tasks import CodingTask
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Weights, >= 0, of what is paid besides 1 for a solution."""

    partial_weight: float = 0.2
    """Of the checks that pass beyond what the untouched files pass, where some still fail. Above 0, the untouched files
    are judged once for each task."""
    checks_weight: float = 0.0
    """Of what the checks say themselves: the share of passed ones, or the number that a script wrote."""
    format_weight: float = 0.0
    """Of the share of calls that were well formed; paid for failures too, so keep it far below 1."""
    brevity_weight: float = 0.0
    """Of the share of turns that a solution left unused."""
    length_weight: float = 0.0
    """Of the share of tokens that a solution left unused, of those that its turns may have."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name} must be >= 0, got {value} ([environment.options.reward])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How an agent worked, whatever came of it."""

    num_calls: int
    """Malformed ones included."""
    num_malformed: int
    num_turns: int
    max_turns: int
    num_tokens: int
    """Sampled."""
    max_tokens: int
    """That could have been sampled."""

    @property
    def format(self) -> float:
        """The share of well-formed calls, 0 without any."""
        return (self.num_calls - self.num_malformed) / self.num_calls if self.num_calls else 0.0

    @property
    def brevity(self) -> float:
        """The share of unused turns: 1 after the first of many, 0 after the last."""
        return (self.max_turns - self.num_turns) / max(1, self.max_turns - 1)

    @property
    def shortness(self) -> float:
        """The share of unused tokens."""
        return max(0.0, 1 - self.num_tokens / self.max_tokens)


def partial_of(verdict: Verdict, untouched: Verdict) -> float:
    """Return the share, from 0 to 1, of what the untouched files fail and these files pass."""
    if verdict.tampered:
        return 0.0
    if verdict.passed:
        total, before, after = float(len(verdict.passed)), _count(untouched), _count(verdict)
    else:
        total, before, after = 1.0, untouched.reward, verdict.reward
    return min(1.0, max(0.0, after - before) / (total - before)) if total > before else 0.0


def _count(verdict: Verdict) -> float:
    return float(sum(verdict.passed.values()))


def pay(
    task: CodingTask,
    verdicts: Sequence[Verdict],
    untouched: Sequence[Verdict],
    conduct: Conduct,
    settings: RewardSettings,
) -> tuple[float, dict[str, float]]:
    """Return the reward and its parts.

    Args: `verdicts` are of the steps that were reached; `untouched` are of all steps, or empty where nothing is paid
    for parts of a solution. An agent that tampered with its judge at any step gets nothing at all.
    """
    partials = [0.0 if v.solved else partial_of(v, u) for v, u in zip(verdicts, untouched, strict=False)]
    tampered = any(verdict.tampered for verdict in verdicts)
    solved = _over_steps(task, [float(verdict.solved) for verdict in verdicts])
    partial = _over_steps(task, partials)
    terms = {
        "solved": (1.0, solved),
        "partial": (settings.partial_weight, partial),
        "checks": (settings.checks_weight, _over_steps(task, [verdict.reward for verdict in verdicts])),
        "format": (settings.format_weight, conduct.format),
        "brevity": (settings.brevity_weight, solved * conduct.brevity),
        "length": (settings.length_weight, solved * conduct.shortness),
    }
    paid = {f"paid_{name}": 0.0 if tampered else weight * value for name, (weight, value) in terms.items() if weight}
    parts = {
        "solved": float(solved == 1.0 and not tampered),
        "partial": partial,
        "format": conduct.format,
        "brevity": conduct.brevity,
        "shortness": conduct.shortness,
        "tampered": float(tampered),
        "tool_calls": float(conduct.num_calls - conduct.num_malformed),
        "malformed": float(conduct.num_malformed),
    }
    return sum(paid.values()), parts | paid


def _over_steps(task: CodingTask, values: Sequence[float]) -> float:
    """Return a task's value from those of the steps that were reached."""
    reached = [*values, *[0.0] * (len(task.steps) - len(values))]
    return reached[-1] if task.last_step_counts else fmean(reached)
