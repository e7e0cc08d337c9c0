"""What the process that holds the models is told, in a JSON file. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.learner.settings import DEVICES, DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsJob:
    """One base model and how it computes."""

    model: str
    """Directory of the base."""
    dtype: str = "bfloat16"
    """Of the base; adapters are float32 (float64 for float64)."""
    head_dtype: str = "float32"
    attention: str = "auto"
    device: str = "auto"
    threads: int = 0
    gradient_checkpointing: bool = False
    microbatch_tokens: int = 2048
    """Tokens that one forward reads."""
    max_samplers: int = 4
    """Saved adapters that are kept in memory for sampling."""

    def __post_init__(self) -> None:
        """Refuse what cannot run. Raises: ConfigError."""
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")


def write_job(job: ModelsJob, path: Path) -> None:
    """Write the file that `read_job` reads."""
    path.write_bytes(msgspec.json.encode(job))


def read_job(path: Path) -> ModelsJob:
    """Return what stands in the file."""
    return msgspec.json.decode(path.read_bytes(), type=ModelsJob)
