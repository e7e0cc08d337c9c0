"""The orchestrator's side of one actor: the process that it keeps, and what becomes of it."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
import trio
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.errors import BoundaryError
from asyncrl.on_ray.actor import Order, RoleActor
from asyncrl.on_ray.bundles import Bundle
from asyncrl.on_ray.calls import outcome

_THREADS = 8  # of an actor: it waits for its process's end, carries its stream both ways, and is told to stop
_STOP_MARGIN_S = 20.0  # beyond a process's grace; then Ray ends the actor with the placement group
_ASK_AGAIN_S = 1.0  # of an actor that Ray is bringing back: nothing tells when it is


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """How a process ended, in words."""

    words: str

    def describe(self) -> str:
        """Return the words."""
        return self.words


class RoleProcess:
    """A process on a node. A `children.Watched`."""

    def __init__(self, name: str, actor: Any, address: str) -> None:
        self.name = name
        self.address = address
        """"HOST:PORT" of where it was told to listen."""
        self._actor = actor
        self._words = ""
        self._ended = trio.Event()

    async def watch(self) -> None:
        """Learn how it ends: by itself, or with its actor, or with its node, as Ray finds."""
        try:
            self._words = await outcome(self._actor.wait_exit.remote())
        except RayActorError as error:
            self._words = f"{self.name} at {self.address} is lost: {reason_of(error)}"
        self._ended.set()

    async def wait_exit(self) -> RoleEnd:
        """Return how it ended, once it has."""
        await self._ended.wait()
        return RoleEnd(self._words)

    async def fail_on_exit(self, error: type[Exception]) -> None:
        """Raise `error` when it ends."""
        raise error((await self.wait_exit()).describe())

    async def carry(self, stream: trio.SocketStream) -> None:
        """Carry bytes between `stream` and the process's own until either closes; then close `stream`."""
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._carry_there, stream, nursery.cancel_scope)
            with suppress(RayActorError, trio.BrokenResourceError, trio.ClosedResourceError):  # `watch` tells of it
                while data := await outcome(self._actor.receive.remote()):
                    await stream.send_all(data)
            nursery.cancel_scope.cancel()

    async def _carry_there(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        with suppress(OSError, RayActorError, trio.BrokenResourceError):
            async for data in stream:  # one call at a time: those of an actor with threads overtake each other
                await outcome(self._actor.send.remote(bytes(data)))
        scope.cancel()


class Role:
    """One bundle's actor."""

    def __init__(self, bundle: Bundle, group: PlacementGroup, index: int, *, comes_back: bool) -> None:
        """`index` is the bundle's in `group`. Where it `comes_back`, Ray restarts the actor, on another node if needed.

        Whoever asks it to start a process again counts how often that was.
        """
        self.name = bundle.name
        amounts = dict(bundle.amounts)
        self._actor = (
            ray.remote(RoleActor)
            .options(
                name=f"{bundle.name} of {group.id.hex()[:12]}",
                num_cpus=amounts.pop("CPU", 0),
                num_gpus=amounts.pop("GPU", 0),
                memory=amounts.pop("memory", None),
                resources=amounts,
                max_restarts=-1 if comes_back else 0,
                max_concurrency=_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote(bundle.name)
        )

    @asynccontextmanager
    async def started(self, order: Order, error: type[BoundaryError]) -> AsyncIterator[RoleProcess]:
        """Start a process, once the actor is there; on leaving, it and all that came from it are ended.

        Raises: `error` where it cannot be started.
        """
        process = RoleProcess(self.name, self._actor, await self._start(order, error))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.watch)
                yield process
                nursery.cancel_scope.cancel()
        finally:
            with trio.move_on_after(order.grace_s + _STOP_MARGIN_S, shield=True), suppress(RayActorError):
                await outcome(self._actor.stop.remote(order.grace_s))  # an actor that is gone has taken it along

    async def free_address(self, error: type[BoundaryError]) -> str:
        """Return a "HOST:PORT" of its node that is free. Raises: `error`."""
        return await self._ask(self._actor.free_address.remote, error)

    async def _start(self, order: Order, error: type[BoundaryError]) -> str:
        return await self._ask(functools.partial(self._actor.start.remote, order), error)

    async def _ask(self, call: Callable[[], Any], error: type[BoundaryError]) -> str:
        while True:
            try:
                address: str = await outcome(call())
                return address
            except ActorUnavailableError:
                await trio.sleep(_ASK_AGAIN_S)
            except (RayError, OSError, RuntimeError) as cause:
                raise error(f"{self.name} cannot be started on Ray: {reason_of(cause)}") from cause


def reason_of(error: BaseException) -> str:
    """Return what Ray says has happened, in one line."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
