"""task.toml of a Harbor task: its fields and their defaults.

Source: Harbor 0.26, schema 1.4 (Apache-2.0), as documented at harborframework.com; field names are the format's own.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.errors import ConfigError

_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthcheckTable:
    """A command that succeeds once an environment is ready."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTable:
    """Where the agent, or a separate verifier, works."""

    build_timeout_sec: float = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] = field(default_factory=list)
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    skills_dir: str = ""
    healthcheck: HealthcheckTable | None = None
    workdir: str = ""
    network_mode: str = ""
    """Empty is the format's default, which is "public"."""
    allowed_hosts: list[str] = field(default_factory=list)
    allow_internet: bool | None = None
    memory: str = ""
    storage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTable:
    """Limits of the agent."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str = ""
    allowed_hosts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectTable:
    """A command that writes down what a separate verifier wants to see."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierTable:
    """How a step is judged."""

    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    environment_mode: str = ""
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = field(default_factory=list)
    network_mode: str = ""
    allowed_hosts: list[str] = field(default_factory=list)

    @property
    def mode(self) -> str:
        """Return "shared", "separate", or nothing where it is not said at this level."""
        return self.environment_mode or ("separate" if self.environment is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactTable:
    """Files that a separate verifier sees, at the place where they lay."""

    source: str
    destination: str = ""
    """Where Harbor keeps them on its host; says nothing of the verifier."""
    exclude: list[str] = field(default_factory=list)
    service: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """One of several steps."""

    name: str
    agent: AgentTable = field(default_factory=AgentTable)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: list[str | ArtifactTable] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionTable:
    """The reference's surroundings."""

    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageTable:
    """What a registry says of the task."""

    name: str = ""
    version: str = ""
    description: str = ""
    authors: list[dict[str, Any]] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskToml:
    """The whole file."""

    schema_version: str = "1.4"
    version: str = ""
    """The older key of the same."""
    source: str = ""
    task: PackageTable | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    agent: AgentTable = field(default_factory=AgentTable)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    environment: EnvironmentTable = field(default_factory=EnvironmentTable)
    solution: SolutionTable = field(default_factory=SolutionTable)
    artifacts: list[str | ArtifactTable] = field(default_factory=list)
    multi_step_reward_strategy: str = "mean"
    steps: list[StepTable] = field(default_factory=list)


def read_task_toml(text: str, *, task_id: str) -> tuple[TaskToml, list[str]]:
    """Return the file's content, and the names of the fields that the format does not have.

    Raises: ConfigError naming the task and the field.
    """
    try:
        table = tomllib.loads(text)
        found = msgspec.convert(table, TaskToml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{task_id}: task.toml is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{task_id}: task.toml: {error}") from None
    for where, number in _numbers(table, ""):
        if not math.isfinite(number):
            raise ConfigError(f"{task_id}: task.toml: {where} must be finite, got {number}")
    _require_one_of(task_id, "multi_step_reward_strategy", found.multi_step_reward_strategy, ("mean", "final"))
    _require_one_of(task_id, "environment.os", found.environment.os.lower(), ("linux", "windows"))
    for verifier in (found.verifier, *(step.verifier for step in found.steps)):
        _require_one_of(task_id, "verifier.environment_mode", verifier.environment_mode, ("", "shared", "separate"))
        if verifier.environment_mode == "shared" and verifier.environment is not None:
            raise ConfigError(
                f"{task_id}: task.toml: environment_mode = 'shared' with a [verifier.environment]: drop one of them"
            )
    names = [step.name for step in found.steps]
    if len({name.casefold() for name in names}) < len(names):
        raise ConfigError(f"{task_id}: task.toml: the names of [[steps]] must differ, got {', '.join(names)}")
    return found, sorted(_unknown(table, TaskToml, ""))


def megabytes(size: str, *, task_id: str) -> int:
    """Return the older form of a size, such as "2G", in MiB. Raises: ConfigError."""
    number, unit = size.strip()[:-1], size.strip()[-1:].upper()
    try:
        return int(float(number) * _SIZES[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{task_id}: task.toml: a size must be like '2G' or '512M', got {size!r}") from None


def resolved(
    values: Mapping[str, str], *, task_id: str, host: Mapping[str, str], allowed: typing.Collection[str]
) -> dict[str, str]:
    """Return variables, those that are `${NAME}` or `${NAME:-default}` taken from `host` where `allowed` names them.

    Raises: ConfigError for a name without a default that is not allowed or not set.
    """

    def fill(value: str) -> str:
        found = _VARIABLE.fullmatch(value)
        if found is None:
            return value
        name, default = found[1], found[2]
        if name in allowed and name in host:
            return host[name]
        if default is not None:
            return str(default)
        why = "is not set" if name in allowed else "may not be read"
        raise ConfigError(
            f"{task_id}: it wants ${{{name}}} of this machine, which {why}: set it, and name it in host_variables"
        )

    return {name: fill(value) for name, value in values.items()}


def _require_one_of(task_id: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{task_id}: task.toml: {name} must be one of {', '.join(filter(None, allowed))}, got {value!r}"
        )


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _numbers(below, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for below in value:
            yield from _numbers(below, where)


def _unknown(value: Any, kind: Any, where: str) -> Iterator[str]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union, list):
        for one in typing.get_args(kind):
            if dataclasses.is_dataclass(one) or typing.get_origin(one) in (types.UnionType, typing.Union):
                for below in value if isinstance(value, list) else [value]:
                    yield from _unknown(below, one, where)
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        for key, below in value.items():
            name = f"{where}.{key}".lstrip(".")
            if key not in hints:
                yield name
            else:
                yield from _unknown(below, hints[key], name)
