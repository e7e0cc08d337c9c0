"""Idle time by cause: in what the learner waits, and why the engines have nothing to do. Seconds on trio's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import trio

from asyncrl.protocols import Sampler, Watch
from asyncrl.types import Completion, TokenIds

LEARNER_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "straggler": "waiting for a group that no other can stand in for",
        "groups": "waiting for any group",
        "sync": "waiting for the engines' pull",
        "evaluation": "waiting for the held-out tasks",
        "saving": "writing a checkpoint",
    }
)
"""cause -> what it means."""

ENGINE_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "no_slot": "no group runs, and the gate lets none in",
        "sync": "paused for new weights, or waiting for them while no group runs",
        "no_requests": "no running episode asks for tokens, or there are no more tasks",
    }
)
"""cause -> what it means."""

_CAUSE_OF_PHASE = {
    "waiting for groups": "groups",
    "syncing": "sync",
    "evaluating": "evaluation",
    "saving": "saving",
}


class IdleClock:
    """Adds time to one cause at a time, or to none."""

    def __init__(self, seconds: dict[str, float], causes: Mapping[str, str]) -> None:
        """`seconds` by cause is the caller's, and is added to."""
        self._seconds = seconds
        self._cause: str | None = None
        self._since = 0.0
        for cause in causes:
            seconds.setdefault(cause, 0.0)
        self._lap = dict(seconds)

    def switch(self, cause: str | None) -> None:
        """Add what has passed to the cause so far, and go on with another."""
        now = trio.current_time()
        if self._cause is not None:
            self._seconds[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def flush(self) -> None:
        """Add what has passed."""
        self.switch(self._cause)

    def add(self, cause: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds[cause] += seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds by cause since the last call."""
        self.flush()
        passed = {cause: seconds - self._lap[cause] for cause, seconds in self._seconds.items()}
        self._lap = dict(self._seconds)
        return passed


class LearnerIdle(IdleClock):
    """What the learner waits for, told by the phases of the loop."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__(seconds, LEARNER_CAUSES)
        self.straggler: int | None = None
        """The group that no other can stand in for, while it is waited for."""
        self._straggling: dict[int, float] = {}

    def phase(self, phase: str) -> None:
        """Note what the learner's side does from now on."""
        self._note(None, _CAUSE_OF_PHASE.get(phase))

    def wait_for(self, straggler: int | None, *, for_pull: bool = False) -> None:
        """Note who is waited for from now on, in a wait for groups; None is anybody, unless only a pull helps."""
        if for_pull:
            self._note(None, "sync")
        else:
            self._note(straggler, "groups" if straggler is None else "straggler")

    def _note(self, straggler: int | None, cause: str | None) -> None:
        self.switch(cause)
        self.straggler = straggler

    def switch(self, cause: str | None) -> None:
        """See `IdleClock.switch`."""
        if self.straggler is not None:
            waited = self._straggling.get(self.straggler, 0.0)
            self._straggling[self.straggler] = waited + trio.current_time() - self._since
        super().switch(cause)

    def worst_straggler(self) -> int | None:
        """Return the group that was waited for longest since the last call, None where none was."""
        worst = max(self._straggling, key=lambda group_id: (self._straggling[group_id], -group_id), default=None)
        self._straggling.clear()
        return worst


class EngineIdle(IdleClock):
    """Why no engine has a request, told by those who make requests and by those who cannot."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__(seconds, ENGINE_CAUSES)
        self._num_requests = self._num_groups = self._num_at_gate = self._num_syncs = 0

    def watch(self, sampler: Sampler) -> Sampler:
        """Return the sampler, its requests counted."""
        return _WatchedRequests(sampler, self)

    def request(self) -> _Request:
        """Note that an engine has a request while inside."""
        return _Request(self)

    def count_request(self, change: int) -> None:
        """Note that there are so many more requests."""
        self._num_requests += change
        self.update()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Note that a group runs while inside."""
        self._num_groups += 1
        self.update()
        try:
            yield
        finally:
            self._num_groups -= 1
            self.update()

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Note that the next group waits for a slot while inside."""
        self._num_at_gate += 1
        self.update()
        try:
            yield
        finally:
            self._num_at_gate -= 1
            self.update()

    @contextmanager
    def sync(self) -> Iterator[Callable[[float], None]]:
        """Note that weights are on their way while inside; what is yielded is told how long the engines were paused.

        Of that, only what was no idle time without requests is added.
        """
        self._num_syncs += 1
        self.update()
        before = sum(self._seconds.values())

        def add_stall(seconds: float) -> None:
            self.flush()
            self.add("sync", max(0.0, seconds - (sum(self._seconds.values()) - before)))

        try:
            yield add_stall
        finally:
            self._num_syncs -= 1
            self.update()

    def update(self) -> None:
        """Note why the engines are idle from now on, if they are."""
        if self._num_requests:
            self.switch(None)
        elif self._num_syncs and not self._num_groups:
            self.switch("sync")
        elif self._num_at_gate and not self._num_groups:
            self.switch("no_slot")
        else:
            self.switch("no_requests")


class _Request:
    """One request while inside. No generator: every rollout under way holds one, and that takes half a KiB."""

    __slots__ = ("_idle",)

    def __init__(self, idle: EngineIdle) -> None:
        self._idle = idle

    def __enter__(self) -> None:
        self._idle.count_request(+1)

    def __exit__(self, *_: object) -> None:
        self._idle.count_request(-1)


class _WatchedRequests:
    """A `Sampler` whose requests are counted."""

    def __init__(self, sampler: Sampler, idle: EngineIdle) -> None:
        self._sampler = sampler
        self._idle = idle

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """See `protocols.Sampler`."""
        with self._idle.request():
            return await self._sampler.sample(
                token_ids,
                max_tokens=max_tokens,
                trajectory_id=trajectory_id,
                stop_token_ids=stop_token_ids,
                watch=watch,
            )
