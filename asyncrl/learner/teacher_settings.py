"""Settings of the models that are asked and not trained: teacher, and reference of a KL term. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.losses.presets import DIVERGENCES, SUPPORTS, LossSettings

TEACHERS = ("none", "model", "self", "engine")
REFERENCES = ("start", "model", "engine")
_NO_PATH = Path("")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """Whom the policy learns from, and how its next-token distributions are compared with the teacher's.

    Example:
        >>> TeacherSettings(source="model", path=Path("models/large"), divergence="jsd", top_k=100).support
        'teacher'
    """

    source: str = "none"
    """"none"; "model": a frozen copy of `path` in the learner; "self": the policy itself, without a gradient, which
    knows more where the environment tells teachers (`teacher_prompts`); "engine": the vLLM server at `url`."""
    path: Path = _NO_PATH
    """"model": a directory in Hugging Face form whose tokenizer has the policy's own vocabulary."""
    url: str = ""
    """"engine": of a server that runs already and serves one model with the policy's vocabulary."""
    timeout_s: float = 300.0
    """"engine": after which a server that does not answer a request ends the run."""
    ema_rate: float = 0.0
    """"self": the teacher's weights move by this share towards the policy's after each step. 0 is the present weights,
    without a copy; above, the learner holds a second model and its float32 average."""
    divergence: str = "reverse_kl"
    """"forward_kl", "reverse_kl" or "jsd" (losses/LOSSES.md says what each makes of a student)."""
    beta: float = 0.5
    """"jsd": the teacher's share of the mixture, inside (0, 1)."""
    top_k: int = 0
    """Compares this many tokens and what is left as one more; 0 compares the whole vocabulary. A server gives at most
    what it was started with (`--max-logprobs`, 20 by default)."""
    support: str = "teacher"
    """Whose likeliest `top_k` tokens: "teacher" or "student"."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        section = "[learner.teacher]"
        _check_source(self, TEACHERS, section)
        for name, allowed in (("divergence", DIVERGENCES), ("support", SUPPORTS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r} ({section})"
                )
        if not 0.0 <= self.ema_rate < 1.0:
            raise ConfigError(f"ema_rate must be in [0, 1), got {self.ema_rate} ({section})")
        if not 0.0 < self.beta < 1.0:
            limits = "its limits are divergence = 'forward_kl' and 'reverse_kl'"
            raise ConfigError(f"beta must be inside (0, 1), got {self.beta}: {limits} ({section})")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be >= 0 tokens, got {self.top_k} ({section})")
        _refuse_unread(self, section, {"ema_rate": self.source == "self", "beta": self.divergence == "jsd"})
        _refuse_unread(self, section, {"support": self.top_k > 0})
        if self.source == "engine" and self.support == "student":
            raise ConfigError(
                f"support must be 'teacher' with source = 'engine': it knows its own likeliest ({section})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """The frozen model that a KL term or a preference is relative to."""

    source: str = "start"
    """"start": a copy of the run's starting weights in the learner; "model": one of `path`; "engine": the server at
    `url`."""
    path: Path = _NO_PATH
    """As in [learner.teacher]."""
    url: str = ""
    """As in [learner.teacher]."""
    timeout_s: float = 300.0
    """As in [learner.teacher]."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        _check_source(self, REFERENCES, "[learner.reference]")


def check_teacher(loss: LossSettings, teacher: TeacherSettings) -> None:
    """Raise ConfigError where the loss needs a teacher that is not there, or there is one that nothing reads."""
    own = loss.objective == "custom"  # a loss of one's own may read whatever it is given
    if loss.reads_teacher and teacher.source == "none":
        raise ConfigError(
            f"loss {loss.name!r} needs a teacher: set source to one of {', '.join(TEACHERS[1:])} ([learner.teacher])"
        )
    if teacher.source != "none" and not (loss.reads_teacher or own):
        raise ConfigError(
            f"source = {teacher.source!r} ([learner.teacher]) is not read by loss {loss.name!r}: set distillation_coef "
            "([learner.loss_settings]), or take loss = 'opd' or 'distillation'"
        )
    if not loss.distillation_coef:
        unread = dict.fromkeys(("divergence", "beta", "top_k", "support"), False)
        _refuse_unread(teacher, "[learner.teacher]", unread, needs="a distillation_coef ([learner.loss_settings])")
    elif teacher.source == "engine" and not teacher.top_k:
        raise ConfigError("top_k must be >= 1 with source = 'engine': no server sends all of its log-probs")


def check_temperature(temperature: float, teacher: TeacherSettings, reference: ReferenceSettings) -> None:
    """Raise ConfigError where a server is asked whose log-probs are not those of the run's `temperature`."""
    for section, settings in (("teacher", teacher), ("reference", reference)):
        if settings.source == "engine" and temperature != 1.0:
            raise ConfigError(
                f"temperature must be 1 with source = 'engine' ([learner.{section}]), got {temperature} ([sampling]): "
                "a server gives the log-probs of given tokens at temperature 1 only"
            )


def _check_source(settings: TeacherSettings | ReferenceSettings, sources: tuple[str, ...], section: str) -> None:
    source = settings.source
    if source not in sources:
        raise ConfigError(f"source must be one of {', '.join(sources)}, got {source!r} ({section})")
    if source == "model" and settings.path == _NO_PATH:
        raise ConfigError(f"path must name a model directory with source = 'model' ({section})")
    if source == "engine" and not settings.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"url must begin with http:// or https:// with source = 'engine', got {settings.url!r} ({section})"
        )
    if not (math.isfinite(settings.timeout_s) and settings.timeout_s > 0):
        raise ConfigError(f"timeout_s must be > 0 and finite seconds, got {settings.timeout_s} ({section})")
    read = {"path": source == "model", "url": source == "engine", "timeout_s": source == "engine"}
    _refuse_unread(settings, section, read)


def _refuse_unread(settings: Any, section: str, read: dict[str, bool], *, needs: str = "") -> None:
    """Raise ConfigError for a setting that was changed and is not read."""
    for field in fields(settings):
        if not read.get(field.name, True) and getattr(settings, field.name) != field.default:
            found = f"{field.name} = {str(getattr(settings, field.name))!r}"
            raise ConfigError(f"{found} would not be read{f' without {needs}' if needs else ''} ({section})")
