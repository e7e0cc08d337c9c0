"""A coding task's place: its sandbox opened, its steps begun, its reference applied."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncrl.coding.tasks import CodingTask, Reference, TaskStep
from asyncrl.errors import EnvironmentFault, SandboxError, UnsafeFilesError
from asyncrl.protocols import ExecResult, Outcome, Sandbox, SandboxBackend, Snapshot

_SOLUTION = "/solution"

HISTORIES = frozenset({".git", ".hg", ".svn", ".bzr", "CVS"})
"""Names of the files and directories in which version control keeps what was there before."""

_COMMIT = """set -e
git init --quiet --initial-branch=main .
git add --all --force .
git -c user.name=task -c user.email=task@localhost commit --quiet --allow-empty --message "The task's files"
"""  # in the sandbox: on the host, git would run what a task's files say
_ASIDE = "/task-files"
_COPY = """if [ -d {0} ]; then cp -a -n {0}/. .; fi
find . \\( {1} \\) -prune -exec rm -rf {{}} +"""
_NO_CONFIGURATION = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TEMPLATE_DIR": ""}


async def prepare_files(backend: SandboxBackend, task: CodingTask) -> Snapshot:
    """Return the task's files as `open_place` takes them for many sandboxes: without any history they came with.

    Raises: SandboxError, EnvironmentFault where a repository is wanted and the sandbox has no git.
    """
    files = {path: data for path, data in task.files.items() if not is_history(path)}
    prepared = await backend.prepare(files, executable=[path for path in task.executable if path in files])
    if task.image:
        prepared = await _over_image(backend, task, prepared)
    if not task.repository:
        return prepared
    async with prepared, await open_place(backend, task, prepared) as sandbox:
        result = await sandbox.exec(with_variables(["sh", "-c", _COMMIT], _NO_CONFIGURATION))
        _require_success(result, f"{task.task_id}: making a git repository")
        return await sandbox.snapshot()


async def _over_image(backend: SandboxBackend, task: CodingTask, files: Snapshot) -> Snapshot:
    """Return the task's files over those that its image has in the working directory, which else these would hide."""
    histories = " -o ".join(f"-name {name}" for name in sorted(HISTORIES))
    async with files, await backend.open(files, limits=task.limits, work=_ASIDE, image=task.image) as sandbox:
        result = await sandbox.exec(["sh", "-c", _COPY.format(shlex.quote(task.work), histories)])
        _require_success(result, f"{task.task_id}: copying {task.work} out of the image {task.image}")
        return await sandbox.snapshot()


def is_history(path: str) -> bool:
    """Return whether a relative path lies in what version control keeps."""
    return not HISTORIES.isdisjoint(path.split("/"))


async def open_place(backend: SandboxBackend, task: CodingTask, files: Snapshot | None = None) -> Sandbox:
    """Return a new sandbox that holds the task's files; `files` are those, from `prepare_files`, for many sandboxes.

    Raises: SandboxError, EnvironmentFault as `prepare_files` does.
    """
    if files is not None:
        places = dict.fromkeys(task.places)
        return await backend.open(files, limits=task.limits, work=task.work, places=places, image=task.image)
    async with await prepare_files(backend, task) as prepared:
        return await open_place(backend, task, prepared)


class NoRoomFault(EnvironmentFault):
    """A step cannot begin: something stands in the place of its files, the disk is full, or its set-up fails there.

    Before an agent's first turn that is the task's fault; later it is the agent's doing.
    """


async def begin_step(sandbox: Sandbox, task: CodingTask, step: TaskStep) -> None:
    """Write a step's files and run its set-up.

    Raises: SandboxError, NoRoomFault.
    """
    for path, data in step.files.items():
        try:
            await sandbox.write(path, data)
        except (OSError, UnsafeFilesError) as error:
            raise NoRoomFault(f"{task.task_id}: {path!r} of step {step.name!r} cannot be written: {error}") from error
    if step.setup:
        result = await sandbox.exec(with_variables(["bash", "-c", step.setup], task.variables))
        _require_success(result, f"{task.task_id}: the set-up of step {step.name!r}", NoRoomFault)


async def apply_reference(backend: SandboxBackend, task: CodingTask, reference: Reference, sandbox: Sandbox) -> Sandbox:
    """Return the sandbox in which the reference was applied; it replaces the one given, which it may have closed.

    Raises: SandboxError, EnvironmentFault where the reference's script was ended by a limit.
    """
    if not reference.script:
        for path, data in reference.files.items():
            await sandbox.write(path, data)
        return sandbox
    async with (
        sandbox,
        await sandbox.snapshot() as files,
        await backend.prepare(reference.files, executable=list(reference.files)) as solution,
    ):
        places = {**dict.fromkeys(task.places), _SOLUTION: solution}
        room = replace(task.limits, disk_bytes=task.limits.disk_bytes + files.num_bytes)  # beside what is there already
        solved = await backend.open(files, limits=room, work=task.work, places=places, image=task.image)
    script = ["bash", f"{_SOLUTION}/{reference.script}"]
    result = await solved.exec(with_variables(script, {**task.variables, **reference.variables}))
    if result.outcome is not Outcome.OK:
        await solved.aclose()
        _require_success(result, f"{task.task_id}: the reference's script")
    return solved


def with_variables(argv: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return a command that runs `argv` with environment variables besides the sandbox's own."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *argv] if variables else list(argv)


def exported(variables: Mapping[str, str]) -> str:
    """Return shell text that sets environment variables; empty for none."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _require_success(result: ExecResult, what: str, kind: type[EnvironmentFault] = EnvironmentFault) -> None:
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise SandboxError(f"{what}: {result.detail}")
    if result.outcome is not Outcome.OK or result.exit_code != 0:
        said = (result.stdout + result.stderr).decode(errors="replace").strip()[-200:]
        raise kind(f"{what} failed: {result.outcome}, exit code {result.exit_code}; {said}")
