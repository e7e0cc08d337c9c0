"""Connections to an environment that lives elsewhere: made, kept, made again, and what is played over one of them."""

from __future__ import annotations

import math
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio

from asyncrl import wire
from asyncrl.children import last_lines, start_child
from asyncrl.environments import service_messages as messages
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault, leaves
from asyncrl.protocols import KeepsTrajectories, Sampler, Watch
from asyncrl.types import Completion, Task, TokenIds, Trajectory

_ITEMS_AHEAD = 8  # tasks that are drawn before they are wanted, so that admission waits for none
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between attempts to connect again; nothing tells when one would succeed
_LOST_MS = 30_000  # a service whose machine is gone acknowledges nothing for as long; then it is lost


class LostError(Exception):
    """A connection broke while a group was played over it."""


class Place(Protocol):
    """Where an environment is."""

    name: str

    def open(self, directory: Path) -> AbstractAsyncContextManager[trio.abc.Stream]:
        """Return a connection. Raises: OSError, EnvironmentFault."""
        ...


class Service:
    """A service that listens."""

    def __init__(self, url: str) -> None:
        """`url` is "HOST:PORT"."""
        self.name = url
        self._host, _, port = url.rpartition(":")
        self._port = int(port)

    @asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[trio.abc.Stream]:
        """See `Place`."""
        async with await trio.open_tcp_stream(self._host, self._port) as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_MS // 3000)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOST_MS // 3000)
            yield stream


class ChildProcess:
    """A child of this run, with a Python of its own; started again where it died."""

    name = "its child process"

    def __init__(self, environment: str, python: str, token: str) -> None:
        self._environment = environment
        self._python = python or sys.executable
        self._token = token

    @asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[trio.abc.Stream]:
        """See `Place`."""
        ours, theirs = socket.socketpair()
        log_path = directory / "environment.log"
        argv = [self._python, "-m", "asyncrl.environments.service_process", self._environment]
        with theirs, ours:
            child = start_child(
                "the environment",
                [*argv, "--fd", str(theirs.fileno())],
                log_path=log_path,
                environment={"ASYNCRL_ENVIRONMENT_TOKEN": self._token},
                pass_fds=[theirs.fileno()],
            )
            async with child:
                theirs.close()
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
                async with stream:
                    try:
                        yield stream
                    except (EOFError, trio.BrokenResourceError) as error:
                        said = last_lines(log_path, 15)
                        raise EnvironmentFault(f"it ended; the last lines of {log_path}:\n{said}") from error


class Link:
    """Keeps a connection to one place for as long as the run lasts."""

    def __init__(
        self, place: Place, hello: messages.Hello, on_change: Callable[[Link, messages.Welcome | None], None]
    ) -> None:
        """`on_change` hears of a new connection, with what its environment said, and of the end of one."""
        self.place = place
        self.connection: Connection | None = None
        self.trouble = ""
        """Why there is no connection, as far as is known."""
        self._hello = hello
        self._on_change = on_change

    async def keep(self, directory: Path) -> None:
        """Connect, again and again. Raises: ConfigError where the environment is refused."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with self.place.open(directory) as stream:
                    welcome = await self._greet(stream)
                    wait_s = _FIRST_WAIT_S
                    await self._use(stream, welcome)
            except* (OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError, EnvironmentFault) as group:
                self.trouble = str(next(leaves(group))) or "the connection broke"
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _greet(self, stream: trio.abc.Stream) -> messages.Welcome:
        await wire.send_async(stream, self._hello)
        answer = await wire.receive_async(stream, messages.Welcome | messages.Refused)
        if answer is None:
            raise EOFError("it closed the connection without a word")
        if isinstance(answer, messages.Refused):
            raise ConfigError(f"the environment at {self.place.name} refuses: {answer.reason} ([environment.options])")
        return answer  # type: ignore[no-any-return]

    async def _use(self, stream: trio.abc.Stream, welcome: messages.Welcome) -> None:
        connection = self.connection = Connection(stream, learns=welcome.learns)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.run)
                self._on_change(self, welcome)
        finally:
            self.connection = None
            self._on_change(self, None)


class Connection:
    """What is said over one connection."""

    def __init__(self, stream: trio.abc.Stream, *, learns: bool) -> None:
        self.learns = learns
        """The environment wants to know what became of its groups."""
        self.on_item: Callable[[messages.Item | messages.ItemsEnded], None] = lambda item: None
        """Hears of tasks."""
        self._stream = stream
        # no bound of its own: it holds what the run's groups say, and each of those waits for answers
        self._send, self._outbox = trio.open_memory_channel[wire.Message](math.inf)
        self._groups: dict[int, trio.MemorySendChannel[Any]] = {}
        self._num_groups = 0

    @property
    def num_groups(self) -> int:
        """Groups that are played over it now."""
        return len(self._groups)

    def post(self, message: wire.Message) -> None:
        """Send a message that has no answer."""
        self._send.send_nowait(message)

    async def run(self) -> None:
        """Read and write until it breaks. Raises: EOFError, trio.BrokenResourceError."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                reader = wire.Reader(self._stream)
                while (message := await reader.receive(messages.ToRun)) is not None:
                    self._handle(message)
                raise EOFError("it closed the connection")
        finally:
            for group in self._groups.values():
                group.close()

    async def _write(self) -> None:
        async for message in self._outbox:
            await wire.send_async(self._stream, message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.Refused):
            raise ConfigError(f"the environment cannot go on: {message.reason} ([environment.options])")
        if isinstance(message, messages.Item | messages.ItemsEnded):
            self.on_item(message)
        elif message.group in self._groups:  # else nobody waits for it any more
            self._groups[message.group].send_nowait(message)

    async def collect(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        kept: Sequence[Trajectory],
        on_trajectory: Callable[[Trajectory], None],
    ) -> Sequence[Trajectory]:
        """Return a group's trajectories.

        Raises: LostError where the connection breaks; EnvironmentFault with what the environment's own code raised.
        """
        self._num_groups += 1
        number = self._num_groups
        self._groups[number], inbox = trio.open_memory_channel(math.inf)  # at most what its episodes say
        asked = messages.Collect(number=number, task=task, group_id=group_id, group_size=group_size, kept=list(kept))
        end: messages.Collected | messages.CollectFailed | None = None
        try:
            self.post(asked)
            async with trio.open_nursery() as nursery, inbox:
                async for message in inbox:
                    match message:
                        case messages.SampleRequest():
                            nursery.start_soon(self._answer, sampler, message)
                        case messages.Finished():
                            on_trajectory(message.trajectory)
                        case messages.Collected() | messages.CollectFailed():
                            end = message
                            break
                nursery.cancel_scope.cancel()
        finally:
            del self._groups[number]
            if end is None:
                self.post(messages.Cancel(group=number))
        if end is None:
            raise LostError
        if isinstance(end, messages.CollectFailed):
            raise EnvironmentFault(end.message)
        return end.trajectories

    async def _answer(self, sampler: Sampler, request: messages.SampleRequest) -> None:
        try:
            completion = await sampler.sample(
                request.token_ids,
                max_tokens=request.max_tokens,
                trajectory_id=request.trajectory_id,
                stop_token_ids=request.stop_token_ids,
            )
        except EngineError as error:
            self.post(messages.SampleFailed(number=request.number, message=str(error)))
            return
        self.post(messages.Sampled(number=request.number, completion=completion))


class Items:
    """Tasks that are drawn ahead, so that whoever wants one need not wait for a connection."""

    def __init__(self) -> None:
        self.state: Any = None
        """The environment's after the last task that was taken."""
        self._ready: deque[messages.Item] = deque()
        self._num_asked = 0
        self._is_untouched = False
        self._connection: Connection | None = None
        self._generation = 0
        self._ended = False
        self._restored = False

    def has(self, count: int) -> bool:
        """Tell whether `take` can answer so many times."""
        return len(self._ready) >= count or self._ended

    def want(self, count: int) -> None:
        """Draw as many ahead, where that is more than usual."""
        self._ask(count - len(self._ready) - self._num_asked)

    def take(self) -> Task:
        """Return the next task, once `ready`. Raises: StopIteration after the last one."""
        if not self._ready:
            assert self._ended, "nobody waited for a task"
            raise StopIteration
        item = self._ready.popleft()
        self.state, self._is_untouched = item.state, False
        self.want(_ITEMS_AHEAD)
        return item.task

    def restore(self, state: Any) -> None:
        """Go on after the task that was last taken before `state`; to do so twice draws nothing anew."""
        if self._is_untouched and state == self.state:
            return
        self.state, self._restored, self._is_untouched = state, True, True
        self._ready.clear()
        self._begin(state)

    def begin(self, connection: Connection, welcome: messages.Welcome, on_ready: Callable[[], object]) -> None:
        """Draw over a new connection from now on, after the last task that came over the one before."""
        known = self._restored or self._connection is not None
        self._connection = connection
        connection.on_item = lambda item: self._note(item, on_ready)
        if not known:
            self.state = welcome.state
        self._begin(self._ready[-1].state if self._ready else self.state)

    def _begin(self, state: Any) -> None:
        self._generation += 1
        self._ended = False
        self._num_asked = 0
        if self._connection is not None:
            self._connection.post(messages.Restore(generation=self._generation, state=state))
            self._ask(_ITEMS_AHEAD - len(self._ready))

    def _ask(self, count: int) -> None:
        if self._connection is not None and not self._ended:
            for _ in range(count):
                self._num_asked += 1
                self._connection.post(messages.NextItem(generation=self._generation))

    def _note(self, item: messages.Item | messages.ItemsEnded, on_ready: Callable[[], object]) -> None:
        if item.generation != self._generation:
            return
        self._num_asked -= 1
        if isinstance(item, messages.Item):
            self._ready.append(item)
        else:
            self._ended = True
        on_ready()


class Memory:
    """The sampler of one group, which answers from memory what it sampled before a connection broke."""

    def __init__(self, sampler: Sampler) -> None:
        self.finished: dict[str, Trajectory] = {}
        """Episodes that are final."""
        self._sampler = sampler
        self._answered: list[tuple[str, TokenIds, Completion]] = []
        self._again: list[tuple[str, TokenIds, Completion]] = []

    def kept(self, trajectory_ids: Sequence[str]) -> list[Trajectory]:
        """Return those of the episodes that need not be played, from an interrupted run too."""
        if isinstance(self._sampler, KeepsTrajectories):
            found = {name: self._sampler.kept_trajectory(name) for name in trajectory_ids}
            self.finished |= {name: trajectory for name, trajectory in found.items() if trajectory is not None}
        return list(self.finished.values())

    def rewind(self) -> None:
        """Answer from memory, from the beginning."""
        self._again = list(self._answered)

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
        for place, (name, prompt, completion) in enumerate(self._again):
            if name == trajectory_id and prompt == token_ids:
                del self._again[place]
                return completion
        completion = await self._sampler.sample(
            token_ids, max_tokens=max_tokens, trajectory_id=trajectory_id, stop_token_ids=stop_token_ids, watch=watch
        )
        self._answered.append((trajectory_id, token_ids, completion))
        return completion
