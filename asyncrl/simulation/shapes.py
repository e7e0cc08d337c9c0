"""What a cluster is made of, as a TOML file says it: one section a part, in which every number is an assumption.

Names are those of `SimulationRates` and of a run's configuration where they mean the same.
"""

from __future__ import annotations

import ast
import inspect
import math
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from asyncrl.buffers import BufferSettings
from asyncrl.configs.loader import apply_overrides, build, read_toml
from asyncrl.errors import ConfigError


class _Section:
    """Refuses what no cluster can have, by the setting's name."""

    _section = ""
    _positive: tuple[str, ...] = ()
    """Fields that may not be 0; the others may."""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):  # type: ignore[arg-type]
            value, positive = getattr(self, name), name in self._positive
            if isinstance(value, str):
                continue
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise ConfigError(f"{name} must be {'> 0' if positive else '>= 0'}, got {value} ([{self._section}])")
            if name.endswith("_share") and value > 1:
                raise ConfigError(f"{name} must be at most 1, got {value} ([{self._section}])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(_Section):
    """The model that is trained."""

    _section = "model"
    _positive = ("parameters", "bytes_per_parameter")

    parameters: float
    """All of them: what is sent to the engines."""
    active_parameters: float = 0.0
    """That one token passes, in a mixture of experts; 0 is all."""
    bytes_per_parameter: float = 2.0
    """As engines are sent them."""

    @property
    def active(self) -> float:
        """The parameters that one token passes."""
        return self.active_parameters or self.parameters

    @property
    def num_bytes(self) -> float:
        """Of one version of the weights."""
        return self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShape(_Section):
    """What one episode takes."""

    _section = "episodes"
    _positive = ("completion_tokens", "turns", "straggler_factor")

    prompt_tokens: float = 500.0
    """That all episodes of a group begin with; the learner reads them once for each group."""
    observation_tokens: float = 0.0
    """That an episode reads after its prompt and does not sample: answers of tools, say."""
    completion_tokens: float = 400.0
    """Median tokens that it samples, over all turns."""
    completion_sigma: float = 0.5
    """Of the lognormal that they follow."""
    turns: float = 1.0
    """Requests to an engine."""
    environment_s: float = 2.0
    """Median seconds in which it samples nothing: tools, tests, sandboxes."""
    environment_sigma: float = 0.8
    """Of the lognormal that they follow."""
    straggler_share: float = 0.02
    """Of the episodes: those whose environment takes `straggler_factor` times the median."""
    straggler_factor: float = 4.0
    """Times the median that a straggler's environment takes."""
    failure_share: float = 0.0
    """Of the episodes: those that infrastructure ends without a reward; what they sampled is not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape(_Section):
    """The engines, all alike."""

    _section = "engines"
    _positive = ("count", "gpus_each", "per_host", "tokens_per_second", "request_tokens_per_second", "max_num_seqs")

    count: int
    """How many."""
    gpus_each: int = 1
    """That one engine spans."""
    per_host: int = 1
    """Engines that share a host's network."""
    tokens_per_second: float
    """Of one engine with as many requests as it takes, all together, sampled ones."""
    request_tokens_per_second: float
    """Of one request, however idle the engine is."""
    max_num_seqs: int = 256
    """Requests that one engine samples for at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerShape(_Section):
    """The learner's ranks, one a GPU."""

    _section = "learner"
    _positive = ("ranks", "peak_tflops", "utilisation_share")

    ranks: int
    """How many."""
    peak_tflops: float
    """10^12 operations a second of one GPU, as its vendor states them for the dtype of the products."""
    utilisation_share: float = 0.4
    """Of the peak, that a step's products reach (model FLOP utilisation)."""
    extra_forwards: float = 0.0
    """Forward passes of the batch beside the one that is trained: a reference model, a teacher."""
    tokens_per_second: float = 0.0
    """Of all ranks together, read tokens, where it was measured; 0 takes it from the operations."""
    step_overhead_s: float = 1.0
    """Seconds of a step that do not depend on its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncShape(_Section):
    """How new weights come to the engines. Gigabytes (10^9) a second."""

    _section = "weight_sync"
    _positive = (
        "changed_share",
        "publish_gbytes_per_second",
        "source_gbytes_per_second",
        "host_gbytes_per_second",
        "load_gbytes_per_second",
        "chunk_mbytes",
    )

    way: str = "read"
    """"read": every host reads all of it from one source (the filesystem transport). "broadcast": the hosts pass it on
    in a chain, chunk by chunk (NCCL, which asyncrl has not been run with)."""
    changed_share: float = 1.0
    """Of the bytes: what is sent; below 1 with deltas."""
    publish_gbytes_per_second: float = 1.0
    """At which the learner gathers and writes a version; it steps no further meanwhile."""
    source_gbytes_per_second: float = 1.0
    """Out of the source, to all hosts together."""
    host_gbytes_per_second: float = 1.0
    """Into one host."""
    load_gbytes_per_second: float = 10.0
    """From a host's memory into one engine, which samples nothing meanwhile."""
    chunk_mbytes: float = 64.0
    """Megabytes (10^6) that a host of a chain has before it passes them on."""
    overhead_s: float = 0.5
    """Seconds of a sync that do not depend on its bytes."""

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        _Section.__post_init__(self)
        if self.way not in ("read", "broadcast"):
            raise ConfigError(f"way must be one of read, broadcast, got {self.way!r} ([weight_sync])")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxShape(_Section):
    """Where episodes' code runs."""

    _section = "sandboxes"

    count: int = 0
    """Open at once, over all hosts; an episode holds one from its beginning to its end. 0: episodes need none."""
    start_s: float = 0.0
    """Seconds until one is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorShape(_Section):
    """The process of the loop, and those that rollouts were given away to; CLUSTERS.md says what its defaults are."""

    _section = "orchestrator"

    loop_ms_per_trajectory: float = 0.5
    """Processor milliseconds of gate, buffer, journal and books."""
    turn_ms: float = 1.5
    """Processor milliseconds of one turn where its rollout runs: prompt, request to the engine, answer."""
    rollout_processes: int = 0
    """Processes of `asyncrl serve environment` that play the episodes; 0 plays them in the orchestrator."""
    message_ms: float = 1.0
    """Processor milliseconds of the orchestrator for one turn that another process plays: a completion asked for, and
    the request to the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureShape(_Section):
    """What breaks, how often, and what it costs."""

    _section = "failures"
    _positive = ("gpu_hours_between", "checkpoint_gbytes_per_second", "checkpoint_every_steps")

    gpu_hours_between: float = 50_000.0
    """GPU hours from one failure of a GPU or what is around it to the next."""
    detect_s: float = 30.0
    """Seconds until it is noticed."""
    engine_restart_s: float = 180.0
    """Seconds until an engine that failed samples again; what its requests had sampled goes on elsewhere."""
    learner_restart_s: float = 600.0
    """Seconds until the learner goes on, from its last checkpoint."""
    checkpoint_every_steps: int = 20
    """Optimizer steps from one checkpoint to the next."""
    checkpoint_gbytes_per_second: float = 5.0
    """At which the learner, which waits, writes a checkpoint: float32 masters, two moments, and the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """A whole cluster, and the run on it.

    Example:
        >>> shape = ClusterShape(
        ...     model=ModelShape(parameters=8e9),
        ...     engines=EngineShape(count=4, tokens_per_second=4000, request_tokens_per_second=80),
        ...     learner=LearnerShape(ranks=4, peak_tflops=989),
        ... )
        >>> shape.gpus
        8
    """

    model: ModelShape
    buffer: BufferSettings = field(default_factory=BufferSettings)
    episodes: EpisodeShape = field(default_factory=EpisodeShape)
    engines: EngineShape
    learner: LearnerShape
    weight_sync: WeightSyncShape = field(default_factory=WeightSyncShape)
    sandboxes: SandboxShape = field(default_factory=SandboxShape)
    orchestrator: OrchestratorShape = field(default_factory=OrchestratorShape)
    failures: FailureShape = field(default_factory=FailureShape)

    @property
    def gpus(self) -> int:
        """Of engines and learner."""
        return self.engines.count * self.engines.gpus_each + self.learner.ranks

    @property
    def hosts(self) -> int:
        """Of engines."""
        return -(-self.engines.count // self.engines.per_host)


def read_cluster(path: Path, overrides: list[str] | None = None) -> ClusterShape:
    """Return the cluster that a file describes. Raises: ConfigError naming the setting, and the file."""
    try:
        shape = build(ClusterShape, apply_overrides(read_toml(path), overrides or []))
        check_shape(shape)
    except ConfigError as error:
        raise ConfigError(error if str(path) in str(error) else f"{error} in {path}") from None
    return shape


def check_shape(shape: ClusterShape) -> None:
    """Raise ConfigError where two settings do not go together, or the prediction does not know one of [buffer]."""
    buffer, engines, orchestrator = shape.buffer, shape.engines, shape.orchestrator
    if buffer.max_uses > 1:
        raise ConfigError(f"max_uses must be 1 for a prediction, got {buffer.max_uses} ([buffer])")
    if buffer.replace_zero_advantage:
        raise ConfigError(
            "replace_zero_advantage must be false for a prediction: how many are replaced is not known ([buffer])"
        )
    if engines.per_host > engines.count:
        raise ConfigError(f"per_host must be at most count = {engines.count}, got {engines.per_host} ([engines])")
    if shape.model.active > shape.model.parameters:
        raise ConfigError(
            f"active_parameters must be at most parameters = {shape.model.parameters:g}, got "
            f"{shape.model.active:g} ([model])"
        )
    if shape.episodes.failure_share == 1:
        raise ConfigError("failure_share must be below 1: nothing would be trained on ([episodes])")
    if not orchestrator.loop_ms_per_trajectory:
        raise ConfigError("loop_ms_per_trajectory must be > 0, got 0 ([orchestrator])")


def sections() -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Yield (section, what it is, [(setting, default or "", what it is)]); [buffer] is a run's own and has none."""
    hints = typing.get_type_hints(ClusterShape)
    for name, kind in ((each.name, hints[each.name]) for each in fields(ClusterShape)):
        if not issubclass(kind, _Section):
            continue
        words = _field_docstrings(kind)
        rows = [(each.name, _default(each.default), words.get(each.name, "")) for each in fields(kind)]
        yield name, _flat(inspect.getdoc(kind) or ""), rows


def _default(value: Any) -> str:
    if value is MISSING:
        return ""
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _field_docstrings(kind: type) -> dict[str, str]:
    """Return field -> the string under it, which Python itself does not keep."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            assert isinstance(after.value, ast.Constant)
            found[before.target.id] = _flat(str(after.value.value))
    return found


def _flat(text: str) -> str:
    return " ".join(text.split())
