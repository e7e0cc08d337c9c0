"""The gateway: an HTTP face before the engines, for agents that know a base URL and a key and nothing of asyncrl.

Every rollout has a session. Its requests come by its path (`/sessions/ID/v1/...`) or by its key alone (`/v1/...`); what
they sample is recorded, and becomes the session's trajectory. They go to the sampler that the session was opened with:
in a run that is the run's own, so that bounds, versions, retries and the journal are those of every other rollout.

A stream is sent as its completion is sampled. Of that it shows only what stays, whichever engine dies and whichever
weights are disowned meanwhile; so what an agent has seen is what is recorded. One that leaves a stream ends its
completion there, as a stop string would: what it was told is recorded.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import trio

from asyncrl.errors import EnvironmentFault
from asyncrl.gateway import anthropic, openai, vllm
from asyncrl.gateway.admission import CacheUse
from asyncrl.gateway.fields import Fields
from asyncrl.gateway.figures import GatewayFigures
from asyncrl.gateway.http import (
    Answer,
    ErrorBody,
    Handler,
    Refused,
    Request,
    Route,
    Routes,
    event,
    event_stream,
    json_answer,
)
from asyncrl.gateway.http import openai_error as _openai_error
from asyncrl.gateway.live import Live
from asyncrl.gateway.model import ServedModel
from asyncrl.gateway.record import Record
from asyncrl.gateway.server import HTTPServer
from asyncrl.gateway.session import Session
from asyncrl.gateway.settings import GatewaySettings
from asyncrl.protocols import Sampler
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Task

_Face = Callable[[ServedModel, Session, Fields, Live | None], Awaitable[Answer | None]]
"""Returns an answer, or says one to a `Live` and returns None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatistics:
    """What the gateway is doing and has done."""

    sessions: int
    running: int
    """Requests that are being answered."""
    waiting: int
    """Open sessions that were turned away, as every engine's cache was full, and have not begun."""
    answered: int
    refused: dict[int, int]
    """By HTTP status."""
    sessions_ended: dict[str, int]
    """By what became of them; "left" where whoever opened one neither closed nor failed it."""


class Gateway:
    """Sessions and their faces. `serve` answers; `session` opens one.

    Example:
        >>> gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=2048)  # doctest: +SKIP
        >>> async with trio.open_nursery() as nursery:                                           # doctest: +SKIP
        ...     await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
        ...     async with gateway.session(sampler, task=task, trajectory_id="7-0") as session:
        ...         await run_agent(session.base_url, session.token)
        ...         trajectory = session.close(reward=1.0)
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        settings: GatewaySettings,
        *,
        temperature: float,
        max_model_len: int,
        model_name: str = "policy",
        cache_use: CacheUse | None = None,
    ) -> None:
        self.model = ServedModel.of(
            renderer, settings, temperature=temperature, max_model_len=max_model_len, name=model_name
        )
        self.token = f"gateway-{secrets.token_urlsafe(24)}"
        """Opens every session, and what only the operator may do."""
        self.url = ""
        """Where agents reach it; "" until it serves."""
        self.more_routes: list[Route] = []
        """Routes of whoever is handed the gateway before it serves."""
        self._settings = settings
        self._cache_use = cache_use
        self._by_id: dict[str, Session] = {}
        self._by_token: dict[str, Session] = {}
        self.figures = GatewayFigures()
        self._running = self._answered = 0
        self._refused: Counter[int] = Counter()
        self._ended: Counter[str] = Counter()

    async def serve(
        self,
        listener: socket.socket,
        *,
        routes: Sequence[Route] = (),
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer requests until cancelled; takes the socket over. `routes` are further ones."""
        host, port = listener.getsockname()[:2]
        self.url = self._settings.public_url.rstrip("/") or f"http://{host}:{port}"
        table = Routes([*self.routes(), *routes, *self.more_routes])
        server = HTTPServer(table.answer, stalled_client_s=self._settings.stalled_client_s)
        async with trio.open_nursery() as nursery:
            if self._cache_use is not None:
                nursery.start_soon(self._cache_use.watch)
            await server.serve(listener, task_status=task_status)

    def statistics(self) -> GatewayStatistics:
        """Return the present counts."""
        return GatewayStatistics(
            sessions=len(self._by_id),
            running=self._running,
            waiting=sum(s.turned_away_at is not None and not s.has_begun for s in self._by_id.values()),
            answered=self._answered,
            refused=dict(self._refused),
            sessions_ended=dict(self._ended),
        )

    # --- sessions ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session(
        self,
        sampler: Sampler,
        *,
        task: Task,
        trajectory_id: str,
        deadline_s: float = math.inf,
        max_turns: int = 0,
        max_tokens: int = 0,
        renderer: ChatRenderer | None = None,
    ) -> AsyncIterator[Session]:
        """Open a session for one rollout; on leaving, nothing more is answered for it.

        `deadline_s` from now its requests end and further ones are refused; what it recorded can still be closed. It
        may take `max_turns` completions of at most `max_tokens` tokens each; 0 is no limit. A `renderer` is taken
        instead of the gateway's own. Raises: EnvironmentFault where the gateway does not serve.
        """
        session = self.open(
            sampler,
            task=task,
            trajectory_id=trajectory_id,
            deadline_s=deadline_s,
            max_turns=max_turns,
            max_tokens=max_tokens,
            renderer=renderer,
        )
        try:
            yield session
        finally:
            self.forget(session)

    def open(
        self,
        sampler: Sampler,
        *,
        task: Task,
        trajectory_id: str,
        deadline_s: float = math.inf,
        record: Record | None = None,
        max_requests: int = 0,
        max_turns: int = 0,
        max_tokens: int = 0,
        renderer: ChatRenderer | None = None,
    ) -> Session:
        """Return a new session, which the caller must `forget`.

        A `record` of one's own keeps what it likes of what is sampled; 0 `max_requests` is `max_session_requests`.
        Raises: EnvironmentFault.
        """
        if not self.url:
            raise EnvironmentFault("the gateway does not serve: nobody could reach the session")
        model = self.model
        if renderer is not None and renderer is not model.renderer:
            model = model.speaking(renderer)
        if record is None:
            record = Record(end_token_ids=model.renderer.end_token_ids, vocab_size=model.renderer.vocab_size)
        session = Session(
            sampler,
            record,
            task=task,
            trajectory_id=trajectory_id,
            url=self.url,
            deadline_s=deadline_s,
            max_requests=max_requests or self._settings.max_session_requests,
            max_turns=max_turns,
            max_tokens=max_tokens,
        )
        session.model = model
        self._by_id[session.session_id] = self._by_token[session.token] = session
        return session

    def forget(self, session: Session) -> None:
        """Answer nothing more for a session, and hold nothing of it."""
        self._ended[session.outcome or "left"] += 1
        session.stop("whoever opened it has left it")
        del self._by_id[session.session_id], self._by_token[session.token]

    def session_of(self, request: Request) -> Session:
        """Return the session that a request may speak for. Raises: Refused."""
        token = _token_of(request)
        session_id = request.parameters.get("session")
        if session_id is None:
            if (session := self._by_token.get(token)) is None:
                raise Refused(401, "the key is missing, or of no session that is open")
            return session
        session = self._by_id.get(session_id)
        if session is None:
            raise Refused(404, f"there is no session {session_id[:64]!r}, or it is over", code="no_session")
        if not (hmac.compare_digest(token.encode(), session.token.encode()) or self.is_operator(request)):
            raise Refused(401, "the key is missing, or of another session")
        return session

    def is_operator(self, request: Request) -> bool:
        """Whether a request carries the gateway's own token."""
        return hmac.compare_digest(_token_of(request).encode(), self.token.encode())

    def need_operator(self, request: Request) -> None:
        """Raise Refused unless a request carries the gateway's own token."""
        if not self.is_operator(request):
            raise Refused(401, "this needs the gateway's own token")

    # --- requests ---------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Return the faces' routes, each by key and by path."""
        faces: list[tuple[str, str, _Face, ErrorBody]] = [
            ("chat", "/v1/chat/completions", openai.chat, _openai_error),
            ("completions", "/v1/completions", openai.completions, _openai_error),
            ("messages", "/v1/messages", anthropic.messages, anthropic.anthropic_error),
            ("generate", "/generate", vllm.generate, _openai_error),
            ("inference", "/inference/v1/generate", vllm.inference_generate, _openai_error),
        ]
        others: list[tuple[str, str, Handler]] = [
            ("GET", "/v1/models", self._models),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/health", self._health),
        ]
        found = [
            Route(method="POST", path=path, handler=self._answering(name, face, counted), error_body=counted)
            for name, path, face, error_body in faces
            for counted in [self._counted(error_body)]
        ]
        found += [
            Route(method=method, path=path, handler=handler, error_body=self._counted(_openai_error))
            for method, path, handler in others
        ]
        by_path = [
            Route(method=r.method, path=f"/sessions/{{session}}{r.path}", handler=r.handler, error_body=r.error_body)
            for r in found
        ]
        return [*found, *by_path]

    def _counted(self, error_body: ErrorBody) -> ErrorBody:
        def body(refused: Refused) -> object:
            self._refused[refused.status] += 1
            return error_body(refused)

        return body

    def _answering(self, name: str, face: _Face, error_body: ErrorBody) -> Handler:
        async def answer(request: Request) -> Answer:
            with self.figures.answering(name) as note:
                session = self.session_of(request)
                self._admit(session)
                fields = await self.fields(request)
                note.is_handed_on = fields.flag("stream")
                if not note.is_handed_on:
                    with self._holding(), session.request(timeout_s=self._settings.request_timeout_s):
                        found = await face(session.model or self.model, session, fields, None)
                    assert found is not None
                    self._answered += 1
                    return found
            live = Live(lambda refused: event(error_body(refused), name=event_name))
            assert request.nursery is not None, "only a server streams"
            request.nursery.start_soon(self._say, name, face, session, fields, live)
            await live.wait_begun()
            return event_stream(live.parts(), headers=live.headers)

        event_name = "error" if face is anthropic.messages else ""
        return answer

    async def _say(self, name: str, face: _Face, session: Session, fields: Fields, live: Live) -> None:
        """Have a face say its answer, to its end."""
        try:
            with (
                self.figures.answering(name),
                self._holding(),
                session.request(timeout_s=self._settings.request_timeout_s),
            ):
                await face(session.model or self.model, session, fields, live)
        except Refused as refused:
            live.end(refused)
        else:
            self._answered += 1
            self.figures.streams_left += live.left
            live.end()

    def _admit(self, session: Session) -> None:
        if session.has_begun or self._cache_use is None or self._cache_use.has_room:
            if session.turned_away_at is not None:
                self.figures.admission_seconds.add(trio.current_time() - session.turned_away_at)
                session.turned_away_at = None
            return
        self.figures.turned_away += 1
        if session.turned_away_at is None:
            session.turned_away_at = trio.current_time()
        raise Refused(
            429,
            f"the engines' caches are {self._cache_use.least:.0%} full (max_cache_use of [gateway]): sessions that "
            "have begun go first",
            code="engines_full",
            retry_after_s=1,
        )

    @contextmanager
    def _holding(self) -> Iterator[None]:
        if self._running >= self._settings.max_requests:
            raise Refused(
                503,
                f"the gateway answers {self._running} requests already (max_requests of [gateway])",
                code="overloaded",
                retry_after_s=1,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def fields(self, request: Request) -> Fields:
        """Return a request's body as fields. Raises: Refused."""
        settings = self._settings
        body = await request.body(max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        return Fields(body)

    def _known(self, request: Request) -> ServedModel:
        """Return the model as whoever asks is shown it. Raises: Refused where nobody knows them."""
        if self.is_operator(request) and "session" not in request.parameters:
            return self.model
        return self.session_of(request).model or self.model

    async def _models(self, request: Request) -> Answer:
        return openai.models(self._known(request))

    async def _tokenize(self, request: Request) -> Answer:
        return await openai.tokenize(self._known(request), await self.fields(request))

    async def _detokenize(self, request: Request) -> Answer:
        return openai.detokenize(self._known(request), await self.fields(request))

    async def _health(self, request: Request) -> Answer:
        return json_answer({})


def _token_of(request: Request) -> str:
    """Return the key that a request carries, as OpenAI's or as Anthropic's clients send it; "" without one."""
    bearer: str = request.headers.get("authorization", "")
    if bearer.lower().startswith("bearer "):
        return bearer[len("bearer ") :].strip()
    return request.headers.get("x-api-key", "")


@runtime_checkable
class NeedsGateway(Protocol):
    """An environment whose agents ask for completions over HTTP: the run opens a gateway for it."""

    @property
    def needs_gateway(self) -> bool:
        """Whether it does; a mixture does where one of its parts does."""
        ...

    def use_gateway(self, gateway: Gateway) -> None:
        """Take the run's gateway, once, before any group is collected."""
        ...
