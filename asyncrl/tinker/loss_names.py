"""The losses of the service by name, made of those of `asyncrl.losses`, each a sum over tokens. Imports no torch.

With p the policy's probability of the target, q the sampler's, A the advantage and w the weight of a token:

    cross_entropy          sum_t  -w log p
    importance_sampling    sum_t  -(p/q) A
    ppo                    sum_t  -min((p/q) A, clip(p/q, low, high) A)
    cispo                  sum_t  -sg(clip(p/q, low, high)) A log p

`low` and `high` are thresholds of the ratio itself: 0.8 and 1.2 for ppo, 0 and 4 for cispo, or `clip_low_threshold` and
`clip_high_threshold`. Source: the formulas and defaults on the page "Loss Functions" of Tinker's documentation; PPO,
arXiv:1707.06347; CISPO, arXiv:2506.13585.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.losses import resolve
from asyncrl.tinker.orders import Row

_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


def _ppo(low: float, high: float) -> dict[str, float]:
    return {"clip_low": 1.0 - low, "clip_high": high - 1.0}


def _cispo(low: float, high: float) -> dict[str, float]:
    return {"ratio_low": low, "ratio_high": high}


_CLIPPED: Mapping[str, tuple[float, float, Callable[[float, float], dict[str, float]]]] = MappingProxyType(
    {"ppo": (0.8, 1.2, _ppo), "cispo": (0.0, 4.0, _cispo)}
)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")


def loss_of(name: str, options: Mapping[str, float]) -> tuple[str, dict[str, Any]]:
    """Return the name and settings of the loss in `asyncrl.losses`. Raises: ConfigError.

    Example:
        >>> loss_of("cispo", {"clip_high_threshold": 5.0})
        ('cispo', {'aggregation': 'sum', 'ratio_low': 0.0, 'ratio_high': 5.0})
    """
    if name not in LOSSES:
        raise ConfigError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r}")
    known = _THRESHOLDS if name in _CLIPPED else ()
    for option in options:
        if option not in known:
            raise ConfigError(f"loss_fn {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    settings: dict[str, Any] = {"aggregation": "sum"}
    if name in _CLIPPED:
        low, high, settings_of = _CLIPPED[name]
        low, high = (options.get(option, usual) for option, usual in zip(_THRESHOLDS, (low, high), strict=True))
        if not 0 <= low <= 1 <= high:
            raise ConfigError(
                f"loss_fn {name}: clip_low_threshold must be from 0 to 1 and clip_high_threshold at least 1 (they are "
                f"ratios, not distances from 1), got {low:g} and {high:g}"
            )
        settings |= settings_of(low, high)
    own = "reinforce" if name == "cross_entropy" else name  # its sum of -A log p, with the weights for advantages
    resolve(own, **settings)
    return own, settings


def check_rows(name: str, rows: list[Row], *, vocab_size: int, max_positions: int) -> None:
    """Raise ConfigError, naming the row, unless the rows hold what the loss reads and the model can read them."""
    needed = ("logprobs", "advantages") if name != "cross_entropy" else ()
    for index, row in enumerate(rows):
        count = len(row.token_ids)
        if not 0 < count <= max_positions:
            raise ConfigError(f"data[{index}] has {count} tokens; 1 to {max_positions} are allowed")
        lengths = {"target_tokens": len(row.target_ids)} | {key: len(found) for key, found in row.values.items()}
        for key, length in lengths.items():
            if length != count:
                raise ConfigError(f"data[{index}]: {key} has {length} entries for {count} tokens")
        for key in row.values:
            if key not in (*needed, "weights"):
                raise ConfigError(f"data[{index}]: loss_fn {name} reads no {key!r}; {', '.join(needed) or 'weights'}")
        for key in needed:
            if key not in row.values:
                raise ConfigError(f"data[{index}]: loss_fn {name} needs {key}")
        for key, ids in (("model_input", row.token_ids), ("target_tokens", row.target_ids)):
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise ConfigError(f"data[{index}]: {key} must hold tokens from 0 to {vocab_size - 1}")
