"""A role's place at the rendezvous: who it is, whether it is there, and the channels to its service."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from asyncrl.roles.messages import Hello, Open
from asyncrl.roles.pipes import Conversation


class _Wanted:
    """A channel that was asked for and has not been dialled yet."""

    def __init__(self) -> None:
        self.stream: trio.abc.Stream | None = None
        self.settled = trio.Event()
        """Set when there is a stream, or will be none."""
        self.done = trio.Event()
        """Set when the stream is not used any more."""

    def settle(self, stream: trio.abc.Stream | None) -> None:
        self.stream = stream
        self.settled.set()


class Guest:
    """One identity: present, away for a while, or lost. Its place and its address outlive its processes."""

    def __init__(self, hello: Hello, number: int, *, lost_s: float) -> None:
        self.kind = hello.kind
        self.name = hello.name
        self.hello = hello
        """Of its present process."""
        self.number = number
        """Counts the processes of a run."""
        self.conversation: Conversation | None = None
        """While it is connected."""
        self.is_lost = False
        self.is_ready = False
        self.token = ""
        """What its service asks for."""
        self.port = 0
        """Of this host's loopback, from where its service is reached."""
        self.away_since = trio.current_time()
        self._lost_s = lost_s
        self._wanted: dict[str, _Wanted] = {}
        self._open: set[trio.abc.Stream] = set()
        self._changed = trio.Event()

    @property
    def url(self) -> str:
        """Where its HTTP service answers."""
        return f"http://127.0.0.1:{self.port}"

    def note_change(self) -> None:
        """Wake who waits for it to come or go."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Return when it has come or gone."""
        await self._changed.wait()

    async def arrive(self, hello: Hello, conversation: Conversation) -> None:
        """Note that it is connected. What was asked for while it was away is asked for again."""
        if self.conversation is not None:  # it has seen sooner that this one is broken
            await self.conversation.close()
        self.hello, self.conversation, self.is_lost = hello, conversation, False
        for key, wanted in self._wanted.items():
            if not wanted.settled.is_set():
                conversation.post(Open(key=key))
        self.note_change()

    def depart(self) -> None:
        """Note that its conversation has ended."""
        self.conversation = None
        self.away_since = trio.current_time()
        self.note_change()

    async def cut(self) -> None:
        """End every channel to its service, as the end of the service would."""
        for wanted in self._wanted.values():
            if not wanted.settled.is_set():
                wanted.settle(None)
        for stream in list(self._open):
            await trio.aclose_forcefully(stream)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[trio.abc.Stream]:
        """Yield a connection to its service. Raises: OSError where there is none, or it is lost."""
        key, wanted = secrets.token_hex(16), _Wanted()
        self._wanted[key] = wanted
        try:
            with trio.move_on_after(self._lost_s):
                while self.conversation is None and not self.is_lost:
                    await self.wait_changed()
                if self.conversation is not None:
                    self.conversation.post(Open(key=key))
                    await wanted.settled.wait()
            stream = wanted.stream
            if stream is None:
                raise ConnectionRefusedError(f"{self.name} at {self.hello.host} opens no channel to its {self.kind}")
            self._open.add(stream)
            try:
                yield stream
            finally:
                self._open.discard(stream)
        finally:
            wanted.done.set()
            del self._wanted[key]

    async def hand_over(self, key: str, stream: trio.abc.Stream) -> bool:
        """Give a dialled channel to who asked for it, and return when it is not used any more; False for a stranger."""
        wanted = self._wanted.get(key)
        if wanted is None or wanted.settled.is_set():
            return False
        wanted.settle(stream)
        await wanted.done.wait()
        return True

    def give_up(self, key: str) -> None:
        """Note that a channel cannot be opened."""
        if key in self._wanted:
            self._wanted[key].settle(None)

    def owns(self, key: str) -> bool:
        """Tell whether a channel was asked of it."""
        return key in self._wanted
