"""Whether engines and learner fit on the one GPU that they share, side by side or in turns.

Of the learner only what is there between two steps can be told beforehand: weights, masters, moments, sums of
gradients, and the models that it asks. Activations come on top (`microbatch_tokens`, `gradient_checkpointing`), and
are what the rest must do for.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from asyncrl.configs import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.lora_settings import adapter_size
from asyncrl.learner.settings import DTYPE_BYTES
from asyncrl.weight_sync.names import checkpoint_shapes

_GIB = 2**30
_VLLM_UTILIZATION = 0.92  # vLLM's own default of gpu_memory_utilization
_ENGINE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}
_QUANTISED_BYTES = 0.5  # of a weight, at least: four bits
_STATES = 4  # of a trained number, in the masters' dtype: master, two moments, sum of gradients
_ASK_S = 20.0  # a driver that hangs must not hang a check


@dataclass(frozen=True, slots=True, kw_only=True)
class CardShares:
    """What each side takes of the GPU that they share, in bytes."""

    card: float
    engines: float
    learner: float
    """At least, between two steps."""
    in_turns: bool

    @property
    def left(self) -> float:
        """For the learner's activations."""
        return self.card - self.learner - (0.0 if self.in_turns else self.engines)

    def __str__(self) -> str:
        how = "in turns" if self.in_turns else "side by side"
        return (
            f"{self.card / _GIB:.1f} GiB, {how}: engines {self.engines / _GIB:.1f} GiB, learner at least "
            f"{self.learner / _GIB:.1f} GiB, {self.left / _GIB:.1f} GiB left for its activations"
        )


def card_shares(config: Config) -> CardShares | None:
    """Return the shares, or None where no card is shared or nothing tells its size."""
    engine, learner = config.engine, config.learner
    learners = {str(rank) for rank in range(learner.ranks)}
    if config.engines_elsewhere or config.roles.learner or not config.samples:
        return None
    servers = [set(entry.split(",")) for entry in engine.devices or ("0",) * engine.count]
    beside = max(sum(card_id in devices for devices in servers) for card_id in learners)
    if learner.device == "cpu" or not beside:
        return None
    card = engine.card_gib * _GIB or _size_of_first_card()
    if not card:
        return None
    return CardShares(
        card=card,
        engines=beside * _engine_bytes(config, card),
        learner=_learner_bytes(config),
        in_turns=engine.colocated,
    )


def check_card(config: Config) -> None:
    """Raise ConfigError where engines and learner cannot fit on the GPU that they share."""
    shares = card_shares(config)
    if shares is None or (shares.left > 0 and shares.engines <= shares.card):
        return
    how = "lower kv_cache_gib" if config.engine.kv_cache_gib else "lower extra.gpu_memory_utilization"
    turns = "" if shares.in_turns else ", or let them take turns (colocated = true)"
    raise ConfigError(f"the GPU does not hold both, of {shares}: {how} ([engine]){turns}, or train adapters alone "
                      "([learner.lora])")  # fmt: skip


def _engine_bytes(config: Config, card: float) -> float:
    engine = config.engine
    if not engine.kv_cache_gib:
        return card * float(engine.extra.get("gpu_memory_utilization", _VLLM_UTILIZATION))
    bytes_each = _QUANTISED_BYTES if engine.quantisation else _ENGINE_BYTES[engine.dtype]
    return _numbers(config.model.path) * bytes_each / engine.num_ranks + engine.kv_cache_gib * _GIB


def _learner_bytes(config: Config) -> float:
    learner, numbers = config.learner, _numbers(config.model.path)
    narrow, wide = DTYPE_BYTES[learner.dtype], max(4, DTYPE_BYTES[learner.dtype])
    trained = adapter_size(learner.lora, config.model.path) if learner.lora.enabled else numbers
    frozen = numbers if learner.lora.enabled else 0
    copied = trained if learner.ranks == 1 else 0  # what several ranks train are the masters themselves
    found = (frozen + copied) * narrow + trained * wide * _STATES
    if learner.critic.kind == "model":
        path = learner.critic.path if learner.critic.path != Path("") else config.model.path
        found += _numbers(path) * (narrow + wide * _STATES)
    if learner.needs_reference and learner.reference.source == "model":
        found += _numbers(learner.reference.path) * narrow
    elif learner.needs_reference and learner.reference.source == "start" and not learner.lora.enabled:
        found += numbers * narrow
    if learner.teacher.source == "model":
        found += _numbers(learner.teacher.path) * narrow
    elif learner.teacher.ema_rate:
        found += numbers * (narrow + wide)
    return found / learner.ranks


def _numbers(model: Path) -> int:
    return sum(math.prod(shape) for shape in checkpoint_shapes(model).values())


def _size_of_first_card() -> float:
    """Return bytes as the driver says, 0 where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0.0
    argv = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout
        return float(answer.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(f"{' '.join(argv)} does not tell the card's size: {error}; set card_gib ([engine])") from None
