"""Learner and engines on one GPU, taking turns: the engines sleep while the learner computes, and the reverse.

    generate | sleep | step, publish | wake with the new weights | generate
             |       learner's state on the card, else in host memory

It is synchronous in time, whatever `max_off_policyness` is. That bound still counts what it always does: with 0 all
of a step's groups are over when the engines are put to sleep; above, groups that are under way keep their tokens and go
on after the wake, under the next weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import trio

from asyncrl.protocols import PLAIN_STEP, Learner, StepOptions, StepResult, SyncReport, WeightPuller
from asyncrl.types import Group, PolicyVersion, Segment, WeightManifest


class SleepingEngines(WeightPuller, Protocol):
    """Engines that can give up their memory; a pull wakes them."""

    async def sleep(self) -> None:
        """Return when all of them sleep. Raises: EngineError (in an exception group)."""
        ...


class SharedCard:
    """A `Learner` and a `WeightPuller` that never let both onto the card.

    The learner itself leaves it when it has published, and begins outside of it. It gets it back only when the engines
    have pulled what it published: they would otherwise sleep through a version.
    """

    def __init__(self, learner: Learner, engines: SleepingEngines) -> None:
        self._learner = learner
        self._engines = engines
        self._is_learners = False
        self._awake = trio.Event()
        self._awake.set()

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """See `protocols.Learner`. Raises besides: EngineError for an engine that does not go to sleep."""
        await self._take()
        return await self._learner.step(groups, options)

    async def supervised_step(self, segments: Sequence[Segment], *, learning_rate: float) -> StepResult:
        """See `step`."""
        await self._take()
        return await self._learner.supervised_step(segments, learning_rate=learning_rate)

    async def supervised_loss(self, segments: Sequence[Segment]) -> float:
        """See `step`."""
        await self._take()
        return await self._learner.supervised_loss(segments)

    async def publish(self, *, keep: Collection[PolicyVersion] = ()) -> WeightManifest:
        """See `step`; the card is the engines' when it returns."""
        await self._take()
        manifest = await self._learner.publish(keep=keep)
        self._is_learners, self._awake = False, trio.Event()
        return manifest

    async def save(self, directory: str) -> Mapping[str, int]:
        """See `protocols.Learner`: it writes from wherever its state lies."""
        return await self._learner.save(directory)

    async def make_room(self) -> Collection[PolicyVersion]:
        """See `protocols.WeightPuller`."""
        return await self._engines.make_room()

    async def pull_all(self, manifest: WeightManifest) -> Sequence[SyncReport]:
        """See `protocols.WeightPuller`."""
        assert not self._is_learners, "engines would wake beside the learner"
        reports = await self._engines.pull_all(manifest)
        self._awake.set()
        return reports

    async def _take(self) -> None:
        await self._awake.wait()
        if not self._is_learners:
            await self._engines.sleep()
            self._is_learners = True
