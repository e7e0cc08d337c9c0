"""What can go wrong in a simulation, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from asyncrl.errors import ConfigError

FAULTS: Mapping[str, str] = MappingProxyType(
    {
        "silent_worker": "one episode never returns",
        "engine_death": "every request fails from then on",
        "learner_death": "the learner's process ends in the middle of the step",
        "slow_sync": "the sync takes fifty times as long",
        "failed_sync": "the sync is refused",
        "unverified_sync": "the engines hold other bytes than were sent",
        "stale_engine": "the engines say that they took the new weights, and sample from the old ones",
        "nan_logprobs": "the step's gradient is not finite, and it is skipped",
        "full_disk": "the checkpoint cannot be written",
        "duplicate_results": "an environment returns the same episode twice",
        "short_group": "an environment returns fewer episodes than were asked for",
        "no_more_tasks": "the tasks are used up",
    }
)
"""Name -> what happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of `FAULTS`, from the step that begins at `version` on (one that happens once happens in that step)."""

    kind: str
    version: int

    def __post_init__(self) -> None:
        """Raises: ConfigError naming the faults there are."""
        if self.kind not in FAULTS:
            raise ConfigError(f"unknown fault {self.kind!r} (--fault); the faults are {', '.join(FAULTS)}")
        if self.version < 0:
            raise ConfigError(f"a fault's version must be >= 0, got {self.version} (--fault)")


def parse(assignments: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of "KIND@VERSION" arguments. Raises: ConfigError."""
    faults = []
    for text in assignments:
        kind, _, version = text.partition("@")
        if not version.isdigit():
            raise ConfigError(f"a fault is given as KIND@VERSION, got {text!r} (--fault)")
        faults.append(Fault(kind=kind, version=int(version)))
    return tuple(faults)
