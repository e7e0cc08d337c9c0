"""What a user may set about Ray, where `asyncrl train CONFIG --on ray` places a run. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.errors import ConfigError


class Strategy(StrEnum):
    """How Ray's placement group lays bundles on nodes; the names are Ray's."""

    PACK = "PACK"
    """On as few nodes as can be."""
    SPREAD = "SPREAD"
    """On as many nodes as can be."""
    STRICT_PACK = "STRICT_PACK"
    """On one node, or not at all."""
    STRICT_SPREAD = "STRICT_SPREAD"
    """Each on a node of its own, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleResources:
    """What one process of a role is given, by Ray's names. A GPU that it is given is the only one that it sees."""

    cpus: float = 1.0
    """A learner rank and an engine compute with as many threads, unless their own `threads` says otherwise."""
    gpus: float = 0.0
    memory_gib: float = 0.0
    """Ray keeps account of it and limits nothing; 0 leaves it out."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Names that nodes were started with (`ray start --resources`), as in {engines = 1}."""

    def amounts(self, times: int = 1) -> dict[str, float]:
        """Return Ray's name -> amount of so many of them, without what is zero; memory in bytes."""
        whole = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_gib * 2**30, **self.resources}
        return {name: amount * times for name, amount in whole.items() if amount > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Where a run is placed that is started with --on ray."""

    address: str = "auto"
    """"auto" is the cluster of this machine (or RAY_ADDRESS), "local" one of this run's own that ends with it, else
    "HOST:PORT" of a cluster, or "ray://HOST:PORT" through Ray's client."""
    namespace: str = "asyncrl"
    strategy: Strategy = Strategy.PACK
    sandboxes: int = 0
    """Servers of sandboxes; 0 leaves the sandboxes to the orchestrator, on its own machine."""
    environments: int = 0
    """Workers that play the environment, each with sandboxes on its own node; 0 leaves it to the orchestrator."""
    restarts: int = 3
    """How often a sandbox server or an environment worker may be lost; then the run ends. Of engines [engine] says it,
    and a rank of the learner that is lost ends the run."""
    start_timeout_s: float = 120.0
    """For all places to be had, and for a server on one of them to listen."""
    logs: bool = True
    """Whether Ray shows here what the processes write, as it also keeps it beside its own logs."""
    learner: RoleResources = field(default_factory=RoleResources)
    """Of each rank."""
    engine: RoleResources = field(default_factory=RoleResources)
    """Of each worker of an engine: one with tensor_parallel_size = 2 ([engine.extra]) takes twice that, on one node."""
    sandbox: RoleResources = field(default_factory=RoleResources)
    """Of each server of sandboxes."""
    environment: RoleResources = field(default_factory=RoleResources)
    """Of each environment worker."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for name, count in (
            ("sandboxes", self.sandboxes),
            ("environments", self.environments),
            ("restarts", self.restarts),
        ):
            if not 0 <= count <= 4096:
                raise ConfigError(f"{name} must be from 0 to 4096, got {count} ([ray])")
        if not 0 < self.start_timeout_s < float("inf"):
            raise ConfigError(f"start_timeout_s must be > 0 and finite seconds, got {self.start_timeout_s} ([ray])")
        if not self.address:
            raise ConfigError('address must be "auto", "local", "HOST:PORT" or "ray://HOST:PORT", got \'\' ([ray])')
        if self.sandboxes and self.environments:
            raise ConfigError(
                f"sandboxes must be 0 where environments = {self.environments}, got {self.sandboxes} ([ray]): each "
                "environment worker opens sandboxes on its own node"
            )
        for role in ("learner", "engine", "sandbox", "environment"):
            _check(getattr(self, role), role)


def _check(asked: RoleResources, role: str) -> None:
    named = {"cpus": asked.cpus, "gpus": asked.gpus, "memory_gib": asked.memory_gib}
    named |= {f"resources.{name}": amount for name, amount in asked.resources.items()}
    for name, amount in named.items():
        if not 0 <= amount < float("inf"):
            raise ConfigError(f"{name} must be >= 0 and finite, got {amount} ([ray.{role}])")
        if amount > 1 and amount != int(amount) and name != "memory_gib":
            raise ConfigError(f"{name} must be whole where it is above 1, as Ray counts, got {amount} ([ray.{role}])")
    for name in {"CPU", "GPU", "memory"} & {*asked.resources}:
        raise ConfigError(f"resources may not name {name} ([ray.{role}]): set cpus, gpus or memory_gib")
    if not asked.amounts():
        raise ConfigError(f"something must be asked for: Ray places nothing that takes nothing ([ray.{role}])")
