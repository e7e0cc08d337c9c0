"""What the operator may do over HTTP, with the gateway's own token: sessions and engines.

| request | what it does |
|---|---|
| `POST /sessions` `{"task_id", "trajectory_id", "deadline_s"}` | opens one: its id, `url`, `base_url` and `token` |
| `GET /sessions/ID` | says how far it is |
| `POST /sessions/ID/close` `{"reward", "reward_parts"}` | closes it: its trajectory |
| `POST /sessions/ID/close` `{"failed": "why"}` | the same, masked |
| `GET /engines` | who serves, who does not and why |
| `POST /engines` `{"url"}` | takes one more; answered when it serves |
| `DELETE /engines/NAME` | lets one go; its requests go on elsewhere |

A session that is not closed by its deadline ends there: its trajectory is masked, with that reason.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import trio

from asyncrl.engines import Engine, EnginePool
from asyncrl.errors import ConfigError, EngineError, WeightSyncError
from asyncrl.gateway.gateway import Gateway
from asyncrl.gateway.http import Answer, Handler, Refused, Request, Route, json_answer, openai_error
from asyncrl.gateway.session import Session
from asyncrl.protocols import Sampler
from asyncrl.types import Segment, Task, Trajectory, TrajectoryStatus

_LONGEST_S = 7 * 86400.0


class Operating:
    """The operator's routes of a gateway. `serve` must run while they are answered: it ends sessions at their deadline.

    `on_trajectory` hears of every trajectory of a session that was opened here.
    """

    def __init__(
        self,
        gateway: Gateway,
        sampler: Sampler | None = None,
        *,
        pool: EnginePool | None = None,
        make_engine: Callable[[str, str], Engine] | None = None,
        on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Without a `sampler` no session is opened here. `make_engine` returns the client of a name and its URL."""
        self._gateway = gateway
        self._sampler = sampler
        self._pool = pool
        self._make_engine = make_engine
        self._on_trajectory = on_trajectory
        self._open: dict[str, Session] = {}
        self._deadlines: list[tuple[float, str]] = []
        """A heap: when which session ends. One that was closed stays until then; a task for each would hold more."""
        self._opened = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End sessions at their deadline, until cancelled."""
        task_status.started()
        while True:
            with trio.move_on_at(self._deadlines[0][0] if self._deadlines else math.inf):
                await self._opened.wait()
                self._opened = trio.Event()
            while self._deadlines and self._deadlines[0][0] <= trio.current_time():
                self._expire(heapq.heappop(self._deadlines)[1])

    def routes(self) -> list[Route]:
        """Return the operator's routes."""
        found: list[tuple[str, str, Handler]] = []
        if self._sampler is not None:
            found += [
                ("POST", "/sessions", self._open_session),
                ("GET", "/sessions/{session}", self._show_session),
                ("POST", "/sessions/{session}/close", self._close_session),
            ]
        if self._pool is not None:
            found += [
                ("GET", "/engines", self._show_engines),
                ("POST", "/engines", self._add_engine),
                ("DELETE", "/engines/{engine}", self._remove_engine),
            ]
        return [
            Route(method=method, path=path, handler=self._guarded(handler), error_body=openai_error)
            for method, path, handler in found
        ]

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Answer:
            self._gateway.need_operator(request)
            return await handler(request)

        return answer

    # --- sessions ---------------------------------------------------------------------------------------------

    async def _open_session(self, request: Request) -> Answer:
        fields = await self._gateway.fields(request)
        assert self._sampler is not None
        deadline_s = fields.number("deadline_s", 3600.0)
        assert deadline_s is not None
        if not (math.isfinite(deadline_s) and 0 < deadline_s <= _LONGEST_S):
            raise Refused(400, f"deadline_s must be > 0 and <= {_LONGEST_S:g} seconds, got {deadline_s}")
        task = Task(task_id=fields.text("task_id", "task"), environment=fields.text("environment", "gateway"))
        session = self._gateway.open(
            self._sampler, task=task, trajectory_id=fields.text("trajectory_id"), deadline_s=deadline_s
        )
        session.trajectory_id = session.trajectory_id or session.session_id
        self._open[session.session_id] = session
        heapq.heappush(self._deadlines, (session.deadline, session.session_id))
        self._opened.set()
        body = {"session_id": session.session_id, "url": session.url, "base_url": session.base_url}
        return json_answer({**body, "token": session.token, "trajectory_id": session.trajectory_id})

    def _expire(self, session_id: str) -> None:
        if (session := self._open.get(session_id)) is not None:
            why = f"nobody closed the session within its deadline of {session.deadline_s:g} s"
            self._end(session, session.fail(TrajectoryStatus.FAILED_DEADLINE, why))

    def _end(self, session: Session, trajectory: Trajectory) -> Trajectory:
        del self._open[session.session_id]
        self._gateway.forget(session)
        self._on_trajectory(trajectory)
        return trajectory

    def _session(self, request: Request) -> Session:
        session = self._open.get(request.parameters["session"])
        if session is None:
            wanted = request.parameters["session"][:64]
            raise Refused(404, f"there is no session {wanted!r}, or it is over", code="no_session")
        return session

    async def _show_session(self, request: Request) -> Answer:
        session = self._session(request)
        return json_answer(
            {
                "session_id": session.session_id,
                "trajectory_id": session.trajectory_id,
                "turns": session.record.num_turns,
                "sampled_tokens": session.record.num_sampled_tokens,
                "running": session.num_running,
                "seconds_left": session.deadline - trio.current_time(),
            }
        )

    async def _close_session(self, request: Request) -> Answer:
        fields = await self._gateway.fields(request)
        session = self._session(request)
        failed, reward = fields.text("failed"), fields.number("reward", None)
        parts = fields.object("reward_parts").rest()
        if bool(failed) == (reward is not None):
            raise Refused(400, "either reward must be a number, or failed must say why there is none")
        if not all(isinstance(part, (int, float)) for part in parts.values()):
            raise Refused(400, "reward_parts must be numbers by name")
        if reward is None:
            trajectory = session.fail(TrajectoryStatus.FAILED_ENVIRONMENT, failed)
        else:
            trajectory = session.close(float(reward), reward_parts=parts)
        return json_answer(shown_trajectory(self._end(session, trajectory)))

    # --- engines ----------------------------------------------------------------------------------------------

    async def _show_engines(self, request: Request) -> Answer:
        assert self._pool is not None
        return json_answer({"engines": [asdict(engine) for engine in self._pool.statistics().engines]})

    async def _add_engine(self, request: Request) -> Answer:
        assert self._pool is not None
        url = (await self._gateway.fields(request)).text("url")
        if self._make_engine is None:
            raise Refused(400, "this run takes no further engines")
        if not url.startswith(("http://", "https://")):
            raise Refused(400, f"url must begin with http:// or https://, got {url!r}")
        taken = {engine.name for engine in self._pool.statistics().engines}
        name = next(name for number in itertools.count() if (name := f"engine {number}") not in taken)
        try:
            await self._pool.add(self._make_engine(name, url))
        except (EngineError, WeightSyncError) as error:
            raise Refused(502, str(error)) from None
        return json_answer({"name": name}, status=201)

    async def _remove_engine(self, request: Request) -> Answer:
        assert self._pool is not None
        try:
            self._pool.remove(request.parameters["engine"])
        except ConfigError as error:
            known = any(e.name == request.parameters["engine"] for e in self._pool.statistics().engines)
            raise Refused(409 if known else 404, str(error)) from None
        return json_answer({})


def shown_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON: per-token lists, and masks of 0 and 1."""
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "environment": trajectory.environment,
        "status": str(trajectory.status),
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "detail": trajectory.detail,
        "num_turns": trajectory.num_turns,
        "truncated": trajectory.truncated,
        "extras": dict(trajectory.extras),
        "segments": [_shown_segment(segment) for segment in trajectory.segments],
    }


def _shown_segment(segment: Segment) -> dict[str, Any]:
    return {
        "token_ids": list(segment.token_ids),
        "loss_mask": list(segment.loss_mask),
        "behaviour_logprobs": list(segment.behaviour_logprobs),
        "spans": [{"start": span.start, "end": span.end, "version": span.version} for span in segment.spans],
    }
