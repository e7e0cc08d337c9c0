"""What the parts promise each other. Standard library only, so that every layer may import it.

Long because what one part may expect of another is read in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from asyncrl.types import (
    Completion,
    Group,
    Logprobs,
    PolicyVersion,
    Segment,
    Task,
    TokenIds,
    TokenSpan,
    Trajectory,
    WeightManifest,
)

if TYPE_CHECKING:
    from pathlib import Path

    import trio

# --- sampling -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has been sampled of a completion until now, all of which stays."""

    token_ids: TokenIds
    """[n]"""
    behaviour_logprobs: Logprobs
    """[n] nats, <= 0."""
    spans: tuple[TokenSpan, ...]
    """Cover exactly the n tokens, in order."""


Watch = Callable[[Progress], bool]
"""Hears of a completion in the making; True ends it with the tokens that it has, as an end token would."""


@runtime_checkable
class Sampler(Protocol):
    """Who asks for tokens. One object may serve many concurrent episodes."""

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Return one completion of `token_ids`, sampled at the run's temperature with nothing cut off.

        It ends after the model's own end token or one of `stop_token_ids`, which is part of the completion. `watch`
        hears of it while it is sampled, as far as whoever samples can tell; the last tokens come with the completion.

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
        """Run and score `group_size` episodes of `task`, concurrently, or bring what stands for them.

        Ids differ. A task with a `group_size` of its own gets that many; where it is 0, any number but none may come. A
        failed episode is a trajectory with a failure status; its siblings go on.
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
class RunsAlongside(Protocol):
    """An environment with business of its own while the run lasts: a connection, a server, a child process."""

    async def serve(self, directory: Path, *, task_status: trio.TaskStatus[None]) -> None:
        """Go about it until cancelled; started once `held_out` can answer.

        `directory` is where it may leave logs. Raises: ConfigError, EnvironmentFault where it cannot begin.
        """
        ...


@runtime_checkable
class FetchesItems(Protocol):
    """An environment whose tasks take time to come."""

    async def wait_item(self, count: int = 1) -> None:
        """Return once `get_item` can answer so many times, with a task or the end of them."""
        ...


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
    lifetime_s: float = 6 * 3600.0
    """Seconds after which the sandbox is closed, whoever still holds it."""


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
    """For `infrastructure`, what failed; else what else there is to know, such as that the shell is a new one."""


class FileKind(StrEnum):
    """What a name in a directory stands for."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    """A symbolic link; never followed from outside."""
    OTHER = "other"
    """A socket, a pipe, a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One thing below a directory, as it was found without being opened."""

    path: str
    """As `read` takes it, however odd: with newlines, or bytes that are no UTF-8 (as os.fsdecode)."""
    kind: FileKind
    num_bytes: int
    """Apparent size; a sparse file says more than it holds."""


class Snapshot(Protocol):
    """Files that any number of sandboxes are opened over, copied only where one of them writes. Closed by `async with`.

    Sandboxes that were opened over it go on after it is closed.
    """

    snapshot_id: str
    num_bytes: int
    num_files: int

    async def aclose(self) -> None:
        """Give the files up. May be called twice."""
        ...

    async def __aenter__(self) -> Snapshot: ...

    async def __aexit__(self, *args: object) -> None: ...


class Sandbox(Protocol):
    """One place where an agent's code runs. Closed by `async with`.

    Relative paths are below the working directory; absolute ones must lie in it or in one of the sandbox's writable
    places. One command runs at a time; others wait for their turn.
    """

    sandbox_id: str
    wall: str
    """Names what holds the agent in: "bubblewrap", ... or a weaker wall that was asked for by name."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run one command to its end, its stray children included. Never raises for what the agent did.

        Its input is `stdin` and then the end: a program that waits for more sees that end. There is no terminal.
        What is None is taken from the sandbox's limits.
        """
        ...

    async def shell(
        self,
        command: str,
        *,
        wall_s: float | None = None,
        output_bytes: int | None = None,
        kept_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run shell text in the sandbox's one persistent shell; never raises for what the agent did.

        Directory, variables, functions and background processes stay from call to call. The input of every command is
        empty, so that a program that asks is told the end at once. The shell starts with the first call, and anew after
        it exited or was ended by a limit, which ends everything in the sandbox; `detail` then says so.
        What a background process writes belongs to the call during which it is read.
        """
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a regular file, and the directories above it. Raises OSError (ENOSPC), SandboxError if unsafe."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1 * 2**20) -> bytes:
        """Return a regular file's content. Raises FileNotFoundError, or SandboxError if unsafe or larger."""
        ...

    async def list(self, path: str = ".") -> Sequence[str]:
        """Return the names in a directory, sorted. Raises FileNotFoundError, or SandboxError if unsafe."""
        ...

    async def walk(self, path: str = ".", *, max_entries: int = 10_000) -> Sequence[FileEntry]:
        """Return all that lies below a directory, sorted by path; no link is followed and nothing is opened.

        Raises: FileNotFoundError, or SandboxError if unsafe, or where there are more than `max_entries`.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Return the working directory as it is now; waits for a running command.

        What background processes write meanwhile may be in it or not. Processes, /tmp and other places do not come
        along. Raises: SandboxError.
        """
        ...

    async def fork(self) -> Sandbox:
        """Return a new sandbox with the same limits, work and places, and the working directory as it is now.

        Waits for a place as `SandboxBackend.open` does. Raises: SandboxError.
        """
        ...

    async def kill(self) -> None:
        """End every process inside, at once; the files stay."""
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

    async def prepare(self, files: Mapping[str, bytes], *, executable: Collection[str] = ()) -> Snapshot:
        """Return a task's files (path -> content) for many sandboxes; those in `executable` may be run.

        Raises: SandboxError where they cannot be kept.
        """
        ...

    async def open(
        self,
        files: Mapping[str, bytes] | Snapshot,
        *,
        limits: SandboxLimits,
        work: str = "/task",
        places: Mapping[str, Snapshot | None] = MappingProxyType({}),
        image: str = "",
    ) -> Sandbox:
        """Return a new sandbox over `files`, waiting where as many are open as may be.

        A mapping (path -> content) is written into it; a snapshot of this backend is laid below it, and copied only
        where something is written.

        Args: `work` is where the working directory appears inside; `places` are further absolute paths: a snapshot is
        shown read-only, None is an empty writable directory within the same limits. `image` is what is around all of
        these, read-only; empty is the backend's own.
        Raises: SandboxError when none can be had, where the files do not fit into its limits, or where the image is not
        here; ConfigError for an image where the backend runs none.
        """
        ...


# --- learner --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    version: PolicyVersion
    """After the step."""
    metrics: Mapping[str, float]
    """Names as documented in `asyncrl.learner.report`."""
    stepped: bool = True
    """False where the weights stayed as they were (non-finite gradient norm, nothing to train on, a limit of the step's
    options); the version still counts."""
    histograms: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """name -> {"edges": [k], "counts": [k + 1]}"""
    top_ratios: Sequence[Mapping[str, Any]] = ()
    """The step's largest token ratios, for attribution."""
    spikes: Sequence[Mapping[str, Any]] = ()
    """The tokens with the largest ratios and influences, with all that explains them: `asyncrl.learner.attribution`."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """One trajectory, token by token (`asyncrl.learner.attribution`); empty where nothing was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How an optimizer step is to be taken."""

    learning_rate_scale: float = 1.0
    """Share of the learning rate that the schedule gives."""
    update: bool = True
    """False: everything is measured, and the weights stay as they are."""
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """metric -> (least, most). Where one is outside, the weights stay as they are; one that is not measured is not."""


PLAIN_STEP = StepOptions()
"""A step as the settings have it."""


class Learner(Protocol):
    """The orchestrator's side of the process that steps the optimizer. One request at a time."""

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
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

    async def publish(self, *, keep: Collection[PolicyVersion] = ()) -> WeightManifest:
        """Make the present weights available to the engines, in place of the oldest version that is not in `keep`.

        Raises: LearnerError.
        """
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
    """That the engine read of what was published, all its ranks together."""
    seconds: Mapping[str, float]
    """By phase: pause, start, update, finish, resume, ..."""
    stall_seconds: float
    """In which the engine produced no token."""
    canary_distance: float | None = None
    """Nats a token between the engine's log-probs of the canary's text and the learner's; None without a canary."""
    encoding: str = "full"
    """"delta" where it read only what differs from the version it held."""
    chain_break: str = ""
    """Where deltas are sent, why it read the whole version all the same; `asyncrl.weight_sync.reader.ChainBreak`."""


class WeightPuller(Protocol):
    """The engines' side of weight sync. Engines may be several versions behind the newest one, and skip what is old."""

    async def make_room(self) -> Collection[PolicyVersion]:
        """Let no engine begin to read a version before the next `pull_all`; return those that are being read, once that
        is one at most: any other may be replaced.

        Raises: WeightSyncError naming who reads what, when that takes too long.
        """
        ...

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """Return once every engine holds the manifest's version or a later one, with a report of each engine's pull.

        It may be called while an earlier call waits: each engine goes from what it holds to the newest, by itself.
        Raises: WeightSyncError.
        """
        ...


class WeightPublisher(Protocol):
    """The learner's half of a transport: makes a version of the weights available."""

    def publish(
        self,
        tensors: Mapping[str, Any],
        version: PolicyVersion,
        *,
        keep: Collection[PolicyVersion] = (),
        adapter_scale: float | None = None,
    ) -> WeightManifest:
        """Make `tensors` (name -> torch.Tensor, in the engine's dtype) available and return the manifest.

        What was published before may go, but for what is in `keep`: it is being read. With an `adapter_scale` they are
        the factors of an adapter alone.
        """
        ...

    def close(self) -> None:
        """Remove what was published. May be called twice."""
        ...
