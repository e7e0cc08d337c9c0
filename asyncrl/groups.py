"""The producing half of the loop: a group for every slot of the gate, from its task to its place in the buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import trio

from asyncrl.buffers import BufferSettings, Gate, GroupBuffer, Ledger, Stage
from asyncrl.collecting import GroupCollector
from asyncrl.dynamic_sampling import FILTERED, Replacements, is_filtered, zero_advantage_reason
from asyncrl.errors import EnvironmentFault
from asyncrl.idle import EngineIdle
from asyncrl.protocols import Environment, FetchesItems, LearnsFromGroups, Sampler
from asyncrl.resume_plan import Resumption
from asyncrl.run_journal import Draw, GroupAdmitted, GroupDropped, JournalledSampler, KeptWork, Kind, RunJournal
from asyncrl.sampler import CountingSampler
from asyncrl.status import RunStatus
from asyncrl.types import Completion, Group, PolicyVersion, Task, Trajectory, TrajectoryStatus
from asyncrl.waiting import RunningGroup, WatchedSampler

ALL_FAILED = "all_failed"
GROUP_DEADLINE = "group_deadline"
SAMPLED_BEFORE = "sampled_before_admission"
_MAX_FAILED_GROUPS = 3  # this many groups in a row without enough usable episodes: the environment is broken, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group that is neither trained on nor dropped."""

    draw: Draw
    position: int
    """Of its admission in the journal."""


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
        journal: RunJournal,
        resumption: Resumption,
    ) -> None:
        """`on_group` is told of every finished group; what `resumption` keeps comes before the environment's tasks."""
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
        self._journal = journal
        self._kept = resumption.kept
        self._redraw = deque(resumption.redraw)
        self._open: dict[int, OpenGroup] = {
            kept.group_id: OpenGroup(draw=kept.draw, position=kept.position)
            for kept in resumption.kept
            if not kept.uses
        }
        self._trained = {kept.group_id: kept.position for kept in resumption.kept if kept.uses}
        self._failed_in_a_row = 0
        self._collector = GroupCollector(environment, deadline_s=settings.group_deadline_s, retries=settings.retries)
        self._replacements = Replacements(settings.max_replacements)
        self.running: dict[int, RunningGroup] = {}
        """group id -> what its episodes do now."""
        self.tasks_ended = False

    @property
    def open_draws(self) -> Sequence[tuple[Draw, int | None]]:
        """Tasks that were drawn and are neither trained on nor dropped, with the groups that run them, if any."""
        running = [(group.draw, group_id) for group_id, group in self._open.items()]
        return [*running, *((draw, None) for draw in self._redraw)]

    @property
    def reusable(self) -> Mapping[int, int]:
        """group id -> steps that trained on it, of groups that were used less often than they may be."""
        return {group_id: uses for group_id, uses in self._buffer.reusable.items() if group_id in self._trained}

    @property
    def needed_from(self) -> int:
        """The position from which the journal tells of every group that is open, or waits for a further use."""
        positions = [group.position for group in self._open.values()]
        positions += [self._trained[group_id] for group_id in self.reusable]
        return min(positions, default=self._journal.position)

    def close(self, group_ids: Iterable[int]) -> None:
        """Note that groups were trained on."""
        for group_id in group_ids:
            self._trained[group_id] = self._open.pop(group_id).position
        self._trained = {group_id: self._trained[group_id] for group_id in self.reusable}

    async def run(self) -> None:
        """Start a group whenever the gate has a slot, until `stop` or the end of the tasks; wait for their ends."""
        async with trio.open_nursery() as nursery:
            for kept in self._kept:  # all before the first wait: the learner must not choose among some of them
                self._gate.readmit(kept.group_id)
                group = kept.group and replace(kept.group, admitted_at=trio.current_time())
                if group is not None and kept.uses:
                    self._buffer.put_back(group, uses=kept.uses)
                    continue
                self._buffer.admit(kept.group_id, sampled_since=kept.oldest_version)
                if group is not None:
                    self._buffer.put(group)
                else:
                    nursery.start_soon(self._rollout, kept.group_id, kept.draw.task, kept.admitted_version, kept.work)
            while not self._stop.is_set():
                with self._idle.gate():
                    group_id = await self._gate.admit()
                if isinstance(self._environment, FetchesItems):
                    await self._environment.wait_item()
                try:
                    task = self._admit(group_id)
                except StopIteration:
                    self._gate.release([group_id])
                    self.tasks_ended = True
                    break
                nursery.start_soon(self._rollout, group_id, task, self._buffer.version, KeptWork())
            self._buffer.end_admission()

    def _admit(self, group_id: int) -> Task:
        """Return the task of a new group after noting it everywhere. Raises: StopIteration."""
        fresh = not self._redraw
        draw = Draw(draw_id=group_id, task=self._environment.get_item()) if fresh else self._redraw.popleft()
        version = self._buffer.version
        self._buffer.admit(group_id)
        self._ledger.admit(group_id, num_trajectories=self._settings.group_size_of(draw.task))
        record = GroupAdmitted(draw_id=draw.draw_id, task=draw.task, version=version, fresh=fresh)
        position = self._journal.append_nowait(Kind.GROUP_ADMITTED, record, group_id=group_id)
        self._open[group_id] = OpenGroup(draw=draw, position=position)
        return draw.task

    async def _rollout(self, group_id: int, task: Task, version: PolicyVersion, work: KeptWork) -> None:
        admitted_at = trio.current_time()
        running = self.running[group_id] = RunningGroup(group_id, task.task_id, admitted_at)

        def count_retry(failed: Sequence[Trajectory]) -> None:
            self._ledger.retry(group_id, failed)
            self._status.episodes_retried += len(failed)

        sampler = JournalledSampler(
            WatchedSampler(self._counting(group_id), running), self._journal, group_id, kept=work
        )
        with self._idle.group():
            trajectories = await self._collector.collect(
                task,
                sampler,
                group_id=str(group_id),
                group_size=self._settings.group_size,
                on_trajectory=sampler.keep_nowait,
                on_retry=count_retry,
            )
        del self.running[group_id]
        group = Group(
            group_id=group_id,
            task=task,
            trajectories=tuple(trajectories),
            admitted_at=admitted_at,
            admitted_version=version,
        )
        sampler.finish_nowait(group)
        await self._finish(group)

    async def _finish(self, group: Group) -> None:
        """Note a finished group; hand it in, or free its slot, once the journal has it."""
        self._ledger.finish(group)
        self._status.count_group(group)
        self._status.select(Stage.GENERATED, group.trajectories, self._status.version)
        self._on_group(group)
        if isinstance(self._environment, LearnsFromGroups):
            self._environment.observe(group.task, group.trajectories)
        reason = self._reason_to_drop(group)
        if reason:
            self._status.groups_dropped[reason] += 1
            self._status.select(Stage.DROPPED, group.trajectories, self._status.version)
            self._ledger.drop(group.group_id, reason)
            record = GroupDropped(reason=reason, redrawn=False)
            self._journal.append_nowait(Kind.GROUP_DROPPED, record, group_id=group.group_id)
            del self._open[group.group_id]
        await self._journal.flush()  # a checkpoint that is written meanwhile knows of what is noted above
        if reason:
            self._buffer.drop(group.group_id, reason)
            self._gate.release([group.group_id])
        else:
            self._buffer.put(group)

    def _reason_to_drop(self, group: Group) -> str | None:
        """Return why a finished group will not be trained on; None where it will."""
        reason = self._failure_of(group)
        if reason:
            self._count_failed(group, reason)
            return reason
        self._failed_in_a_row = 0
        if self._was_sampled_before(group):
            return SAMPLED_BEFORE
        if is_filtered(group):
            return FILTERED
        reason = zero_advantage_reason(group)
        return reason if reason and self._may_replace() else None

    def _was_sampled_before(self, group: Group) -> bool:
        """Tell whether a group that came as it is has tokens from before it was asked for: the bound would not hold.

        Such tokens of a group that was played here are an engine's broken word, which the step raises on.
        """
        oldest = group.oldest_version
        return group.task.has_any_size and oldest is not None and oldest < self._buffer.sampled_since(group.group_id)

    def _failure_of(self, group: Group) -> str | None:
        """Return why a group cannot be trained on, or None. One that was cut short needs two usable episodes."""
        num_usable = sum(trajectory.reward is not None for trajectory in group.trajectories)
        if any(trajectory.status is TrajectoryStatus.FAILED_DEADLINE for trajectory in group.trajectories):
            return GROUP_DEADLINE if num_usable < min(2, self._settings.group_size_of(group.task)) else None
        return ALL_FAILED if num_usable == 0 else None

    def _counting(self, group_id: int) -> Sampler:
        def count(trajectory_id: str, completion: Completion) -> None:
            self._ledger.sample(group_id, trajectory_id, len(completion.token_ids))

        return CountingSampler(self._sampler, count)

    def _may_replace(self) -> bool:
        """Tell whether a group without an advantage is dropped; not where no other could take its place."""
        if not self._settings.replace_zero_advantage or self.tasks_ended:
            return False
        return self._replacements.allow(self._buffer.next_step)

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
