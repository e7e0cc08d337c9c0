"""What a user may set about the gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.errors import ConfigError


class ForeignSampling(StrEnum):
    """What becomes of a request that asks for another distribution than the run samples from and trains on."""

    REFUSE = "refuse"
    """It is answered 400, naming the parameter."""
    IGNORE = "ignore"
    """It is sampled as the run samples. The answer's header `asyncrl-ignored` names what was ignored, and the
    trajectory's extras count it."""


class ToolFormat(StrEnum):
    """How a model writes that it calls a tool."""

    AUTO = "auto"
    """As the model's chat template shows it; none where that shows none of those below."""
    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3, SmolLM3."""
    LLAMA_JSON = "llama_json"
    """A reply that is nothing but `{"name": ..., "parameters": {...}}`: Llama 3.1 and later."""
    NONE = "none"
    """Replies are text; requests with tools are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The HTTP face before the engines. It listens where the environment's agents need it, or a port is given.

    Example:
        >>> GatewaySettings(max_cache_use=1.5)
        Traceback (most recent call last):
        asyncrl.errors.ConfigError: max_cache_use must be from 0 to 1, got 1.5 ([gateway])
    """

    host: str = "127.0.0.1"
    """The address that it listens on. Agents on other machines need another one; every request needs a token."""
    port: int = 0
    """0 takes a free one, where an environment needs the gateway."""
    public_url: str = ""
    """How agents reach it, where that is not http://HOST:PORT: behind a proxy, or from a container."""
    foreign_sampling: ForeignSampling = ForeignSampling.REFUSE
    tool_format: ToolFormat = ToolFormat.AUTO
    max_tokens: int = 0
    """Sampled tokens of a completion whose request names no limit; 0 leaves it what the context has room for."""
    max_choices: int = 16
    """Largest `n` of a request: choices that are sampled beside each other, each from the same prompt."""
    max_body_mib: float = 16.0
    """Largest body, unpacked; a larger one is answered 413 without being read to its end."""
    max_requests: int = 4096
    """Requests at once; further ones are answered 503."""
    max_session_requests: int = 16
    """Requests at once of one session; further ones are answered 429."""
    max_cache_use: float = 0.95
    """Share of every engine's cache of keys and values above which a session that has not begun is answered 429: those
    that have begun can then end. 1 never does."""
    body_timeout_s: float = 30.0
    """For a request's body to arrive; then it is answered 408."""
    request_timeout_s: float = 600.0
    """From a request's body to its answer, waiting for an engine included; then it is answered 504."""
    stalled_client_s: float = 30.0
    """After which the connection of a client that takes nothing of its answer is dropped."""

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of range."""
        _in_range("port", self.port, 0, 65535)
        _in_range("max_tokens", self.max_tokens, 0, 2**24)
        _in_range("max_choices", self.max_choices, 1, 1024)
        _in_range("max_body_mib", self.max_body_mib, 0.001, 1024)
        _in_range("max_requests", self.max_requests, 1, 2**20)
        _in_range("max_session_requests", self.max_session_requests, 1, 2**20)
        _in_range("max_cache_use", self.max_cache_use, 0, 1)
        for name in ("body_timeout_s", "request_timeout_s", "stalled_client_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name} must be > 0 and finite seconds, got {seconds} ([gateway])")
        if self.public_url and not self.public_url.startswith(("http://", "https://")):
            raise ConfigError(f"public_url must begin with http:// or https://, got {self.public_url!r} ([gateway])")
        if not self.host:
            raise ConfigError("host must not be empty ([gateway]); 0.0.0.0 listens on all addresses")

    @property
    def max_body_bytes(self) -> int:
        """Of a body, unpacked."""
        return int(self.max_body_mib * 2**20)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # so that NaN is refused too
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {value:g} ([gateway])")
