"""What a configuration asks of a Ray cluster, and which of it a cluster lacks. Knows no Ray."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.configs import Config
from asyncrl.errors import ConfigError
from asyncrl.ray_settings import RaySettings, RoleResources, Strategy

_SETTINGS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gib"}
_ROUNDING = 1e-6  # Ray counts in ten-thousandths


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one process takes of one node."""

    role: str
    """learner, engine, sandbox or environment: the table below [ray] that says how much."""
    index: int
    """Among those of its role."""
    amounts: Mapping[str, float]
    """Ray's name -> amount, all > 0."""

    @property
    def name(self) -> str:
        """In messages."""
        return f"{self.role} {self.index}"

    def describe(self) -> str:
        """Return what it takes, in words."""
        return ", ".join(f"{name} {_number(name, amount)}" for name, amount in self.amounts.items())


def bundles_of(config: Config) -> tuple[Bundle, ...]:
    """Return what a run of `config` takes on Ray, in the order of the placement group.

    Raises: ConfigError for settings that only make sense on one machine.
    """
    check_settings(config)
    ray = config.ray
    engines = config.engine.count if config.samples and not config.engine.urls else 0
    counts: tuple[tuple[str, int, RoleResources, int], ...] = (
        ("learner", config.learner.ranks, ray.learner, 1),
        ("engine", engines, ray.engine, workers_of(config)),
        ("sandbox", ray.sandboxes, ray.sandbox, 1),
        ("environment", ray.environments, ray.environment, 1),
    )
    return tuple(
        Bundle(role=role, index=index, amounts=asked.amounts(times))
        for role, count, asked, times in counts
        for index in range(count)
    )


def resolved(config: Config) -> Config:
    """Return the configuration as all nodes understand it: paths are absolute, and threads are as many as CPUs.

    Threads that are set stay.
    """
    learner, engine, ray = config.learner, config.engine, config.ray
    learner = replace(learner, threads=learner.threads or max(1, int(ray.learner.cpus)))
    engine = replace(engine, threads=engine.threads or max(1, int(ray.engine.cpus)))
    absolute: Config = _with_absolute_paths(replace(config, learner=learner, engine=engine))
    return absolute


def _with_absolute_paths(settings: Any) -> Any:
    changed = {}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if isinstance(value, Path) and value != Path(""):
            changed[one.name] = value.absolute()
        elif is_dataclass(value):
            changed[one.name] = _with_absolute_paths(value)
    return replace(settings, **changed)


def workers_of(config: Config) -> int:
    """Return how many workers one engine has, by vLLM's own settings."""
    given = {name.replace("-", "_"): value for name, value in config.engine.extra.items()}
    workers = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = given.get(name, 1)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} must be a whole number >= 1, got {size!r} ([engine.extra])")
        workers *= size
    return workers


def check_settings(config: Config) -> None:
    """Raise ConfigError for what cannot be meant where parts of a run may be on different nodes."""
    engine, roles = config.engine, config.roles
    if roles.learner or roles.engines or roles.environments or roles.sandboxes:
        raise ConfigError("[roles] that other hosts bring and --on ray exclude each other: Ray places every part")
    if config.weight_sync.transport == "shared_memory":
        raise ConfigError(
            "transport = 'shared_memory' ([weight_sync]) ends at the edge of a node, and on Ray engines may be on "
            "other nodes than the learner: take transport = 'filesystem' and a directory that all nodes see"
        )
    if config.learner.start == "by_hand":
        raise ConfigError("start = 'by_hand' ([learner]) and --on ray exclude each other: Ray starts the ranks")
    if engine.colocated:
        raise ConfigError("colocated = true ([engine]) shares one card, and Ray gives each process cards of its own")
    if engine.devices:
        raise ConfigError(f"devices must be empty on Ray, which gives them out, got {list(engine.devices)} ([engine])")
    if engine.port:
        raise ConfigError(f"port must be 0 on Ray, where each node has its own free ones, got {engine.port} ([engine])")
    if config.ray.sandboxes and config.sandbox.backend == "remote":
        raise ConfigError(
            f"sandboxes = {config.ray.sandboxes} ([ray]) are servers, and backend = 'remote' ([sandbox]) names others: "
            "set one of the two; [sandbox] is what the servers open"
        )


def check_cluster(
    bundles: Sequence[Bundle], settings: RaySettings, nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> None:
    """Raise ConfigError naming every resource that is short: who asks for how much, and how much there is.

    `nodes` are the living nodes' resources, `free` what nobody has taken of all of them.
    """
    asked = _sum([bundle.amounts for bundle in bundles])
    has = _sum(nodes)
    short = []
    for name, amount in asked.items():
        whole, unused = has.get(name, 0.0), min(free.get(name, 0.0), has.get(name, 0.0))
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        too_large = [b.name for b in bundles if b.amounts.get(name, 0.0) > largest + _ROUNDING]
        if amount > unused + _ROUNDING:
            there = f"{_number(name, whole)} on {len(nodes)} nodes" + f", {_number(name, unused)} of it free" * (
                whole > 0
            )
            short.append(f"{name}: {_number(name, amount)} asked for by {_askers(bundles, name)}, there is {there}")
        elif too_large:
            short.append(f"{name}: no node has what {', '.join(too_large)} needs, the largest {_number(name, largest)}")
    short = short or _strict(bundles, settings.strategy, nodes)
    if short:
        raise ConfigError(
            f"the Ray cluster {settings.address!r} has not what is asked for ([ray]): " + "; ".join(short)
        )


def _strict(bundles: Sequence[Bundle], strategy: Strategy, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    if strategy is Strategy.STRICT_SPREAD and len(bundles) > len(nodes):
        return [f"nodes: {len(bundles)} asked for by strategy = 'STRICT_SPREAD', one for each process, of {len(nodes)}"]
    asked = _sum([bundle.amounts for bundle in bundles])

    def fits(node: Mapping[str, float]) -> bool:
        return all(node.get(name, 0.0) + _ROUNDING >= amount for name, amount in asked.items())

    if strategy is Strategy.STRICT_PACK and not any(map(fits, nodes)):
        words = ", ".join(f"{name} {_number(name, amount)}" for name, amount in asked.items())
        return [f"a node with {words}: strategy = 'STRICT_PACK' puts everything on one"]
    return []


def _askers(bundles: Sequence[Bundle], resource: str) -> str:
    groups: dict[tuple[str, float], int] = defaultdict(int)
    for bundle in bundles:
        if resource in bundle.amounts:
            groups[bundle.role, bundle.amounts[resource]] += 1
    return " and ".join(
        f"{count} {role}{'s' * (count > 1)} ({_number(resource, amount)} each, "
        f"{_SETTINGS.get(resource, 'resources')} in [ray.{role}])"
        for (role, amount), count in groups.items()
    )


def _sum(amounts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for one in amounts:
        for name, amount in one.items():
            total[name] += amount
    return dict(total)


def _number(resource: str, amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB" if resource == "memory" else f"{round(amount, 4):g}"
