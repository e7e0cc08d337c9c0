"""What one session has asked and sampled, by token ids: turns that extend each other exactly share a segment.

An agent may hold several conversations in a session, take several choices of one prompt, and rewrite its history. Each
completion goes behind the branch whose ids its prompt extends exactly; where there is none, it begins a branch, whose
context is the whole prompt. So every sampled token is trained on once, in the context that it was really sampled in.

A chat request is text. Where its messages begin with ones that were recorded here, reply included, the recorded ids are
its beginning, and only what comes after them is rendered: a reply is never tokenised again. Messages are known by a
hash over all that came before, so that nothing but ids is kept of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from asyncrl.tokens import Message, build_segments, turn_from_prompt
from asyncrl.types import Completion, FinishReason, Segment, TokenIds, Turn


class Branch:
    """Turns whose ids extend each other: a segment in the making."""

    def __init__(self) -> None:
        self.token_ids = TokenIds()
        """All ids so far, the last completion included."""
        self.turns: list[Turn] = []

    def add(self, prompt: TokenIds, completion: Completion) -> None:
        """Put a turn behind the others."""
        self.turns.append(turn_from_prompt(self.token_ids, prompt, completion))
        self.token_ids = TokenIds(prompt + completion.token_ids)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a recorded reply ends: so many ids into a branch."""

    branch: Branch
    num_tokens: int
    ended: bool
    """Whether the reply's ids end with an end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The recorded beginning of a chat request."""

    token_ids: TokenIds
    num_messages: int
    """How many of the request's messages it stands for."""
    ended: bool


class Record:
    """The branches of one session, and the messages that lead to them.

    Example:
        >>> from asyncrl.types import Logprobs, TokenSpan
        >>> record = Record(end_token_ids={2})
        >>> reply = Completion(token_ids=TokenIds([5, 2]), behaviour_logprobs=Logprobs([-0.5, -0.1]),
        ...                    spans=(TokenSpan(start=0, end=2, version=3),), finish_reason=FinishReason.STOP)
        >>> record.add(TokenIds([7]), reply)
        >>> record.add(TokenIds([7, 5, 2, 9]), reply)  # extends what was recorded
        >>> record.add(TokenIds([7, 6, 2, 9]), reply)  # was rewritten
        >>> [list(segment.token_ids) for segment in record.segments()]
        [[7, 5, 2, 9, 5, 2], [7, 6, 2, 9, 5, 2]]
    """

    def __init__(self, *, end_token_ids: Collection[int], vocab_size: int | None = None) -> None:
        self._end_token_ids = frozenset(end_token_ids)
        self._vocab_size = vocab_size
        self._branches: list[Branch] = []
        self._places: dict[bytes, _Place] = {}
        self.num_turns = 0
        self.last_finish_reason: FinishReason | None = None
        self.truncated = False
        """True where any completion ended at the limit on tokens."""
        self.num_sampled_tokens = 0

    def add(self, prompt: TokenIds, completion: Completion, *, messages: bytes | None = None) -> None:
        """Record a turn. `messages` is the fingerprint of the messages that it answers and of the reply itself."""
        tips = [branch for branch in self._branches if prompt[: len(branch.token_ids)] == branch.token_ids]
        branch = max(tips, key=lambda tip: len(tip.token_ids), default=None)
        if branch is None:
            branch = Branch()
            self._branches.append(branch)
        branch.add(prompt, completion)
        self.num_turns += 1
        self.num_sampled_tokens += len(completion.token_ids)
        self.last_finish_reason = completion.finish_reason
        self.truncated |= completion.finish_reason is FinishReason.LENGTH
        if messages is not None:
            ended = bool(completion.token_ids) and completion.token_ids[-1] in self._end_token_ids
            self._places[messages] = _Place(branch, len(branch.token_ids), ended)

    def find(self, fingerprints: Sequence[bytes]) -> Known | None:
        """Return the longest recorded beginning of a request, which must go on after it. None where there is none.

        `fingerprints` has one entry for each beginning of the request's messages, the shortest first.
        """
        for number in range(len(fingerprints) - 1, 0, -1):
            if (place := self._places.get(fingerprints[number - 1])) is not None:
                ids = TokenIds(place.branch.token_ids[: place.num_tokens])
                return Known(token_ids=ids, num_messages=number, ended=place.ended)
        return None

    @property
    def turns(self) -> list[Turn]:
        """The turns of all branches, one branch after the other; the first of each starts a segment."""
        return [turn for branch in self._branches for turn in branch.turns]

    def segments(self) -> tuple[Segment, ...]:
        """Return what can be trained on. Raises: EnvironmentFault for a completion that contradicts itself."""
        return build_segments(self.turns, end_token_ids=self._end_token_ids, vocab_size=self._vocab_size)


def fingerprints(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[bytes]:
    """Return a hash for each beginning of `messages`, the shortest first, under the tools that were offered."""
    seed = _digest(b"", tools)
    return list(accumulate(messages, lambda before, message: _digest(before, _essence(message)), initial=seed))[1:]


def followed_by(fingerprint: bytes, reply: Message) -> bytes:
    """Return the fingerprint of messages with one more behind them."""
    return _digest(fingerprint, _essence(reply))


def _essence(message: Message) -> list[Any]:
    """Return what of a message the model can see: a call's id is made up here, its arguments are compared as values."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return [message["role"], message.get("content") or "", calls, message.get("name")]


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(value, order="sorted"), digest_size=16).digest()
