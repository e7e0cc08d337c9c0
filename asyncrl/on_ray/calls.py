"""What Ray's calls give, awaited in trio.

A call of an actor gives a reference at once, and Ray tells of its result in a thread of its own, through a
`concurrent.futures.Future`; that thread wakes the task that waits. So nothing polls and no thread of ours stands in
`ray.get`: a wait that is cancelled leaves nothing behind that would have to be abandoned. The few calls that block
(`blocking`) run in trio's threads and take milliseconds once Ray is connected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import trio

T = TypeVar("T")


async def outcome(reference: Any) -> Any:
    """Return what a call gives. Raises: ray.exceptions.RayError where it was lost; else what the actor has raised.

    Cancelling the wait does not end the call.
    """
    token = trio.lowlevel.current_trio_token()
    done = trio.Event()

    def wake(_: Future[Any]) -> None:
        with suppress(trio.RunFinishedError):  # Ray hears of a call's end after the run's: nobody waits
            token.run_sync_soon(done.set)

    future = reference.future()
    future.add_done_callback(wake)
    await done.wait()
    return future.result(timeout=0)


async def blocking(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return what a call of Ray gives that blocks, from a thread of trio's."""
    return await trio.to_thread.run_sync(functools.partial(function, *arguments, **named))
