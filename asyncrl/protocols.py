"""What the parts promise each other. Standard library only, so that every layer may import it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from asyncrl.types import Completion, Group, PolicyVersion, Segment, Task, TokenIds, Trajectory, WeightManifest

# --- sampling -------------------------------------------------------------------------------------------------


@runtime_checkable
class Sampler(Protocol):
    """Who asks for tokens. One object may serve many concurrent episodes."""

    async def sample(
        self, token_ids: TokenIds, *, max_tokens: int, trajectory_id: str, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Return one completion of `token_ids`, sampled at the run's temperature with nothing cut off.

        It ends after the model's own end token or one of `stop_token_ids`, which is part of the completion.

        Raises: EngineError when no engine could answer.
        """
        ...


@runtime_checkable
class KeepsTrajectories(Protocol):
    """A sampler that outlives the process: what an interrupted group had finished need not be run again."""

    def kept_trajectory(self, trajectory_id: str) -> Trajectory | None:
        """Return an episode that was finished before the run was interrupted, or None."""
        ...


# --- environments ---------------------------------------------------------------------------------------------


@runtime_checkable
class Environment(Protocol):
    """Asks tasks, drives the sampler, scores what came back."""

    name: str

    def get_item(self) -> Task:
        """Return the next task to train on; may run a curriculum. Raises StopIteration when the tasks are used up."""
        ...

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on."""
        ...

    async def collect_trajectories(
        self, task: Task, sampler: Sampler, *, group_id: str, group_size: int
    ) -> Sequence[Trajectory]:
        """Run and score `group_size` episodes of `task`, concurrently.

        A failed episode is a trajectory with a failure status; its siblings go on.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what `restore` needs to go on with the same tasks (JSON-like)."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        ...

    async def aclose(self) -> None:
        """Release what the environment holds."""
        ...


class ReportsTrajectories(Environment, Protocol):
    """An environment that tells of each episode as it ends, so that those survive a group that is cut short.

    It is told from others by the keyword that its `collect_trajectories` takes.
    """

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """As `Environment.collect_trajectories`; calls `on_trajectory` with each trajectory once it is final.

        Trajectory ids are the group's id, "-", and a number from 0 on. The call may be cancelled at any moment.
        """
        ...


def reports_trajectories(environment: Environment) -> bool:
    """Tell whether an environment's `collect_trajectories` takes `on_trajectory`."""
    return "on_trajectory" in inspect.signature(environment.collect_trajectories).parameters


@runtime_checkable
class LearnsFromGroups(Protocol):
    """An environment whose choice of tasks follows from what became of earlier ones."""

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Note a finished group of a task that `get_item` returned, whether it is trained on or not."""
        ...


# --- sandboxes ------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a command in a sandbox ended, told from counters and not from return codes."""

    OK = "ok"
    """It ended by itself, whatever its exit code."""
    WALL = "wall"
    CPU = "cpu"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    OUTPUT = "output"
    INFRASTRUCTURE = "infrastructure"
    """The sandbox itself failed: never the agent's doing, never a reward of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Hard limits of one sandbox."""

    wall_s: float = 10.0
    """Seconds that one command may take."""
    cpu_s: float = 10.0
    """CPU seconds that one process may burn."""
    memory_bytes: int = 256 * 2**20
    """Memory of all processes together, the tmpfs contents included."""
    max_pids: int = 64
    disk_bytes: int = 64 * 2**20
    """Size of the writable tmpfs over the task's files."""
    max_files: int = 4096
    output_bytes: int = 1 * 2**20
    """Bytes of stdout and stderr together after which the command is ended."""
    kept_output_bytes: int = 64 * 2**10
    """Bytes kept of each stream: the first and the last half of this, with the cut marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did."""

    outcome: Outcome
    exit_code: int | None
    """None where the command was ended by a limit or never started; -N where signal N ended it."""
    stdout: bytes
    stderr: bytes
    """Head and tail with the cut marked, where `truncated`."""
    truncated: bool = False
    output_bytes: int = 0
    """Bytes written to both streams together, kept or not."""
    seconds: float = 0.0
    peak_memory_bytes: int | None = None
    peak_pids: int | None = None
    detail: str = ""
    """For `infrastructure`, what failed."""


class Sandbox(Protocol):
    """One place where an agent's code runs. Closed by `async with`."""

    sandbox_id: str
    wall: str
    """Names what holds the agent in: "bubblewrap", ... or a weaker wall that was asked for by name."""

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", wall_s: float | None = None) -> ExecResult:
        """Run one command to its end, its stray children included. Never raises for what the agent did."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file below the working directory."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1 * 2**20) -> bytes:
        """Read a regular file below the working directory. Raises FileNotFoundError, or SandboxError if unsafe."""
        ...

    async def list(self, path: str = ".") -> Sequence[str]:
        """Return the names in a directory below the working directory."""
        ...

    async def aclose(self) -> None:
        """End every process and remove every trace. May be called twice."""
        ...

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *args: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatistics:
    """How busy a backend is."""

    open: int
    opened: int
    """Since the start, those that were refused included."""
    waiting: int
    """Callers that wait for a sandbox to be closed."""


class SandboxBackend(Protocol):
    """Opens sandboxes; owns what they share (the launcher process, the ledger)."""

    wall: str
    python: tuple[str, ...]
    """The argument list that runs Python inside a sandbox; its own arguments follow."""

    def statistics(self) -> BackendStatistics:
        """Return the present counts."""
        ...

    async def open(self, files: Mapping[str, bytes], *, limits: SandboxLimits) -> Sandbox:
        """Return a new sandbox whose working directory holds `files` (path -> content).

        Raises: SandboxError when none can be had.
        """
        ...


# --- learner --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    version: PolicyVersion
    """After the step."""
    metrics: Mapping[str, float]
    """Names as documented in `asyncrl.metrics`."""
    stepped: bool = True
    """False where the step was skipped (non-finite gradient norm, nothing to train on); the version still counts."""
    histograms: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """name -> {"edges": [k], "counts": [k + 1]}"""
    top_ratios: Sequence[Mapping[str, Any]] = ()
    """The step's largest token ratios, for attribution."""


class Learner(Protocol):
    """The orchestrator's side of the process that steps the optimizer. One request at a time."""

    async def step(self, groups: Sequence[Group]) -> StepResult:
        """Take one optimizer step. Raises: LearnerError."""
        ...

    async def supervised_step(self, segments: Sequence[Segment], *, learning_rate: float) -> StepResult:
        """Take one optimizer step that raises the likelihood of the segments' masked tokens; the version counts it.

        Metrics: loss (nats a token, before the step), tokens_trained, grad_norm, learning_rate. Raises: LearnerError.
        """
        ...

    async def supervised_loss(self, segments: Sequence[Segment]) -> float:
        """Return the mean of -logp over the segments' masked tokens, in nats; nothing is learned."""
        ...

    async def publish(self) -> WeightManifest:
        """Make the present weights available to the engines. Raises: LearnerError."""
        ...

    async def save(self, directory: str) -> Mapping[str, int]:
        """Write model, optimizer and random state below `directory`; return file name -> bytes."""
        ...


# --- weight sync ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one engine's pull of one version did."""

    engine: str
    version: PolicyVersion
    verified: bool
    """The digest that the engine computed of what it now holds equals the manifest's."""
    num_bytes: int
    seconds: Mapping[str, float]
    """By phase: pause, start, update, finish, resume, ..."""
    stall_seconds: float
    """In which the engine produced no token."""


class WeightPuller(Protocol):
    """The engines' side of weight sync."""

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Bring every engine to the manifest's version, all at once. Raises: WeightSyncError."""
        ...


class WeightPublisher(Protocol):
    """The learner's half of a transport: makes a version of the weights available."""

    def publish(self, tensors: Mapping[str, Any], version: PolicyVersion) -> WeightManifest:
        """Make `tensors` (name -> torch.Tensor, in the engine's dtype) available and return the manifest."""
        ...

    def close(self) -> None:
        """Remove what was published. May be called twice."""
        ...
