"""What a coding task is: files, an instruction, hidden checks and a reference, whoever made it and whoever asks it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from asyncrl.protocols import SandboxLimits
from asyncrl.sandbox.judge import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChecks:
    """Hidden calls of one function whose answers are compared outside the sandbox (`asyncrl.sandbox.run_calls`).

    The strongest judge; for functions whose inputs and outputs are plain data.
    """

    path: str
    """Of the file that is judged. It alone crosses, so it imports nothing else of the task."""
    function: str
    """As `run_calls` takes it: dots are allowed."""
    hidden: tuple[Call, ...]
    visible: tuple[Call, ...] = ()
    """Calls that the agent may see; none of them is among the hidden ones."""
    call_timeout_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestChecks:
    """Hidden tests in the form of pytest files (`asyncrl.sandbox.PytestVerifier`)."""

    tests: Mapping[str, bytes]
    """Path -> content, in a place of their own beside the candidate's files."""
    expected: tuple[str, ...]
    """The ids that count, such as "test_add.py::test_zero"."""
    submitted: tuple[str, ...] = ("*.py",)
    """Paths and patterns of the agent's files that cross to the judge."""
    runs: int = 1
    """More than one tell flaky tests from failing ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptChecks:
    """A script that leaves the rewards in a file, as Harbor's tests/test.sh does."""

    files: Mapping[str, bytes]
    """Below /tests, there only while the script runs."""
    script: str = "test.sh"
    """Of `files`; run by bash from the working directory. Its exit code says nothing."""
    variables: Mapping[str, str] = field(default_factory=dict)
    submitted: tuple[str, ...] | None = None
    """Absolute or relative paths, or patterns of them, that cross to a sandbox of its own, directories with all below
    them; None judges a copy of the whole working directory and of the task's other places, as the agent left them and
    without the agent's processes."""
    excluded: tuple[str, ...] = ()
    """Patterns of absolute paths that do not cross all the same."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Where `submitted` is given, what the judge's working directory holds before they are laid over it."""
    collect: tuple[str, ...] = ()
    """Shell commands that are run in the agent's sandbox before anything crosses; their exit codes say nothing."""
    provided: tuple[str, ...] = ()
    """Names of what the script may ask to have installed: stand-ins of the programs that install (`stand_ins`) come
    first on the path. Empty where nothing is installed, and nothing stands in."""
    limits: SandboxLimits | None = None
    """Of the judge's sandbox, where it is one of its own; None are the task's."""
    timeout_s: float = 600.0


Checks = CallChecks | PytestChecks | ScriptChecks


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What solves a step: files that are written over the task's, or a script that is run among them."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path in the working directory -> content; where `script` is given, below /solution instead."""
    script: str = ""
    """Of `files`; run by bash from the working directory."""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStep:
    """One thing that is asked for, and graded; most tasks have one."""

    instruction: str
    checks: Checks
    reference: Reference | None = None
    """None where the task brings no solution; it can then be trained on, and not be validated."""
    name: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written into the working directory as the step begins."""
    setup: str = ""
    """Shell text that is run before the agent's first turn of the step."""
    agent_timeout_s: float | None = None
    """Of the agent's work; the step is then graded as it stands. None leaves it to the environment's settings."""
    min_reward: Mapping[str, float] = field(default_factory=dict)
    """Reward's name -> the least that lets the next step begin; empty always does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """One task, whole. Paths are relative to the working directory."""

    task_id: str
    steps: tuple[TaskStep, ...]
    files: Mapping[str, bytes]
    """What the agent finds: path -> content. No tests that are hidden, no solution, no history."""
    executable: Collection[str] = ()
    repository: bool = False
    """Whether the agent finds a git repository, with one commit of these files. A history that the files bring is left
    out either way: it may hold the solution."""
    work: str = "/task"
    """Where the working directory appears inside."""
    places: tuple[str, ...] = ()
    """Further absolute paths that are empty and writable, such as /logs/agent."""
    image: str = ""
    """Of the container; empty runs on any backend."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of everything that runs in the agent's sandbox."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    allowed_paths: tuple[str, ...] = ("*",)
    """Patterns of what a solution may edit or add; edits elsewhere are counted, and not forbidden."""
    last_step_counts: bool = False
    """The task's reward is that of its last step; else the mean over all steps. One that was not reached counts 0."""
    origin: str = ""
    """Where it comes from: a template and its seed, a file, a directory."""
    notes: tuple[str, ...] = ()
    """What a person should know: what the task asks for and does not get, what of it was not understood."""


class TaskSet(Protocol):
    """Where coding tasks come from. What an id names is built anew each time, and always alike."""

    def training_ids(self, epoch: int) -> Sequence[str]:
        """Return the ids of an epoch (0, 1, ...), never none."""
        ...

    def held_out_ids(self) -> Sequence[str]:
        """Return the ids that are never trained on."""
        ...

    def all_ids(self) -> Sequence[str]:
        """Return every id that can be told beforehand, of both splits: what is listed and validated."""
        ...

    def task(self, task_id: str) -> CodingTask:
        """Return the task with that id. Raises: ConfigError where it cannot be built, saying why."""
        ...


@runtime_checkable
class BringsCodingTasks(Protocol):
    """What an environment of coding tasks has besides `Environment`: its tasks can be validated, audited and shown."""

    @property
    def task_set(self) -> TaskSet:
        """Return the tasks of all splits."""
        ...
