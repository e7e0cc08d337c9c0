"""Limits of the service."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSettings:
    """What the service bears.

    Example:
        >>> TinkerSettings(max_models=0)
        Traceback (most recent call last):
        asyncrl.errors.ConfigError: max_models must be >= 1, got 0
    """

    max_models: int = 16
    """Models at once, over all sessions: each has its adapter, gradients and moments in memory."""
    max_tokens: int = 65_536
    """Tokens of one forward or forward_backward, or of one sampling request with all it may sample."""
    max_waiting: int = 256
    """Requests of one model that wait, and sampling requests in all."""
    max_snapshots: int = 8
    """Unnamed weights for samplers that are kept of each model: of the oldest the sampler ends."""
    max_results_mib: float = 256.0
    """Results that wait to be fetched, or to be fetched again."""
    max_body_mib: float = 32.0
    """Largest body of a request, unpacked."""
    gap_timeout_s: float = 60.0
    """How long requests of a model wait for one with a lower number."""
    session_timeout_s: float = 600.0
    """Without a word from a client, after which its session ends and its models are unloaded."""
    poll_s: float = 20.0
    """How long an answer waits for a result that is not there yet."""
    body_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        for name in ("max_models", "max_tokens", "max_waiting", "max_snapshots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in (
            "max_results_mib", "max_body_mib", "gap_timeout_s", "session_timeout_s", "poll_s", "body_timeout_s"
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be > 0 and finite, got {getattr(self, name):g}")
