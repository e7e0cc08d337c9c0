"""The one place where failures become data: what stands outside ends an episode, and never a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from asyncrl.errors import BoundaryError, EngineError, EnvironmentFault, SandboxError, leaves
from asyncrl.types import TrajectoryStatus

_STATUS_OF_ERROR: Mapping[type[BoundaryError], TrajectoryStatus] = {
    EngineError: TrajectoryStatus.FAILED_ENGINE,
    SandboxError: TrajectoryStatus.FAILED_SANDBOX,
    EnvironmentFault: TrajectoryStatus.FAILED_ENVIRONMENT,
}


@dataclass(slots=True)
class Caught:
    """What a `boundary` stopped."""

    status: TrajectoryStatus | None = None
    detail: str = ""


class boundary:  # noqa: N801 - used as a function is, and every rollout under way holds one: a generator takes a KiB
    """Turn errors of `kinds` (default: engine, sandbox, environment) into the status they stand for.

    Everything else leaves: it is a programmer's error, or a cancellation. An exception group is stopped only where all
    its errors are of `kinds`; the first is then reported.
    """

    __slots__ = ("_caught", "_kinds")

    def __init__(self, *kinds: type[BoundaryError]) -> None:
        self._kinds = kinds or tuple(_STATUS_OF_ERROR)
        self._caught = Caught()

    async def __aenter__(self) -> Caught:
        return self._caught

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, self._kinds):
            _note(self._caught, error)
            return True
        if isinstance(error, ExceptionGroup):  # one that holds a cancellation too is none of these
            matched, rest = error.split(self._kinds)
            if rest is None and matched is not None:
                _note(self._caught, next(leaves(matched)))
                return True
        return False


def _note(caught: Caught, error: BaseException) -> None:
    caught.status = next(status for kind, status in _STATUS_OF_ERROR.items() if isinstance(error, kind))
    caught.detail = f"{type(error).__name__}: {error}"
