"""The journal for many trio tasks: the disk is waited for in one thread, and who waits together is written together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from asyncrl.buffers.journal import Journal, JournalStatistics
from asyncrl.errors import JournalError

RunBlocking = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function that may block, where it stalls nobody."""


class GroupCommit:
    """Appends for concurrent tasks, in the order in which they asked. While the disk is busy the next batch gathers.

    A position is given when a record is handed in, so that a checkpoint can name it; the promise of the journal's
    policy holds once `append` or `flush` returns. A cancelled `append` may leave its record to a later batch. The first
    failure is final: every later call raises it again.

    Example:
        >>> import tempfile; from pathlib import Path
        >>> async def main(journal):
        ...     log = GroupCommit(journal)
        ...     async with trio.open_nursery() as nursery:
        ...         for payload in (b"one", b"two"):
        ...             nursery.start_soon(log.append, 0, payload)
        ...     await log.flush()
        ...     return log.next_position
        >>> with tempfile.TemporaryDirectory() as scratch, Journal(Path(scratch), run_id="demo") as journal:
        ...     trio.run(main, journal)
        2
    """

    def __init__(self, journal: Journal, *, run_blocking: RunBlocking | None = None) -> None:
        """`run_blocking` is a thread of its own; simulations, whose clock would run on meanwhile, give another."""
        self._journal = journal
        self._limiter = trio.CapacityLimiter(1)
        self._run_blocking = run_blocking or self._run_in_thread
        self._turn = trio.Lock()
        self._pending: list[tuple[int, bytes]] = []
        self._next = self._written = self._flushed = journal.next_position
        self._failure: JournalError | None = None

    @property
    def next_position(self) -> int:
        """The position that the next record gets."""
        return self._next

    def append_nowait(self, kind: int, payload: bytes) -> int:
        """Hand in a record and return its position; it is written with the next `append` or `flush`."""
        self._check()
        self._pending.append((kind, payload))
        self._next += 1
        return self._next - 1

    async def append(self, kind: int, payload: bytes) -> int:
        """Return a record's position once the policy's promise holds for it. Raises: JournalError."""
        position = self.append_nowait(kind, payload)
        await self._reach(position + 1, durable=False)
        return position

    async def flush(self) -> None:
        """Return once all that was handed in before is written, and synced where the policy syncs at all.

        Raises: JournalError.
        """
        await self._reach(self._next, durable=True)

    async def release(self, before_position: int) -> int:
        """See `Journal.release`."""
        async with self._turn:
            self._check()
            freed: int = await self._run_blocking(lambda: self._journal.release(before_position))
            return freed

    def statistics(self) -> JournalStatistics:
        """Return what lies on disk."""
        return self._journal.statistics()

    async def _reach(self, end: int, *, durable: bool) -> None:
        async with self._turn:
            self._check()
            if self._written >= end and (not durable or self._flushed >= end):
                return  # an earlier batch took it along
            batch = tuple(self._pending)
            try:
                await self._run_blocking(lambda: self._commit(batch, durable))
            except JournalError as error:
                self._failure = error
                raise
            del self._pending[: len(batch)]  # only now: a cancellation comes before the work or not at all
            self._written += len(batch)
            if durable:
                self._flushed = self._written

    def _commit(self, batch: tuple[tuple[int, bytes], ...], durable: bool) -> None:
        if batch:
            self._journal.append_all(batch)
        if durable:
            self._journal.flush()

    async def _run_in_thread(self, work: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(work, limiter=self._limiter)

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalError(f"the journal failed before: {self._failure}") from self._failure
