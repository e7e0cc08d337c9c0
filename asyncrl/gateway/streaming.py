"""The choices of one request, told while they are sampled: each piece once, and the last one when all is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from asyncrl.gateway.live import GrowingText, Live
from asyncrl.gateway.sampling import Choice, Wanted, version_names
from asyncrl.protocols import Progress, Watch
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Logprobs, TokenIds, TokenSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What has been sampled of a choice since its last piece."""

    index: int
    """Of the choice."""
    is_first: bool
    text: str
    """May lag behind the tokens: a character, a stop string or a tool call that is not whole is not shown yet."""
    token_ids: TokenIds
    logprobs: Logprobs
    spans: tuple[TokenSpan, ...]
    """Of the whole choice so far."""


class _Told:
    """One choice, as far as it has been told."""

    def __init__(self, text: GrowingText) -> None:
        self.text = text
        self.num_tokens = 0
        self.is_begun = False


class Stream:
    """Tells of each choice of a request, and ends a choice whose stop string has come, or that nobody waits for."""

    def __init__(
        self,
        live: Live,
        renderer: ChatRenderer,
        wanted: Wanted,
        tell: Callable[[Piece], None],
        *,
        sure: Callable[[str], int] = len,
        first_index: int = 0,
    ) -> None:
        """`tell` says a piece. The choices are numbered from `first_index` on."""
        self._live = live
        self._wanted = wanted
        self._tell = tell
        self._first_index = first_index
        self._told = [_Told(GrowingText(renderer, stops=wanted.stop, sure=sure)) for _ in range(wanted.n)]

    def watches(self) -> list[Watch]:
        """Return who hears of each choice."""
        return [partial(self._hear, place) for place in range(len(self._told))]

    def shown(self, place: int) -> str:
        """Return the text that was told of a choice."""
        return self._told[place].text.shown

    def rest(self, place: int, choice: Choice, text: str) -> Piece:
        """Return what is left to tell of a choice, whose text is `text`."""
        completion = choice.completion
        progress = Progress(
            token_ids=completion.token_ids, behaviour_logprobs=completion.behaviour_logprobs, spans=completion.spans
        )
        return self._piece(place, self._told[place].text.finish(text), progress)

    def _hear(self, place: int, progress: Progress) -> bool:
        told = self._told[place]
        text = told.text.take(progress.token_ids)
        if told.text.is_stopped:
            return True
        self._tell(self._piece(place, text, progress))
        return self._live.left

    def _piece(self, place: int, text: str, progress: Progress) -> Piece:
        told = self._told[place]
        if not self._live.headers:
            self._live.headers = headers_of(progress.spans, self._wanted)
        piece = Piece(
            index=self._first_index + place,
            is_first=not told.is_begun,
            text=text,
            token_ids=TokenIds(progress.token_ids[told.num_tokens :]),
            logprobs=Logprobs(progress.behaviour_logprobs[told.num_tokens :]),
            spans=progress.spans,
        )
        told.is_begun, told.num_tokens = True, max(told.num_tokens, len(progress.token_ids))
        return piece


def headers_of(spans: tuple[TokenSpan, ...], wanted: Wanted) -> dict[str, str]:
    """Return the headers that every face sends: the versions that sampled the answer, and what was ignored."""
    headers = {"asyncrl-version": version_names(spans)}
    if wanted.ignored:
        headers["asyncrl-ignored"] = ", ".join(wanted.ignored).encode("ascii", "replace").decode()
    return headers
