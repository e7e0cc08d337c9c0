"""Settings of the critic, and what of them only the model's own files can tell. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from asyncrl.errors import ConfigError
from asyncrl.learner.vocabulary import check_same_vocabulary, tokenizer_of

KINDS = ("none", "model", "head", "yes_no")

_SHARED = frozenset({"gamma", "lam", "bootstrap_truncated", "critic_warmup_steps"})
_READS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "none": frozenset(),
        "model": _SHARED | {"path", "learning_rate", "value_clip", "updates_per_batch"},
        "head": _SHARED | {"stop_gradient", "learning_rate", "value_clip", "value_coef"},
        "yes_no": _SHARED | {"question", "yes", "no", "question_every", "reward_low", "reward_high", "value_coef"},
    }
)
"""What each kind reads; another setting that is not at its default is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """How the value of a state is estimated, and advantages from it. With a critic no group baseline is taken.

    Example:
        >>> CriticSettings(kind="head", lam=0.95).stop_gradient
        True
    """

    kind: str = "none"
    """"none"; "model": a value model of its own, with as much memory as the policy's; "head": a linear head on the
    policy's body; "yes_no": the policy's probability of one word against another after a question."""
    gamma: float = 1.0
    """Discount a time step, from 0 to 1. A time step is a sampled token, or with "yes_no" a question; what the
    environment wrote takes no time."""
    lam: float = 1.0
    """From 0 to 1: 1 credits a token with all that follows, less the value; 0 with the next value's rise alone."""
    bootstrap_truncated: bool = True
    """A trajectory that was cut off (truncated_length, truncated_turns, timed_out) goes on after its last token with
    that state's value. False where its reward is final all the same, as where the cut-off answer was graded."""
    critic_warmup_steps: int = 0
    """First steps in which the policy's loss is left out. "model" and "head" leave the policy's weights as they are;
    "yes_no" has no others, and they learn from the values alone."""
    learning_rate: float = 1e-5
    """Of the value model, or of the head. The other settings of the optimizer are the policy's."""
    value_coef: float = 0.1
    """"head", "yes_no": what the value loss is multiplied by where it is added to the policy's."""
    value_clip: float = 0.0
    """"model", "head": distance from the value before the update beyond which a value that moves away from its return
    has no gradient; 0 clips nothing. Values move only after the first of `updates_per_batch`."""
    updates_per_batch: int = 1
    """"model": optimizer steps of the value model on each batch."""
    path: Path = Path("")
    """"model": directory of the value model's body, with the policy's tokenizer; empty takes the policy's starting
    weights."""
    stop_gradient: bool = True
    """"head": whether the value loss leaves the policy's body alone."""
    question: str = "\nWill the task be solved in the end? Answer:"
    """"yes_no": appended to what the policy has read so far."""
    yes: str = " Yes"
    """"yes_no": the word after the question that stands for `reward_high`; one token of the model."""
    no: str = " No"
    """"yes_no": the word that stands for `reward_low`; one token of the model."""
    question_every: int = 0
    """"yes_no": sampled tokens after which it is asked again inside a turn; 0 asks at the start of each turn only."""
    reward_low: float = 0.0
    """"yes_no": the least reward; rewards are rescaled so that it is 0."""
    reward_high: float = 1.0
    """"yes_no": the greatest reward; rescaled, it is 1. A trajectory's reward outside of the two ends the run."""

    @property
    def on(self) -> bool:
        """Whether there is a critic."""
        return self.kind != "none"

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r} ([learner.critic])")
        for known in fields(self):
            value = getattr(self, known.name)
            if known.name != "kind" and known.name not in _READS[self.kind] and value != known.default:
                kinds = " or ".join(f'"{kind}"' for kind in KINDS if known.name in _READS[kind])
                raise ConfigError(
                    f'{known.name} = {value!r} is not used with kind = "{self.kind}": it is for {kinds} '
                    "([learner.critic])"
                )
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be from 0 to 1, got {getattr(self, name)} ([learner.critic])")
        for name, least, unit in (
            ("critic_warmup_steps", 0, "optimizer steps"),
            ("updates_per_batch", 1, "optimizer steps"),
            ("question_every", 0, "tokens"),
            ("learning_rate", 0.0, ""),
            ("value_coef", 0.0, ""),
            ("value_clip", 0.0, ""),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name} must be >= {least} {unit}".rstrip() + f", got {value} ([learner.critic])")
        if not (math.isfinite(self.reward_high - self.reward_low) and self.reward_low < self.reward_high):
            raise ConfigError(
                f"reward_low must be below reward_high, got {self.reward_low} and {self.reward_high} ([learner.critic])"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of a yes/no critic in the model's tokens."""

    token_ids: tuple[int, ...]
    yes: int
    no: int


def check_critic(settings: CriticSettings, policy: Path) -> None:
    """Raise ConfigError where the files of the `policy` model, or of the value model, cannot do what is asked."""
    if settings.kind == "yes_no":
        read_question(settings, policy)
    if settings.kind == "model" and settings.path != Path(""):
        if not any(settings.path.glob("*.safetensors")) or not (settings.path / "config.json").is_file():
            raise ConfigError(f"path: {settings.path} holds no model in Hugging Face form ([learner.critic])")
        check_same_vocabulary(policy, settings.path, "[learner.critic]")


def read_question(settings: CriticSettings, directory: Path) -> Question:
    """Return the question as the tokenizer of the model in `directory` reads it.

    Raises: ConfigError where an answer is not one token, both are the same one, or the question is empty.
    """
    tokenizer = tokenizer_of(directory)

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    token_ids = encoded(settings.question)
    if not token_ids:
        raise ConfigError(f"question must hold a token, got {settings.question!r} ([learner.critic])")
    answers = {name: encoded(getattr(settings, name)) for name in ("yes", "no")}
    for name, found in answers.items():
        if len(found) != 1:
            raise ConfigError(
                f"{name} = {getattr(settings, name)!r} must be one token of the model {directory}, it is {len(found)} "
                "([learner.critic]); a space in front often matters"
            )
    if answers["yes"] == answers["no"]:
        raise ConfigError(f"yes and no are the same token, {settings.yes!r} ([learner.critic])")
    return Question(token_ids=tuple(token_ids), yes=answers["yes"][0], no=answers["no"][0])
