"""What can be told from one completion's tokens or text alone. Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from asyncrl.errors import ConfigError


def repetition_n(token_ids: Sequence[int], n: int = 3) -> float:
    """Return 1 - (distinct n-grams) / (n-grams), in [0, 1); 0 for fewer than n tokens.

    Raises: ConfigError for n < 1.
    """
    if n < 1:
        raise ConfigError(f"repetition_n: n must be >= 1 tokens, got {n}")
    total = len(token_ids) - n + 1
    if total < 1:
        return 0.0
    return 1.0 - len({tuple(token_ids[i : i + n]) for i in range(total)}) / total


def longest_run_share(token_ids: Sequence[int]) -> float:
    """Return the longest run of one repeated token over the length, in (0, 1]; 0 for no tokens."""
    longest, run, previous = 0, 0, None
    for token in token_ids:
        run = run + 1 if token == previous else 1
        longest, previous = max(longest, run), token
    return longest / len(token_ids) if token_ids else 0.0


def compression_ratio(text: str, last_chars: int = 10_000) -> float:
    """Return the UTF-8 bytes of the last characters over their zlib-compressed size; above about 10 it is a loop."""
    raw = text[-last_chars:].encode("utf-8", "surrogatepass") if last_chars > 0 else b""
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0
