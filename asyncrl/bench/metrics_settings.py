"""Settings and promises of `asyncrl bench metrics`, for a command line that must start without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.bench.goals import Goal
from asyncrl.errors import ConfigError

GOALS = (
    Goal(name="watching_of_step", words="diagnostics and attribution, of a learner's step", limit=0.02, is_least=False),
    Goal(name="on_of_off", words="everything on: more of a step's processor time", limit=0.02, is_least=False),
    Goal(name="scrape_ms", words="a scrape, ms", limit=50.0, is_least=False),
    Goal(name="update_us", words="one update of a metric, us", limit=3.0, is_least=False),
    Goal(name="spikes_mb", words="spikes.jsonl of 100 steps, MB", limit=1.0, is_least=False),
    Goal(name="report_s", words="the report of 1,000 steps, s", limit=10.0, is_least=False),
    Goal(name="report_mb", words="the report of 1,000 steps, MB", limit=20.0, is_least=False),
)

_LEAST_STEPS = 4  # on each side; with fewer nothing is told from what the steps differ in


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsBench:
    """What is measured."""

    model: Path
    segments: int = 32
    """Of a step: as many as the demo's episodes."""
    shortest: int = 150
    longest: int = 350
    prompt_tokens: int = 100
    rounds: int = 3
    """Learner's steps after one for warm-up."""
    environments: int = 10
    scrapes: int = 50
    report_steps: int = 1000
    pairs: int = 2
    """Of real runs, one with everything on and one with everything off; 0 leaves them out."""
    steps: int = 6
    """Measured ones of each of these runs."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the option's name."""
        for name in ("segments", "rounds", "environments", "scrapes", "report_steps", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.pairs < 0 or (self.pairs and self.steps * self.pairs < _LEAST_STEPS):
            raise ConfigError(
                f"--pairs must be >= 0, and times --steps at least {_LEAST_STEPS}, got {self.pairs} and {self.steps}"
            )
        if not self.prompt_tokens < self.shortest <= self.longest:
            raise ConfigError("--prompt-tokens must be below --shortest, and that at most --longest")
