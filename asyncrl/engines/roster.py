"""Which engines of a pool are in service, who is not and why, and how long nobody has been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from asyncrl.engines.engine import Engine, EngineStatistics, Health
from asyncrl.errors import EngineError
from asyncrl.protocols import SyncReport
from asyncrl.types import WeightManifest


class Member:
    """One engine's place in a pool. The roster writes its health, the pool's line its places."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.health = Health.STARTING
        self.reason = ""
        """Why it does not serve, in words."""
        self.since = trio.current_time()
        self.has_served = False
        self.restarts = 0
        self.places_taken = 0
        """Requests that were sent to it and have not ended."""
        self.holds: WeightManifest | None = None
        """The last version that it is known to hold whole; None until it has pulled one."""
        self.report: SyncReport | None = None
        """Of that pull."""
        self.changing = trio.Lock()
        """Held by who brings it into service, or weights into it."""
        self.unsettled = trio.Event()
        """Set when it is doubted or lost."""

    @property
    def name(self) -> str:
        """Of the engine."""
        return self.engine.name

    @property
    def has_place(self) -> bool:
        """True where one more request would run at once."""
        return self.health is Health.SERVING and self.places_taken < self.engine.capacity

    async def pull(self, manifest: WeightManifest) -> None:
        """Bring the engine to a version. Raises: WeightSyncError."""
        self.report = await self.engine.pull(manifest)
        self.holds = manifest

    def statistics(self) -> EngineStatistics:
        """Return the engine's counts and its health."""
        return replace(
            self.engine.statistics(),
            health=self.health,
            health_seconds=trio.current_time() - self.since,
            reason=self.reason,
            restarts=self.restarts,
        )


class Roster:
    """The members of a pool. An engine serves only while it holds the newest weights."""

    def __init__(self, engines: Sequence[Engine], *, outage_timeout_s: float) -> None:
        self.members = tuple(Member(engine) for engine in engines)
        self.newest: WeightManifest | None = None
        """What an engine must hold to serve; None while nothing has been published: what it was started with."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever an engine comes or goes."""
        self._outage_timeout_s = outage_timeout_s
        self._outage_began = trio.current_time()
        self._changed = trio.Event()

    @property
    def serving(self) -> list[Member]:
        """Those in service."""
        return [member for member in self.members if member.health is Health.SERVING]

    def put_in_service(self, member: Member) -> None:
        """Let requests go to it."""
        assert member.holds is self.newest, f"{member.name} does not hold the newest weights"
        member.unsettled = trio.Event()
        member.has_served = True
        self._set(member, Health.SERVING, "")

    def doubt(self, member: Member, reason: str) -> None:
        """Let no new request go to it until it has been looked at."""
        if member.health is Health.SERVING:
            self._set(member, Health.DOUBTED, reason)
            member.unsettled.set()

    def take_out(self, member: Member, reason: str, *, health: Health = Health.LOST) -> None:
        """Let no request go to it until it has been brought back with the newest weights."""
        member.holds = member.report = None
        self._set(member, health, reason)
        member.unsettled.set()

    def _set(self, member: Member, health: Health, reason: str) -> None:
        was_served = bool(self.serving)
        if member.health is not health:
            member.since = trio.current_time()
        member.health, member.reason = health, reason
        if was_served and not self.serving:
            self._outage_began = trio.current_time()
        self._changed.set()
        self._changed = trio.Event()
        self.on_change()

    async def wait_changed(self) -> None:
        """Return when an engine comes or goes."""
        await self._changed.wait()

    async def wait_serving(self) -> None:
        """Return when any engine is in service. Raises: EngineError when none has been for too long."""
        while not self.serving:
            with trio.move_on_at(self._outage_began + self._outage_timeout_s) as patience:
                await self.wait_changed()
            if patience.cancelled_caught and not self.serving:
                why = "; ".join(f"{m.name} is {m.health}" + f" ({m.reason})" * bool(m.reason) for m in self.members)
                raise EngineError(
                    f"no engine has served for {self._outage_timeout_s:g} s ([engine] outage_timeout_s): {why}"
                )
