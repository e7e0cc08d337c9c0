"""Which engines of a pool are in service, who is not and why, and how long nobody has been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from asyncrl.engines.engine import Engine, EngineStatistics, Health
from asyncrl.errors import ConfigError, EngineError, WeightMismatch
from asyncrl.protocols import SyncReport
from asyncrl.types import PolicyVersion, WeightManifest


class Member:
    """One engine's place in a pool. The roster writes its health, the pool's line its places."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.health = Health.STARTING
        self.reason = ""
        """Why it does not serve, in words."""
        self.since = trio.current_time()
        self.has_served = False
        self.restarts = self.quarantines = 0
        self.places_taken = 0
        """Requests that were sent to it and have not ended."""
        self.holds: WeightManifest | None = None
        """The last version that it is known to hold whole; None until it has pulled one."""
        self.report: SyncReport | None = None
        """Of that pull."""
        self.reading: PolicyVersion | None = None
        """The version whose files it may be reading now."""
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

    def holds_at_least(self, version: PolicyVersion) -> bool:
        """True where it is known to hold a version, or a later one."""
        return self.holds is not None and self.holds.version >= version

    def statistics(self) -> EngineStatistics:
        """Return the engine's counts and its health."""
        return replace(
            self.engine.statistics(),
            health=self.health,
            health_seconds=trio.current_time() - self.since,
            reason=self.reason,
            restarts=self.restarts,
            quarantines=self.quarantines,
            reading=self.reading,
        )


class Roster:
    """The members of a pool. An engine comes into service with the newest weights; it then serves while it goes from
    what it holds to newer ones.
    """

    def __init__(self, engines: Sequence[Engine], *, outage_timeout_s: float) -> None:
        self.members = tuple(Member(engine) for engine in engines)
        self.newest: WeightManifest | None = None
        """What an engine must hold to come into service; None while nothing has been published: what it was started
        with.
        """
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever an engine comes or goes."""
        self.say: Callable[[str], None] = lambda words: None
        """Hears of who is quarantined, and comes out of it."""
        self._outage_timeout_s = outage_timeout_s
        self._outage_began = trio.current_time()
        self._changed = trio.Event()
        self._is_held_back = False

    @property
    def serving(self) -> list[Member]:
        """Those in service."""
        return [member for member in self.members if member.health is Health.SERVING]

    # --- weights ----------------------------------------------------------------------------------------------

    @property
    def reading(self) -> dict[str, PolicyVersion]:
        """By name, the version that an engine is reading."""
        return {member.name: member.reading for member in self.members if member.reading is not None}

    def hold_back(self) -> None:
        """Let no engine begin to read a version before the next one is offered: any of them may be replaced by it."""
        self._is_held_back = True

    def offer(self, manifest: WeightManifest) -> None:
        """Let engines pull a version, from now on and instead of any before it."""
        if self.newest is None or manifest.version > self.newest.version:
            self.newest = manifest
        self._is_held_back = False
        self._note_change()

    async def pull(self, member: Member) -> None:
        """Bring an engine to the newest version, which is waited for where it is about to be replaced.

        One that takes other weights than were published is quarantined, and sent them once more.
        Raises: WeightMismatch where that does not help, which nobody may survive: the learner's own weights, the way or
        the engine cannot be trusted. WeightSyncError where it fails otherwise.
        """
        before, reason = member.health, member.reason
        try:
            await self._pull_newest(member)
            return
        except WeightMismatch as error:
            member.quarantines += 1
            self._set(member, Health.QUARANTINED, str(error))
            member.engine.withdraw(str(error))
            self.say(f"{member.name} is quarantined: {error}\nit is sent the newest version once more")
        try:
            await self._pull_newest(member)
        except WeightMismatch as error:
            raise WeightMismatch(f"{error}; it was sent twice", tensor=error.tensor) from error
        if member.health is Health.QUARANTINED:  # else its end has been seen
            self._set(member, before, reason)
            self.say(f"{member.name} holds what was published, and is out of quarantine")

    async def _pull_newest(self, member: Member) -> None:
        while self._is_held_back:
            await self.wait_changed()
        newest = self.newest
        assert newest is not None
        member.reading = newest.version
        try:
            member.report = await member.engine.pull(newest)
            member.holds = newest
        finally:
            member.reading = None
            self._note_change()

    # --- who there is -----------------------------------------------------------------------------------------

    def add(self, engine: Engine) -> Member:
        """Return the place of one more engine, which does not serve yet. Raises: ConfigError for a name twice."""
        if any(member.name == engine.name for member in self.members):
            raise ConfigError(f"there is an engine {engine.name!r} already")
        member = Member(engine)
        self.members = (*self.members, member)
        self._note_change()
        return member

    def drop(self, member: Member, reason: str) -> None:
        """Forget an engine."""
        self.take_out(member, reason)
        self.members = tuple(other for other in self.members if other is not member)
        self._note_change()
        self.on_change()

    # --- health -----------------------------------------------------------------------------------------------

    def put_in_service(self, member: Member) -> None:
        """Let requests go to it. One that was doubted may be on its way to the newest weights."""
        assert member.holds is self.newest or member.health is Health.DOUBTED, f"{member.name} holds old weights"
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
        self._note_change()
        self.on_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Return when an engine comes or goes, a version is offered, or one has been read."""
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
