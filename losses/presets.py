"""The table of losses, and the settings that a loss is composed from. Imports no torch.

A loss is `weight * objective(ratio, advantage)` per token, aggregated. `LOSSES` gives the settings of every name; a
setting that the composed loss would not read, or two settings that contradict each other, are refused with the reason.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from asyncrl.errors import ConfigError

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const", "prompt_mean", "sum")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_is", "k3_value_k2_grad")
BASELINES = ("mean", "leave_one_out", "none")
"""Group baselines of `asyncrl.advantages.group_advantages`, here so that settings are checked without torch."""
SCALES = ("none", "group_std", "batch_std", "group_mean")
"""Scales of `asyncrl.advantages.group_advantages`."""
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
"""Of a teacher from a student, as `asyncrl.losses.divergence` computes them."""
SUPPORTS = ("teacher", "student")
"""Whose k likeliest tokens a divergence over k tokens and a tail is taken over."""

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "objective": ("policy", "kl", "likelihood", "distillation", "pairs", "custom"),
        "ratio": ("none", "token", "prefix", "sequence_mean", "sequence_product"),
        "anchor": ("behaviour", "proximal"),
        "gradient": ("ratio", "token", "logprob"),
        "clip": ("none", "ppo", "sqrt_window", "cap", "mask", "probability"),
        "advantage": ("token", "sequence_mean", "teacher"),
        "correction": ("none", "weight", "truncate", "mask"),
        "correction_level": ("token", "sequence_mean", "sequence_product"),
        "aggregation": AGGREGATIONS,
        "kl_estimator": KL_ESTIMATORS,
        "bad_logprobs": ("cap", "mask", "raise"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What one loss is composed from. Made by `resolve`, never by hand.

    Example:
        >>> resolve("dapo", clip_high=0.3).clip_high
        0.3
    """

    name: str
    objective: str = "policy"
    """"policy": ratio times advantage; "kl": the reference KL alone; "likelihood": -logp; "distillation": the teacher's
    divergence alone; "pairs": DPO; "custom"."""
    ratio: str = "token"
    """How per-token log ratios become the ratio of token t: itself, sums up to t, the sequence's mean or its sum."""
    anchor: str = "behaviour"
    """Denominator of the ratio. "proximal" needs a correction from proximal to behaviour."""
    gradient: str = "ratio"
    """"ratio": through the ratio; "token": sg(ratio) exp(logp - sg logp); "logprob": sg(ratio) logp."""
    clip: str = "none"
    """"ppo" and "sqrt_window" take the pessimistic minimum; "cap" and "mask" bound a stopped ratio; "probability"
    drops tokens whose probability has moved by more than `max_probability_change` the way the advantage points."""
    clip_low: float = 0.2
    """PPO: the ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """PPO: the ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = None
    """PPO: for negative advantages the ratio counts at most this much (> 1), or None."""
    window_low: float = 0.025
    """sqrt_window: nats per sqrt(action tokens so far) below 0."""
    window_high: float = 0.05
    """sqrt_window: nats per sqrt(action tokens so far) above 0."""
    window_dual: bool = True
    """sqrt_window: for negative advantages the ratio counts at most the upper bound."""
    ratio_low: float = 0.0
    """cap, mask: smallest ratio (an absolute value, not a distance from 1)."""
    ratio_high: float = math.inf
    """cap, mask: largest ratio (an absolute value)."""
    max_probability_change: float = 0.2
    advantage: str = "token"
    """"token": as given; "sequence_mean": its mean over the active tokens; "teacher": teacher - behaviour."""
    correction: str = "none"
    """What multiplies the loss for proximal / behaviour: the weight, min(weight, high), or the weight inside
    [low, high] and 0 outside."""
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = math.inf
    renormalise: bool = False
    """Whether dropped tokens also leave the denominator."""
    sequence_drift: float | None = None
    """Drop tokens with a negative advantage where the sequence mean of behaviour - policy (nats) exceeds this."""
    log_ratio_sq_coef: float = 0.0
    """Coefficient of the squared log ratio, added per token."""
    min_reward: float | None = None
    """Restrict the loss to sequences whose reward is greater, or None."""
    dpo_beta: float = 0.1
    aggregation: str = "token_mean"
    const_length: float = 64.0
    """Tokens; `const` divides by (all sequences) x const_length."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    observation_coef: float = 0.0
    """Coefficient of the mean of -logp over observation tokens (ECHO)."""
    entropy_coef: float = 0.0
    distillation_coef: float = 0.0
    """Coefficient of the teacher's divergence from the student, over the active tokens as the loss is aggregated."""
    distillation_clip: float | None = None
    """Nats; a token's divergence counts at most this much, and has no gradient beyond: where a teacher knows the answer
    a few pivotal tokens would outweigh all others. None clips nothing."""
    bad_logprobs: str = "cap"
    """A behaviour log-prob on an active token that is positive, not finite or below -1000: "cap" bounds its log ratio
    at 20 nats (a NaN is dropped), "mask" drops the token, "raise" ends the run. All are counted."""
    function: str = ""
    """"package.module:function" of a user's own loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings passed on to `function`."""

    @property
    def needs_advantage(self) -> bool:
        """True where a segment whose advantages are all 0 has no gradient, so that none need be computed."""
        other_terms = (
            self.kl_coef,
            self.observation_coef,
            self.entropy_coef,
            self.log_ratio_sq_coef,
            self.distillation_coef,
        )
        return self.reads_advantage and self.objective == "policy" and not any(other_terms)

    @property
    def reads_advantage(self) -> bool:
        """True where the loss weighs tokens by the trainer's advantages at all (one of your own may)."""
        return self.objective == "custom" or (self.objective == "policy" and self.advantage != "teacher")

    @property
    def reads_reference(self) -> bool:
        """True where the loss needs the log-probs of the reference."""
        return self.kl_coef > 0 or self.objective in ("kl", "pairs")

    @property
    def reads_teacher(self) -> bool:
        """True where the loss needs a teacher: its log-probs of the sampled tokens, or its divergence."""
        return self.distillation_coef > 0 or (self.objective == "policy" and self.advantage == "teacher")


def _preset(**settings: Any) -> Mapping[str, Any]:
    return MappingProxyType(settings)


_DAPO = {"clip": "ppo", "clip_high": 0.28}
_GSPO = {"clip": "ppo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"}
_CTPO = {"ratio": "prefix", "gradient": "token", "clip": "sqrt_window"}
_PROXIMAL = {"anchor": "proximal", "clip": "ppo"}
_MIS = {**_PROXIMAL, "clip_high": 0.28, "correction": "mask"}
_LOGPROB = {"gradient": "logprob"}

LOSSES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "reinforce": _preset(ratio="none", **_LOGPROB),
        "importance_sampling": _preset(),
        "ppo": _preset(clip="ppo"),
        "grpo": _preset(clip="ppo", kl_coef=0.04, aggregation="seq_mean_token_mean"),
        "dapo": _preset(**_DAPO),
        "dapo_dual": _preset(**_DAPO, dual_clip=3.0),
        "dr_grpo": _preset(clip="ppo", aggregation="const"),
        "gspo": _preset(ratio="sequence_mean", advantage="sequence_mean", **_GSPO),
        "gspo_token": _preset(ratio="sequence_mean", gradient="token", **_GSPO),
        "cispo": _preset(clip="cap", ratio_high=5.0, **_LOGPROB),
        "cispo_two_sided": _preset(clip="cap", ratio_low=0.8, ratio_high=1.28, **_LOGPROB),
        "icepop": _preset(clip="mask", ratio_low=0.5, ratio_high=5.0, **_LOGPROB),
        "ctpo": _preset(**_CTPO),
        "ctpo_no_dual": _preset(**_CTPO, window_dual=False),
        "prefix_is": _preset(ratio="prefix", gradient="token"),
        "sequence_is": _preset(ratio="sequence_product", aggregation="seq_mean_token_sum", **_LOGPROB),
        "sequence_tis": _preset(
            ratio="sequence_product", clip="cap", ratio_high=5.0, aggregation="seq_mean_token_sum", **_LOGPROB
        ),
        "sequence_clip": _preset(ratio="sequence_product", gradient="token", **_DAPO),
        "tis": _preset(**_PROXIMAL, clip_high=0.28, correction="truncate", correction_high=2.0),
        "tis_sequence": _preset(
            **_PROXIMAL,
            clip_high=0.28,
            correction="truncate",
            correction_level="sequence_product",
            correction_high=5.0,
        ),
        "mis": _preset(**_MIS, correction_low=0.5, correction_high=5.0),
        "mis_renorm": _preset(**_MIS, correction_low=0.5, correction_high=5.0, renormalise=True),
        "mis_sequence": _preset(**_MIS, correction_level="sequence_product", correction_high=3.0),
        "decoupled_ppo": _preset(**_PROXIMAL, correction="weight"),
        "decoupled_ppo_mask": _preset(**_PROXIMAL, correction="mask", correction_high=5.0),
        "opsm": _preset(**_DAPO, sequence_drift=0.1),
        "dppo": _preset(clip="probability", log_ratio_sq_coef=1e-3),
        "kl_k1": _preset(objective="kl", kl_estimator="k1", kl_coef=1.0),
        "kl_k2": _preset(objective="kl", kl_estimator="k2", kl_coef=1.0),
        "kl_k3": _preset(objective="kl", kl_estimator="k3", kl_coef=1.0),
        "kl_k3_is": _preset(objective="kl", kl_estimator="k3_is", kl_coef=1.0),
        "kl_k3_value_k2_grad": _preset(objective="kl", kl_estimator="k3_value_k2_grad", kl_coef=1.0),
        "sft": _preset(objective="likelihood"),
        "rejection_sft": _preset(objective="likelihood", min_reward=0.5),
        "opd": _preset(advantage="teacher"),
        "distillation": _preset(objective="distillation", distillation_coef=1.0),
        "echo": _preset(**_DAPO, observation_coef=0.1),
        "dpo": _preset(objective="pairs"),
    }
)
"""name -> the settings that differ from `LossSettings`' defaults."""

_TERMS = frozenset(
    {"kl_coef", "observation_coef", "entropy_coef", "distillation_coef", "aggregation", "const_length", "bad_logprobs"}
)
_STRUCTURE = frozenset({"ratio", "anchor", "gradient", "clip", "advantage", "correction"})
_CLIP_READS = {
    "none": frozenset[str](),
    "ppo": frozenset({"clip_low", "clip_high", "dual_clip"}),
    "sqrt_window": frozenset({"window_low", "window_high", "window_dual"}),
    "cap": frozenset({"ratio_low", "ratio_high"}),
    "mask": frozenset({"ratio_low", "ratio_high"}),
    "probability": frozenset({"max_probability_change"}),
}


def resolve(name: str, /, **settings: Any) -> LossSettings:
    """Return the checked settings of the loss `name` with `settings` put over its defaults.

    `name` is a key of `LOSSES` or "package.module:function"; of the latter only the form is checked here, and
    settings that are not among `LossSettings` are kept for the function. A number may be given as int or float.
    Raises: ConfigError for an unknown name or setting (with the nearest match), a value out of range, a setting that
    this loss does not read, or settings that contradict each other.
    """
    if ":" in name:
        return _custom(name, settings)
    if name not in LOSSES:
        raise ConfigError(
            f"unknown loss {name!r}{_nearest(name, LOSSES)}; or name your own as 'package.module:function'"
        )
    known = {f.name for f in fields(LossSettings)} - {"name", "objective", "function", "options"}
    for key in settings:
        if key not in known:
            raise ConfigError(f"loss {name!r} has no setting {key!r}{_nearest(key, known)}")
    default = LossSettings(name=name, **LOSSES[name])
    resolved = replace(default, **{key: _typed(name, key, value) for key, value in settings.items()})
    _check_ranges(resolved)
    _check_composition(resolved)
    reads = _reads(resolved)
    for key in settings:
        if key not in reads and getattr(resolved, key) != getattr(default, key):
            raise ConfigError(
                f"loss {name!r} does not use {key} with these settings; it reads {', '.join(sorted(reads))}"
            )
    return resolved


def _custom(name: str, settings: Mapping[str, Any]) -> LossSettings:
    module, _, function = name.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"loss {name!r} is not of the form 'package.module:function'")
    ours = {*_TERMS, "kl_estimator", "distillation_clip", "min_reward"}
    options = {key: value for key, value in settings.items() if key not in ours}
    typed = {key: _typed(name, key, value) for key, value in settings.items() if key in ours}
    resolved = LossSettings(name=name, objective="custom", function=name, options=options, **typed)
    _check_ranges(resolved)
    return resolved


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def _typed(name: str, key: str, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            hint = _nearest(str(value), _CHOICES[key])
            raise ConfigError(f"loss {name!r}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}{hint}")
        return value
    if key in ("window_dual", "renormalise"):
        if not isinstance(value, bool):
            raise ConfigError(f"loss {name!r}: {key} must be true or false, got {value!r}")
        return value
    if value is None and key in ("dual_clip", "sequence_drift", "min_reward", "distillation_clip"):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(f"loss {name!r}: {key} must be a number, got {value!r}")
    return float(value)


def _check_ranges(s: LossSettings) -> None:
    """Raise ConfigError for a number out of its range."""
    inf = math.inf
    for key, low, high in (
        ("clip_low", 0.0, 1.0),
        ("clip_high", 0.0, inf),
        ("window_low", 0.0, inf),
        ("window_high", 0.0, inf),
        ("ratio_low", 0.0, inf),
        ("correction_low", 0.0, inf),
        ("max_probability_change", 0.0, 1.0),
        ("log_ratio_sq_coef", 0.0, inf),
        ("kl_coef", 0.0, inf),
        ("observation_coef", 0.0, inf),
        ("entropy_coef", 0.0, inf),
        ("distillation_coef", 0.0, inf),
    ):
        if not low <= getattr(s, key) <= high:
            raise ConfigError(f"loss {s.name!r}: {key} must be in [{low:g}, {high:g}], got {getattr(s, key):g}")
    for key in ("const_length", "dpo_beta", "ratio_high", "correction_high"):
        if not getattr(s, key) > 0:
            raise ConfigError(f"loss {s.name!r}: {key} must be > 0, got {getattr(s, key):g}")
    for low_key, high_key in (("ratio_low", "ratio_high"), ("correction_low", "correction_high")):
        if getattr(s, low_key) > getattr(s, high_key):
            raise ConfigError(
                f"loss {s.name!r}: {low_key} {getattr(s, low_key):g} is above {high_key} {getattr(s, high_key):g}"
            )
    if s.distillation_clip is not None and not s.distillation_clip > 0:
        raise ConfigError(f"loss {s.name!r}: distillation_clip must be > 0 nats, got {s.distillation_clip:g}")
    if s.dual_clip is not None and s.dual_clip <= max(1.0, 1.0 + s.clip_high):
        raise ConfigError(
            f"loss {s.name!r}: dual_clip must be greater than 1 + clip_high = {1 + s.clip_high:g}, got {s.dual_clip:g}"
        )


def _check_composition(s: LossSettings) -> None:
    """Raise ConfigError where the parts contradict each other."""
    for objective, coef in (("kl", "kl_coef"), ("distillation", "distillation_coef")):
        if s.objective == objective and getattr(s, coef) == 0.0:
            raise ConfigError(f"loss {s.name!r}: {coef} 0 leaves nothing to learn from")
    if s.objective != "policy":
        return
    reason = ""
    if s.ratio == "none" and (s.clip != "none" or s.gradient != "logprob"):
        reason = "without a ratio there is nothing to clip or differentiate: use gradient='logprob' and clip='none'"
    elif s.gradient == "logprob" and s.clip in ("ppo", "sqrt_window", "probability"):
        reason = (
            f"clip={s.clip!r} acts through the ratio's gradient, which gradient='logprob' stops: use 'cap' or 'mask'"
        )
    elif s.gradient != "logprob" and s.clip == "cap":
        reason = "capping a ratio that is differentiated removes its gradient: use gradient='logprob', or clip='ppo'"
    elif s.clip == "sqrt_window" and s.ratio != "prefix":
        reason = "the sqrt(t) window belongs to the prefix ratio: use ratio='prefix'"
    elif s.clip == "probability" and s.ratio != "token":
        reason = "a change of probability is defined per token: use ratio='token'"
    elif s.ratio == "prefix" and s.gradient == "ratio":
        reason = "differentiating the whole prefix product weights early tokens by what follows: use gradient='token'"
    elif s.anchor == "proximal" and s.correction == "none":
        reason = "policy/proximal alone drops the off-policy correction: set correction, or anchor='behaviour'"
    elif s.anchor == "behaviour" and s.correction != "none":
        reason = "policy/behaviour times proximal/behaviour counts the behaviour policy twice: use anchor='proximal'"
    elif s.anchor == "proximal" and s.ratio == "none":
        reason = "anchor='proximal' without a ratio has no effect"
    elif s.renormalise and not (s.correction == "mask" or s.clip in ("mask", "probability") or s.sequence_drift):
        reason = "renormalise has no effect: nothing drops tokens"
    elif s.renormalise and s.aggregation in ("const", "prompt_mean"):
        reason = f"renormalise is not defined for aggregation={s.aggregation!r}"
    if reason:
        raise ConfigError(f"loss {s.name!r}: {reason}")


def _reads(s: LossSettings) -> frozenset[str]:
    """The settings that the composed loss uses."""
    reads = set(_TERMS)
    if s.kl_coef:
        reads.add("kl_estimator")
    if s.distillation_coef:
        reads.add("distillation_clip")
    if s.aggregation != "const":
        reads.discard("const_length")
    if s.objective == "pairs":
        return frozenset({"dpo_beta"})
    reads.add("min_reward")
    if s.objective == "policy":
        reads |= _STRUCTURE | _CLIP_READS[s.clip] | {"sequence_drift", "log_ratio_sq_coef", "renormalise"}
        if s.correction != "none":
            reads.add("correction_level")
        if s.correction in ("truncate", "mask"):
            reads.add("correction_high")
        if s.correction == "mask":
            reads.add("correction_low")
    return frozenset(reads)
