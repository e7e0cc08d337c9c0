"""How an engine comes into service, and comes back: started, looked at, brought to the newest weights, then asked.

A server that is started here and dies is started again, as often as `restarts` allows; one that does not answer, or
cannot take the weights, is given one chance and then ended and started again. A server elsewhere is waited for. Either
way it gets the newest weights before any request, because the roster does not let it serve without them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, Protocol

import trio

from asyncrl.engines.engine import Health
from asyncrl.engines.roster import Member, Roster
from asyncrl.engines.settings import EngineSettings
from asyncrl.errors import EngineError, WeightMismatch, WeightSyncError
from asyncrl.types import PolicyVersion

_DEATH_SEEN_S = 3.0  # from a server's last answer to its process's end: its keeper ends its family first
_RETRY_S = 5.0  # between two tries to reach a server elsewhere, or to give it weights that it has not taken


class Server(Protocol):
    """A server process that was started here; it may not answer yet."""

    url: str
    version: PolicyVersion
    """What the weights that it was started with are called."""

    async def wait_exit(self) -> str:
        """Return how it ended, in words, once it has."""
        ...


StartServer = Callable[[int, bool], AbstractAsyncContextManager[Server]]
"""Starts a server, given how often it was started before and whether any weights have been published: then any will do,
for they are replaced before it serves. It is ended on leaving."""


class Supervisor:
    """Brings the members of a roster into service, for as long as it runs."""

    def __init__(self, roster: Roster, settings: EngineSettings, say: Callable[[str], None]) -> None:
        self._roster = roster
        self._settings = settings
        self._say = say

    async def keep(self, member: Member, start: StartServer | None) -> NoReturn:
        """Keep one engine in service.

        Raises: EngineError when it does not come up, or has used up its restarts; WeightMismatch (in an exception
        group) when it takes other weights than were published, twice.
        """
        if start is None:
            await self._keep_elsewhere(member)
        while True:
            async with start(member.restarts, self._roster.newest is not None) as server:
                end = await self._attend(member, server)
            if not member.has_served:
                raise EngineError(end)  # whatever ended it would end it again
            if member.restarts == self._settings.allowed_restarts:
                used_up = f"\nit was started again {member.restarts} times ([engine] restarts)"
                raise EngineError(end + used_up * bool(member.restarts))
            member.restarts += 1
            self._say(f"{end}\nstarting it again, {member.restarts} of {self._settings.restarts} times")

    async def _keep_elsewhere(self, member: Member) -> NoReturn:
        await self._bring_up(member, self._settings.start_timeout_s)
        while True:
            await self._wait_lost(member)
            self._say(f"{member.name} is lost: {member.reason}")
            while member.health is not Health.SERVING:
                try:
                    await self._bring_up(member, self._settings.sync_timeout_s)
                    self._say(f"{member.name} is back")
                except WeightMismatch:
                    raise
                except (EngineError, WeightSyncError) as error:
                    self._roster.take_out(member, str(error))
                    await trio.sleep(_RETRY_S)

    async def _attend(self, member: Member, server: Server) -> str:
        """Keep a server in service while it can be; return why it cannot any more."""
        end = ""

        async def watch() -> None:
            nonlocal end
            end = await server.wait_exit()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                async with member.changing:
                    await member.engine.connect(server.url, server.version)
                timeout_s = self._settings.start_timeout_s
                while True:
                    await self._bring_up(member, timeout_s)
                    await self._wait_lost(member)
                    timeout_s = self._settings.sync_timeout_s
            except WeightMismatch:
                raise
            except (EngineError, WeightSyncError) as error:
                self._roster.take_out(member, str(error))
                with trio.move_on_after(_DEATH_SEEN_S):  # if it is dying, how it ends says more
                    await trio.sleep_forever()
                end = f"{member.name} was ended: {error}"
                nursery.cancel_scope.cancel()
        self._roster.take_out(member, end.partition("\n")[0], health=Health.STARTING)
        return end

    async def _bring_up(self, member: Member, timeout_s: float) -> None:
        """Wait until the server answers, give it the newest weights, and put it in service.

        Raises: EngineError, WeightSyncError. Weights that are replaced by newer ones meanwhile are no failure.
        """
        async with member.changing:
            await member.engine.wait_healthy(timeout_s)
            while (newest := self._roster.newest) is not member.holds:
                try:
                    await self._roster.pull(member)
                except WeightMismatch:
                    raise
                except WeightSyncError:
                    if self._roster.newest is newest:
                        raise
            self._roster.put_in_service(member)

    async def _wait_lost(self, member: Member) -> None:
        """Return when the engine is lost: taken out of service, or failing a look at it after it was doubted."""
        while True:
            await member.unsettled.wait()
            if member.health is not Health.DOUBTED:
                return
            sound = await member.engine.check()
            if member.health is not Health.DOUBTED:
                return
            if not sound:
                self._roster.take_out(member, member.reason)
                return
            self._roster.put_in_service(member)
