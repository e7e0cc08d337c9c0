"""The model that the faces serve, and what every face asks of it: prompts from messages, and recorded choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio

from asyncrl.errors import ConfigError
from asyncrl.gateway.http import Refused
from asyncrl.gateway.live import GrowingText
from asyncrl.gateway.record import Known, fingerprints, followed_by
from asyncrl.gateway.sampling import Choice, Wanted, choice_of
from asyncrl.gateway.session import Session
from asyncrl.gateway.settings import GatewaySettings, ToolFormat
from asyncrl.gateway.tool_calls import format_of
from asyncrl.protocols import Progress, Watch
from asyncrl.tokens import ChatRenderer, Message
from asyncrl.types import Completion, TokenIds

_INLINE_CHARS = 20_000  # more takes longer to tokenise than other requests may wait: about 5 ms
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What every face knows."""

    renderer: ChatRenderer
    settings: GatewaySettings
    temperature: float
    max_model_len: int
    name: str = "policy"
    tool_format: ToolFormat = ToolFormat.NONE
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    """For long texts."""

    @classmethod
    def of(
        cls,
        renderer: ChatRenderer,
        settings: GatewaySettings,
        *,
        temperature: float,
        max_model_len: int,
        name: str = "policy",
    ) -> ServedModel:
        """Return it with the tool format that its template shows."""
        return cls(
            renderer=renderer,
            settings=settings,
            temperature=temperature,
            max_model_len=max_model_len,
            name=name,
            tool_format=format_of(renderer.template_text, settings.tool_format),
        )

    def speaking(self, renderer: ChatRenderer) -> ServedModel:
        """Return the same model with another renderer, the one of an environment with a template of its own."""
        form = format_of(renderer.template_text, self.settings.tool_format)
        return replace(self, renderer=renderer, tool_format=form)

    async def encode(self, text: str) -> TokenIds:
        """Return the ids of plain text; nothing is added."""
        return await self._work(len(text), partial(self.renderer.encode, text))

    async def prompt_of(self, messages: Sequence[Message], tools: Tools = (), known: Known | None = None) -> TokenIds:
        """Return a chat request's prompt: what was recorded of it as it was sampled, and the rest rendered.

        Raises: Refused where the template does not take the messages.
        """
        if known is not None:
            messages = messages[known.num_messages :]

        def render() -> TokenIds:
            renderer = self.renderer.with_tools(tools) if tools else self.renderer
            return renderer.start(messages) if known is None else renderer.extend(messages, ended=known.ended)

        try:
            rendered = await self._work(sum(len(message["content"]) for message in messages), render)
        except ConfigError as error:
            raise Refused(400, str(error)) from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # raised by what a template does with them
            raise Refused(400, f"the model's chat template fails on the messages: {error}") from None
        return rendered if known is None else TokenIds(known.token_ids + rendered)

    async def _work(self, length: int, work: Callable[[], TokenIds]) -> TokenIds:
        if length <= _INLINE_CHARS:
            return work()
        return await trio.to_thread.run_sync(work, limiter=self.threads)

    async def sample(
        self, session: Session, prompt: TokenIds, wanted: Wanted, watches: Sequence[Watch] = ()
    ) -> list[Choice]:
        """Return `n` choices of a prompt, sampled beside each other; they are not recorded. `watches` hear of them.

        Raises: Refused where the prompt leaves no room, or no engine could answer.
        """
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise Refused(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt has "
                f"{len(prompt)}: it leaves no room for a reply",
                code="context_length_exceeded",
            )
        limit = min(room, wanted.max_tokens or self.settings.max_tokens or room)
        session.ignored.update(wanted.ignored)
        if not prompt:
            raise Refused(400, "the prompt is empty")
        stops = (*self.renderer.stop_token_ids, *wanted.stop_token_ids)
        if wanted.stop and not watches:
            watches = [self._until_stopped(wanted.stop) for _ in range(wanted.n)]
        if wanted.n == 1:  # as nearly all are
            watch = watches[0] if watches else None
            only = await session.sample(prompt, max_tokens=limit, stop_token_ids=stops, watch=watch)
            return [choice_of(only, wanted, self.renderer)]
        found: dict[int, Completion] = {}
        refused: list[Refused] = []

        async def one(index: int) -> None:
            try:
                found[index] = await session.sample(
                    prompt,
                    max_tokens=limit,
                    stop_token_ids=stops,
                    watch=watches[index] if watches else None,
                )
            except Refused as error:
                refused.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(wanted.n):
                nursery.start_soon(one, index)
        if refused:
            raise refused[0]
        return [choice_of(found[index], wanted, self.renderer) for index in range(wanted.n)]

    def _until_stopped(self, stops: Sequence[str]) -> Watch:
        """Return who ends a completion once a stop string has come: whatever follows would be cut off."""
        text = GrowingText(self.renderer, stops=stops)

        def hear(progress: Progress) -> bool:
            text.take(progress.token_ids)
            return text.is_stopped

        return hear

    async def complete(
        self, session: Session, prompt: TokenIds, wanted: Wanted, watches: Sequence[Watch] = ()
    ) -> list[Choice]:
        """Return recorded choices of a prompt. Raises: Refused."""
        choices = await self.sample(session, prompt, wanted, watches)
        for choice in choices:
            session.record.add(prompt, choice.completion)
        return choices

    async def converse(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Tools,
        wanted: Wanted,
        reply_of: Callable[[int, Choice], Message],
        watches_of: Callable[[TokenIds], Sequence[Watch]] = lambda prompt: (),
    ) -> tuple[TokenIds, list[tuple[Choice, Message]]]:
        """Return the prompt and recorded choices of a chat request, each with the message that it is shown as.

        `watches_of` returns who hears of the choices before, once the prompt is there.
        Raises: Refused.
        """
        known_by = fingerprints(messages, tools)
        prompt = await self.prompt_of(messages, tools, session.record.find(known_by))
        sampled = await self.sample(session, prompt, wanted, watches_of(prompt))
        choices = [(choice, reply_of(place, choice)) for place, choice in enumerate(sampled)]
        for choice, reply in choices:
            session.record.add(prompt, choice.completion, messages=followed_by(known_by[-1], reply))
        return prompt, choices
