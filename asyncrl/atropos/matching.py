"""Which tokens of a posted sequence were sampled here, by their ids: with the log-probs and versions they really had.

An unmodified environment says which tokens are to be trained on, and not which weights sampled them; many send no
log-probs, and tokenise text again that they were given. So everything that the gateway samples for environments is kept
here for a while, known by the whole prompt that it was sampled behind. A token of a posted sequence was sampled here
where a completion with exactly the ids before it as its prompt has exactly these ids. Nothing else is trained on: an
end of turn that a chat template put there, and text that came back as other tokens, are context.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncrl.atropos.messages import UNTRAINED, BadField
from asyncrl.types import Completion, Logprobs, PolicyVersion, TokenIds, TokenSpan, Turn

_CLOSE = 1e-3  # nats, in which two engines' words for one log-prob may differ by rounding


@dataclass(slots=True, eq=False)
class _Sampled:
    key: tuple[int, bytes]  # prompt's length and digest
    completion: Completion
    used: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """What of a posted sequence was sampled here."""

    turns: tuple[Turn, ...]
    """Its tokens up to the last one that was sampled."""
    num_unsampled: int
    """Tokens that were to be trained on, and were not sampled here."""


class SampledTokens:
    """What was sampled lately.

    Example:
        >>> from asyncrl.types import FinishReason
        >>> sampled = SampledTokens(max_tokens=1000, end_token_ids={2})
        >>> reply = Completion(token_ids=TokenIds([5, 2]), behaviour_logprobs=Logprobs([-0.5, -0.25]),
        ...                    spans=(TokenSpan(start=0, end=2, version=3),), finish_reason=FinishReason.STOP)
        >>> sampled.add(TokenIds([7, 8]), reply)
        >>> matched = sampled.match(0, [7, 8, 5, 2, 9], [-100, -100, 5, 2, 9])  # the 9 was put there by a template
        >>> list(matched.turns[0].context_token_ids), list(matched.turns[0].completion.token_ids), matched.num_unsampled
        ([7, 8], [5, 2], 1)
    """

    def __init__(self, *, max_tokens: int, end_token_ids: Collection[int]) -> None:
        """At most `max_tokens` sampled tokens are kept; the oldest completions go first."""
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._by_prompt: dict[tuple[int, bytes], list[_Sampled]] = {}
        self._order: deque[_Sampled] = deque()
        self._num_tokens = 0
        self._lengths: Counter[int] = Counter()  # prompt's length -> completions
        self.newest_version: PolicyVersion = 0
        """The newest that sampled a token."""
        self.num_forgotten = 0
        """Completions that made room for newer ones and were in no sequence that was posted by then."""

    def add(self, prompt: TokenIds, completion: Completion) -> None:
        """Note a completion and the whole prompt that it was sampled behind."""
        if not completion.token_ids:
            return
        sampled = _Sampled((len(prompt), _digest(prompt)), completion)
        self._by_prompt.setdefault(sampled.key, []).append(sampled)
        self._order.append(sampled)
        self._num_tokens += len(completion.token_ids)
        self._lengths[len(prompt)] += 1
        self.newest_version = max(self.newest_version, *(span.version for span in completion.spans))
        while self._num_tokens > self._max_tokens and len(self._order) > 1:
            self._forget(self._order.popleft())

    def match(
        self, place: int, tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None = None
    ) -> Matched:
        """Return what of a posted sequence was sampled here.

        Of several equal completions of one prompt it is the one with these `logprobs`, then one that was not taken yet,
        then the oldest. Raises: BadField for sequence `place` where nothing was.
        """
        ids = TokenIds(tokens)
        turns: list[Turn] = []
        taken: list[_Sampled] = []
        done = position = num_trained = 0
        while position < len(ids):
            if mask[position] == UNTRAINED:
                position += 1
                continue
            end = position
            while end < len(ids) and mask[end] != UNTRAINED:
                end += 1
            num_trained += end - position
            while position < end:
                found = self._find(ids, position, end, logprobs)
                if found is None:
                    position += 1
                    continue
                sampled, length = found
                turns.append(
                    Turn(context_token_ids=TokenIds(ids[done:position]), completion=_cut(sampled.completion, length))
                )
                taken.append(sampled)
                position += length
                done = position
        if not taken:
            raise BadField(f"tokens.{place}", self._why(ids, mask))
        for sampled in taken:
            sampled.used = True
        num_sampled = sum(len(turn.completion.token_ids) for turn in turns)
        return Matched(turns=tuple(turns), num_unsampled=num_trained - num_sampled)

    def _find(
        self, ids: TokenIds, start: int, end: int, logprobs: Sequence[float] | None
    ) -> tuple[_Sampled, int] | None:
        """Return the completion whose prompt is all before `start`, and how many of its ids stand there."""
        if start not in self._lengths:
            return None
        found = [
            (sampled, length)
            for sampled in self._by_prompt.get((start, _digest(ids[:start])), ())
            if (length := self._length(sampled.completion.token_ids, ids, start, end))
        ]
        if not found:
            return None
        return min(found, key=lambda one: (-one[1], not _are_close(one[0], start, one[1], logprobs), one[0].used))

    def _length(self, sampled: TokenIds, ids: TokenIds, start: int, end: int) -> int:
        """Return how many of the sampled ids stand at `start`; 0 where other ones follow before they, or `end`, end.

        An environment may cut a completion, or leave its end token off.
        """
        length = min(len(sampled), end - start)
        if ids[start : start + length] == sampled[:length]:
            return length
        if sampled[-1] in self._end_token_ids and length == len(sampled):
            length -= 1
            return length if ids[start : start + length] == sampled[:length] else 0
        return 0

    def _why(self, ids: TokenIds, mask: Sequence[int]) -> str:
        first = next((position for position, value in enumerate(mask) if value != UNTRAINED), None)
        if first is None:
            return "no token of it is to be trained on"
        known = self._by_prompt.get((first, _digest(ids[:first])), ())
        if known:
            return (
                f"the tokens from {first} on are none of the {len(known)} completions that were sampled behind the "
                "tokens before them: text that was tokenised again may be other tokens"
            )
        return (
            f"nothing was sampled here behind its first {first} tokens: does the environment ask this run's gateway, "
            "and tokenise with the model's own tokenizer and chat template?"
        )

    def _forget(self, sampled: _Sampled) -> None:
        others = self._by_prompt[sampled.key]
        others.remove(sampled)
        if not others:
            del self._by_prompt[sampled.key]
        length = sampled.key[0]
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        self._num_tokens -= len(sampled.completion.token_ids)
        self.num_forgotten += not sampled.used


def _are_close(sampled: _Sampled, start: int, length: int, logprobs: Sequence[float] | None) -> bool:
    if logprobs is None:
        return True
    own = sampled.completion.behaviour_logprobs
    return all(abs(own[place] - logprobs[start + place]) < _CLOSE for place in range(length))


def _cut(completion: Completion, length: int) -> Completion:
    """Return the first tokens of a completion."""
    if length == len(completion.token_ids):
        return completion
    spans = [
        TokenSpan(start=span.start, end=min(span.end, length), version=span.version)
        for span in completion.spans
        if span.start < length
    ]
    return Completion(
        token_ids=TokenIds(completion.token_ids[:length]),
        behaviour_logprobs=Logprobs(completion.behaviour_logprobs[:length]),
        spans=tuple(spans),
        finish_reason=completion.finish_reason,
        engine=completion.engine,
    )


def _digest(ids: array[int]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
