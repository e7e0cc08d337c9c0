"""What `asyncrl bench gpu` runs: the models' shapes and the batches' sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's architecture, Llama's, and the batches that are laid out for it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool = True
    """Whether embedding and LM head are one matrix."""
    microbatch_tokens: int = 16384
    step_tokens: int = 65536
    """Of the timed optimizer steps."""
    longest: int = 2048
    """Tokens; the segments' lengths lie evenly between an eighth of it and all."""
    group_size: int = 8
    prompt_tokens: int = 1024
    """That the segments of a group share where prefix sharing is timed; a quarter as many follow in each."""
    head_rows: int = 8192
    """Predictions for which the LM head is timed."""
    gradient_checkpointing: bool = False


# The two sizes are those of Qwen2.5-0.5B and Qwen2.5-3B, without their biases.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "0.5b": Shape(
            hidden=896, intermediate=4864, layers=24, heads=14, key_heads=2, head_width=64, vocabulary=151936
        ),
        "3b": Shape(
            hidden=2048,
            intermediate=11008,
            layers=36,
            heads=16,
            key_heads=2,
            head_width=128,
            vocabulary=151936,
            step_tokens=32768,
            gradient_checkpointing=True,
        ),
        "tiny": Shape(
            hidden=64,
            intermediate=128,
            layers=2,
            heads=4,
            key_heads=2,
            head_width=16,
            vocabulary=512,
            microbatch_tokens=128,
            step_tokens=256,
            longest=64,
            group_size=4,
            prompt_tokens=16,
            head_rows=64,
        ),
    }
)
"""Name -> shape; "tiny" runs every piece within seconds on a CPU, and its figures say nothing."""

DENSE_BFLOAT16_FLOPS: Mapping[str, float] = MappingProxyType(
    {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
)
"""Part of a card's name -> floating-point operations a second of dense bfloat16 products, as its vendor states them."""


def stated_flops(card: str) -> float | None:
    """Return what the vendor states for a card, None for one that is not listed.

    Example:
        >>> stated_flops("NVIDIA H100 PCIe") == 756e12, stated_flops("NVIDIA T4")
        (True, None)
    """
    return next((flops for name, flops in DENSE_BFLOAT16_FLOPS.items() if name in card), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBench:
    """What is measured, and for how long."""

    shapes: tuple[str, ...] = ("0.5b", "3b")
    """Names of `SHAPES`."""
    device: str = "cuda"
    """"cuda" or "cpu"."""
    rounds: int = 3
    """Of each timing, after one that is not counted; figures are medians."""
    limit_s: float = 270.0
    """Seconds after which nothing new is begun; what was left out is listed."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the option's name."""
        for name in self.shapes:
            if name not in SHAPES:
                raise ConfigError(f"--shape must be among {', '.join(SHAPES)}, got {name!r}")
        if len({*self.shapes}) < len(self.shapes):
            raise ConfigError(f"--shape must name each shape once, got {' '.join(self.shapes)}")
        if self.device not in ("cuda", "cpu"):
            raise ConfigError(f"--device must be cuda or cpu, got {self.device!r}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be >= 1, got {self.rounds}")
        if not self.limit_s > 0:
            raise ConfigError(f"--limit-s must be > 0, got {self.limit_s}")
