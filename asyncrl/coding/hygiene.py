"""Proves of one coding task that it can be trained on: it can fail, it can be solved, and it gives nothing away.

A task is looked at in its opened sandbox, as the agent finds it, and graded by the same judge as the agent's work.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum

import trio

from asyncrl.boundary import boundary
from asyncrl.coding.exposure import exposed
from asyncrl.coding.grading import Grader
from asyncrl.coding.keys import known_secrets, secrets_in
from asyncrl.coding.places import (
    HISTORIES,
    apply_reference,
    begin_step,
    is_history,
    open_place,
    prepare_files,
    with_variables,
)
from asyncrl.coding.tasks import CodingTask, TaskStep
from asyncrl.coding.verdicts import Verdict
from asyncrl.errors import SandboxError, UnsafeFilesError
from asyncrl.protocols import FileEntry, FileKind, Outcome, Sandbox, SandboxBackend
from asyncrl.types import TrajectoryStatus

REFERENCE_RUNS = 3  # a reference that passes only sometimes is a flaky task
RULES = 1
"""Raised when a change here, or in what this calls, judges tasks differently: older verdicts are then void."""

_MAX_ENTRIES = 20_000  # files of a task that are looked at
_MAX_FILE_BYTES = 2 * 2**20
_MAX_BYTES = 64 * 2**20
_NOT_FOR_AGENTS = ("/tests", "/solution", "/oracle", "/logs/verifier")
_LOOPBACK = "lo"

# What the agent's own commands would see, divided by a line of ours.
_PROBE = """
tail -n +3 /proc/net/dev; echo "$1"
readlink /proc/self/ns/net; echo "$1"
for place in {places}; do test -e "$place" && echo "$place"; done; echo "$1"
cat /proc/self/environ
""".format(places=" ".join(_NOT_FOR_AGENTS))
_ONE_COMMIT = "git rev-list --all --reflog --count && git fsck --unreachable --no-progress | wc -l"


class Fault(StrEnum):
    """What kind of thing is wrong with a task."""

    UNFIXED_PASSES = "unfixed_passes"
    REFERENCE_FAILS = "reference_fails"
    FLAKY = "flaky"
    """The reference passes in some runs and not in others."""
    HISTORY = "history"
    """Version control shows what was there before."""
    SECRET = "secret"
    EXPOSED = "exposed"
    """Hidden checks, or the reference, can be read by the agent."""
    NETWORK = "network"
    BROKEN = "broken"
    """It cannot be set up or judged."""
    UNCHECKED = "unchecked"
    """The sandboxes failed, so nothing is known; looked at anew the next time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason not to train on a task."""

    fault: Fault
    detail: str
    step: str = ""
    """Its name or number, where the task has several."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.detail}" if self.step else self.detail


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """What was found out about one task."""

    task_id: str
    held_out: bool
    problems: tuple[Problem, ...]
    """Why the task must not be trained on; empty for a good one."""
    unproven: tuple[str, ...] = ()
    """Steps without a reference, and those after them: whether they can be solved, nobody knows."""
    digest: str = ""
    """Of the task's content; a verdict says nothing of another."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """True where nothing speaks against the task."""
        return not self.problems


async def examine(
    task: CodingTask,
    backend: SandboxBackend,
    grader: Grader,
    *,
    held_out: bool = False,
    variables: Mapping[str, str] = os.environ,
) -> TaskVerdict:
    """Return a verdict on a task: all that is wrong with it, and not the first thing alone.

    Args: `variables` are those of this machine, whose values the agent must not find.
    """
    started = trio.current_time()
    problems: list[Problem] = []
    unproven: list[str] = []
    async with boundary() as caught:
        await _Examination(task, backend, grader, known_secrets(variables), problems, unproven).run()
    if caught.status is not None:
        failed = caught.status is TrajectoryStatus.FAILED_SANDBOX
        fault = Fault.UNCHECKED if failed else Fault.BROKEN
        problems.append(Problem(fault=fault, detail=f"could not be checked: {caught.detail}"))
    return TaskVerdict(
        task_id=task.task_id,
        held_out=held_out,
        problems=tuple(dict.fromkeys(problems)),
        unproven=tuple(unproven),
        digest=digest(task),
        seconds=trio.current_time() - started,
    )


@dataclass(frozen=True, slots=True)
class _Examination:
    task: CodingTask
    backend: SandboxBackend
    grader: Grader
    secrets: Mapping[bytes, str]
    problems: list[Problem]
    unproven: list[str]

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            files = await stack.enter_async_context(await prepare_files(self.backend, self.task))
            place = await stack.enter_async_context(await open_place(self.backend, self.task, files))
            for number, step in enumerate(self.task.steps):
                name = (step.name or str(number + 1)) if len(self.task.steps) > 1 else ""
                await begin_step(place, self.task, step)
                await self._look(place, step, name)
                before = await self.grader.grade(self.task, step, place)
                if before.solved:
                    self._note(Fault.UNFIXED_PASSES, "the unfixed code passes", name)
                if step.reference is None:
                    self.unproven.extend(one.name or str(n + 1) for n, one in enumerate(self.task.steps) if n >= number)
                    return
                await self._prove(place, step, name)
                if number + 1 < len(self.task.steps):
                    solved = await apply_reference(self.backend, self.task, step.reference, place)
                    place = await stack.enter_async_context(solved)

    def _note(self, fault: Fault, detail: str, step: str) -> None:
        printable = detail.encode(errors="backslashreplace").decode()  # names of files may be no text
        self.problems.append(Problem(fault=fault, detail=printable, step=step))

    async def _prove(self, place: Sandbox, step: TaskStep, name: str) -> None:
        """Solve the step several times, from the same beginning."""
        assert step.reference is not None
        verdicts: list[Verdict] = []
        for _ in range(REFERENCE_RUNS):
            fork = await place.fork()
            async with await apply_reference(self.backend, self.task, step.reference, fork) as solved:
                verdicts.append(await self.grader.grade(self.task, step, solved))
        passed = sum(verdict.solved for verdict in verdicts)
        flaky = sorted({check for verdict in verdicts for check in verdict.flaky})
        if passed < REFERENCE_RUNS:
            fault = Fault.FLAKY if passed or flaky else Fault.REFERENCE_FAILS
            self._note(fault, f"the reference passes {passed} of {REFERENCE_RUNS} times", name)
        if flaky:
            self._note(Fault.FLAKY, f"checks that pass in some runs and not in others: {', '.join(flaky)}", name)

    async def _look(self, place: Sandbox, step: TaskStep, name: str) -> None:
        """Look at what the agent finds as the step begins."""
        try:
            entries = await place.walk(max_entries=_MAX_ENTRIES)
        except UnsafeFilesError as error:
            self._note(Fault.BROKEN, f"its files cannot be looked through: {error}", name)
            return
        files = await self._read(place, entries, name)
        for detail in exposed(step, files):
            self._note(Fault.EXPOSED, detail, name)
        for where, text in [*files.items(), ("the instruction", step.instruction.encode())]:
            for what in secrets_in(text, self.secrets):
                self._note(Fault.SECRET, f"{where} holds {what}", name)
        await self._look_for_history(place, {entry.path for entry in entries}, name)
        await self._look_around(place, name)

    async def _read(self, place: Sandbox, entries: Sequence[FileEntry], name: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        size = 0
        for entry in entries:
            if entry.kind is not FileKind.FILE or is_history(entry.path):
                continue
            size += entry.num_bytes
            if entry.num_bytes > _MAX_FILE_BYTES or size > _MAX_BYTES:
                self._note(Fault.BROKEN, f"{entry.path!r} and what follows it is too large to be looked through", name)
                break
            try:
                files[entry.path] = await place.read(entry.path, max_bytes=_MAX_FILE_BYTES)
            except (UnsafeFilesError, OSError) as error:
                self._note(Fault.BROKEN, f"{entry.path!r} cannot be looked at: {error}", name)
        return files

    async def _look_for_history(self, place: Sandbox, paths: Collection[str], name: str) -> None:
        kept = {".git"} if self.task.repository else set()
        for path in sorted({path for path in paths if path.rpartition("/")[2] in HISTORIES} - kept):
            self._note(Fault.HISTORY, f"{path!r} holds a history", name)
        for path in sorted(path for path in paths if path.rpartition("/")[2] == "objects" and not is_history(path)):
            beside = path.removesuffix("objects")
            if {f"{beside}HEAD", f"{beside}refs"} <= set(paths):
                self._note(Fault.HISTORY, f"{beside or '.'!r} is a git repository of another name", name)
        if self.task.repository:
            result = await place.exec(["sh", "-c", _ONE_COMMIT])
            if result.stdout.split() != [b"1", b"0"]:
                told = " ".join((result.stdout + result.stderr).decode(errors="replace").split())
                self._note(Fault.HISTORY, f"the repository has more than its one commit: {told[:200]}", name)

    async def _look_around(self, place: Sandbox, name: str) -> None:
        mark = secrets.token_hex(16)
        result = await place.exec(with_variables(["sh", "-c", _PROBE, "sh", mark], self.task.variables))
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise SandboxError(result.detail)
        parts = result.stdout.split(mark.encode() + b"\n")
        if len(parts) != 4 or not parts[0].strip():
            told = (result.stdout + result.stderr).decode(errors="replace").strip()[-200:]
            self._note(Fault.BROKEN, f"a plain shell command does not run: {result.outcome}, {told}", name)
            return
        devices = {line.partition(":")[0].strip() for line in parts[0].decode(errors="replace").splitlines()}
        if devices - {_LOOPBACK}:
            self._note(Fault.NETWORK, f"there are network devices: {', '.join(sorted(devices - {_LOOPBACK}))}", name)
        elif parts[1].decode().strip() == os.readlink("/proc/self/ns/net"):
            self._note(Fault.NETWORK, "the network is this machine's own", name)
        for path in parts[2].decode(errors="replace").split():
            if path not in self.task.places:
                self._note(Fault.EXPOSED, f"{path} is there before the judge brings it", name)
        for what in secrets_in(parts[3], self.secrets):
            self._note(Fault.SECRET, f"the environment variables hold {what}", name)


def digest(task: CodingTask) -> str:
    """Return a digest of all that a task is, and of the rules that it is judged by here."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in _parts(task):
        hashed.update(b"%d:" % len(part) + part)
    return f"{RULES}-{hashed.hexdigest()}"


def _parts(value: object) -> Iterator[bytes]:
    """Yield what tells a value from others, the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        for one in fields(value):
            yield from _parts(getattr(value, one.name))
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping):
        yield b"{%d" % len(value)
        for key in sorted(value, key=repr):
            yield from _parts(key)
            yield from _parts(value[key])
    elif isinstance(value, set | frozenset):
        yield b"set %d" % len(value)
        yield from sorted(b"".join(_parts(one)) for one in value)
    elif isinstance(value, tuple | list):
        yield b"%s %d" % (type(value).__name__.encode(), len(value))
        for one in value:
            yield from _parts(one)
    else:
        yield f"{type(value).__name__} {value!r}".encode()
