"""The whole configuration: each part's own settings, composed, and what they must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from asyncrl.buffers import BufferSettings, JournalSettings
from asyncrl.configs.loader import apply_overrides, build, read_toml, to_table
from asyncrl.curriculum import CurriculumSettings
from asyncrl.engines import EngineSettings, SamplingSettings
from asyncrl.environments import EnvironmentSettings, resolve_options, spell_out
from asyncrl.errors import ConfigError
from asyncrl.gateway import GatewaySettings
from asyncrl.guards import MEASURED, Action, Controller, GuardSettings, actions
from asyncrl.learner.settings import LearnerSettings
from asyncrl.learner.teacher_settings import check_temperature
from asyncrl.ray_settings import RaySettings
from asyncrl.roles import RoleSettings
from asyncrl.sandbox import SandboxSettings
from asyncrl.warm_start import WarmStartSettings
from asyncrl.weight_sync.settings import WeightSyncSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How long a run lasts and where it leaves what it made."""

    name: str = "run"
    directory: Path = Path("")
    """Where the run writes; empty takes the next free runs/NAME-N."""
    seed: int = 0
    """Of task order, sampling and the learner; concurrent rollouts are not reproducible token by token."""
    steps: int = 100
    """Optimizer steps on rollouts after which the run ends; 0, with a warm start, trains on demonstrations alone."""
    max_minutes: float = 0.0
    """Training time after which no new step starts; 0 is no limit."""
    stall_minutes: float = 10.0
    """Of waiting for groups, after which the run says who waits for whom and counts a stall; 0 never does."""
    checkpoint_every_steps: int = 25
    """0 writes one at the end only."""
    keep_checkpoints: int = 2
    """The newest that stay on disk."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for name, least in (
            ("steps", 0),
            ("max_minutes", 0),
            ("stall_minutes", 0),
            ("checkpoint_every_steps", 0),
            ("keep_checkpoints", 1),
        ):
            if not getattr(self, name) >= least:  # so that NaN is refused too
                raise ConfigError(f"{name} must be >= {least}, got {getattr(self, name)} ([run])")
        if not self.name or "/" in self.name:
            raise ConfigError(f"name must be a plain word that can name a directory, got {self.name!r} ([run])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model that is trained."""

    path: Path
    """A directory in Hugging Face form: config.json, safetensors weights, tokenizer.json, and a chat template unless
    the environment brings its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How the held-out tasks are measured."""

    samples: int = 4
    """Episodes of each held-out task, at the run's temperature; 0 evaluates nothing."""
    before: bool = True
    """Measure the starting weights."""
    every_steps: int = 0
    """Measure while training, after every so many steps; 0 only at the end."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for name in ("samples", "every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)} ([evaluation])")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Where Prometheus finds the run."""

    host: str = "127.0.0.1"
    port: int = 0
    """Of GET /metrics; 0 takes a free port and prints it."""
    serve: bool = True
    """Whether anything is; false opens no port, shows no page, and looks at no memory, disk or engine between steps."""
    page: bool = True
    """Whether the run is shown as a web page, at / of the same host and port, to whoever can reach it."""
    events_mib: float = 32.0
    """Of the run's newest events that stay on disk for `asyncrl trace`; 0 writes none."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port} ([metrics])")
        if not 0 <= self.events_mib < float("inf"):
            raise ConfigError(f"events_mib must be >= 0 and finite, got {self.events_mib} ([metrics])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that a run is told."""

    model: ModelSettings
    environment: EnvironmentSettings
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    run: RunSettings = field(default_factory=RunSettings)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    journal: JournalSettings = field(default_factory=JournalSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    weight_sync: WeightSyncSettings = field(default_factory=WeightSyncSettings)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    roles: RoleSettings = field(default_factory=RoleSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    guards: GuardSettings = field(default_factory=GuardSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    ray: RaySettings = field(default_factory=RaySettings)

    def __post_init__(self) -> None:
        """Refuse settings of different parts that contradict each other."""
        if self.metrics.port in self.engine.ports:
            raise ConfigError(f"port {self.metrics.port} cannot be both [engine]'s and [metrics]'s")
        if self.gateway.port and self.gateway.port in (self.metrics.port, *self.engine.ports):
            raise ConfigError(f"port {self.gateway.port} ([gateway]) is that of [metrics] or [engine] too")
        self._check_latency()
        self._check_guards()
        self._check_group_deadline()
        self._check_warm_start()
        self._check_colocated()
        self._check_teacher()
        self._check_sandboxes()
        self._check_roles()
        pays = getattr(resolve_options(self.environment), "pays_turns", None)
        if self.learner.credit.level == "turn" and pays is False:
            raise ConfigError(
                f"environment {self.environment.name!r} gives no reward per turn with these options "
                '([environment.options]), which level = "turn" needs; set level = "trajectory" ([learner.credit])'
            )
        longest = getattr(resolve_options(self.environment), "max_episode_tokens", 0)
        if longest > self.engine.max_model_len:
            raise ConfigError(
                f"max_episode_tokens = {longest} ([environment.options]) must not exceed max_model_len = "
                f"{self.engine.max_model_len} ([engine])"
            )
        loss = self.learner.resolved_loss
        if self.buffer.group_size == 1 and loss.objective == "pairs":
            raise ConfigError(f"group_size must be >= 2 with loss = {loss.name!r}: it compares a group's trajectories")
        if self.buffer.group_size == 1 and self.learner.compares_groups:
            raise ConfigError(
                f"group_size must be >= 2 with baseline = {self.learner.baseline!r}: a group of one has no baseline "
                f'and would never be trained on; raise group_size ([buffer]), set baseline = "none" ([learner]) or '
                "take a critic ([learner.critic])"
            )

        if self.buffer.replace_zero_advantage and not self.learner.compares_groups:
            raise ConfigError(
                f"replace_zero_advantage = true ([buffer]) drops groups that teach something with baseline = "
                f"{self.learner.baseline!r}, loss = {self.learner.loss!r} ([learner]) and kind = "
                f"{self.learner.critic.kind!r} ([learner.critic]): it is for losses that weigh tokens by an advantage "
                f"over the group"
            )

    def _check_latency(self) -> None:
        straggler_s = self.environment.latency.straggler_s
        limit_s = getattr(resolve_options(self.environment), "episode_timeout_s", float("inf"))
        if straggler_s >= limit_s:
            raise ConfigError(
                f"median_s * straggler_factor = {straggler_s:g} s ([environment.latency]) must be below "
                f"episode_timeout_s = {limit_s:g} ([environment.options]), which it is part of"
            )

    def _check_guards(self) -> None:
        if self.learner.diagnostics:
            return
        blind = [f"{name} = {action.value!r}" for name, action in actions(self.guards).items()
                 if name in MEASURED and action is not Action.OFF]  # fmt: skip
        if self.guards.controller is not Controller.OFF:
            blind.append(f"controller = {self.guards.controller.value!r}")
        if blind or self.learner.entropy_target:
            needed = f"{', '.join(blind)} ([guards])" if blind else "entropy_target ([learner])"
            raise ConfigError(
                f"diagnostics = false ([learner]) measures nothing that {needed} would act on: turn it off too"
            )

    def _check_group_deadline(self) -> None:
        deadline, options = self.buffer.group_deadline_s, resolve_options(self.environment)
        longest = getattr(options, "longest_episode_s", 0.0)  # an environment of a user's own need not say
        if not 0 < deadline < longest:
            return
        part = f", part {options.slowest_part!r}" if hasattr(options, "slowest_part") else ""
        raise ConfigError(
            f"group_deadline_s must be 0, or at least the {longest:g} s that an episode of environment "
            f"{self.environment.name!r}{part} may take by its own episode_timeout_s + grading_timeout_s "
            f"([environment.options]): what these would still have graded would be masked, got {deadline:g} ([buffer])"
        )

    def _check_sandboxes(self) -> None:
        held = getattr(resolve_options(self.environment), "sandboxes_held", 0)
        if held >= self.sandbox.max_open:
            raise ConfigError(
                f"max_open = {self.sandbox.max_open} ([sandbox]) must be above the {held} that episodes hold at a time "
                "(max_open in [environment.options]): they wait for judges, which need sandboxes too"
            )

    def _check_roles(self) -> None:
        roles = self.roles
        if roles.engines and (self.engine.urls or self.engine.count > 1 or self.engine.devices):
            raise ConfigError(
                f"engines = {roles.engines} ([roles]) come from other hosts, where each is one server on its own "
                "devices: leave urls, count and devices out ([engine])"
            )
        if (roles.engines or roles.learner) and self.weight_sync.transport != "filesystem":
            raise ConfigError(
                f'transport = "{self.weight_sync.transport}" ([weight_sync]) does not leave the host, and the learner '
                f'or engines are on others ([roles]): take transport = "filesystem" and a directory that they share'
            )
        if roles.environments and roles.sandboxes:
            raise ConfigError(
                f"sandboxes = {roles.sandboxes} are for an environment that plays here, and environments = "
                f"{roles.environments} play elsewhere in sandboxes of their own: set one of them to 0 ([roles])"
            )
        if roles.sandboxes and self.sandbox.backend == "remote":
            raise ConfigError(
                f"backend must be what each of the sandboxes = {roles.sandboxes} hosts ([roles]) opens itself, got "
                "'remote' ([sandbox])"
            )
        if roles.learner and self.learner.start != "here":
            raise ConfigError(f'start must be "here" where learner = true ([roles]), got {self.learner.start!r}')

    def _check_warm_start(self) -> None:
        if self.warm_start.max_tokens > self.engine.max_model_len:
            raise ConfigError(
                f"max_tokens = {self.warm_start.max_tokens} ([warm_start]) must not exceed max_model_len = "
                f"{self.engine.max_model_len} ([engine])"
            )
        if not self.warm_start.enabled and self.warm_start != WarmStartSettings():
            raise ConfigError("path must be given ([warm_start])")
        if not self.warm_start.enabled and not self.run.steps:
            raise ConfigError("steps must be >= 1, got 0 ([run]): only a run with a [warm_start] may take none")

    def _check_colocated(self) -> None:
        if not self.engine.colocated:
            return
        apart = {
            f"ranks = {self.learner.ranks} ([learner])": self.learner.ranks > 1,
            'device = "cpu" ([learner])': self.learner.device == "cpu",
            f"engines = {self.roles.engines} ([roles])": bool(self.roles.engines),
            "learner = true ([roles])": self.roles.learner,
        }
        for what, found in apart.items():
            if found:
                raise ConfigError(f"{what} does not go with colocated = true ([engine]): both share one GPU")

    def _check_teacher(self) -> None:
        teacher = self.learner.teacher
        check_temperature(self.sampling.temperature, teacher, self.learner.reference)
        told = getattr(resolve_options(self.environment), "teacher_prompts", None)
        if told and teacher.source == "none":
            raise ConfigError(
                "teacher_prompts = true ([environment.options]) needs a teacher: set source ([learner.teacher])"
            )
        if told is False and teacher.source == "self" and not teacher.ema_rate:
            raise ConfigError(
                "source = 'self' ([learner.teacher]) needs teacher_prompts = true ([environment.options]), or an "
                "ema_rate: the policy alone has nothing to teach itself"
            )

    @property
    def samples(self) -> bool:
        """Whether anything is asked of an engine."""
        return bool(self.run.steps or self.evaluation.samples)

    @property
    def engines_elsewhere(self) -> bool:
        """Whether the run starts no engine, and takes those that others start."""
        return bool(self.engine.urls or self.roles.engines)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a TOML file, with `section.key=value` overrides. Raises ConfigError."""
    tables = apply_overrides(read_toml(path), overrides)
    if isinstance(environment := tables.get("environment"), dict):
        tables["environment"] = spell_out(environment)
    return build(Config, tables)


def at_home(config: Config) -> Config:
    """Return the configuration with all parts on this host: roles come to runs that train."""
    return replace(config, roles=RoleSettings())


def dump_config(config: Config) -> str:
    """Return the resolved configuration as TOML; `load_config` of it gives the same configuration."""
    return tomli_w.dumps(to_table(config))


def differences(ours: Config, theirs: Config) -> dict[str, tuple[Any, Any]]:
    """Return "section.key" -> (ours, theirs) where two configurations differ."""
    left, right = _flat(to_table(ours)), _flat(to_table(theirs))
    return {key: (left.get(key), right.get(key)) for key in sorted({*left, *right}) if left.get(key) != right.get(key)}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
