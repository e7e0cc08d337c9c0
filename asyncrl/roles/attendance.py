"""A role's side: it dials the orchestrator for as long as the run lasts, and opens the channels that are asked for."""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from asyncrl import __version__, wire
from asyncrl.errors import BoundaryError, ConfigError, RoleError, leaves
from asyncrl.roles import messages
from asyncrl.roles.clocks import now_s
from asyncrl.roles.pipes import GONE, Conversation, endure, join

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0  # between attempts; nothing tells when one would succeed
_CONNECT_S = 5.0  # the kernel asks a silent host ever more seldom; a new attempt finds one that is back sooner
_DIAL_S = 30.0  # for a connection, its handshake and the answer to the hello
_ENDURE_S = 60.0  # until the welcome says what this run's limit is


class Served(Protocol):
    """A service that runs on this host."""

    token: str
    """What it asks for."""

    async def dial(self) -> trio.abc.Stream:
        """Return a connection to it. Raises: OSError."""
        ...

    async def wait_over(self) -> None:
        """Run until there is nothing left to do for this job. Raises: BoundaryError where it cannot go on."""
        ...


class Role(Protocol):
    """What a host offers."""

    kind: str
    """Of `KINDS`."""

    def serve(
        self, job: Mapping[str, Any], *, seed: int, note: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Served]:
        """Start the service, and end it on leaving; `note` tells the orchestrator.

        Raises: ConfigError, BoundaryError.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the orchestrator is, and what it asks of who comes."""

    host: str
    port: int
    token: str
    name: str
    """The identity of who comes."""
    tls: ssl.SSLContext | None = None
    give_up_s: float = 600.0
    """Of attempts in vain, after which the role ends."""
    devices: str = ""
    """What this host computes on, in words."""
    instance: str = field(default_factory=lambda: secrets.token_hex(16))

    async def dial(self, seconds: float) -> trio.abc.Stream:
        """Return a connection that is broken after so many seconds of silence. Raises: OSError, ConfigError."""
        plain = None
        with trio.move_on_after(_CONNECT_S):
            plain = await trio.open_tcp_stream(self.host, self.port)
        if plain is None:
            raise TimeoutError(f"no connection in {_CONNECT_S:g} s")
        endure(plain, seconds)
        if self.tls is None:
            return plain
        stream = trio.SSLStream(plain, self.tls, server_hostname=self.host, https_compatible=True)
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError as error:
            await trio.aclose_forcefully(stream)
            cause = error.__cause__
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"the orchestrator's certificate is not that of {self.host}, or not of this authority: "
                    f"{cause.verify_message} (--tls-ca)"
                ) from None
            if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
                raise ConfigError(f"{self.host}:{self.port} speaks no TLS: leave --tls-ca out") from None
            raise ConnectionResetError(f"no TLS could be agreed upon: {cause or error}") from None
        return stream

    def hello(self, kind: str) -> messages.Hello:
        """Return who comes."""
        return messages.Hello(
            protocol=messages.PROTOCOL,
            asyncrl=__version__,
            token=self.token,
            kind=kind,
            name=self.name,
            instance=self.instance,
            host=socket.gethostname(),
            clock_s=now_s(),
            devices=self.devices,
        )


async def attend(door: Door, role: Role, *, say: Callable[[str], None], stop: trio.Event) -> str:
    """Play a role until the run ends or `stop` is set; return why it was over.

    Raises (in an exception group): ConfigError where it is refused or cannot do what it is told; RoleError where the
    orchestrator is out of reach for too long; what ended its service.
    """
    async with trio.open_nursery() as nursery:
        attendance = _Attendance(door, role, say, nursery)
        nursery.start_soon(attendance.keep_service)
        nursery.start_soon(attendance.wait_stopped, stop)
        await attendance.run()
        nursery.cancel_scope.cancel()
    return attendance.over


class _Attendance:
    def __init__(self, door: Door, role: Role, say: Callable[[str], None], channels: trio.Nursery) -> None:
        """`channels` holds the channels, which outlive conversations."""
        self.over = ""
        """Why it is, once it is."""
        self._door = door
        self._role = role
        self._say = say
        self._channels = channels
        self._welcome: messages.Welcome | None = None
        """Whose job the service was started for, or is to be."""
        self._changed = trio.Event()
        self._served: Served | None = None
        self._serving = trio.CancelScope()
        self._conversing = trio.CancelScope()
        self._conversation: Conversation | None = None

    # --- the conversation -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Hold a conversation, and make it again whenever it breaks, until it is over."""
        with self._conversing:
            while not self.over:
                stream, welcome = await self._reach()
                try:
                    async with stream:
                        await self._converse(stream, welcome)
                except* GONE as group:
                    why = next(leaves(group))
                    self._say(f"the conversation broke ({why or type(why).__name__}); trying again")

    async def _reach(self) -> tuple[trio.abc.Stream, messages.Welcome]:
        """Return a conversation that has begun. Raises: ConfigError where it is refused, RoleError in vain."""
        began, wait_s, trouble = trio.current_time(), _FIRST_WAIT_S, ""
        where = f"the orchestrator at {self._door.host}:{self._door.port}"
        while trio.current_time() - began < self._door.give_up_s:
            answer, seen = None, f"no answer in {_DIAL_S:g} s"
            with trio.move_on_after(_DIAL_S):
                try:
                    answer = await self._greet()
                except (OSError, trio.BrokenResourceError, EOFError) as error:
                    seen = str(error) or type(error).__name__
            if answer is not None:
                return answer
            if seen != trouble:
                self._say(f"{where} is out of reach ({seen}); trying again")
            trouble = seen
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise RoleError(f"{where} was out of reach for {self._door.give_up_s:g} s (--give-up-s): {trouble}")

    async def _greet(self) -> tuple[trio.abc.Stream, messages.Welcome]:
        stream = await self._door.dial(self._lost_s)
        try:
            await wire.send_async(stream, self._door.hello(self._role.kind))
            answer = await wire.receive_async(stream, messages.Welcome | messages.Refused, max_bytes=messages.MAX_BYTES)
            if answer is None:
                raise EOFError("it closed the connection without a word: does it want TLS (--tls-ca)?")
            if isinstance(answer, messages.Refused):
                raise ConfigError(f"the orchestrator refuses {self._role.kind} {self._door.name}: {answer.reason}")
        except BaseException:  # until it is returned, nobody else closes the stream; raised again
            await trio.aclose_forcefully(stream)
            raise
        return stream, answer

    @property
    def _lost_s(self) -> float:
        return _ENDURE_S if self._welcome is None else self._welcome.lost_s

    async def _converse(self, stream: trio.abc.Stream, welcome: messages.Welcome) -> None:
        self._say(f"{self._role.kind} {self._door.name} is connected to {self._door.host}:{self._door.port}")
        conversation = Conversation(stream, heartbeat_s=welcome.heartbeat_s, lost_s=welcome.lost_s)
        self._conversation = conversation
        if self._welcome is None or self._welcome.job != welcome.job:
            self._welcome = welcome
            self._serving.cancel()
            self._changed.set()
            self._changed = trio.Event()
        elif self._served is not None:
            conversation.post(messages.Ready(token=self._served.token))
        try:
            await conversation.hold(messages.ToRole, self._handle)
        finally:
            self._conversation = None

    async def _handle(self, message: messages.Open | messages.Farewell) -> bool:
        if isinstance(message, messages.Open):
            self._channels.start_soon(self._open, message.key)
            return False
        self.over = message.reason
        return True

    def _post(self, message: wire.Message) -> None:
        if self._conversation is not None:
            self._conversation.post(message)

    async def _leave(self, reason: str) -> None:
        self.over = reason
        if self._conversation is not None:
            await self._conversation.say_last(messages.Leave(reason=reason))

    async def wait_stopped(self, stop: trio.Event) -> None:
        """End it once `stop` is set."""
        await stop.wait()
        await self._leave("it was told to stop")
        self._conversing.cancel()

    # --- the service ------------------------------------------------------------------------------------------

    async def keep_service(self) -> None:
        """Keep the service of the newest job, and one that was started for the same job as it is."""
        begun = None
        while True:
            while self._welcome is begun:
                await self._changed.wait()
            begun = self._welcome
            assert begun is not None
            with trio.CancelScope() as self._serving:
                try:
                    await self._serve(begun)
                except* (BoundaryError, ConfigError) as group:
                    await self._leave("; ".join(str(error) for error in leaves(group)))
                    raise

    async def _serve(self, welcome: messages.Welcome) -> None:
        try:
            async with self._role.serve(welcome.job, seed=welcome.seed, note=self._note) as served:
                self._served = served
                self._post(messages.Ready(token=served.token))
                await served.wait_over()
        finally:
            self._served = None

    def _note(self, text: str) -> None:
        self._say(text)
        self._post(messages.Note(text=text))

    async def _open(self, key: str) -> None:
        """Dial one channel and carry what is said over it."""
        try:
            if self._served is None:
                raise ConnectionRefusedError("the service is being started")
            service = await self._served.dial()
        except OSError:
            self._post(messages.CannotOpen(key=key))
            return
        async with service:
            try:
                async with await self._door.dial(self._lost_s) as channel:
                    await wire.send_async(channel, messages.Channel(key=key))
                    await join(service, channel)
            except (OSError, *GONE):
                return  # who asked for it gives up in time, or asks again
