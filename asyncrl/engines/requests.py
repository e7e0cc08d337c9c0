"""A request on its way to a server, and weights whose requests are not yet believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from asyncrl.engines.answers import Answer
from asyncrl.engines.draft import Part
from asyncrl.errors import EngineError
from asyncrl.types import PolicyVersion


class Request:
    """One request on its way. Mutable, owned by the task that sent it."""

    def __init__(self, engine: str) -> None:
        self.answer = Answer(engine)
        self.scope = trio.CancelScope()
        self.withdrawn = False
        self.failure = ""
        self.kind: type[EngineError] = EngineError
        """Of the failure."""
        self.last_event: float | None = None
        self.shown: Part | None = None
        """What whoever waits has heard of, and what must stay."""
        self.ended = False
        """Whether it is to end with what was shown."""
        self.cut_at: PolicyVersion | None = None
        """The version whose tokens must not be kept."""


def sampling_params(
    temperature: float, max_tokens: int, *, stop_token_ids: Sequence[int], stream_interval: int
) -> dict[str, Any]:
    """Return how a server is to sample: one distribution, nothing cut off, each token with its log-prob."""
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "logprobs": 0,
        "ignore_eos": True,  # the end tokens are those given here, whatever the model's files say
        "stop_token_ids": list(stop_token_ids),
        "detokenize": False,
        "stream_interval": stream_interval,
    }


class Probation:
    """A version that is in place and whose canary has not been heard yet."""

    def __init__(self, version: PolicyVersion) -> None:
        self.version = version
        self.over = trio.Event()
