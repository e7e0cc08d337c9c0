"""What a user may set about tasks that come as directories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from asyncrl.coding.sets.dockerfile import BASE_IMAGES
from asyncrl.errors import ConfigError

_WHERE = "([environment.options.task_options])"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborSettings:
    """Which task directories are read, and what they are given."""

    path: Path
    """A task's directory, or one that holds such directories at any depth."""
    held_out_percent: int = 20
    """Share of the tasks that is never trained on; chosen by the tasks' ids alone."""
    images: bool = False
    """Whether tasks may bring an image, which the sandbox backend `container` runs; else they are refused."""
    skip_refused: bool = False
    """Whether tasks that cannot run here are left out, and named; else the first of them is an error."""
    base_images: tuple[str, ...] = BASE_IMAGES
    """Images without tags for which this machine's /usr may stand, in Dockerfiles that build nothing."""
    tests_provided: tuple[str, ...] = ()
    """Packages that test scripts and Dockerfiles may ask for, since they are here: "curl" and "uv" (of which nothing is
    fetched), "pytest", and Debian or Python packages that the sandbox has. Empty refuses whatever installs anything."""
    host_variables: tuple[str, ...] = ()
    """Environment variables of this machine that tasks may read by ${NAME}."""
    timeout_multiplier: float = 1.0
    """Of the tasks' own timeouts, after they have been bounded by the next two."""
    max_agent_timeout_s: float = 1800.0
    max_verifier_timeout_s: float = 600.0
    command_s: float = 600.0
    """Seconds of one command, and of the reference's script, where a task sets no timeout for its agent."""
    max_memory_mb: int = 2048
    """Of one sandbox, what lies on its disk included."""
    max_storage_mb: int = 512

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        if not 0 <= self.held_out_percent <= 100:
            raise ConfigError(f"held_out_percent must be from 0 to 100, got {self.held_out_percent} {_WHERE}")
        for name in (
            "timeout_multiplier", "max_agent_timeout_s", "max_verifier_timeout_s", "command_s", "max_memory_mb",
            "max_storage_mb",
        ):  # fmt: skip
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be > 0 and finite, got {value} {_WHERE}")

    def agent_timeout_s(self, base: float | None) -> float | None:
        """Return min(base, max) x multiplier; None where the task sets none."""
        return None if base is None else min(base, self.max_agent_timeout_s) * self.timeout_multiplier

    def verifier_timeout_s(self, base: float) -> float:
        """Return min(base, max) x multiplier."""
        return min(base, self.max_verifier_timeout_s) * self.timeout_multiplier
