"""An environment as a service: it plays for whoever connects and knows the token, and never waits for a learner.

Each connection has an environment of its own, built with the options, the tokenizer and the seed that the run brings;
what a run does not share, a slow or dying one cannot disturb. See `service_messages` for what is said.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from typing import Any

import trio

from asyncrl import wire
from asyncrl.collecting import collect_from
from asyncrl.environments import service_messages as messages
from asyncrl.environments.loading import EnvironmentSettings, load_environment
from asyncrl.errors import ConfigError, EngineError, leaves
from asyncrl.protocols import Environment, LearnsFromGroups, SandboxBackend, Watch
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Completion, TokenIds, Trajectory

_HELLO_S = 30.0  # for a client to say who it is
_CLOSE_S = 30.0  # for an environment to release what it holds


class EnvironmentService:
    """Plays the environment `name` for every connection."""

    def __init__(self, name: str, sandboxes: SandboxBackend, *, token: str, max_groups: int = 0) -> None:
        """`name` as in [environment]; at most `max_groups` groups at a time over all connections, 0 is no limit."""
        self._name = name
        self._sandboxes = sandboxes
        self._token = token.encode()
        self._places = trio.CapacityLimiter(max_groups or math.inf)

    @property
    def num_groups(self) -> int:
        """Groups that are played now."""
        return self._places.borrowed_tokens

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end; whatever it had under way ends with it.

        A side that is gone, or speaks something else, is nobody else's business.
        """
        try:
            async with stream:
                environment = await self._welcome(stream)
                if environment is not None:
                    await self._play_for(stream, environment)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, EOFError, ValueError):
            pass

    async def _play_for(self, stream: trio.abc.Stream, environment: Environment) -> None:
        try:
            await _Connection(stream, environment, self._places).run()
        finally:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await environment.aclose()

    async def _welcome(self, stream: trio.abc.Stream) -> Environment | None:
        hello = None
        with trio.move_on_after(_HELLO_S):
            hello = await wire.receive_async(stream, messages.Hello)
        if hello is None:
            return None
        reason, environment = "", None
        if not hmac.compare_digest(hello.token.encode(), self._token):
            reason = "the token is wrong"
        elif hello.protocol != messages.PROTOCOL:
            reason = f"the run speaks protocol {hello.protocol} and this service {messages.PROTOCOL}: update the older"
        else:
            try:
                environment = self._build(hello)
            except ConfigError as error:
                reason = str(error)
        if environment is None:
            await wire.send_async(stream, messages.Refused(reason=reason))
            return None
        welcome = messages.Welcome(
            name=environment.name,
            held_out=list(environment.held_out()),
            state=environment.state(),
            learns=isinstance(environment, LearnsFromGroups),
        )
        await wire.send_async(stream, welcome)
        return environment

    def _build(self, hello: messages.Hello) -> Environment:
        settings = EnvironmentSettings(name=self._name, options=hello.options)
        renderer = ChatRenderer.of_record(hello.renderer)
        return load_environment(settings, renderer=renderer, sandboxes=self._sandboxes, seed=hello.seed)


class _Connection:
    """One run's environment: its groups under way, and the completions that they wait for."""

    def __init__(self, stream: trio.abc.Stream, environment: Environment, places: trio.CapacityLimiter) -> None:
        self._stream = stream
        self._environment = environment
        self._places = places
        # no bound of its own: it holds at most what the run's episodes say, and those wait for answers
        self._send, self._outbox = trio.open_memory_channel[wire.Message](math.inf)
        self._scopes: dict[int, trio.CancelScope] = {}
        self._waiting: dict[int, trio.MemorySendChannel[messages.Sampled | messages.SampleFailed]] = {}
        self._num_requests = 0

    async def run(self) -> None:
        """Return when the other side has closed."""
        async with trio.open_nursery() as nursery, self._send:
            nursery.start_soon(self._write)
            reader = wire.Reader(self._stream)
            while (message := await reader.receive(messages.ToService)) is not None:
                try:
                    self._handle(message, nursery)
                except Exception as error:  # noqa: BLE001 - a boundary, as for groups: other runs are served on
                    self._send.send_nowait(messages.Refused(reason=f"it raised {type(error).__name__}: {error}"))
            nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        async for message in self._outbox:
            await wire.send_async(self._stream, message)

    def _handle(self, message: Any, nursery: trio.Nursery) -> None:
        match message:
            case messages.Restore():
                self._environment.restore(message.state)
            case messages.NextItem():
                self._send.send_nowait(self._draw(message.generation))
            case messages.Collect():
                scope = self._scopes[message.number] = trio.CancelScope()
                nursery.start_soon(self._collect, message, scope)
            case messages.Cancel() if message.group in self._scopes:
                self._scopes[message.group].cancel()
            case messages.Sampled() | messages.SampleFailed() if message.number in self._waiting:
                self._waiting[message.number].send_nowait(message)
            case messages.Observe() if isinstance(self._environment, LearnsFromGroups):
                self._environment.observe(message.task, message.trajectories)

    def _draw(self, generation: int) -> wire.Message:
        try:
            task = self._environment.get_item()
        except StopIteration:
            return messages.ItemsEnded(generation=generation)
        return messages.Item(generation=generation, task=task, state=self._environment.state())

    async def _collect(self, asked: messages.Collect, scope: trio.CancelScope) -> None:
        with scope:
            async with self._places:
                self._send.send_nowait(await self._play(asked))
        del self._scopes[asked.number]

    async def _play(self, asked: messages.Collect) -> wire.Message:
        def tell(trajectory: Trajectory) -> None:
            self._send.send_nowait(messages.Finished(group=asked.number, trajectory=trajectory))

        try:
            trajectories = await collect_from(
                self._environment,
                asked.task,
                _AskingSampler(self, asked),
                group_id=asked.group_id,
                group_size=asked.group_size,
                on_trajectory=tell,
            )
        except Exception as error:  # noqa: BLE001 - a boundary: what an environment raises is for the run that asked
            found = leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
            text = "; ".join(f"{type(one).__name__}: {one}" for one in found)
            return messages.CollectFailed(group=asked.number, message=text)
        return messages.Collected(group=asked.number, trajectories=list(trajectories))

    async def ask(
        self, group: int, token_ids: TokenIds, max_tokens: int, trajectory_id: str, stop_token_ids: Sequence[int]
    ) -> Completion:
        """Return a completion that the run's engines sampled. Raises: EngineError."""
        self._num_requests += 1
        number = self._num_requests
        request = messages.SampleRequest(
            number=number,
            group=group,
            token_ids=token_ids,
            max_tokens=max_tokens,
            trajectory_id=trajectory_id,
            stop_token_ids=list(stop_token_ids),
        )
        self._waiting[number], answered = trio.open_memory_channel(1)
        self._send.send_nowait(request)
        try:
            answer: messages.Sampled | messages.SampleFailed = await answered.receive()
        finally:
            del self._waiting[number]
        if isinstance(answer, messages.SampleFailed):
            raise EngineError(answer.message)
        return answer.completion


class _AskingSampler:
    """The sampler of one group: it asks the run. A `Sampler` that `KeepsTrajectories`."""

    def __init__(self, connection: _Connection, asked: messages.Collect) -> None:
        self._connection = connection
        self._group = asked.number
        self._kept = {trajectory.trajectory_id: trajectory for trajectory in asked.kept}

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        trajectory_id: str,
        stop_token_ids: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> Completion:
        """See `protocols.Sampler`."""
        return await self._connection.ask(self._group, token_ids, max_tokens, trajectory_id, stop_token_ids)

    def kept_trajectory(self, trajectory_id: str) -> Trajectory | None:
        """Return an episode that was finished before the connection, or the run, was interrupted; or None."""
        return self._kept.get(trajectory_id)
