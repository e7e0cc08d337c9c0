"""A rendezvous and roles in one program, over real sockets, with a wire between them that can be cut and held."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio

from asyncrl.errors import BoundaryError, EngineError
from asyncrl.roles import Door, Guest, Rendezvous, Role, RoleSettings, attend
from asyncrl.serving import listen

TOKEN = "a-token-of-the-tests"
TIMEOUT_S = 60.0


class Wire:
    """Forwards connections to a port. Held, it delivers nothing and loses nothing, like a network that is down."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.num_connections = 0
        self._target = port
        self._streams: list[trio.SocketStream] = []
        self._flows = trio.Event()
        self._flows.set()

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Forward until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._forward, [listener])

    async def _forward(self, here: trio.SocketStream) -> None:
        self.num_connections += 1
        self._streams.append(here)
        try:
            await self._flows.wait()
            there = await trio.open_tcp_stream("127.0.0.1", self._target)
            async with here, there, trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, here, there, nursery.cancel_scope)
                nursery.start_soon(self._carry, there, here, nursery.cancel_scope)
        except OSError:
            await here.aclose()  # nobody listens
        finally:
            self._streams.remove(here)

    async def _carry(self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            async for piece in source:
                await self._flows.wait()
                await sink.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await self._flows.wait()
        scope.cancel()

    async def cut(self, number: int) -> None:
        """Break one of the connections, by the order in which they came."""
        await trio.aclose_forcefully(self._streams[number])

    def hold(self) -> None:
        """Deliver nothing from now on."""
        self._flows = trio.Event()

    def flow(self) -> None:
        """Deliver what was held, and all that follows."""
        self._flows.set()


class EchoRole:
    """Its service says back what it is told. A `roles.Role`."""

    token = "echo"

    def __init__(self, kind: str = "engine") -> None:
        self.kind = kind
        self.jobs: list[Mapping[str, Any]] = []
        """What it was started for, once each time."""
        self.seeds: list[int] = []
        self.fails = trio.Event()
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def serve(self, job: Mapping[str, Any], *, seed: int, note: Callable[[str], None]) -> AsyncIterator[EchoRole]:
        """See `roles.Role`."""
        self.jobs.append(job)
        self.seeds.append(seed)
        async with trio.open_nursery() as self._nursery:
            yield self
            self._nursery.cancel_scope.cancel()

    async def dial(self) -> trio.abc.Stream:
        """See `roles.Served`."""
        ours, theirs = trio.socket.socketpair()
        self._nursery.start_soon(self._echo, trio.SocketStream(theirs))
        return trio.SocketStream(ours)

    async def _echo(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                async for piece in stream:
                    await stream.send_all(piece)
            except trio.BrokenResourceError:
                return

    async def wait_over(self) -> None:
        """See `roles.Served`."""
        await self.fails.wait()
        raise EngineError("the echo died away")


@dataclass
class Rig:
    """A rendezvous with a wire before it, and the roles that dialled."""

    rendezvous: Rendezvous
    wire: Wire
    nursery: trio.Nursery
    door: Door
    said: list[str]
    """By the rendezvous."""
    ended: dict[str, str] = field(default_factory=dict)
    """Name -> why its attendance was over."""
    failed: dict[str, BaseException] = field(default_factory=dict)

    def come(self, role: Role, *, stop: trio.Event | None = None, **changes: Any) -> Door:
        """Let a role dial, by the wire unless a `port` is given."""
        door = replace(self.door, **{"instance": f"{len(self.ended)} {id(role)} {id(changes)}", **changes})
        self.nursery.start_soon(self.attend, door, role, trio.Event() if stop is None else stop)
        return door

    async def attend(self, door: Door, role: Role, stop: trio.Event) -> None:
        """Attend, and keep how it ended."""
        try:
            self.ended[door.name] = await attend(door, role, say=lambda words: None, stop=stop)
        except* (BoundaryError, ValueError) as group:
            self.failed[door.name] = group

    async def guest(self, kind: str = "engine") -> Guest:
        """Return the first of a kind, once all are there."""
        return (await self.rendezvous.wait_all())[kind][0]

    async def wait_said(self, words: str) -> None:
        """Return once the rendezvous has said something that has these words."""
        while not any(words in line for line in self.said):  # noqa: ASYNC110 - only a test waits for what a person reads
            await trio.sleep(0.01)

    async def wait_ended(self, name: str) -> str:
        """Return how a role ended."""
        while name not in self.ended and name not in self.failed:  # noqa: ASYNC110 - only a test waits for this
            await trio.sleep(0.01)
        error: BaseException | None = self.failed.get(name)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return self.ended.get(name) or f"{type(error).__name__}: {error}"


def settings(**changes: Any) -> RoleSettings:
    """Return settings of one engine with a short patience."""
    return RoleSettings(**{"listen": "127.0.0.1:0", "engines": 1, "heartbeat_s": 0.2, "lost_s": 2.0, **changes})


def run(
    body: Callable[[Rig], Awaitable[None]],
    *,
    jobs: Mapping[str, Mapping[str, Any]] | None = None,
    tls: ssl.SSLContext | None = None,
    **changes: Any,
) -> Rig:
    """Run a test body with a rendezvous that is open; who has come is let go at its end."""
    rigs: list[Rig] = []

    async def main() -> None:
        said: list[str] = []
        role_settings = settings(**changes)
        given = jobs or {kind: {"do": kind} for kind in role_settings.wanted}
        rendezvous = Rendezvous(role_settings, given, token=TOKEN, tls=tls, say=said.append)
        listener = listen("127.0.0.1", 0, setting="a test's port")
        wire = Wire(listener.getsockname()[1])
        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as wires:
                await wires.start(wire.serve)
                async with trio.open_nursery() as roles, rendezvous.opened(listener):
                    door = Door(host="127.0.0.1", port=wire.port, token=TOKEN, name="e0", give_up_s=20.0)
                    rigs.append(Rig(rendezvous, wire, roles, door, said))
                    await body(rigs[0])
                wires.cancel_scope.cancel()

    trio.run(main)
    return rigs[0]


@asynccontextmanager
async def speaking(guest: Guest) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Yield what says something over one connection to a guest's echo, and hears it."""
    async with await trio.open_tcp_stream("127.0.0.1", guest.port) as stream:
        yield partial(_say, stream)


async def _say(stream: trio.SocketStream, words: bytes) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, words)
        heard = bytearray()
        while len(heard) < len(words):
            piece = await stream.receive_some(65536)
            if not piece:
                raise EOFError("the echo ended")
            heard += piece
    assert bytes(heard) == words
