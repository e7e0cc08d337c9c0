"""One completion in the making, which may pass from an engine that dies to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.protocols import Progress, Watch
from asyncrl.types import Completion, FinishReason, Logprobs, PolicyVersion, TokenIds, TokenSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one engine has sampled of a completion."""

    token_ids: TokenIds
    """[n]"""
    behaviour_logprobs: Logprobs
    """[n] nats, <= 0."""
    spans: tuple[TokenSpan, ...]
    """Cover exactly the n tokens, in order."""
    finish_reason: FinishReason | None
    """None where the engine did not come to an end."""

    def before(self, version: PolicyVersion) -> Part:
        """Return what comes before the first token of a version; all where there is none."""
        end = next((span.start for span in self.spans if span.version == version), None)
        if end is None:
            return self
        return Part(
            token_ids=TokenIds(self.token_ids[:end]),
            behaviour_logprobs=Logprobs(self.behaviour_logprobs[:end]),
            spans=tuple(span for span in self.spans if span.end <= end),
            finish_reason=None,
        )

    def ended(self) -> Part:
        """Return it as a completion that has come to its end."""
        return replace(self, finish_reason=FinishReason.STOP)


class Draft:
    """What was asked for, and what has been sampled of it until now. Mutable, owned by the task that waits for it.

    An engine adds to it and may then fail: what was added stays, and the next engine goes on behind it.

    Example:
        >>> draft = Draft(TokenIds([7]), max_tokens=3, trajectory_id="0-0")
        >>> part = Part(token_ids=TokenIds([8]), behaviour_logprobs=Logprobs([-0.5]),
        ...             spans=(TokenSpan(start=0, end=1, version=4),), finish_reason=None)
        >>> draft.take(part, "engine 0")
        >>> list(draft.context()), draft.is_whole
        ([7, 8], False)
    """

    def __init__(
        self,
        prompt: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.trajectory_id = trajectory_id
        self.stop_token_ids = tuple(stop_token_ids)
        self.watch = watch
        """Who hears of it before it is whole, if anybody."""
        self.token_ids = TokenIds()
        self.behaviour_logprobs = Logprobs()
        self.spans: list[TokenSpan] = []
        self.finish_reason: FinishReason | None = None
        self.engines: list[str] = []
        """Who sampled something of it, in order."""
        self.moved_at: list[int] = []
        """How many tokens there were each time an engine had run it and failed."""

    @property
    def is_whole(self) -> bool:
        """True once an engine has come to an end."""
        return self.finish_reason is not None

    def context(self) -> TokenIds:
        """Return the tokens that the next one follows: the prompt, and what has been sampled."""
        return TokenIds([*self.prompt, *self.token_ids])

    def show(self, part: Part) -> bool:
        """Tell of what an engine has sampled and will add; return whether it is to end there."""
        assert self.watch is not None
        progress = Progress(
            token_ids=TokenIds(self.token_ids + part.token_ids),
            behaviour_logprobs=Logprobs(self.behaviour_logprobs + part.behaviour_logprobs),
            spans=tuple(self._spans_with(part)),
        )
        return self.watch(progress)

    def take(self, part: Part, engine: str) -> None:
        """Add what an engine has sampled."""
        assert not self.is_whole
        self.spans = self._spans_with(part)
        self.token_ids += part.token_ids
        self.behaviour_logprobs += part.behaviour_logprobs
        if part.token_ids and self.engines[-1:] != [engine]:
            self.engines.append(engine)
        self.finish_reason = part.finish_reason

    def _spans_with(self, part: Part) -> list[TokenSpan]:
        offset, spans = len(self.token_ids), list(self.spans)
        for span in part.spans:
            placed = TokenSpan(start=span.start + offset, end=span.end + offset, version=span.version)
            if spans and spans[-1].version == placed.version:
                placed = TokenSpan(start=spans.pop().start, end=placed.end, version=placed.version)
            spans.append(placed)
        return spans

    def completion(self, seconds: float = 0.0) -> Completion:
        """Return it whole; `seconds` is what it took."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=self.token_ids,
            behaviour_logprobs=self.behaviour_logprobs,
            spans=tuple(self.spans),
            finish_reason=self.finish_reason,
            seconds=seconds,
            engine=", ".join(self.engines),
            moved_at=tuple(self.moved_at),
        )
