"""What `asyncrl bench scale` measures, and the figures that the project promises of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from asyncrl.bench.goals import Goal
from asyncrl.errors import ConfigError

GOALS = (
    Goal(name="wire_messages", words="messages there and back a second, of a plain socket's", limit=0.7, is_least=True),
    Goal(name="wire_frames", words="frames one way a second, of a plain socket's", limit=0.7, is_least=True),
    Goal(name="wire_megabytes", words="MB/s of batches, of a plain socket's", limit=0.7, is_least=True),
    Goal(name="kib_per_rollout", words="KiB of a rollout under way besides its tokens", limit=8.0, is_least=False),
)

_LEAST = {"groups": 2, "parameters": 1, "steps": 1, "rollouts": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBench:
    """Sizes of the measurement; the defaults are what the project's figures are measured with."""

    frames: int = 20_000
    """Small frames of a round, 256 bytes each."""
    megabytes: int = 256
    """Of batches, sent in a round."""
    rounds: int = 5
    """In which ours and the plain thing take turns; figures are medians."""
    groups: int = 64
    """Of a batch: 8 trajectories of 512 tokens each."""
    parameters: int = 30
    """Millions, of the model with random weights that the learner's ranks hold; 0 leaves the learner out."""
    steps: int = 3
    """Timed optimizer steps of each learner, after one that is not counted."""
    rollouts: int = 100_000
    """Under way at one moment."""
    requests: int = 2_000
    """To a stand-in for an engine, over HTTP; 0 leaves them out."""
    directory: Path = Path()
    """On the disk that checkpoints are measured on."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the option's name."""
        for option in fields(self):
            value = getattr(self, option.name)
            least = 0 if option.name in ("parameters", "requests") else _LEAST.get(option.name, 1)
            if isinstance(value, int) and value < least:
                raise ConfigError(f"--{option.name} must be >= {least}, got {value}")
        if not self.directory.is_dir():
            raise ConfigError(f"--directory: there is no directory {self.directory}")
