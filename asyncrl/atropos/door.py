"""The environments' half of the Atropos contract over HTTP: they register, ask how things stand, and post groups.

What waits behind the door, and for whom, is a `Trainer`: a queue for a trainer of its own (`store`), or a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import msgspec
import trio
from isal import isal_zlib

from asyncrl.atropos.messages import (
    KEYS,
    BadField,
    EnvironmentRegistration,
    Registration,
    ScoredGroup,
    error_body,
    read,
    read_group,
    read_groups,
)
from asyncrl.atropos.roster import Roster, WaitingCounts
from asyncrl.gateway.http import Answer, Refused, Request, Route, json_answer

RETRY_WINDOW_S = 120.0
"""In which a group that comes again is the same one: a client tries three times, with at most ten seconds between."""
_PACK_FROM_BYTES = 1000  # smaller answers are sent as they are
_THREAD_FROM_BYTES = 2**20  # a larger body is read on a thread: it would hold all others up


class Trainer(Protocol):
    """For whom groups are posted."""

    takes: bool
    """Whether it has begun to take groups: environments wait until then."""
    roster: Roster
    waiting: WaitingCounts

    @property
    def registration(self) -> Registration | None:
        """How it trains; None until it has said so."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Ids are below it, where that is known."""
        ...

    @property
    def max_group_size(self) -> int | None:
        """Sequences of the largest group that it can ever take, where there is a largest."""
        ...

    @property
    def current_step(self) -> int:
        """The step that environments are told."""
        ...

    @property
    def latest(self) -> bytes | None:
        """The last group that came, as JSON."""
        ...

    async def note_environments(self) -> None:
        """Note that the roster has changed."""
        ...

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        """Take groups over, all or none. Raises: Refused."""
        ...


_Key = tuple[int | None, bytes]


class Recent:
    """The digests of groups that came lately."""

    def __init__(self) -> None:
        self._came: dict[_Key, float] = {}

    def is_new(self, group: ScoredGroup) -> bool:
        """Tell whether a group did not come in the last RETRY_WINDOW_S."""
        now = trio.current_time()
        for key, at in list(self._came.items()):  # in the order in which they came
            if now - at < RETRY_WINDOW_S:
                break
            del self._came[key]
        return (group.env_id, group.digest) not in self._came

    def add(self, env_id: int | None, digest: bytes) -> None:
        """Note that a group came."""
        self._came.pop((env_id, digest), None)
        self._came[env_id, digest] = trio.current_time()

    def forget(self, group: ScoredGroup) -> None:
        """Take a group for one that never came."""
        self._came.pop((group.env_id, group.digest), None)


class Door:
    """The routes that environments use.

    Example:
        >>> routes = Door(trainer, max_body_bytes=2**26).routes()                                # doctest: +SKIP
        >>> await HTTPServer(Routes(routes).answer).serve(listen("127.0.0.1", 8000, setting="--port"))  # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer, *, max_body_bytes: int, body_timeout_s: float = 60.0) -> None:
        """`max_body_bytes` of a body, unpacked; a larger one is answered 413."""
        self._trainer = trainer
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._recent = Recent()
        self._putting: dict[_Key, trio.Event] = {}
        self._threads = trio.CapacityLimiter(1)
        self.refused: Counter[str] = Counter()
        """Field, or HTTP status where no field is at fault -> requests."""
        self.duplicates = 0
        """Groups that had come before."""

    def know(self, env_id: int | None, digest: bytes) -> None:
        """Take a group for one that has come, which was posted before a restart."""
        self._recent.add(env_id, digest)

    def routes(self) -> list[Route]:
        """Return the table of routes."""
        found: list[tuple[str, str, Callable[[Request], Awaitable[Answer]]]] = [
            ("GET", "/", self._root),
            ("GET", "/info", self._info),
            ("GET", "/wandb_info", self._wandb_info),
            ("GET", "/status", self._status),
            ("GET", "/latest_example", self._latest_example),
            ("POST", "/register-env", self._register_env),
            ("POST", "/disconnect-env", self._disconnect_env),
            ("GET", "/status-env", self._status_env),
            ("POST", "/scored_data", self._scored_data),
            ("POST", "/scored_data_list", self._scored_data_list),
        ]
        return [Route(method=m, path=path, handler=handler, error_body=self.error_body) for m, path, handler in found]

    def error_body(self, refused: Refused) -> Any:
        """Count a refusal, and return what it is answered with."""
        self.refused[refused.where.partition(".")[0] if isinstance(refused, BadField) else str(refused.status)] += 1
        return error_body(refused)

    async def body(self, request: Request) -> bytes:
        """Return a request's body. Raises: Refused."""
        return await request.body(max_bytes=self._max_body_bytes, timeout_s=self._body_timeout_s)

    # --- what is asked ----------------------------------------------------------------------------------------

    async def _root(self, request: Request) -> Answer:
        return json_answer({"message": "AtroposLib API"})

    async def _info(self, request: Request) -> Answer:
        said = self._trainer.registration
        return json_answer(
            {"batch_size": -1, "max_token_len": -1}
            if said is None
            else {"batch_size": said.batch_size, "max_token_len": said.max_token_len}
        )

    async def _wandb_info(self, request: Request) -> Answer:
        said = self._trainer.registration
        return json_answer({"group": said and said.wandb_group, "project": said and said.wandb_project})

    async def _status(self, request: Request) -> Answer:
        return json_answer(
            {"current_step": self._trainer.current_step, "queue_size": self._trainer.waiting.groups}
            if self._trainer.registration
            else {"current_step": 0, "queue_size": 0}
        )

    async def _latest_example(self, request: Request) -> Answer:
        nothing = msgspec.json.encode({**dict.fromkeys(KEYS), "tokens": [], "masks": [], "scores": []})
        return await packed(request, self._trainer.latest or nothing)

    async def _register_env(self, request: Request) -> Answer:
        said = read(EnvironmentRegistration, await self.body(request))
        registration = self._trainer.registration
        if registration is None or not self._trainer.takes:
            return json_answer({"status": "wait for trainer to start"})
        member = self._trainer.roster.register(said)
        await self._trainer.note_environments()
        return json_answer(
            {
                "status": "success",
                "env_id": member.env_id,
                "wandb_name": member.name,
                "checkpoint_dir": registration.checkpoint_dir,
                "starting_step": self._trainer.current_step,
                "checkpoint_interval": registration.save_checkpoint_interval,
                "num_steps": registration.num_steps,
            }
        )

    async def _disconnect_env(self, request: Request) -> Answer:
        env_id = self._env_id(request, await self.body(request))
        try:
            self._trainer.roster.disconnect(env_id)
        except BadField as error:
            return json_answer({"status": "failure", "error": str(error)})
        await self._trainer.note_environments()
        return json_answer({"status": "success"})

    async def _status_env(self, request: Request) -> Answer:
        env_id = self._env_id(request, await self.body(request))
        said = self._trainer.registration
        status = self._trainer.roster.status(
            env_id,
            self._trainer.waiting,
            step=self._trainer.current_step,
            batch_size=said.batch_size if said else 0,
        )
        return json_answer(asdict(status))

    def _env_id(self, request: Request, body: bytes) -> int:
        """Return which environment asks: as JSON, or in the query where a proxy strips the bodies of GET."""
        query = request.query.get("env_id")
        if not body and query is not None:
            if not query.lstrip("-").isdecimal():
                raise BadField("env_id", f"must be a whole number, got {query[:40]!r}")
            return int(query)
        return read(_WhichEnvironment, body).env_id

    # --- what is posted ---------------------------------------------------------------------------------------

    async def _scored_data(self, request: Request) -> Answer:
        groups = await self._read(await self.body(request), lambda body, **more: [read_group(body, **more)])
        await self._put(groups)
        return json_answer({"status": "received"})

    async def _scored_data_list(self, request: Request) -> Answer:
        groups = await self._read(await self.body(request), read_groups)
        await self._put(groups)
        return json_answer({"status": "received", "groups_processed": len(groups)})

    async def _read(self, body: bytes, reading: Callable[..., list[ScoredGroup]]) -> list[ScoredGroup]:
        said = self._trainer.registration
        limits = {"vocab_size": self._trainer.vocab_size, "max_token_len": said.max_token_len if said else 0}
        if len(body) < _THREAD_FROM_BYTES:
            groups = reading(body, **limits)
        else:
            groups = await trio.to_thread.run_sync(lambda: reading(body, **limits), limiter=self._threads)
        largest = self._trainer.max_group_size
        for group in groups:
            if largest is not None and group.size > largest:
                raise BadField("tokens", f"a group of {group.size} never fits into a batch of {largest}")
            self._trainer.roster.hear(group.env_id)
        return groups

    async def _put(self, groups: Sequence[ScoredGroup]) -> None:
        """Hand groups over once, however often they come."""
        keys = {(group.env_id, group.digest): group for group in groups}
        while coming := [self._putting[key] for key in keys if key in self._putting]:
            await coming[0].wait()  # what is answered to a repetition must be as true as what is answered first
        new = [group for group in keys.values() if self._recent.is_new(group)]
        self.duplicates += len(groups) - len(new)
        if not new:
            return
        done = trio.Event()
        for group in new:
            self._recent.add(group.env_id, group.digest)  # first, as a client that goes away cancels what follows
            self._putting[group.env_id, group.digest] = done
        try:
            await self._trainer.put(new)
        except Refused:
            for group in new:
                self._recent.forget(group)
            raise
        finally:
            done.set()
            for group in new:
                del self._putting[group.env_id, group.digest]


class _WhichEnvironment(msgspec.Struct, frozen=True):
    env_id: int


async def packed(request: Request, body: bytes) -> Answer:
    """Return an answer of JSON, as gzip where it is large and the client takes that."""
    if len(body) < _PACK_FROM_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
        return Answer(body=body)
    work = partial(_gzip, body)
    smaller = work() if len(body) < _THREAD_FROM_BYTES else await trio.to_thread.run_sync(work)
    return Answer(body=smaller, headers={"content-encoding": "gzip"})


def _gzip(body: bytes) -> bytes:
    packer = isal_zlib.compressobj(1, wbits=31)
    return packer.compress(body) + packer.flush()
