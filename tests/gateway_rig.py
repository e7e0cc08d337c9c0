"""A gateway over a sampler that says what a test tells it to, spoken to over real connections."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio
from scripted import write_chat_files

from asyncrl.errors import EngineError
from asyncrl.gateway import Gateway, GatewaySettings, Session
from asyncrl.protocols import Progress, Watch
from asyncrl.serving import listen
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, FinishReason, Logprobs, Task, TokenIds, TokenSpan

TASK = Task(task_id="add", environment="sums")
MAX_MODEL_LEN = 4096

TEMPLATE = (
    "{%- if tools %}<|user|>Call <tool_call> {% for tool in tools %}{{ tool | tojson }}{% endfor %}</s>{% endif %}"
    "{%- for message in messages %}<|{{ 'assistant' if message['role'] == 'assistant' else 'user' }}|>"
    "{{ message['role'] }}: {{ message['content'] }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>"
    "{%- endfor %}{% if add_generation_prompt %}<|assistant|>assistant: {% endif %}"
)


async def trio_checkpoint(count: int) -> None:
    """Wait for nothing."""
    await trio.lowlevel.checkpoint()


def make_renderer(directory: Path, template: str = TEMPLATE) -> ChatRenderer:
    """Return the renderer of byte-level tokens and a template with tools."""
    return ChatRenderer.load(write_chat_files(directory, template=template))


@dataclass
class Scripted:
    """Answers each request with the next text. A `Sampler` that remembers what it was asked."""

    renderer: ChatRenderer
    replies: list[str | Exception] = field(default_factory=list)
    asked: list[TokenIds] = field(default_factory=list)
    asked_with: list[dict[str, Any]] = field(default_factory=list)
    version: int = 3
    hold: trio.Event | None = None
    """Where it is given, nothing is answered before it is set."""
    begun: trio.Event = field(default_factory=trio.Event)
    step: int = 0
    """Where it is given, whoever watches hears of so many tokens more at a time."""
    go_on: Callable[[int], Awaitable[None]] = trio_checkpoint
    """What is waited for after each of them; it is told how many there are."""
    fails_at: int = 0
    """The number of them after which the engines fail."""

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """Return the next reply, cut at the limit; each token has a log-prob of its own."""
        self.asked.append(token_ids)
        self.asked_with.append({"max_tokens": max_tokens, "id": trajectory_id, "stop": tuple(stop_token_ids)})
        reply = self.replies.pop(0) if self.replies else f"reply {len(self.asked)}"
        self.begun.set()
        if self.hold is not None:
            await self.hold.wait()
        await trio.lowlevel.checkpoint()
        if isinstance(reply, Exception):
            raise reply
        (end,) = self.renderer.end_token_ids
        ids = [*self.renderer.encode(reply), end]
        reason = FinishReason.LENGTH if len(ids) > max_tokens else FinishReason.STOP
        ids = ids[:max_tokens]
        if watch is not None and self.step:
            for count in range(self.step, len(ids), self.step):
                so_far = self._completion(ids[:count], reason)
                progress = Progress(
                    token_ids=so_far.token_ids, behaviour_logprobs=so_far.behaviour_logprobs, spans=so_far.spans
                )
                if watch(progress):
                    return self._completion(ids[:count], FinishReason.STOP)
                await self.go_on(count)
                if self.fails_at == count:
                    raise EngineError("engine 0 died")
        return self._completion(ids, reason)

    def _completion(self, ids: Sequence[int], reason: FinishReason) -> Completion:
        return Completion(
            token_ids=TokenIds(ids),
            behaviour_logprobs=Logprobs([-0.25 - place / 64 for place in range(len(ids))]),
            spans=tuple(
                TokenSpan(start=start, end=stop, version=self.version + number)
                for number, (start, stop) in enumerate(itertools.pairwise([0, max(1, len(ids) // 2), len(ids)]))
                if stop > start
            ),
            finish_reason=reason,
        )


@dataclass
class Rig:
    """A gateway that serves, one open session of it, and a client with the session's key."""

    gateway: Gateway
    sampler: Scripted
    session: Session
    client: httpx.AsyncClient
    nursery: trio.Nursery

    @property
    def renderer(self) -> ChatRenderer:
        return self.sampler.renderer

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Send JSON below the session's path."""
        return await self.client.post(f"{self.session.url}{path}", json=body, **more)

    async def chat(self, *messages: dict[str, Any], **more: Any) -> httpx.Response:
        """Ask for a chat completion."""
        return await self.post("/v1/chat/completions", {"model": "any", "messages": list(messages), **more})


@asynccontextmanager
async def serving(
    renderer: ChatRenderer, settings: GatewaySettings, sampler: Scripted, **more: Any
) -> AsyncIterator[Rig]:
    """Yield a rig, and end all of it on leaving."""
    gateway = Gateway(renderer, settings, temperature=1.0, max_model_len=MAX_MODEL_LEN, **more)
    async with trio.open_nursery() as nursery, httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
        async with gateway.session(sampler, task=TASK, trajectory_id="7-0") as session:
            client.headers["authorization"] = f"Bearer {session.token}"
            yield Rig(gateway=gateway, sampler=sampler, session=session, client=client, nursery=nursery)
        nursery.cancel_scope.cancel()


def run(
    directory: Path,
    body: Callable[[Rig], Awaitable[None]],
    *,
    settings: GatewaySettings | None = None,
    template: str = TEMPLATE,
    replies: Sequence[str | Exception] = (),
    **more: Any,
) -> None:
    """Run an async test body with a gateway."""
    renderer = make_renderer(directory, template)

    async def main() -> None:
        with trio.fail_after(60):
            sampler = Scripted(renderer, list(replies))
            async with serving(renderer, settings or GatewaySettings(), sampler, **more) as rig:
                await body(rig)

    trio.run(main)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
