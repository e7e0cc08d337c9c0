"""Every error that asyncrl raises on purpose.

    AsyncRLError
     |- ConfigError (ValueError)     what a person typed; the command line turns it into exit code 2
     |- BoundaryError                something outside this process failed; at a boundary it becomes a status
     |   |- EngineError              an inference engine did not answer, or died
     |   |- SandboxError             a sandbox could not be had or broke for reasons that are not the agent's
     |   |   `- UnsafeFilesError     what the agent left cannot be taken over; this one is the agent's doing
     |   |- EnvironmentFault         an environment broke its contract or died
     |   |- WeightSyncError          weights did not arrive, or not the ones that were sent
     |   |   `- WeightMismatch       other weights than were published: says which tensor
     |   |- LearnerError             the learner process failed a step or died
     |   |- RoleError                a role on another host did not come, or the orchestrator is out of its reach
     |   |- CheckpointError          a checkpoint cannot be written, or is not whole
     |   `- JournalError             the journal cannot be written, or is another's
     |- ShapeError (ValueError)      arrays whose shapes contradict each other
     `- StalenessError               a token older than `max_off_policyness` reached training: always a bug

A failed episode is data (a trajectory with a status); a failed programmer is an exception.
"""

from __future__ import annotations

from collections.abc import Iterator


class AsyncRLError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """What a person typed cannot be used. The message names the setting, what was found and what is allowed."""


class BoundaryError(AsyncRLError):
    """A part outside this process failed."""


class EngineError(BoundaryError):
    """An inference engine did not answer, answered nonsense, or died."""


class SandboxError(BoundaryError):
    """A sandbox could not be had, or broke for reasons that are not the agent's."""


class UnsafeFilesError(SandboxError):
    """What lies in a sandbox cannot be taken over: links, pipes, too many or too large files. The agent's doing."""


class EnvironmentFault(BoundaryError):  # noqa: N818  (the field says fault; EnvironmentError is a builtin)
    """An environment broke its contract or died."""


class WeightSyncError(BoundaryError):
    """Weights did not arrive, or not the ones that were sent. The message names engine, phase and tensor."""


class WeightMismatch(WeightSyncError):  # noqa: N818  (one kind of the error above, and its opposite is a match)
    """An engine was offered, or holds, other weights than were published."""

    def __init__(self, message: str, *, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
        """The first that differs; empty where the version as a whole does and no single one can be blamed."""


class LearnerError(BoundaryError):
    """The learner process failed a step or died."""


class RoleError(BoundaryError):
    """A role on another host did not come, or the orchestrator is out of a role's reach."""


class CheckpointError(BoundaryError):
    """A checkpoint cannot be written, or is not whole. The message names the file."""


class JournalError(BoundaryError):
    """The journal cannot be written, or its files are of another run or format. The message names the file."""


class ShapeError(AsyncRLError, ValueError):
    """Arrays whose shapes contradict each other."""


class StalenessError(AsyncRLError):
    """A token older than `max_off_policyness` reached training. Always a bug in the gate, never the user's doing."""


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors in a group and in the groups inside it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
