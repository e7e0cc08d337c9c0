"""Supervised training on demonstrations before the first rollout: which ones a step takes, and what came of it.

Every step is an optimizer step, so the policy version counts it. The optimizer's moments go on into what follows; the
learning rate does not: the warm start has its own, and `[learner]`'s warmup begins after it. The likelihood that rises
is that of the distribution which rollouts sample from, at the run's temperature.

The frozen reference of a KL term and an averaged teacher do not learn along: they begin at the weights of [model]
path. To hold the policy to what it learned here, end with steps = 0 ([run]) and start a new run from the checkpoint's
model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from asyncrl.demonstrations import TOO_LONG, Demonstrations
from asyncrl.errors import ConfigError
from asyncrl.protocols import Learner
from asyncrl.types import Segment

_MAX_NATS = 700.0  # exp() of more is not a float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """What is learned from demonstrations before the first rollout.

    Example:
        >>> WarmStartSettings(path=Path("demonstrations.jsonl"), epochs=3).enabled
        True
    """

    path: Path = Path("")
    """File of demonstrations, as `asyncrl.demonstrations` reads it; empty is no warm start."""
    epochs: int = 1
    """Times that every demonstration is trained on."""
    steps: int = 0
    """Optimizer steps instead of `epochs`; 0 goes by the epochs."""
    sequences_per_step: int = 16
    """Demonstrations of one optimizer step; an epoch's last ones share a step with the next epoch's first."""
    learning_rate: float = 1e-5
    """Of the warm start alone."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0; constant after."""
    seed: int = 0
    """Of the order, and of which demonstrations are held out."""
    held_out_share: float = 0.1
    """Share of the demonstrations that is never trained on and gives the held-out loss; 0 measures none."""
    measure_every_steps: int = 10
    """Optimizer steps between measurements of the held-out loss; before the first and after the last in any case."""
    max_tokens: int = 0
    """Longest demonstration; 0 takes the engine's max_model_len."""
    too_long: str = "refuse"
    """What happens to a longer one: "refuse" ends the command, "drop" leaves it out and counts it."""

    @property
    def enabled(self) -> bool:
        """Whether there is a warm start."""
        return self.path != Path("")

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        least = {"epochs": 1, "steps": 0, "sequences_per_step": 1, "warmup_steps": 0, "measure_every_steps": 1}
        for name, lowest in {**least, "max_tokens": 0}.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be >= {lowest}, got {getattr(self, name)} ([warm_start])")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"learning_rate must be > 0, got {self.learning_rate} ([warm_start])")
        if not 0 <= self.held_out_share < 1:
            raise ConfigError(f"held_out_share must be from 0 to below 1, got {self.held_out_share} ([warm_start])")
        if self.too_long not in TOO_LONG:
            raise ConfigError(f"too_long must be one of {', '.join(TOO_LONG)}, got {self.too_long!r} ([warm_start])")
        if self.steps and self.epochs != 1:
            raise ConfigError(f"epochs = {self.epochs} and steps = {self.steps}: give one of them ([warm_start])")


class WarmStart:
    """The demonstrations of one run in the order of its seed, and how many steps of them are taken."""

    def __init__(
        self, demonstrations: Demonstrations, settings: WarmStartSettings, *, state: Mapping[str, Any] | None = None
    ) -> None:
        """`state` is what an earlier `state()` returned: this goes on after it.

        Raises: ConfigError where nothing is left to train on, or the file is not the one that `state` is about.
        """
        if state is not None and state["digest"] != demonstrations.digest:
            raise ConfigError(
                f"path: {settings.path} is not the file that the run was started with: its content has changed "
                f"([warm_start])"
            )
        self._settings = settings
        self._digest = demonstrations.digest
        self._num_dropped = demonstrations.num_dropped
        self._train, self._held_out = split(demonstrations.segments, share=settings.held_out_share, seed=settings.seed)
        if not self._train:
            raise ConfigError(
                f"held_out_share = {settings.held_out_share} of {len(demonstrations.segments)} demonstrations leaves "
                f"none to train on ([warm_start])"
            )
        self._orders: dict[int, list[int]] = {}
        self.steps_done = 0 if state is None else int(state["steps_done"])
        self.num_steps = settings.steps or math.ceil(settings.epochs * len(self._train) / settings.sequences_per_step)

    @property
    def is_over(self) -> bool:
        """Whether every step is taken."""
        return is_over(self.state())

    def describe(self) -> str:
        """Return the plan in words."""
        words = f"{len(self._train)} demonstrations in {self.num_steps} steps, {len(self._held_out)} held out"
        if self._num_dropped:
            words += f", {self._num_dropped} dropped for their length"
        return words + (f", {self.steps_done} steps taken" if self.steps_done else "")

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on needs (JSON-like)."""
        return {"steps_done": self.steps_done, "num_steps": self.num_steps, "digest": self._digest}

    async def step(self, learner: Learner) -> dict[str, float]:
        """Take the next step and return its record, the held-out loss included where it is due. Raises: LearnerError.

        Keys besides the learner's own: step, num_steps, version, sequences, stepped (0 where the learner skipped it);
        held_out_loss (nats a token) and held_out_perplexity; held_out_perplexity_before, in the first record.
        """
        record: dict[str, float] = {}
        if self.steps_done == 0 and self._held_out:
            record["held_out_perplexity_before"] = _perplexity(await learner.supervised_loss(self._held_out))
        batch = self.batch(self.steps_done)
        result = await learner.supervised_step(batch, learning_rate=self._learning_rate())
        self.steps_done += 1
        record |= {
            **result.metrics,
            "step": self.steps_done,
            "num_steps": self.num_steps,
            "version": result.version,
            "sequences": len(batch),
            "stepped": float(result.stepped),
        }
        due = self.is_over or self.steps_done % self._settings.measure_every_steps == 0
        if due and self._held_out:
            loss = await learner.supervised_loss(self._held_out)
            record |= {"held_out_loss": loss, "held_out_perplexity": _perplexity(loss)}
        return record

    def batch(self, step: int) -> list[Segment]:
        """Return the demonstrations of a step, counted from 0: the same ones in every process of the same settings."""
        size, count = self._settings.sequences_per_step, len(self._train)
        end = (step + 1) * size if self._settings.steps else min((step + 1) * size, self._settings.epochs * count)
        return [self._train[self._order(place // count)[place % count]] for place in range(step * size, end)]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a step that does not hold more than an epoch spans two of them
                self._orders.clear()
            order = list(range(len(self._train)))
            Random(f"{self._settings.seed}/{epoch}").shuffle(order)
            self._orders[epoch] = order
        return self._orders[epoch]

    def _learning_rate(self) -> float:
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * (min(1.0, (self.steps_done + 1) / warmup) if warmup else 1.0)


def is_over(state: Mapping[str, Any]) -> bool:
    """Tell from a warm start's state whether every step is taken."""
    return bool(state["steps_done"] >= state["num_steps"])


def split(segments: Sequence[Segment], *, share: float, seed: int) -> tuple[list[Segment], list[Segment]]:
    """Return (train, held out): by the demonstrations' tokens and the seed, wherever they stand in the file.

    Equal demonstrations go to the same side. A share above 0 holds out at least one.
    """
    if not share:
        return list(segments), []
    keys = [hashlib.sha256(f"{seed}/".encode() + segment.token_ids.tobytes()).digest() for segment in segments]
    last = sorted(keys)[max(1, round(share * len(keys))) - 1]
    train = [segment for segment, key in zip(segments, keys, strict=True) if key > last]
    held_out = [segment for segment, key in zip(segments, keys, strict=True) if key <= last]
    return train, held_out


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, _MAX_NATS))
