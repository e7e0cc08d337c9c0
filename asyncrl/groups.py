"""The producing half of the loop: a group for every slot of the gate, from its task to its place in the buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import trio

from asyncrl.buffers import BufferSettings, Gate, GroupBuffer, Ledger
from asyncrl.collecting import GroupCollector
from asyncrl.dynamic_sampling import Replacements, zero_advantage_reason
from asyncrl.errors import EnvironmentFault
from asyncrl.idle import EngineIdle
from asyncrl.protocols import Environment, LearnsFromGroups, Sampler
from asyncrl.sampler import CountingSampler
from asyncrl.status import RunStatus
from asyncrl.types import Completion, Group, Task, Trajectory, TrajectoryStatus
from asyncrl.waiting import RunningGroup, WatchedSampler

ALL_FAILED = "all_failed"
GROUP_DEADLINE = "group_deadline"
_MAX_FAILED_GROUPS = 3  # this many groups in a row without enough usable episodes: the environment is broken, stop


class GroupRollouts:
    """Rolls groups out and hands them in, for as long as `run` is not cancelled.

    It takes slots of the gate and frees those of groups that it drops; the others are freed by whoever trains on them.
    """

    def __init__(
        self,
        environment: Environment,
        sampler: Sampler,
        settings: BufferSettings,
        *,
        gate: Gate,
        buffer: GroupBuffer,
        ledger: Ledger,
        idle: EngineIdle,
        status: RunStatus,
        on_group: Callable[[Group], None],
        stop: trio.Event,
        redraw: Iterable[Task] = (),
    ) -> None:
        """`on_group` is told of every finished group; `redraw` are tasks to begin with, before the environment's."""
        self._environment = environment
        self._sampler = sampler
        self._settings = settings
        self._gate = gate
        self._buffer = buffer
        self._ledger = ledger
        self._idle = idle
        self._status = status
        self._on_group = on_group
        self._stop = stop
        self._redraw = deque(redraw)
        self._open_tasks: dict[int, Task] = {}
        self._failed_in_a_row = 0
        self._collector = GroupCollector(environment, settings)
        self._replacements = Replacements(settings.max_replacements)
        self.running: dict[int, RunningGroup] = {}
        """group id -> what its episodes do now."""
        self.tasks_ended = False

    @property
    def open_tasks(self) -> Sequence[Task]:
        """Tasks that were drawn and whose groups were neither trained on nor dropped, the oldest first."""
        return [*self._open_tasks.values(), *self._redraw]

    def close(self, group_ids: Iterable[int]) -> None:
        """Note that groups were trained on."""
        for group_id in group_ids:
            del self._open_tasks[group_id]

    async def run(self) -> None:
        """Start a group whenever the gate has a slot, until `stop` or the end of the tasks; wait for their ends."""
        async with trio.open_nursery() as nursery:
            while not self._stop.is_set():
                with self._idle.gate():
                    group_id = await self._gate.admit()
                try:
                    task = self._redraw.popleft() if self._redraw else self._environment.get_item()
                except StopIteration:
                    self._gate.release([group_id])
                    self.tasks_ended = True
                    break
                self._buffer.admit(group_id)
                self._ledger.admit(group_id, num_trajectories=self._settings.group_size)
                self._open_tasks[group_id] = task
                nursery.start_soon(self._rollout, group_id, task)
            self._buffer.end_admission()

    async def _rollout(self, group_id: int, task: Task) -> None:
        admitted_at, version = trio.current_time(), self._buffer.version
        running = self.running[group_id] = RunningGroup(group_id, task.task_id, admitted_at)

        def count_retry(failed: Sequence[Trajectory]) -> None:
            self._ledger.retry(group_id, failed)
            self._status.episodes_retried += len(failed)

        sampler = WatchedSampler(self._counting(group_id), running)
        with self._idle.group():
            trajectories = await self._collector.collect(task, sampler, group_id=group_id, on_retry=count_retry)
        del self.running[group_id]
        group = Group(
            group_id=group_id,
            task=task,
            trajectories=tuple(trajectories),
            admitted_at=admitted_at,
            admitted_version=version,
        )
        self._ledger.finish(group)
        self._status.count_group(group)
        self._on_group(group)
        if isinstance(self._environment, LearnsFromGroups):
            self._environment.observe(task, trajectories)
        reason = self._failure_of(group)
        if reason:
            self._count_failed(group, reason)
        else:
            self._failed_in_a_row = 0
            reason = zero_advantage_reason(group)
            reason = reason if reason and self._may_replace() else None
        if reason:
            self._drop(group, reason)
        else:
            self._buffer.put(group)

    def _failure_of(self, group: Group) -> str | None:
        """Return why a group cannot be trained on, or None. One that was cut short needs two usable episodes."""
        num_usable = sum(trajectory.reward is not None for trajectory in group.trajectories)
        if any(trajectory.status is TrajectoryStatus.FAILED_DEADLINE for trajectory in group.trajectories):
            return GROUP_DEADLINE if num_usable < min(2, self._settings.group_size) else None
        return ALL_FAILED if num_usable == 0 else None

    def _counting(self, group_id: int) -> Sampler:
        def count(trajectory_id: str, completion: Completion) -> None:
            self._ledger.sample(group_id, trajectory_id, len(completion.token_ids))

        return CountingSampler(self._sampler, count)

    def _may_replace(self) -> bool:
        """Tell whether a group without an advantage is dropped; not where no other could take its place."""
        if not self._settings.replace_zero_advantage or self.tasks_ended:
            return False
        return self._replacements.allow(self._buffer.version)

    def _count_failed(self, group: Group, reason: str) -> None:
        """Count a group that has failed, and end the run when that goes on."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _MAX_FAILED_GROUPS:
            details = sorted({f"{t.status}: {t.detail}" for t in group.trajectories})
            found = "no usable episode" if reason == ALL_FAILED else "too few episodes that ended in time"
            raise EnvironmentFault(
                f"{self._failed_in_a_row} groups in a row had {found}; the last, of task "
                f"{group.task.task_id}: {'; '.join(details[:3])}"
            )

    def _drop(self, group: Group, reason: str) -> None:
        """Count a group that will not be trained on, and free its slot."""
        self._status.groups_dropped[reason] += 1
        self._ledger.drop(group.group_id, reason)
        self._buffer.drop(group.group_id, reason)
        del self._open_tasks[group.group_id]
        self._gate.release([group.group_id])
