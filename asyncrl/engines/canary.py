"""The canary: a short text whose log-probs tell, after every sync, whether an engine computes what the learner does.

Digests compare bytes on their way. Two layers that were exchanged behind them, a kernel that still holds what was there
before, a wrong configuration: those show in what comes out. So with every version the learner says what it makes of a
fixed text, and the engine, which goes on with its requests meanwhile, is asked for the same.

Engine and learner never agree to the last digit, and how far they are apart depends on dtypes and kernels. The distance
is the mean over the text's tokens of the difference between two log-probs, in nats: a single unlikely token may be off
by some tenths where both compute in bfloat16. What is allowed is learnt from the weights that both begin with, which
nothing has been sent of: `_FACTOR` times the largest distance of an engine there, `_FLOOR` at least.

SmolLM2-135M, in bfloat16 on both sides, is 0.02 to 0.035 nats away: 0.16 are allowed. One matrix exchanged with that of
another layer puts it 0.15 to 7 away, a whole layer 0.2 to 15; exchanged norms of neighbours, at 0.05, are not found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncrl.errors import EngineError, WeightMismatch
from asyncrl.tokens import ChatRenderer
from asyncrl.types import TokenIds

_TEXT = """def mean(values):
    total = 0.0
    for value in values:
        total = total + value
    return total / len(values)
"""
_NUM_TOKENS = 32  # a prefill this short is as cheap as a decode step of a few requests
_FACTOR = 5.0  # lower, and training that sharpens the policy trips it; higher, and small wrongs pass
_FLOOR = 0.05  # nats; where both compute in float32 the first distance is rounding, and says little of later ones
_MOST = 0.5  # nats at the start: more is another model, or another arithmetic than ratios can be computed with


class Canary:
    """What the engines of a run are asked after a sync, and how far they may be from the learner.

    Example:
        >>> canary = Canary(TokenIds([5, 6, 7]))
        >>> canary.learn({"engine 0": 0.02})
        >>> canary.tolerance, canary.distance([-1.0, -2.0], [-1.5, -2.0])
        (0.1, 0.25)
    """

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self.tolerance = math.inf
        """Nats; infinite until it is learnt."""

    @classmethod
    def of(cls, renderer: ChatRenderer) -> Canary:
        """Return the canary of a model's tokenizer."""
        return cls(TokenIds(renderer.encode(_TEXT)[:_NUM_TOKENS]))

    def distance(self, found: Sequence[float], expected: Sequence[float]) -> float:
        """Return how far an engine's log-probs are from the learner's, in nats a token."""
        gaps = [abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)]
        distance = sum(gaps) / len(gaps)
        return distance if math.isfinite(distance) else math.inf

    def learn(self, distances: Mapping[str, float]) -> None:
        """Learn the tolerance from engines that hold the weights which the learner began with.

        Raises: WeightMismatch naming the engine that cannot hold them.
        """
        for engine, distance in distances.items():
            if not distance <= _MOST:
                raise WeightMismatch(
                    f"{engine}'s log-probs of a text are {distance:.3f} nats a token from the learner's, both with the "
                    f"weights that the run begins with, and at most {_MOST} can be rounding: are they of the same "
                    "model? canary = false ([weight_sync]) does without this comparison"
                )
        self.tolerance = max(_FLOOR, _FACTOR * max(distances.values()))

    def check(self, engine: str, version: int, distance: float) -> None:
        """Raise WeightMismatch where an engine that holds a version is too far from the learner."""
        if not distance <= self.tolerance:
            raise WeightMismatch(
                f"{engine}, canary of version {version}: its log-probs of a text are {distance:.3f} nats a token from "
                f"the learner's, and {self.tolerance:.3f} are allowed; the digests of all tensors are right"
            )

    def body(self, salt: str) -> dict[str, object]:
        """Return the request for the text's log-probs; `salt` keeps its cached blocks from every other request."""
        return {
            "token_ids": list(self.token_ids),
            "stream": False,
            "cache_salt": salt,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
        }

    def logprobs(self, answer: Mapping[str, object], engine: str) -> list[float]:
        """Return the log-probs of all tokens but the first from what a server answers. Raises: EngineError."""
        entries = answer.get("prompt_logprobs")
        try:
            assert isinstance(entries, list)
            pairs = zip(self.token_ids[1:], entries[1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{engine} gives no log-probs of the canary: {entries!r:.200}") from error
