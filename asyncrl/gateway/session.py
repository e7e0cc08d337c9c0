"""One rollout at the gateway: who may speak for it, what it has asked, and the trajectory that it becomes."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from asyncrl.engines import RequestRefused
from asyncrl.errors import EngineError, EnvironmentFault
from asyncrl.gateway.http import Refused
from asyncrl.gateway.record import Record
from asyncrl.protocols import Sampler, Watch
from asyncrl.types import Completion, FinishReason, Task, TokenIds, Trajectory, TrajectoryStatus

if TYPE_CHECKING:
    from asyncrl.gateway.model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What of the infrastructure has failed a session."""

    status: TrajectoryStatus
    detail: str


class Session:
    """One rollout. Its agent knows `base_url` and `token`; whoever opened it closes it with a reward.

    Example:
        >>> async with gateway.session(sampler, task=task, trajectory_id="7-0") as session:     # doctest: +SKIP
        ...     await run_agent(session.base_url, session.token)
        ...     trajectory = session.close(reward=1.0)
    """

    def __init__(
        self,
        sampler: Sampler,
        record: Record,
        *,
        task: Task,
        trajectory_id: str,
        url: str,
        deadline_s: float = math.inf,
        max_requests: int = 16,
        max_turns: int = 0,
        max_tokens: int = 0,
    ) -> None:
        """At most `max_turns` completions of at most `max_tokens` tokens each; 0 is no limit."""
        self.session_id = secrets.token_hex(12)
        self.token = f"session-{secrets.token_urlsafe(24)}"
        """Opens this session and nothing else."""
        self.url = f"{url}/sessions/{self.session_id}"
        """Below it lie all routes; Anthropic's clients take it as their base URL."""
        self.record = record
        self.model: ServedModel | None = None
        """As its environment speaks to it; None is the gateway's own. Set by the gateway."""
        self.task = task
        self.trajectory_id = trajectory_id
        self.deadline_s = deadline_s
        self.deadline = trio.current_time() + deadline_s
        self.ignored: Counter[str] = Counter()
        """Foreign parameters of its requests, and how often each was ignored."""
        self.turned_away_at: float | None = None
        """Since when it waits for room in an engine's cache, on trio's clock."""
        self.streams_left = 0
        """Streams that their client left before the end; what was sampled by then is recorded."""
        self.failure: Failure | None = None
        """What failed its last request; None after one that was answered."""
        self._sampler = sampler
        self._began = trio.current_time()
        self._max_requests = max_requests
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._turns_used_up = False
        self._running: set[trio.CancelScope] = set()
        self._end = ""
        self._unanswered = 0
        self.outcome = ""
        """What became of it: a trajectory's status, or "" while nobody has said."""

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take."""
        return f"{self.url}/v1"

    @property
    def end(self) -> str:
        """Why it is over, or ""."""
        if not self._end and trio.current_time() >= self.deadline:
            return f"its deadline of {self.deadline_s:g} s has passed"
        return self._end

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    @property
    def has_begun(self) -> bool:
        """Whether anything was sampled for it, or is being."""
        return bool(self.record.num_turns or self._running)

    @contextmanager
    def request(self, *, timeout_s: float) -> Iterator[None]:
        """Hold a request, which ends with the session.

        Raises: Refused where the session is over, has too many requests already, or this one takes too long.
        """
        if self.end:
            raise Refused(410, f"the session is over: {self.end}", code="session_over")
        if self._max_turns and self.record.num_turns >= self._max_turns:
            self._turns_used_up = True
            raise Refused(403, f"the session's {self._max_turns} turns are used up (max_turns)", code="turns_used_up")
        if len(self._running) >= self._max_requests:
            raise Refused(
                429,
                f"the session has {len(self._running)} requests already (max_session_requests of [gateway])",
                code="too_many_requests",
                retry_after_s=1,
            )
        with trio.CancelScope(deadline=min(self.deadline, trio.current_time() + timeout_s)) as scope:
            self._running.add(scope)
            try:
                yield
            finally:
                self._running.discard(scope)
        if scope.cancelled_caught:
            if self.end:
                raise Refused(410, f"the session is over: {self.end}", code="session_over")
            raise Refused(504, f"no answer in {timeout_s:g} s (request_timeout_s of [gateway])", code="timeout")

    async def sample(
        self, prompt: TokenIds, *, max_tokens: int, stop_token_ids: Sequence[int], watch: Watch | None = None
    ) -> Completion:
        """Return a completion; it is not recorded. Raises: Refused where no engine could answer."""
        try:
            completion = await self._sampler.sample(
                prompt,
                max_tokens=min(max_tokens, self._max_tokens or max_tokens),
                trajectory_id=self.trajectory_id,
                stop_token_ids=stop_token_ids,
                **({} if watch is None else {"watch": watch}),
            )
        except RequestRefused as error:
            raise Refused(400, str(error)) from None
        except EngineError as error:
            self.failure = Failure(status=TrajectoryStatus.FAILED_ENGINE, detail=f"EngineError: {error}")
            raise Refused(503, f"no engine could answer: {error}", code="no_engine", retry_after_s=5) from None
        self.failure = None
        return completion

    def close(
        self,
        reward: float,
        *,
        status: TrajectoryStatus | None = None,
        reward_parts: Mapping[str, float] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """End the session and return what can be trained on.

        Without a `status` it is completed, or cut where its last completion was, or more turns were asked for than it
        may take. Where an engine failed its last
        request, or it never made one, nothing is worth a reward: the trajectory has failed, with the reason.
        """
        self.stop("it is closed")
        if self.failure is not None:
            return self._failed(self.failure, extras)
        if not self.record.num_turns:
            detail = "the agent has sampled nothing: it never reached the gateway, or asked nothing that could be"
            return self._failed(Failure(status=TrajectoryStatus.FAILED_ENVIRONMENT, detail=detail), extras)
        if status is None:
            cut = self.record.last_finish_reason is FinishReason.LENGTH
            status = TrajectoryStatus.TRUNCATED_LENGTH if cut else TrajectoryStatus.COMPLETED
            status = TrajectoryStatus.TRUNCATED_TURNS if self._turns_used_up else status
        if not math.isfinite(reward):
            detail = f"EnvironmentFault: the reward must be a finite number, got {reward}"
            return self._failed(Failure(status=TrajectoryStatus.FAILED_ENVIRONMENT, detail=detail), extras)
        try:
            segments = self.record.segments()
        except EnvironmentFault as error:
            detail = f"EnvironmentFault: {error}"
            return self._failed(Failure(status=TrajectoryStatus.FAILED_ENVIRONMENT, detail=detail), extras)
        self.outcome = str(status)
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task_id=self.task.task_id,
            environment=self.task.environment,
            segments=segments,
            reward=float(reward),
            status=status,
            reward_parts=dict(reward_parts or {}),
            num_turns=self.record.num_turns,
            seconds=trio.current_time() - self._began,
            truncated=self.record.truncated,
            extras=self._extras(extras),
        )

    def fail(self, status: TrajectoryStatus, detail: str, *, extras: Mapping[str, Any] | None = None) -> Trajectory:
        """End the session and return a trajectory that is masked, with its reason: never a reward of 0."""
        assert status.failed, status
        self.stop(detail)
        return self._failed(Failure(status=status, detail=detail), extras)

    def stop(self, reason: str) -> None:
        """Answer nothing more; requests that are being answered end."""
        self._end = self._end or reason
        self._unanswered = self._unanswered or len(self._running)
        for scope in self._running:
            scope.cancel()

    def _failed(self, failure: Failure, extras: Mapping[str, Any] | None) -> Trajectory:
        self.outcome = str(failure.status)
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task_id=self.task.task_id,
            environment=self.task.environment,
            segments=(),
            reward=None,
            status=failure.status,
            num_turns=self.record.num_turns,
            seconds=trio.current_time() - self._began,
            detail=failure.detail,
            extras={**self._extras(extras), "discarded_tokens": self.record.num_sampled_tokens},
        )

    def _extras(self, extras: Mapping[str, Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = {**(extras or {})}
        if self.ignored:
            found["ignored_parameters"] = dict(self.ignored)
        if self.streams_left:
            found["streams_left"] = self.streams_left
        if self._unanswered:  # what was sampled for them is in no record
            found["unanswered_requests"] = self._unanswered
        return found
