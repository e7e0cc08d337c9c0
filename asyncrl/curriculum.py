"""Which task is asked next: the ones that teach most, as far as their success so far tells.

Where every episode of a group succeeds, or none, all advantages are 0 and the group teaches nothing. With p the chance
of success, p (1 - p) is the variance of the reward, and 1 - p^G - (1 - p)^G the chance that a group of G episodes has
both outcomes. p is estimated as (s + 1) / (n + 2), Laplace's rule of succession, from successes s in n episodes, both
multiplied by `memory` before each new group is added: the policy that old episodes measured is gone.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from random import Random
from typing import Any, Protocol, runtime_checkable

from asyncrl.collecting import collect_from
from asyncrl.environments.mixed import MixedEnvironment
from asyncrl.errors import ConfigError
from asyncrl.evaluation import is_solved
from asyncrl.protocols import Environment, Sampler
from asyncrl.types import Task, Trajectory


class TaskOrder(StrEnum):
    """How the next task is chosen."""

    SHUFFLED = "shuffled"
    """The environment's own: every task once an epoch."""
    VARIANCE = "variance"
    """At random, with weight p (1 - p)."""
    MIXED_OUTCOMES = "mixed_outcomes"
    """At random, with weight 1 - p^G - (1 - p)^G: flatter in the middle, so that harder tasks come more often."""
    EASY_TO_HARD = "easy_to_hard"
    """Every task once an epoch, the largest p first; the first epoch is shuffled but for what it measures itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """Which task is asked next ([curriculum])."""

    order: TaskOrder = TaskOrder.SHUFFLED
    """"shuffled", "variance", "mixed_outcomes" or "easy_to_hard"."""
    memory: float = 0.9
    """From above 0 to 1: what a task's former episodes still count for when a new group of it arrives; 1 forgets
    nothing."""
    floor: float = 0.05
    """From above 0 to 1, of the largest weight: the least weight, so that solved and hopeless tasks are measured
    again; 1 asks all tasks equally often."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by the setting's name."""
        for name in ("memory", "floor"):
            value = getattr(self, name)
            if not 0 < value <= 1:  # so that NaN is refused too
                raise ConfigError(f"{name} must be above 0 and at most 1, got {value} ([curriculum])")


@runtime_checkable
class TaskPool(Protocol):
    """An environment whose training tasks can be chosen from."""

    @property
    def task_epochs(self) -> int:
        """Times that the tasks are asked; 0 never ends."""
        ...

    def training_tasks(self, epoch: int) -> Sequence[Task]:
        """Return the tasks of an epoch: the same ones in the same order each time, in whatever instances."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumStatistics:
    """A moment's view of a curriculum."""

    num_tasks: int
    num_measured: int
    """Tasks of which at least one episode counts."""
    mean_success: float
    """Mean p over the measured tasks; 0.5 where there are none."""
    mean_weight: float
    """Mean weight over all tasks, 1 being that of p = 0.5."""


class Curriculum:
    """Draws tasks by what their episodes were worth. A pure function of the seed and of what it was told, in order.

    Example:
        >>> tasks = [Task(task_id=name, environment="demo") for name in ("easy", "hard")]
        >>> curriculum = Curriculum(lambda epoch: tasks, CurriculumSettings(order=TaskOrder.VARIANCE), seed=0)
        >>> curriculum.observe(tasks[0], num_solved=100, num_scored=100)
        >>> round(curriculum.weight(0), 2), curriculum.weight(1)
        (0.05, 1.0)
    """

    def __init__(
        self,
        tasks: Callable[[int], Sequence[Task]],
        settings: CurriculumSettings,
        *,
        seed: int,
        group_size: int = 8,
        epochs: int = 0,
    ) -> None:
        self._tasks = tasks
        self._settings = settings
        self._seed = seed
        self._group_size = group_size
        self._epochs = epochs
        self._epoch = 0
        self._pool: Sequence[Task] = tasks(0)
        self._drawn: list[int] = []  # of this epoch, as places in the pool
        self._solved = [0.0] * len(self._pool)
        self._scored = [0.0] * len(self._pool)
        self._open: dict[str, list[int]] = {}  # task id -> its place, and how often it is drawn and not yet observed

    def next(self) -> Task:
        """Return the next task. Raises: StopIteration after the last epoch, which has as many draws as tasks."""
        if len(self._drawn) == len(self._pool):
            self._begin(self._epoch + 1, [])
        if self._epochs and self._epoch >= self._epochs:
            raise StopIteration
        place = self._choose(Random(f"{self._seed}/{self._epoch}/{len(self._drawn)}"))
        self._drawn.append(place)
        task = self._pool[place]
        self._open.setdefault(task.task_id, [place, 0])[1] += 1
        return task

    def observe(self, task: Task, *, num_solved: int, num_scored: int) -> None:
        """Learn from a group of a task that `next` returned: of its scored episodes, so many solved it.

        A task that nobody drew, which only a changed environment can bring, is not counted.
        """
        place, count = self._open.pop(task.task_id, (None, 0))
        if place is None:
            place = next((i for i, known in enumerate(self._pool) if known.task_id == task.task_id), None)
            if place is None:
                return
        if count > 1:
            self._open[task.task_id] = [place, count - 1]
        if num_scored:
            memory = self._settings.memory
            self._solved[place] = memory * self._solved[place] + num_solved
            self._scored[place] = memory * self._scored[place] + num_scored

    def success(self, place: int) -> float:
        """Return the estimated chance of success, from 0 to 1, of the task at a place in the pool."""
        return (self._solved[place] + 1) / (self._scored[place] + 2)

    def weight(self, place: int) -> float:
        """Return how often a task is asked, where one of p = 0.5 has 1; at least the floor."""
        p, size = self.success(place), self._group_size
        if self._settings.order is TaskOrder.VARIANCE:
            weight = 4 * p * (1 - p)
        elif self._settings.order is TaskOrder.MIXED_OUTCOMES and size > 1:
            weight = (1 - p**size - (1 - p) ** size) / (1 - 2 * 0.5**size)
        else:
            weight = 1.0
        return max(weight, self._settings.floor)

    def _choose(self, random: Random) -> int:
        if self._settings.order is TaskOrder.EASY_TO_HARD:
            left = sorted({*range(len(self._pool))} - {*self._drawn})
            Random(f"{self._seed}/{self._epoch}").shuffle(left)  # the order among equals
            easiest: int = max(left, key=self.success)
            return easiest
        # a pass over all tasks: 30 ms for 10^5, once a group
        cumulated = list(accumulate(self.weight(place) for place in range(len(self._pool))))
        return min(bisect(cumulated, random.random() * cumulated[-1]), len(self._pool) - 1)

    def _begin(self, epoch: int, drawn: list[int]) -> None:
        self._epoch, self._drawn = epoch, drawn
        if not self._epochs or epoch < self._epochs:
            self._pool = self._tasks(epoch)
            assert len(self._pool) == len(self._solved), "an epoch has other tasks than the one before"

    def statistics(self) -> CurriculumStatistics:
        """Return what is known of the tasks."""
        measured = [self.success(place) for place, scored in enumerate(self._scored) if scored]
        return CurriculumStatistics(
            num_tasks=len(self._pool),
            num_measured=len(measured),
            mean_success=math.fsum(measured) / len(measured) if measured else 0.5,
            mean_weight=math.fsum(self.weight(place) for place in range(len(self._pool))) / len(self._pool),
        )

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs (JSON-like)."""
        return {
            "epoch": self._epoch,
            "drawn": list(self._drawn),
            "solved": list(self._solved),
            "scored": list(self._scored),
            "open": {task_id: list(value) for task_id, value in self._open.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Raises: ConfigError where the environment has other tasks now."""
        if len(state["solved"]) != len(self._pool):
            raise ConfigError(
                f"the checkpoint's curriculum knows {len(state['solved'])} tasks and the environment has "
                f"{len(self._pool)}: give back the tasks it had, or begin a new run ([environment])"
            )
        self._solved, self._scored = list(state["solved"]), list(state["scored"])
        self._open = {task_id: list(value) for task_id, value in state["open"].items()}
        self._begin(state["epoch"], list(state["drawn"]))


class CurriculumEnvironment:
    """An environment whose next task a curriculum chooses. Fulfils `protocols.ReportsTrajectories`."""

    def __init__(self, environment: Environment, curriculum: Curriculum) -> None:
        self.name = environment.name
        self.curriculum = curriculum
        self._environment = environment

    def get_item(self) -> Task:
        """Return the next task to train on. Raises StopIteration when the tasks are used up."""
        return self.curriculum.next()

    def observe(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Learn from a finished group of a task."""
        scored = [t for t in trajectories if t.reward is not None]
        self.curriculum.observe(task, num_solved=sum(map(is_solved, scored)), num_scored=len(scored))

    def held_out(self) -> Sequence[Task]:
        """Return the tasks that are never trained on."""
        return self._environment.held_out()

    async def collect_trajectories(
        self,
        task: Task,
        sampler: Sampler,
        *,
        group_id: str,
        group_size: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """See `protocols.ReportsTrajectories`."""
        return await collect_from(
            self._environment,
            task,
            sampler,
            group_id=group_id,
            group_size=group_size,
            on_trajectory=on_trajectory,
        )

    def state(self) -> Mapping[str, Any]:
        """Return the environment's state and the curriculum's."""
        return {"environment": self._environment.state(), "curriculum": self.curriculum.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._environment.restore(state["environment"])
        self.curriculum.restore(state["curriculum"])

    async def aclose(self) -> None:
        """Release what the environment holds."""
        await self._environment.aclose()


def with_curriculum(
    environment: Environment, settings: CurriculumSettings, *, seed: int, group_size: int
) -> Environment:
    """Return the environment, its tasks chosen as `settings` say; of a mixture, those of each part.

    Raises: ConfigError where the environment's tasks cannot be chosen from.
    """
    if settings.order is TaskOrder.SHUFFLED:
        return environment
    if isinstance(environment, MixedEnvironment):
        for label, part in environment.parts.items():
            environment.parts[label] = with_curriculum(part, settings, seed=seed, group_size=group_size)
        return environment
    if not isinstance(environment, TaskPool):
        raise ConfigError(
            f"order = {settings.order.value!r} needs an environment with training_tasks(epoch) and task_epochs, which "
            f'{environment.name!r} has not: set order = "shuffled" ([curriculum])'
        )
    pool: TaskPool = environment
    curriculum = Curriculum(pool.training_tasks, settings, seed=seed, group_size=group_size, epochs=pool.task_epochs)
    return CurriculumEnvironment(environment, curriculum)
