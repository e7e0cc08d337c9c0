"""Streams that are sent while their completion is sampled: what is said of it, and its text as far as it is sure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import trio

from asyncrl.gateway.http import Refused
from asyncrl.tokens import ChatRenderer
from asyncrl.types import TokenIds

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a character is decoded to whose last bytes have not been sampled


class Live:
    """What a face says of an answer in the making, and the client takes at its own pace.

    All that is said waits here until it is taken: no more than the answer, which has its limit of tokens.
    """

    def __init__(self, error_part: Callable[[Refused], bytes]) -> None:
        """`error_part` is what is said of a request that fails when the stream has begun."""
        self._error_part = error_part
        self._said: list[bytes] = []
        self._news = trio.Event()
        self._over = False
        self._begun = False
        self._refused: Refused | None = None
        self.headers: dict[str, str] = {}
        """Of the answer; fixed once anything has been said."""
        self.left = False
        """Whether nobody takes it any more."""

    def say(self, part: bytes) -> None:
        """Add a part."""
        self._begun = True
        self._said.append(part)
        self._wake()

    def end(self, refused: Refused | None = None) -> None:
        """Say no more; `refused` where the request has failed."""
        if refused is not None and self._begun:
            self.say(self._error_part(refused))
        self._refused, self._over = refused, True
        self._wake()

    async def wait_begun(self) -> None:
        """Return when anything has been said. Raises: Refused where the request fails first."""
        while not (self._begun or self._over):
            await self._news.wait()
        if self._refused is not None and not self._begun:
            raise self._refused

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield what is said, until there is no more or nobody asks."""
        try:
            while self._said or not self._over:
                if not self._said:
                    await self._news.wait()
                    continue
                said, self._said = self._said, []
                yield b"".join(said)
        finally:
            self.left = True

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()


class GrowingText:
    """The text of a completion in the making, as far as nothing that follows can change it.

    Example:
        >>> text = GrowingText(renderer, stops=("END",))                          # doctest: +SKIP
        >>> text.take(renderer.encode("Hello E")), text.take(renderer.encode("Hello EN"))  # doctest: +SKIP
        ('Hello ', '')
    """

    def __init__(self, renderer: ChatRenderer, *, stops: Sequence[str] = (), sure: Callable[[str], int] = len) -> None:
        """`sure` returns how much of a text may be shown: what may turn out to be a tool call waits."""
        self._renderer = renderer
        self._stops = tuple(stops)
        self._sure = sure
        self._first = self._read = 0
        """Ids before `_read` are in the text; those from `_first` on are decoded with what follows, as they may change
        it."""
        self._text = ""
        self.shown = ""
        """What `take` has returned."""
        self.is_stopped = False
        """Whether a stop string is in it: what follows is not wanted."""

    def take(self, token_ids: TokenIds) -> str:
        """Return what can be shown more, now that there are these ids from the start."""
        before = self._renderer.decode(TokenIds(token_ids[self._first : self._read]))
        text = self._renderer.decode(TokenIds(token_ids[self._first :]))
        if len(text) > len(before) and not text.endswith(_UNFINISHED):
            self._text += text[len(before) :]
            self._first, self._read = self._read, len(token_ids)
        self.is_stopped = any(stop in self._text for stop in self._stops)
        if self.is_stopped:
            return ""  # where it ends is found when the completion is there
        end = min(self._sure(self._text), len(self._text) - self._may_begin_a_stop())
        return self._show(self._text[:end])

    def finish(self, text: str) -> str:
        """Return what is left to show of the whole text."""
        return self._show(text)

    def _show(self, text: str) -> str:
        more = text[len(self.shown) :]
        self.shown += more
        return more

    def _may_begin_a_stop(self) -> int:
        return max((begun_at_end(self._text, stop) for stop in self._stops), default=0)


def begun_at_end(text: str, word: str) -> int:
    """Return how many characters at the end of a text are the beginning of a word.

    Example:
        >>> begun_at_end("so <tool", "<tool_call>"), begun_at_end("so", "<tool_call>")
        (5, 0)
    """
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
