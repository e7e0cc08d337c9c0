"""The trainer's half of the Atropos contract over HTTP, and both halves as one server."""

from __future__ import annotations

import socket

import msgspec
import trio

from asyncrl.atropos.door import Door, packed
from asyncrl.atropos.messages import BadField, Registration, big_number, read
from asyncrl.atropos.store import Store
from asyncrl.gateway.http import Answer, Request, Route, Routes, json_answer
from asyncrl.gateway.server import HTTPServer

BATCH_HEADER = "asyncrl-batch"
"""The number of a batch, in the header of the answer that holds it; `GET /batch?received=NUMBER` says that it came."""


class TrainerDoor:
    """The routes that a trainer uses."""

    def __init__(self, store: Store, door: Door) -> None:
        self._store = store
        self._door = door

    def routes(self) -> list[Route]:
        """Return the table of routes."""
        found = [
            ("POST", "/register", self._register),
            ("GET", "/batch", self._batch),
            ("GET", "/reset_data", self._reset_data),
            ("GET", "/statistics", self._statistics),
        ]
        errors = self._door.error_body
        return [Route(method=m, path=path, handler=handler, error_body=errors) for m, path, handler in found]

    async def _register(self, request: Request) -> Answer:
        said = read(Registration, await self._door.body(request))
        number = await self._store.register(said)
        return json_answer({"uuid": big_number(number)})

    async def _batch(self, request: Request) -> Answer:
        received = request.query.get("received")
        if received is not None and not received.isdecimal():
            raise BadField("received", f"must be the number of a batch, got {received[:40]!r}")
        if self._store.registration is None:
            message = "Trainer not registered. Call /register first."
            return json_answer({"status": "error", "message": message, "batch": []})
        found = await self._store.lend(received=None if received is None else int(received))
        if found is None:
            return json_answer({"batch": None})
        number, body = found
        answer = await packed(request, body)
        return Answer(body=answer.body, headers={**answer.headers, BATCH_HEADER: str(number)})

    async def _reset_data(self, request: Request) -> Answer:
        await self._store.reset()
        return Answer(body=b"Reset successful", content_type="text/plain; charset=utf-8")

    async def _statistics(self, request: Request) -> Answer:
        """Answer what was refused, recognised and dropped, and by what reason."""
        body = {
            "waiting": self._store.waiting.groups,
            "refused": self._door.refused,
            "duplicates": self._door.duplicates,
            "dropped": self._store.dropped,
            "environments": [member.name for member in self._store.roster.alive],
        }
        return Answer(body=msgspec.json.encode(body))


async def serve_store(
    store: Store,
    listener: socket.socket,
    *,
    max_body_bytes: int,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a queue to environments and a trainer until cancelled; takes the socket over."""
    door = Door(store, max_body_bytes=max_body_bytes)
    for group in store.groups:  # whoever posted one and did not hear of it may post it again
        door.know(group.env_id, group.digest)
    routes = [*door.routes(), *TrainerDoor(store, door).routes()]
    await HTTPServer(Routes(routes).answer).serve(listener, task_status=task_status)
