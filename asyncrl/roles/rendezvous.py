"""The orchestrator's side: it listens, knows roles by their identity, and makes their services reachable at home.

A role whose connection breaks has `lost_s` to come back, and nothing of it is touched before. Then its channels are cut
as if its service had died, and who spoke over them does what it does then: requests go on in other engines, or wait;
groups are played on by other hosts; episodes whose sandbox is gone are counted as that. It may still come back.
"""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from asyncrl import __version__, wire
from asyncrl.errors import RoleError
from asyncrl.roles import messages
from asyncrl.roles.clocks import compare
from asyncrl.roles.guests import Guest
from asyncrl.roles.pipes import GONE, Conversation, endure, join
from asyncrl.roles.settings import RoleSettings

_HELLO_S = 10.0  # for a stranger to say who it is
_PLURALS = {"learner": "learners", "engine": "engines", "environment": "environments", "sandbox": "sandboxes"}


class Rendezvous:
    """Where the roles of one run meet.

    Example:
        >>> async with rendezvous.opened(listener):                                   # doctest: +SKIP
        ...     (engine, *_) = (await rendezvous.wait_all())["engine"]
        ...     print(engine.name, "answers at", engine.url)
    """

    def __init__(
        self,
        settings: RoleSettings,
        jobs: Mapping[str, Mapping[str, Any]],
        *,
        token: str,
        tls: ssl.SSLContext | None,
        say: Callable[[str], None],
        seed: int = 0,
    ) -> None:
        """`jobs` are what a role of each kind is told to do."""
        self._settings = settings
        self._jobs = jobs
        self._token = token.encode()
        self._tls = tls
        self._say = say
        self._seed = seed
        self._guests: dict[str, Guest] = {}
        self._num_processes = 0
        self._joined = trio.Event()
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def opened(self, listener: socket.socket) -> AsyncIterator[None]:
        """Receive roles while in the body; leaving it lets them go."""
        host, port = listener.getsockname()[:2]
        self._say(f"roles are received at {host}:{port}{' with TLS' if self._tls else ''}")
        async with trio.open_nursery() as self._nursery:
            listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
            await self._nursery.start(trio.serve_listeners, self._receive, listeners)
            try:
                yield
            finally:
                async with trio.open_nursery() as leaving:
                    leaving.cancel_scope.shield = True  # bounded: each says one thing, within GOODBYE_S
                    for guest in self._guests.values():
                        if guest.conversation is not None:
                            leaving.start_soon(guest.conversation.say_last, messages.Farewell(reason="the run ends"))
                self._nursery.cancel_scope.cancel()

    # --- who there is -----------------------------------------------------------------------------------------

    def guests(self, kind: str) -> Sequence[Guest]:
        """Return those of a kind whose service may be spoken to, in the order in which they came."""
        return [guest for guest in self._guests.values() if guest.kind == kind and guest.is_ready]

    async def wait_all(self) -> Mapping[str, Sequence[Guest]]:
        """Return the guests by kind, once as many are there as the settings ask for.

        Raises: RoleError naming who is missing after `wait_s`.
        """
        said = ""
        with trio.move_on_after(self._settings.wait_s):
            while missing := self._missing():
                if missing != said:
                    self._say(f"waiting for {missing}")
                    said = missing
                await self._joined.wait()
            return {kind: self.guests(kind) for kind in self._settings.wanted}
        raise RoleError(f"{self._missing()} did not come in {self._settings.wait_s:g} s (wait_s, [roles])")

    def _missing(self) -> str:
        counts = {kind: count - len(self.guests(kind)) for kind, count in self._settings.wanted.items()}
        return ", ".join(
            f"{count} {kind if count == 1 else _PLURALS[kind]} (asyncrl {kind} --connect ...)"
            for kind, count in counts.items()
            if count > 0
        )

    async def wait_later(self, known: Collection[str]) -> Sequence[Guest]:
        """Return engines whose names are not among `known`, once there are any."""
        while not (later := [guest for guest in self.guests("engine") if guest.name not in known]):
            await self._joined.wait()
        return later

    # --- connections ------------------------------------------------------------------------------------------

    async def _receive(self, plain: trio.SocketStream) -> None:
        """Serve one connection to its end. A side that is gone, or speaks something else, is nobody else's business."""
        endure(plain, self._settings.lost_s)
        stream: trio.abc.Stream = plain
        if self._tls is not None:
            stream = trio.SSLStream(plain, self._tls, server_side=True, https_compatible=True)
        try:
            async with stream:
                first = None
                with trio.move_on_after(_HELLO_S):
                    first = await wire.receive_async(stream, messages.First, max_bytes=messages.MAX_BYTES)
                if isinstance(first, messages.Channel):
                    for guest in self._guests.values():
                        if guest.owns(first.key):
                            await guest.hand_over(first.key, stream)
                elif first is not None:
                    await self._host(first, stream)
        except* (*GONE, OSError, ValueError):
            pass

    async def _host(self, hello: messages.Hello, stream: trio.abc.Stream) -> None:
        reason = self._refusal(hello) or await self._occupied(hello)
        if reason:
            self._say(f"refused {hello.kind[:20]} {hello.name[:60]!r}: {reason}")
            await wire.send_async(stream, messages.Refused(reason=reason))
            return
        guest, words = self._recognise(hello)
        if guest.hello.instance != hello.instance:
            await guest.cut()  # its former process is dead, and so is whoever speaks to it
            guest.is_ready = False
        settings = self._settings
        conversation = Conversation(stream, heartbeat_s=settings.heartbeat_s, lost_s=settings.lost_s)
        welcome = messages.Welcome(
            job=dict(self._jobs[guest.kind]),
            seed=self._seed + guest.number,
            heartbeat_s=settings.heartbeat_s,
            lost_s=settings.lost_s,
        )
        await wire.send_async(stream, welcome)
        await guest.arrive(hello, conversation)
        self._say("; ".join(filter(None, (words, compare(hello.clock_s)))))
        try:
            await conversation.hold(messages.ToOrchestrator, partial(self._handle, guest))
        finally:
            if guest.conversation is conversation:
                guest.depart()
                self._nursery.start_soon(self._wait_back, guest, conversation.heard_at)

    def _refusal(self, hello: messages.Hello) -> str:
        if not hmac.compare_digest(hello.token.encode(), self._token):
            return "the token is wrong"
        if (hello.protocol, hello.asyncrl) != (messages.PROTOCOL, __version__):
            return f"it has asyncrl {hello.asyncrl} and the orchestrator {__version__}: all roles must have the same"
        if hello.kind not in self._settings.wanted:
            return f"this run asks for no {hello.kind} from elsewhere ([roles])"
        known = self._guests.get(hello.name)
        if known is not None and known.kind != hello.kind:
            return f"its name is taken by {known.kind} {known.name}: take another one (--name)"
        num, wanted = sum(g.kind == hello.kind for g in self._guests.values()), self._settings.wanted[hello.kind]
        if known is None and hello.kind != "engine" and num >= wanted:
            names = ", ".join(guest.name for guest in self._guests.values() if guest.kind == hello.kind)
            return f"this run has the {wanted} that it asks for: {names} ([roles]); come back under one of these names"
        return ""

    async def _occupied(self, hello: messages.Hello) -> str:
        """Return why a name may not be taken; whoever has it is given the time of two heartbeats to show that it lives.

        A host that died without a word is silent, and its successor need not wait until it is lost.
        """
        guest = self._guests.get(hello.name)
        if guest is None or guest.conversation is None or guest.hello.instance == hello.instance:
            return ""
        since = trio.current_time()
        await trio.sleep(2 * self._settings.heartbeat_s)
        if guest.conversation is None or guest.conversation.heard_at < since:
            return ""
        return f"another {guest.kind} of this name is connected from {guest.hello.host}: take another one (--name)"

    def _recognise(self, hello: messages.Hello) -> tuple[Guest, str]:
        """Return the place of who has come, and what to say of it."""
        guest = self._guests.get(hello.name)
        place = f"{hello.kind} {hello.name}"
        if guest is not None and guest.hello.instance == hello.instance:
            return guest, f"{place} is back after {trio.current_time() - guest.away_since:.1f} s"
        number, self._num_processes = self._num_processes, self._num_processes + 1
        if guest is not None:
            guest.number = number
            return guest, f"{place} is back as a new process, at {hello.host}"
        guest = self._guests[hello.name] = Guest(hello, number, lost_s=self._settings.lost_s)
        return guest, f"{place} has come from {hello.host} ({hello.devices})"

    async def _handle(self, guest: Guest, message: Any) -> bool:
        match message:
            case messages.Ready():
                if not guest.port:
                    await self._make_reachable(guest)
                guest.token, guest.is_ready = message.token, True
                guest.note_change()
                self._joined.set()
                self._joined = trio.Event()
            case messages.CannotOpen():
                guest.give_up(message.key)
            case messages.Note():
                self._say(f"{guest.name}: {message.text}")
            case messages.Leave():
                self._say(f"{guest.kind} {guest.name} leaves: {message.reason}")
                await self._lose(guest)
                return True
        return False

    async def _wait_back(self, guest: Guest, heard_at: float) -> None:
        """Give a guest that is away the time to come back; then it is lost."""
        with trio.move_on_at(heard_at + self._settings.lost_s):
            while guest.conversation is None and not guest.is_lost:
                await guest.wait_changed()
            return
        self._say(f"{guest.kind} {guest.name} is lost: not heard for {self._settings.lost_s:g} s")
        await self._lose(guest)

    async def _lose(self, guest: Guest) -> None:
        guest.is_lost = True
        guest.note_change()
        await guest.cut()

    # --- channels ---------------------------------------------------------------------------------------------

    async def _make_reachable(self, guest: Guest) -> None:
        """Listen on this host's loopback for who wants to speak to the guest's service."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        guest.port = listener.socket.getsockname()[1]
        await self._nursery.start(trio.serve_listeners, partial(self._connect, guest), [listener])

    async def _connect(self, guest: Guest, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                async with guest.channel() as channel:
                    await join(stream, channel)
            except OSError:
                return  # closed without a word, as by a service that is gone
