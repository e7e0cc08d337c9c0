"""Settings of the learner, and the job that its process is given. Imports no torch."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.learner.credit_settings import CreditSettings
from asyncrl.learner.critic_settings import CriticSettings
from asyncrl.learner.lora_settings import LoraSettings
from asyncrl.learner.teacher_settings import ReferenceSettings, TeacherSettings, check_teacher, check_temperature
from asyncrl.losses import resolve
from asyncrl.losses.presets import BASELINES, SCALES, LossSettings
from asyncrl.weight_sync.settings import WeightSyncSettings

DTYPES = ("bfloat16", "float32", "float64")
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
DEVICES = ("auto", "cpu", "cuda")
STARTS = ("here", "by_hand")
HEAD_DTYPES = ("float32", "model")
ATTENTIONS = ("auto", "flash_attn", "varlen", "flex", "tiles", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """Which trajectories of a group a preference loss compares."""

    min_gap: float = 0.0
    """Rewards of a pair differ by more than this."""
    per_group: int = 1
    """Pairs of one group: best against worst, then second best against second worst, while there is a gap."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        if not (math.isfinite(self.min_gap) and self.min_gap >= 0):
            raise ConfigError(f"min_gap must be >= 0, got {self.min_gap} ([learner.pairs])")
        if self.per_group < 1:
            raise ConfigError(f"per_group must be >= 1 pairs, got {self.per_group} ([learner.pairs])")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """How the weights are updated.

    Example:
        >>> LearnerSettings(loss="gspo", loss_settings={"clip_high": 4e-3}).resolved_loss.clip_high
        0.004
    """

    loss: str = "dapo"
    """A name of `asyncrl.losses.LOSSES`, or "package.module:function"."""
    loss_settings: Mapping[str, Any] = field(default_factory=dict)
    """Put over the loss's own defaults."""
    entropy_target: float = 0.0
    """Nats; while the mean entropy at the trained tokens is below it, the loss's `entropy_coef` (it begins with what
    `loss_settings` say) rises by `entropy_coef_step` a step, and falls as much while it is above; 0 leaves it alone."""
    entropy_coef_step: float = 0.005
    """What the adapted `entropy_coef` moves by in a step; it stays from 0 to 1."""
    baseline: str = "mean"
    """What an advantage is relative to, inside its group: "mean", "leave_one_out" or "none"."""
    scale: str = "group_std"
    """What an advantage is divided by: "none", "group_std", "batch_std" or "group_mean"."""
    credit: CreditSettings = field(default_factory=CreditSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    """With one, `baseline` and `scale` are not read: advantages are relative to its values."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0; constant after."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, on matrices only: norms and biases are left alone."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped, over the whole batch; 0 clips nothing."""
    microbatch_tokens: int = 2048
    """Tokens that one forward reads, shared prefixes counted once; bounds the activations in memory."""
    diagnostics: bool = True
    """Measure in every step how far off-policy its tokens are, and which of them stand out. Without it `asyncrl
    spikes`, most dashboards and the guards on what a step measures see nothing; it is for telling what they cost."""
    share_prefixes: bool = True
    """Read what segments of one microbatch begin with only once. The result is the same within rounding."""
    dtype: str = "bfloat16"
    """Of the forward and backward pass; masters, moments and sums of gradients are float32 (float64 for float64)."""
    head_dtype: str = "float32"
    """Of the logits behind log-probs: "float32", or "model" for `dtype`, faster, which rounds 20 by up to 0.06."""
    attention: str = "auto"
    """What computes it, of `asyncrl.learner.attention_kinds`; all compute the same. "auto" takes flash-attn's kernels
    on a GPU where that package is there, else PyTorch's own ("varlen"; "flex" for float32), and "tiles" on a CPU."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Trains adapters instead of the whole model."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: a third more work, activations of one layer in memory."""
    compile: bool = False
    """Let torch.compile make programs of the layers: some tens of seconds in the first step, for all trees of tokens
    and numbers of them. It needs a C++ compiler, on a GPU triton too. Results are the same within rounding."""
    ranks: int = 1
    """Processes that hold the model between them (FSDP2), and any reference, teacher or value model too: each keeps its
    part of weights and optimizer, and reads its share of every batch. On GPUs each takes one."""
    context_parallel: int = 1
    """How many of the ranks read one microbatch between them, each a part of its tokens; `ranks` is a multiple. For
    segments whose activations one rank cannot hold: only keys and values of a layer are whole on each."""
    start: str = "here"
    """"here": its processes are started on this host with the run. "by_hand": the run says what starts them and waits;
    with `torchrun` they may be on several hosts, which share the run directory, the first rank on this one."""
    threads: int = 0
    """CPU threads of each rank; 0 takes one a core, shared among ranks."""
    own_cores: bool = False
    """Whether nothing else computes on the cores of its threads: engines on GPUs, on other hosts, or with `threads`
    that leave those cores free. Threads then wait for each other awake for some microseconds, which makes a step on a
    CPU up to a fifth faster; where cores are shared it makes steps and generation slower."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    """Whom losses that need one learn from."""
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    """What a KL term, a KL in the reward and preferences are relative to."""
    pairs: PairSettings = field(default_factory=PairSettings)

    @property
    def resolved_loss(self) -> LossSettings:
        """The loss with its settings, checked."""
        return resolve(self.loss, **self.loss_settings)

    @property
    def compiled_by(self) -> str:
        """The backend of torch.compile, empty for none."""
        return "inductor" if self.compile else ""

    @property
    def compares_groups(self) -> bool:
        """Whether a group whose rewards are all equal, or that has one trajectory, has no advantage to learn from."""
        return self.baseline != "none" and not self.critic.on and self.resolved_loss.reads_advantage

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of the reference are read: by the loss, in the reward, or by a loss of one's own."""
        loss = self.resolved_loss
        own = loss.objective == "custom" and self.reference != ReferenceSettings()
        return loss.reads_reference or self.credit.reward_kl_coef > 0 or own

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for name, allowed in (
            ("baseline", BASELINES),
            ("scale", SCALES),
            ("dtype", DTYPES),
            ("head_dtype", HEAD_DTYPES),
            ("attention", ATTENTIONS),
            ("device", DEVICES),
            ("start", STARTS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r} ([learner])"
                )
        for name, least, unit in (
            ("warmup_steps", 0, "optimizer steps"),
            ("microbatch_tokens", 1, "tokens"),
            ("ranks", 1, "processes"),
            ("context_parallel", 1, "processes"),
            ("threads", 0, "threads"),
            ("weight_decay", 0.0, ""),
            ("max_grad_norm", 0.0, ""),
            ("learning_rate", 0.0, ""),
            ("entropy_target", 0.0, "nats"),
            ("entropy_coef_step", 0.0, ""),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name} must be >= {least} {unit}".rstrip() + f", got {value} ([learner])")
        if not self.adam_eps > 0:
            raise ConfigError(f"adam_eps must be > 0, got {self.adam_eps} ([learner])")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(f"adam_betas must lie in [0, 1), got {list(self.adam_betas)} ([learner])")
        loss = self.resolved_loss
        check_teacher(loss, self.teacher)
        said = self.credit if loss.objective == "pairs" else replace(self.credit, overlong_filter=False)
        unread = {
            "reference": not self.needs_reference and self.reference != ReferenceSettings(),
            "pairs": loss.objective != "pairs" and self.pairs != PairSettings(),
            "credit": not loss.reads_advantage and said != CreditSettings(),
        }
        for section, found in unread.items():
            if found:
                raise ConfigError(f"[learner.{section}] is set and not read by loss {self.loss!r} ([learner])")
        if self.critic.on:
            self._check_critic(loss)
        if self.lora.enabled:
            self._check_lora()
        if self.context_parallel > 1:
            self._check_context(loss)

    def _check_lora(self) -> None:
        if self.compile:
            raise ConfigError(
                "compile = true ([learner]) compiles no adapters, and enabled = true ([learner.lora]): leave one out"
            )
        whole = {
            'kind = "model" ([learner.critic])': self.critic.kind == "model",
            f"ema_rate = {self.teacher.ema_rate} ([learner.teacher])": self.teacher.ema_rate > 0,
        }
        for what, found in whole.items():
            if found:
                raise ConfigError(
                    f"{what} needs the weights of a whole model trained or averaged, and enabled = true "
                    "([learner.lora]) trains adapters alone: leave one of the two out"
                )

    def _check_context(self, loss: LossSettings) -> None:
        said = f"context_parallel = {self.context_parallel} ([learner])"
        if self.ranks % self.context_parallel:
            raise ConfigError(f"{said} must divide ranks = {self.ranks}")
        whole = {
            f'kind = "{self.critic.kind}" ([learner.critic])': self.critic.on,
            f"distillation_coef = {loss.distillation_coef} of loss {self.loss!r}": loss.distillation_coef > 0,
        }
        for what, found in whole.items():
            if found:
                raise ConfigError(f"{said} leaves hidden states apart, which {what} reads: set context_parallel = 1")

    def _check_critic(self, loss: LossSettings) -> None:
        if not loss.reads_advantage:
            raise ConfigError(
                f'loss {self.loss!r} reads no advantages, so kind = "{self.critic.kind}" would change nothing; set it '
                'to "none" ([learner.critic])'
            )
        if self.credit.level != "trajectory":
            raise ConfigError(
                f'level = "{self.credit.level}" ([learner.credit]) compares the turns of a group, which a critic '
                f'(kind = "{self.critic.kind}", [learner.critic]) does not: it sees the rewards of turns in time by '
                'itself; set level = "trajectory"'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerJob:
    """Everything that a learner process is told; read from the JSON file that `--settings` names."""

    model: Path
    """Model directory in Hugging Face form: the starting weights, and the frozen reference of a KL term."""
    run_id: str
    """Names what is published."""
    resume_from: str = ""
    """Checkpoint directory with `model/` and `learner/` inside, or empty."""
    seed: int = 0
    """Of the learner's own random state."""
    temperature: float = 1.0
    """That the tokens are sampled at; log-probs are taken after dividing the logits by it."""
    max_off_policyness: int = 0
    """Optimizer steps; checked again on every trained token."""
    colocated: bool = False
    """Whether engines have the learner's card between a publication and the next request: its state then lies in host
    memory, from the start."""
    canary: tuple[int, ...] = ()
    """Token ids of the text whose log-probs go with every version; empty sends none."""
    weight_sync: WeightSyncSettings = field(default_factory=WeightSyncSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature must be > 0, got {self.temperature}")
        if self.max_off_policyness < 0:
            raise ConfigError(f"max_off_policyness must be >= 0 optimizer steps, got {self.max_off_policyness}")
        check_temperature(self.temperature, self.learner.teacher, self.learner.reference)


def check_ranks(settings: LearnerSettings, count: int) -> None:
    """Raise ConfigError unless as many processes were started as the settings say."""
    if settings.ranks != count:
        raise ConfigError(f"ranks = {settings.ranks} ([learner]), and {count} processes of the learner were started")


def read_job(path: Path) -> LearnerJob:
    """Return the job in a JSON file. Raises ConfigError naming the file and the setting."""
    return parse_job(read_settings(path), path)


def read_settings(path: Path) -> bytes:
    """Return what stands in the file of a job. Raises: ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def parse_job(data: bytes, path: Path) -> LearnerJob:
    """Return the job that stands in JSON; `path` is named where something is wrong. Raises: ConfigError."""
    try:
        table = msgspec.json.decode(data)
        _refuse_unknown(LearnerJob, table, path)
        return msgspec.convert(table, LearnerJob, dec_hook=_path)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None


def _refuse_unknown(kind: type, table: Mapping[str, Any], path: Path) -> None:
    hints = typing.get_type_hints(kind)
    for name, value in table.items():
        if name not in hints:
            raise ConfigError(f"{path}: unknown setting {name!r}")
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            _refuse_unknown(hints[name], value, path)


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"cannot read a {kind.__name__} from {value!r}")
