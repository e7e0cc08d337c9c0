"""What a pool asks of an engine, and what can be seen of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from asyncrl.engines.draft import Draft
from asyncrl.errors import EngineError
from asyncrl.protocols import SyncReport
from asyncrl.types import PolicyVersion, WeightManifest


class RequestRefused(EngineError):  # noqa: N818  (it is the request that is at fault)
    """A request that no engine can serve: asking another one, or again, is of no use."""


class RequestNotSent(EngineError):  # noqa: N818  (nothing is wrong with it)
    """A request that the engine has not begun to run, so that its failure says nothing about the request."""


class Health(StrEnum):
    """Whether an engine may be asked."""

    STARTING = "starting"
    """It does not answer yet, or has not taken the newest weights yet."""
    SERVING = "serving"
    DOUBTED = "doubted"
    """It failed a request and is being looked at; nothing new is sent to it meanwhile."""
    QUARANTINED = "quarantined"
    """It took other weights than were published, and is sent them once more; nothing else is asked of it meanwhile."""
    LOST = "lost"
    """It died, does not answer, or cannot be known to hold the newest weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What one engine is doing and has done."""

    name: str
    running: int
    """Requests in the engine."""
    begun: int
    """Those of them whose first tokens have arrived."""
    waiting: int
    """Requests that wait for a sync to end."""
    completed: int
    failed: int
    withdrawn: int
    """Requests sent again because new weights came before they had begun."""
    tokens_sampled: int
    """As they arrive."""
    tokens_per_second: float
    """Recently."""
    syncs: int
    version: PolicyVersion
    health: Health = Health.SERVING
    health_seconds: float = 0.0
    """Since its health last changed."""
    reason: str = ""
    """Why it is not serving, in words."""
    restarts: int = 0
    """How often its server was started again."""
    quarantines: int = 0
    """How often it took other weights than were published."""
    tokens_unverified: int = 0
    """Tokens that arrived and were not kept: sampled under weights that were found to be wrong."""
    canary_distance: float | None = None
    """Nats a token, after the last sync; see `asyncrl.engines.canary`."""
    reading: PolicyVersion | None = None
    """The version that it is being brought to, if any."""


class Engine(Protocol):
    """A client of one server. Many tasks may generate at once; one at a time may pull."""

    name: str
    version: PolicyVersion
    """What the server's weights are called."""

    @property
    def capacity(self) -> int:
        """Requests that it runs at once."""
        ...

    @property
    def broken(self) -> str:
        """Why it must not be sampled from, or "". A pull that succeeds mends it."""
        ...

    @property
    def seconds_per_token(self) -> float | None:
        """What one request waits for one token, recently; None before anything is known."""
        ...

    async def generate(self, draft: Draft) -> None:
        """Go on with `draft` until it is whole. Whatever is raised, what was sampled is in it.

        Raises: EngineError when the server fails; RequestNotSent before it has begun; RequestRefused when the request
        is at fault.
        """
        ...

    async def connect(self, url: str, version: PolicyVersion) -> None:
        """Speak to a new server from now on, which was started with `version`; the one before is gone."""
        ...

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return when the server answers and has what a run needs.

        Raises: EngineError when it does not answer in time, or naming what it was started without.
        """
        ...

    async def check(self) -> bool:
        """Tell whether the server answers, and holds what it is believed to hold. Bounded in time."""
        ...

    async def sleep(self) -> None:
        """Have the server give up its GPU memory and keep its requests; the next pull wakes it. Raises: EngineError."""
        ...

    async def pull(self, manifest: WeightManifest) -> SyncReport:
        """Bring the server to the manifest's version, in the middle of its requests.

        Raises: WeightSyncError naming engine and phase: it then serves what it held before, or is `broken`.
        WeightMismatch where it has, or was given, other weights than were published: of what was sampled under them
        nothing is kept.
        """
        ...

    async def canary_logprobs(self) -> Sequence[float]:
        """Return what the server makes of the canary's text. Raises: EngineError."""
        ...

    async def metrics(self) -> str:
        """Return the server's own metrics as Prometheus' text; empty where it has none. Not bounded in time."""
        ...

    def withdraw(self, reason: str) -> None:
        """End every running request as a failure, so that it goes on elsewhere."""
        ...

    def statistics(self) -> EngineStatistics:
        """Return counts since the start."""
        ...

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        ...
