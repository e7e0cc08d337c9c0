"""Several engines behind one `Sampler` and one `WeightPuller`, which come and go without a token being lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import trio

from asyncrl.engines.canary import Canary
from asyncrl.engines.draft import Draft
from asyncrl.engines.engine import Engine, EngineStatistics, Health, RequestNotSent, RequestRefused
from asyncrl.engines.line import Line
from asyncrl.engines.roster import Member, Roster
from asyncrl.engines.settings import EngineSettings
from asyncrl.engines.supervision import StartServer, Supervisor
from asyncrl.errors import ConfigError, EngineError, WeightMismatch, WeightSyncError
from asyncrl.protocols import SyncReport, Watch
from asyncrl.types import Completion, PolicyVersion, TokenIds, WeightManifest

_MAX_MOVES = 3  # a request that ends every engine that runs it must not end them all

_ASKED = (Health.SERVING, Health.DOUBTED, Health.QUARANTINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """The engines' statistics, and their sums."""

    engines: tuple[EngineStatistics, ...]
    in_line: int
    """Requests that wait for a place in an engine, or for an engine."""
    requests_moved: int
    """How often a request went on in another engine, or in the same one again."""
    tokens_carried: int
    """Tokens that such requests had already, and that were not sampled again."""

    @property
    def running(self) -> int:
        """Requests in the engines."""
        return sum(engine.running for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place or for a sync to end."""
        return self.in_line + sum(engine.waiting for engine in self.engines)

    @property
    def tokens_sampled(self) -> int:
        """Since the start."""
        return sum(engine.tokens_sampled for engine in self.engines)

    @property
    def serving(self) -> int:
        """Engines in service."""
        return sum(engine.health is Health.SERVING for engine in self.engines)

    @property
    def absent(self) -> tuple[str, ...]:
        """Who is not in service, since when and why, and who is on its way to new weights: a line each."""
        return tuple(
            f"{engine.name}: {engine.health} for {engine.health_seconds:.0f} s"
            + f", {engine.reason}" * bool(engine.reason)
            + f", holds version {engine.version} and pulls {engine.reading}" * (engine.reading is not None)
            for engine in self.engines
            if engine.health is not Health.SERVING or engine.reading is not None
        )

    @property
    def restarts(self) -> int:
        """How often a server was started again."""
        return sum(engine.restarts for engine in self.engines)


class EnginePool:
    """Samples from several engines: see `line` for who runs what, `supervision` for how one that is lost comes back.

    Example:
        >>> async with trio.open_nursery() as nursery:                                         # doctest: +SKIP
        ...     pool = EnginePool([VLLMEngine(...), VLLMEngine(...)], settings)
        ...     await nursery.start(pool.serve)
        ...     completion = await pool.sample(prompt, max_tokens=64, trajectory_id="7-0")
    """

    def __init__(self, engines: Sequence[Engine], settings: EngineSettings) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self._settings = settings
        self._roster = Roster(engines, outage_timeout_s=settings.outage_timeout_s)
        self._line = Line(self._roster)
        self._requests_moved = self._tokens_carried = 0
        self._nursery: trio.Nursery | None = None
        self._kept: dict[str, trio.CancelScope] = {}
        """By an engine's name, what ends its being kept in service."""

    async def serve(
        self,
        starts: Mapping[str, StartServer] | None = None,
        *,
        say: Callable[[str], None] = lambda words: None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Start the engines' servers and keep them in service until cancelled; has started when all have served.

        `starts` has, by an engine's name, who starts its server; an engine without one runs elsewhere. `say` hears of
        what is lost or quarantined and comes back.
        Raises (in an exception group): EngineError when a server cannot be started, dies more often than it may be
        started again, or none serves for too long.
        """
        self._roster.say = say
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for member in self._roster.members:
                nursery.start_soon(self._keep, member, (starts or {}).get(member.name))
            while not all(member.has_served for member in self._roster.members):
                await self._roster.wait_changed()
            task_status.started()
            while True:
                await self._roster.wait_serving()
                await self._roster.wait_changed()

    async def _keep(self, member: Member, start: StartServer | None) -> None:
        """Keep an engine in service until it is removed."""
        with trio.CancelScope() as self._kept[member.name]:
            await Supervisor(self._roster, self._settings, self._roster.say).keep(member, start)
        async with member.changing:  # a pull under way speaks over its connections
            await member.engine.aclose()

    async def add(self, engine: Engine, start: StartServer | None = None) -> None:
        """Take one more engine, and return when it serves; it gets the newest weights first. The pool must be served.

        Raises: ConfigError where its name is taken; EngineError, WeightSyncError where it does not come into service:
        it is then left out again.
        """
        assert self._nursery is not None, "the pool is not served"
        member = self._roster.add(engine)
        failures: list[EngineError | WeightSyncError] = []

        async def keep() -> None:
            try:
                await self._keep(member, start)
            except WeightMismatch:
                raise
            except (EngineError, WeightSyncError) as error:
                if member.has_served:
                    raise
                failures.append(error)
                self._roster.drop(member, str(error))
                await member.engine.aclose()

        self._nursery.start_soon(keep)
        while not member.has_served and not failures:
            await self._roster.wait_changed()
        if failures:
            raise failures[0]

    def remove(self, name: str) -> None:
        """Let an engine go; what its requests have sampled goes on in the others. One that was started here is ended.

        Raises: ConfigError where there is no such engine, or no other one that serves.
        """
        member = next((member for member in self._roster.members if member.name == name), None)
        if member is None:
            known = ", ".join(member.name for member in self._roster.members)
            raise ConfigError(f"there is no engine {name!r}; there are {known}")
        if not [other for other in self._roster.serving if other is not member]:
            raise ConfigError(f"{name} cannot be removed: no other engine serves")
        self._roster.drop(member, "it is removed")
        self._kept.pop(name).cancel()
        member.engine.withdraw("it is removed")

    def statistics(self) -> PoolStatistics:
        """Return what the engines are doing."""
        return PoolStatistics(
            engines=tuple(member.statistics() for member in self._roster.members),
            in_line=self._line.length,
            requests_moved=self._requests_moved,
            tokens_carried=self._tokens_carried,
        )

    def count_quarantines(self) -> int:
        """Return how often engines took other weights than were sent to them."""
        return sum(member.quarantines for member in self._roster.members)

    async def read_metrics(self, timeout_s: float) -> Mapping[str, str]:
        """Return by an engine's name what its server says of itself; those are missing that do not answer in time."""
        texts: dict[str, str] = {}

        async def read(member: Member) -> None:
            with trio.move_on_after(timeout_s):
                if text := await member.engine.metrics():
                    texts[member.name] = text

        async with trio.open_nursery() as nursery:
            for member in self._roster.members:
                nursery.start_soon(read, member)
        return texts

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that any engine in service holds, or any engine where none is."""
        return min(member.engine.version for member in self._roster.serving or self._roster.members)

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Return one completion; see `protocols.Sampler`. Where an engine fails, another goes on behind its tokens.

        Waits where no engine is in service.
        Raises: EngineError when none comes back in time, when several have failed this request, or it cannot be served.
        """
        draft = Draft(
            token_ids,
            max_tokens=max_tokens,
            trajectory_id=trajectory_id,
            stop_token_ids=stop_token_ids,
            watch=watch,
        )
        started = trio.current_time()
        while not draft.is_whole:
            async with self._line.place(draft) as member:
                try:
                    await member.engine.generate(draft)
                except RequestRefused:
                    raise
                except EngineError as error:
                    self._roster.doubt(member, str(error))
                    if not isinstance(error, RequestNotSent):
                        self._move(draft, error)
        return draft.completion(trio.current_time() - started)

    def _move(self, draft: Draft, error: EngineError) -> None:
        draft.moved_at.append(len(draft.token_ids))
        if len(draft.moved_at) > _MAX_MOVES:
            raise EngineError(f"given up after {len(draft.moved_at)} engines failed it; the last: {error}") from error
        self._requests_moved += 1
        self._tokens_carried += len(draft.token_ids)

    async def learn_canary(self, canary: Canary, expected: Sequence[float]) -> None:
        """Learn what is allowed between engines and learner, which now hold the same weights, nothing having been sent.

        Raises: EngineError (in an exception group); WeightMismatch naming an engine that is too far from the learner.
        """
        distances: dict[str, float] = {}

        async def measure(member: Member) -> None:
            distances[member.name] = canary.distance(await member.engine.canary_logprobs(), expected)

        async with trio.open_nursery() as nursery:
            for member in self._roster.serving:
                nursery.start_soon(measure, member)
        canary.learn(distances)

    async def sleep(self) -> None:
        """Put all engines in service to sleep; `pull_all` wakes them. Raises: EngineError (in an exception group)."""

        async def sleep(member: Member) -> None:
            async with member.changing:
                if member.health in _ASKED:
                    await member.engine.sleep()

        async with trio.open_nursery() as nursery:
            for member in self._roster.members:
                nursery.start_soon(sleep, member)

    async def make_room(self) -> Collection[PolicyVersion]:
        """See `protocols.WeightPuller`. It takes too long after `outage_timeout_s`."""
        self._roster.hold_back()
        with trio.move_on_after(self._settings.outage_timeout_s):
            while len({*self._roster.reading.values()}) > 1:
                await self._roster.wait_changed()
            return {*self._roster.reading.values()}
        reading = ", ".join(f"{name} version {version}" for name, version in self._roster.reading.items())
        raise WeightSyncError(
            f"no room for another version in {self._settings.outage_timeout_s:g} s ([engine] outage_timeout_s): both "
            f"that are kept are still being read: {reading}"
        )

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Bring every engine in service to the manifest's version or a later one; one that fails is sent it once more.

        Engines pull beside each other, and each after the other the calls that it is asked for: what an earlier call
        brought, a later version included, is not pulled again.
        One that fails twice or dies is taken out of service, and its report is missing. An engine that comes back takes
        the newest version first. Waits for one to do so where all have died.
        Raises: WeightMismatch (in an exception group) when an engine takes other weights than were published, twice.
        WeightSyncError naming every engine that failed, where none took the version and one refused it, or none came
        back in time.
        """
        self._roster.offer(manifest)
        version = manifest.version
        pulled: dict[str, SyncReport] = {}
        failures: list[WeightSyncError] = []
        refusals: list[WeightSyncError] = []
        async with trio.open_nursery() as nursery:
            for member in self._roster.members:
                if member.health in _ASKED:
                    nursery.start_soon(self._pull, member, version, pulled, failures, refusals)
        while not (reports := self._reports(version, pulled)):
            said = "; ".join(map(str, [*refusals, *failures]))
            if refusals:
                raise WeightSyncError(said)
            try:
                await self._roster.wait_serving()
            except EngineError as error:
                raise WeightSyncError(f"version {version} reached no engine: {error}; {said}") from error
        return reports

    async def _pull(
        self,
        member: Member,
        version: PolicyVersion,
        pulled: dict[str, SyncReport],
        failures: list[WeightSyncError],
        refusals: list[WeightSyncError],
    ) -> None:
        """Pull, twice at most. A refusal is a failure after which the engine still serves what it held."""
        async with member.changing:
            if member.health not in _ASKED:
                return  # it went out of service a moment ago, and will take this version before it comes back
            for _ in range(2):
                try:
                    if not member.holds_at_least(version):
                        await self._roster.pull(member)
                    assert member.report is not None
                    pulled[member.name] = member.report  # now: it is replaced by that of the next version
                    return
                except WeightMismatch:
                    raise
                except WeightSyncError as error:
                    failure = error
                if member.engine.broken:
                    break
            (failures if member.engine.broken else refusals).append(failure)
            member.engine.withdraw(str(failure))
            if member.health in _ASKED:  # else its end has been seen, which says more
                self._roster.take_out(member, str(failure))

    def _reports(self, version: PolicyVersion, pulled: Mapping[str, SyncReport]) -> list[SyncReport]:
        """Return the report of every engine that holds the version, those that came back with it included."""
        holding = (member for member in self._roster.members if member.holds_at_least(version))
        return [report for m in holding if (report := pulled.get(m.name, m.report)) is not None]

    async def aclose(self) -> None:
        """Close the connections; the servers go on."""
        for member in self._roster.members:
            await member.engine.aclose()
