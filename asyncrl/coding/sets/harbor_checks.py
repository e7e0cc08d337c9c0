"""How a Harbor task's steps are judged: by a script, in a copy of the agent's sandbox or in one of its own."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence

from asyncrl.coding.places import exported
from asyncrl.coding.sets.dockerfile import NeedsImageError
from asyncrl.coding.sets.harbor_config import (
    AgentTable,
    ArtifactTable,
    EnvironmentTable,
    StepTable,
    TaskToml,
    VerifierTable,
)
from asyncrl.coding.sets.harbor_settings import HarborSettings
from asyncrl.coding.sets.harbor_source import HarborSource, below, limits_of, surroundings
from asyncrl.coding.tasks import ScriptChecks
from asyncrl.errors import ConfigError
from asyncrl.protocols import SandboxLimits

_INSTALLS = re.compile(
    r"\b(apt|apt-get|apk|yum|dnf|brew)\b[^\n;&|]*\b(install|add|update)\b"
    r"|\bpip3?\s+(\S+\s+)*?install\b|\b(uv|uvx|curl|wget|conda)\b|\b(npm|pnpm|yarn|cargo|go|gem)\s+(install|ci|i|add|get)\b"
    r"|\bgit\s+clone\b"
)
_STANDS_IN = ("apt", "apt-get", "pip", "pip3", "uv", "uvx", "curl", "wget")
_SCRIPT_OUTPUT_BYTES = 16 * 2**20  # Harbor sends it to a file; what is beyond this comes of a loop


def checks(
    source: HarborSource, config: TaskToml, step: StepTable, folder: str, work: str, files: Mapping[str, bytes]
) -> ScriptChecks:
    verifier = step.verifier if step.name else config.verifier
    tests = {**source.tree("tests").files, **(source.tree(f"{folder}tests").files if folder else {})}
    variables = {**source.resolved(config.verifier.env), **source.resolved(step.verifier.env)}
    mode = step.verifier.mode or config.verifier.mode or "shared"
    timeout_s = source.settings.verifier_timeout_s(verifier.timeout_sec)
    if mode == "shared":
        require_tests(source.task_id, tests, source.settings)
        return ScriptChecks(
            files=tests,
            variables=variables,
            timeout_s=timeout_s,
            limits=_script_limits(source, config.environment, config.agent),
            provided=source.settings.tests_provided,
        )
    environment = step.verifier.environment or config.verifier.environment or config.environment
    beside, own = _judge_files(source, step, config, folder, work, tests)
    tests = {**tests, **own}
    require_tests(source.task_id, tests, source.settings)
    artifacts = _artifacts(source, [*config.artifacts, *step.artifacts])
    return ScriptChecks(
        files=tests,
        variables={**source.resolved(environment.env), **variables},
        submitted=tuple(artifact.source for artifact in artifacts),
        excluded=tuple(
            f"{posixpath.join(work, artifact.source).rstrip('/')}/{part}{pattern}"
            for artifact in artifacts
            for pattern in artifact.exclude
            for part in ("", "*/")
        ),
        beside=files if beside is None else beside,
        collect=tuple(_hooks(source, config.verifier, step.verifier)),
        limits=_script_limits(source, environment, config.agent),
        timeout_s=timeout_s,
        provided=source.settings.tests_provided,
    )


def _judge_files(
    source: HarborSource, step: StepTable, config: TaskToml, folder: str, work: str, tests: Mapping[str, bytes]
) -> tuple[dict[str, bytes] | None, dict[str, bytes]]:
    """Return what a separate verifier's working directory and /tests hold by its own Dockerfile; None by the task's."""
    for verifier, place in ((step.verifier, f"{folder}tests"), (config.verifier, "tests")):
        environment = verifier.environment
        if environment is not None and environment.docker_image:
            raise NeedsImageError(
                f"{source.task_id}: its verifier needs an image of its own, {environment.docker_image}"
            )
        if "Dockerfile" in tests and source.has(f"{place}/Dockerfile"):
            recipe, _ = surroundings(source, EnvironmentTable(), place)
            own = {
                path.removeprefix("/tests/"): data for path, data in recipe.files.items() if path.startswith("/tests/")
            }
            recipe.files = {path: data for path, data in recipe.files.items() if not path.startswith("/tests/")}
            return below(source, recipe, work)[0], own
    return None, {}


def require_tests(task_id: str, tests: Mapping[str, bytes], settings: HarborSettings) -> None:
    """Raise ConfigError where there is nothing to judge by, or where the tests install what nobody says is here."""
    if "test.sh" not in tests:
        raise ConfigError(f"{task_id}: it has no tests: write tests/test.sh, which leaves /logs/verifier/reward.txt")
    found = installs(tests)
    others = [line for line, program in found if program not in _STANDS_IN]
    if others:
        raise NeedsImageError(
            f"{task_id}: its tests install things ({others[0]}), and nothing is reached from a sandbox"
        )
    if found and not settings.tests_provided:
        raise NeedsImageError(
            f"{task_id}: its tests install things ({found[0][0]}), and nothing is reached from a sandbox: name in "
            "tests_provided what is here (such as curl, uv, pytest), or leave it out (skip_refused = true)"
        )


def installs(tests: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return each line of the test scripts that installs or fetches something, with the program that it calls."""
    found = []
    for path, data in tests.items():
        if not path.endswith(".sh"):
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
            match = None if line.lstrip().startswith("#") else _INSTALLS.search(line)
            if match is not None and not re.search(r"localhost|127\.0\.0\.1", line):
                found.append((f"{path} line {number}: {line.strip()[:80]}", match[0].split()[0]))
    return found


def _artifacts(source: HarborSource, entries: Sequence[str | ArtifactTable]) -> list[ArtifactTable]:
    artifacts = [ArtifactTable(source=entry) if isinstance(entry, str) else entry for entry in entries]
    for artifact in artifacts:
        if ".." in artifact.source.split("/"):
            raise ConfigError(f"{source.task_id}: an artifact's source must be without '..', got {artifact.source!r}")
        if artifact.service != "main":
            raise NeedsImageError(f"{source.task_id}: an artifact comes from the service {artifact.service!r}")
    return [ArtifactTable(source="/logs/artifacts"), *artifacts]


def _hooks(source: HarborSource, *verifiers: VerifierTable) -> list[str]:
    hooks = [hook for verifier in verifiers for hook in verifier.collect]
    for hook in hooks:
        if hook.service != "main":
            raise NeedsImageError(f"{source.task_id}: a collect command runs in the service {hook.service!r}")
    return [f'{exported({"HOOK": hook.command})}timeout {hook.timeout_sec:g} bash -c "$HOOK"' for hook in hooks]


def _script_limits(source: HarborSource, environment: EnvironmentTable, agent: AgentTable) -> SandboxLimits:
    limits = limits_of(source, environment, agent)
    timeout_s = source.settings.max_verifier_timeout_s
    return SandboxLimits(
        memory_bytes=limits.memory_bytes, disk_bytes=limits.disk_bytes, max_pids=limits.max_pids,
        max_files=limits.max_files, cpu_s=timeout_s, output_bytes=_SCRIPT_OUTPUT_BYTES,
    )  # fmt: skip
