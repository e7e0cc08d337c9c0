"""The training loop: generation never stops for learning, and the bound on staleness holds.

    tasks -> gate -> rollout of a group -> buffer -> learner step v -> v+1 -> engines pull v+1 -> slots are freed

Before it goes the warm start, where there is one (`asyncrl.warm_start`): steps on demonstrations, then one sync.

The producing half (`asyncrl.groups`) and the engines' pulls (`asyncrl.syncing`) run in nurseries here, and the
learner's half beside them: a step begins as soon as its groups are there. This file knows no process, file or clock:
everything it drives is a `Parts`, real (`asyncrl.processes`) or simulated (`asyncrl.testing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import fmean
from typing import Any, Protocol

import trio

from asyncrl.behaviour import counts_of
from asyncrl.buffers import BufferSettings, Gate, GroupBuffer, Ledger, Stage, Wait
from asyncrl.checkpoint import Checkpoint, CheckpointStore
from asyncrl.errors import StalenessError
from asyncrl.evaluation import evaluate, is_solved
from asyncrl.groups import GroupRollouts
from asyncrl.guards import Action, Alarm, Guards, GuardSettings
from asyncrl.idle import EngineIdle, LearnerIdle
from asyncrl.protocols import Environment, Learner, Sampler, StepResult, WeightPuller
from asyncrl.resume_plan import Resumption, plan_resumption
from asyncrl.resuming import go_on
from asyncrl.run_history import RunHistory
from asyncrl.run_journal import GroupsTrained, Kind, RunJournal
from asyncrl.sampler import CountingSampler
from asyncrl.status import EvaluationResult, RunStatus
from asyncrl.syncing import WeightSyncs
from asyncrl.types import Group, PolicyVersion
from asyncrl.waiting import Queue, explain
from asyncrl.warm_start import WarmStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop drives."""

    environment: Environment
    sampler: Sampler
    learner: Learner
    engines: WeightPuller
    queues: Mapping[str, Queue] = field(default_factory=dict)
    """name -> what has a queue that an episode may stand in, for `Run.explain`."""
    quarantines: Callable[[], int] = lambda: 0
    """Times that engines took other weights than were sent, since the start."""


class Recorder(Protocol):
    """Who writes down what happens; never blocks."""

    def group(self, group: Group) -> None:
        """Note a finished group."""
        ...

    def step(self, record: Mapping[str, float], result: StepResult) -> None:
        """Note an optimizer step, once the engines may pull its weights."""
        ...

    def warm_step(self, record: Mapping[str, float]) -> None:
        """Note an optimizer step on demonstrations."""
        ...

    def evaluation(self, result: EvaluationResult) -> None:
        """Note a measurement of the held-out tasks."""
        ...

    def phase(self) -> None:
        """Note that `RunStatus.phase` has changed."""
        ...

    def alarm(self, alarm: Alarm) -> None:
        """Note what a guard saw after the last step, and what it does."""
        ...

    def stalled(self, chain: Sequence[str]) -> None:
        """Note that the learner has waited for longer than `Limits.stall_seconds`, and who waits for whom."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the run ends, saves and measures."""

    steps: int
    max_seconds: float = float("inf")
    checkpoint_every_steps: int = 0
    evaluation_samples: int = 0
    evaluate_before: bool = True
    evaluate_every_steps: int = 0
    stall_seconds: float = float("inf")
    """Of waiting for groups, after which it is said who waits for whom."""


class Run:
    """One run of the loop. `stop` set: no new work, finish the step under way, save, return."""

    def __init__(
        self,
        parts: Parts,
        buffer: BufferSettings,
        limits: Limits,
        *,
        recorder: Recorder,
        checkpoints: CheckpointStore,
        status: RunStatus,
        stop: trio.Event,
        guards: Guards | None = None,
        warm_start: WarmStart | None = None,
        resume_from: Checkpoint | None = None,
        journal: RunJournal | None = None,
        resumption: Resumption | None = None,
        rng: Random | None = None,
    ) -> None:
        """`rng` draws for the buffer's uniform order.

        Without a `journal` only checkpoints are resumed from; `resumption` is what there is of one (`plan_resumption`).
        """
        state: Mapping[str, Any] = resume_from.state if resume_from else {}
        self._parts = parts
        self._settings = buffer
        self._limits = limits
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._stop = stop
        self._warm_start = warm_start
        self._warm_start_state = state.get("warm_start")
        version = resume_from.version if resume_from else 0
        self._guards = guards or Guards(GuardSettings())
        self._guards.restore(state.get("guards", {}))
        status.guard_actions.update(dict.fromkeys(self._guards.deeds, 0))  # a scrape must see the first one grow from 0
        self._go_on = trio.Event()
        self.journal = journal or RunJournal()
        self.status = status
        self.ledger = Ledger()
        if resume_from:
            status.restore(state["counters"])
            status.selection.restore(state["selection"])
            status.behaviour.restore(state.get("behaviour", {}))
            self.ledger.restore(state["accounting"])
            parts.environment.restore(state["environment"])
        self.learner_idle = LearnerIdle(status.learner_idle_seconds)
        self.engine_idle = EngineIdle(status.engine_idle_seconds)
        watched = self.engine_idle.watch(parts.sampler)
        self._sampler = CountingSampler(watched, lambda _, completion: status.count_completion(completion))
        begin_with = go_on(
            resumption or plan_resumption(state, version, RunHistory(), settings=buffer),
            environment=parts.environment,
            ledger=self.ledger,
            status=status,
            journal=self.journal,
            settings=buffer,
        )
        self.notes = begin_with.notes
        """What of an interrupted run was kept and what was not, a line each."""
        self.gate = Gate(buffer.num_slots, first_group_id=begin_with.next_group_id)
        self.buffer = GroupBuffer(
            groups_per_step=buffer.groups_per_step,
            max_off_policyness=buffer.max_off_policyness,
            order=buffer.order,
            window=buffer.effective_window,
            max_uses=buffer.max_uses,
            version=version,
            rng=rng,
        )
        self.syncs = WeightSyncs(
            parts.learner,
            parts.engines,
            buffer=self.buffer,
            gate=self.gate,
            journal=self.journal,
            idle=self.engine_idle,
            status=status,
            max_off_policyness=buffer.max_off_policyness,
        )
        self._rollouts = GroupRollouts(
            parts.environment,
            self._sampler,
            buffer,
            gate=self.gate,
            buffer=self.buffer,
            ledger=self.ledger,
            idle=self.engine_idle,
            status=status,
            on_group=recorder.group,
            stop=stop,
            journal=self.journal,
            resumption=begin_with,
        )
        self._saved_version: PolicyVersion | None = resume_from.version if resume_from else None
        self._started: float | None = None
        self._seconds: float | None = None
        self._phase_began = 0.0

    async def train(self) -> None:
        """Measure, train until a limit, the end of the tasks or `stop`, save, measure again."""
        if self._limits.evaluate_before and self.status.version == 0 and not self.status.evaluations:
            await self._evaluate()
        self._started = trio.current_time()
        async with self.syncs.under_way():
            if self._warm_start is not None:
                await self._warm_up(self._warm_start)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._rollouts.run)
                while not self._is_over():
                    groups = await self._next_groups()
                    if not groups:
                        break
                    await self._step(groups)
                nursery.cancel_scope.cancel()
            if self._saved_version != self.status.version:
                await self._save()
            await self._wait_pulled()
        self._seconds = self.seconds
        if not self._stop.is_set():
            await self._evaluate()
        self.engine_idle.switch(None)
        self._phase("stopped" if self._stop.is_set() else "finished")

    @property
    def max_off_policyness(self) -> int:
        """The largest staleness that is trained on, in optimizer steps."""
        return self._settings.max_off_policyness

    @property
    def num_unfinished(self) -> int:
        """Groups that were drawn and neither trained on nor dropped; a resumed run draws their tasks again."""
        return len(self._rollouts.open_draws)

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included; evaluations at both ends are not."""
        if self._seconds is not None:
            return self._seconds
        return self.status.seconds_before + (trio.current_time() - self._started if self._started is not None else 0.0)

    def _is_over(self) -> bool:
        return self._is_cut_short() or self.status.steps >= self._limits.steps

    def _is_cut_short(self) -> bool:
        return self._stop.is_set() or self.seconds >= self._limits.max_seconds

    async def _warm_up(self, warm_start: WarmStart) -> None:
        """Train on demonstrations, bring the weights into the engines once, and measure what they have learned."""
        every, began = self._limits.checkpoint_every_steps, warm_start.steps_done
        while not (warm_start.is_over or self._is_cut_short()):
            self._phase("warm start", f"step {warm_start.steps_done + 1} of {warm_start.num_steps}")
            record = await warm_start.step(self._parts.learner) | {"seconds": self.seconds}
            self.status.count_warm_step(record)
            self._recorder.warm_step(record)
            if every and (warm_start.steps_done % every == 0 or warm_start.is_over):
                await self._save()
        if warm_start.steps_done > began and not self._stop.is_set():
            await self._publish()
            await self._wait_pulled()
        if self._limits.evaluate_before and self.status.steps == 0 and not self._is_over():
            await self._evaluate()

    # --- the learner's side -----------------------------------------------------------------------------------

    async def _next_groups(self) -> Sequence[Group]:
        """Return the next step's groups, or none when the run is to end first."""
        self._phase("waiting for groups")
        groups: Sequence[Group] = ()
        time_left = self._limits.max_seconds - self.seconds
        with trio.move_on_after(time_left) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when, self._stop, patience)
                nursery.start_soon(self._warn_of_stall)
                groups = await self.buffer.take(on_wait=self._note_wait)
                nursery.cancel_scope.cancel()
        return groups

    def _note_wait(self, wait: Wait) -> None:
        phase = ("syncing", f"version {self.syncs.published}") if wait.for_pull else ("waiting for groups", "")
        if (self.status.phase, self.status.waiting_for) != phase:
            self._phase(*phase)
        self.learner_idle.wait_for(wait.straggler, for_pull=wait.for_pull)

    async def _warn_of_stall(self) -> None:
        await trio.sleep(self._limits.stall_seconds)
        self.status.stalls += 1
        self._recorder.stalled(self.explain())

    def explain(self) -> list[str]:
        """Return who waits for whom, one link of the chain a line."""
        return explain(
            phase=self.status.phase,
            waiting_for=self.status.waiting_for,
            phase_seconds=trio.current_time() - self._phase_began,
            groups_per_step=self._settings.groups_per_step,
            straggler=self.learner_idle.straggler,
            gate=self.gate.statistics(),
            buffer=self.buffer.statistics(),
            running=self._rollouts.running,
            tasks_ended=self._rollouts.tasks_ended,
            queues=self._parts.queues,
        )

    async def _step(self, groups: Sequence[Group]) -> None:
        """Train on `groups` and make the new weights available; what is due by then, save and measure."""
        began = trio.current_time()
        staleness = self._check_staleness(groups)
        fresh = [group.group_id for group in groups if self.buffer.is_first_use(group.group_id)]
        self._phase("stepping")
        result = await self._parts.learner.step(groups, self._guards.options())
        stepped = trio.current_time()
        for group in groups:
            if group.group_id in fresh:
                self.status.select(Stage.TRAINED, group.trajectories, self.status.version)
        self.status.tallies.count_trained(groups, result)
        self.status.count_step(result, staleness, num_groups=len(fresh), num_reused=len(groups) - len(fresh))
        self.ledger.train(fresh)
        await self._publish()
        version = self.status.version
        record = GroupsTrained(group_ids=fresh, version=version, weights=self.journal.weights[version])
        self.journal.append_nowait(Kind.GROUPS_TRAINED, record)
        self._rollouts.close(fresh)
        times = {"step_seconds": stepped - began, "publish_seconds": trio.current_time() - stepped}
        self._record(groups, result, staleness, len(fresh), times)
        held = self._guard(result)
        steps, limits = self.status.steps, self._limits
        if limits.checkpoint_every_steps and steps % limits.checkpoint_every_steps == 0:
            await self._save()
        if limits.evaluate_every_steps and steps % limits.evaluate_every_steps == 0 and steps < limits.steps:
            await self._evaluate()
        if held:
            await self._pause(held)

    def _guard(self, result: StepResult) -> str:
        """Tell the guards of the step and do what they say; return why the run is to pause, if it is."""
        quarantines = self._parts.quarantines()
        why = ""
        for alarm in self._guards.check(self.status.last_step, stepped=result.stepped, quarantines=quarantines):
            self.status.guard_actions[alarm.guard, alarm.action.value] += 1
            self._recorder.alarm(alarm)
            if alarm.action is Action.STOP:
                self.status.stopped_by = self.status.stopped_by or alarm.words
                self._stop.set()
            elif alarm.action is Action.PAUSE:
                why = why or alarm.words
        self.status.guard_scale = self._guards.scale
        self.gate.resize(self._guards.slots(self._settings.groups_per_step, self._settings.num_slots))
        return why

    async def _pause(self, why: str) -> None:
        """Save, and wait for `go_on` or the end; groups that run meanwhile come to their ends."""
        if self._saved_version != self.status.version:
            await self._save()
        self._phase("paused", why)
        self._go_on = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, self._stop, nursery.cancel_scope)
            await self._go_on.wait()
            nursery.cancel_scope.cancel()

    def go_on(self) -> None:
        """End a pause, where there is one."""
        self._go_on.set()

    def _check_staleness(self, groups: Sequence[Group]) -> int:
        """Return the largest staleness among the groups. Raises StalenessError: passing the bound is a bug."""
        bound, version = self._settings.max_off_policyness, self.status.version
        oldest = {g.group_id: v for g in groups if (v := g.oldest_version) is not None}
        for group_id, sampled in oldest.items():
            if not 0 <= version - sampled <= bound:
                raise StalenessError(
                    f"group {group_id} holds a token of version {sampled}, the learner is at {version} and "
                    f"max_off_policyness is {bound}"
                )
        return max((version - sampled for sampled in oldest.values()), default=0)

    async def _publish(self) -> None:
        """Let the engines pull the learner's weights; returns while they do."""
        self._phase("syncing", "room for the next version")
        keep = await self.syncs.make_room()
        self._phase("publishing")
        await self.syncs.publish(keep)

    async def _wait_pulled(self) -> None:
        """Return when the engines hold what the learner has published."""
        if self.buffer.version < self.syncs.published:
            self._phase("syncing", f"version {self.syncs.published}")
            await self.syncs.wait_pulled()

    def _record(
        self,
        groups: Sequence[Group],
        result: StepResult,
        staleness: int,
        num_fresh: int,
        times: Mapping[str, float],
    ) -> None:
        scored = [t for group in groups for t in group.trajectories if t.reward is not None]
        record = {
            **result.metrics,
            "step": self.status.steps,
            "version": self.status.version,
            "seconds": self.seconds,
            "reward_mean": fmean(t.reward or 0.0 for t in scored),
            "solve_rate": fmean(is_solved(t) for t in scored),
            "turns_mean": fmean(t.num_turns for t in scored),
            "completion_tokens_mean": fmean(t.num_sampled_tokens for t in scored),
            "truncated_share": fmean(t.truncated for t in scored),
            **self.status.behaviour.add_step(*counts_of(scored)),
            "staleness_max": staleness,
            "groups_reused": len(groups) - num_fresh,
            "tokens_generated": self.status.tokens_generated,
            **times,
            "versions_ahead": self.status.version - self.buffer.version,
            **self.syncs.lap(),
            **{f"learner_idle_{cause}_seconds": seconds for cause, seconds in self.learner_idle.lap().items()},
            **{f"engine_idle_{cause}_seconds": seconds for cause, seconds in self.engine_idle.lap().items()},
        }
        straggler = self.learner_idle.worst_straggler()
        if straggler is not None:
            record["straggler_group"] = straggler
        self.status.last_step = record
        self._recorder.step(record, result)

    async def _save(self) -> None:
        self._phase("saving")
        version = self.status.version
        partial = self._checkpoints.begin(version)
        await self._parts.learner.save(str(partial))
        state = self._state()
        await self.journal.flush()  # all that the state knows of is on disk before it
        self._checkpoints.commit(partial, version, state)
        self._saved_version = version
        await self.journal.release(self._checkpoints.oldest_state()["journal"]["needed_from"])

    def _state(self) -> dict[str, Any]:
        """Return what resuming needs, as of this moment: open groups are found in the journal, or drawn again."""
        self.flush_idle()
        counters = self.status.counters() | {"seconds_before": self.seconds}
        return {
            "counters": counters,
            "accounting": self.ledger.state(),
            "selection": self.status.selection.state(),
            "behaviour": self.status.behaviour.state(),
            "guards": self._guards.state(),
            "environment": self._parts.environment.state(),
            "warm_start": self._warm_start.state() if self._warm_start else self._warm_start_state,
            "next_group_id": self.gate.next_group_id,
            "draws": [
                {"draw_id": draw.draw_id, "group_id": group_id, "task": asdict(draw.task)}
                for draw, group_id in self._rollouts.open_draws
            ],
            "reusable": {str(group_id): uses for group_id, uses in self._rollouts.reusable.items()},
            "journal": {"position": self.journal.position, "needed_from": self._rollouts.needed_from},
            "weights": {str(version): digest for version, digest in self.journal.weights.items()},
        }

    async def _evaluate(self) -> None:
        tasks = self._parts.environment.held_out()
        if not (self._limits.evaluation_samples and tasks):
            return
        await self._wait_pulled()
        self._phase("evaluating", f"held-out tasks, 0 of {len(tasks)} done")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, self._stop, nursery.cancel_scope)
            result = await evaluate(
                self._parts.environment,
                self._sampler,
                tasks,
                samples=self._limits.evaluation_samples,
                version=self.status.version,
                concurrent_tasks=self._settings.num_slots,
                deadline_s=self._settings.group_deadline_s,
                on_task=lambda done: self._phase("evaluating", f"held-out tasks, {done} of {len(tasks)} done"),
            )
            self.status.evaluations.append(result)
            self._recorder.evaluation(result)
            nursery.cancel_scope.cancel()

    def _phase(self, phase: str, waiting_for: str = "") -> None:
        if phase != self.status.phase:
            self._phase_began = trio.current_time()
        self.status.phase, self.status.waiting_for = phase, waiting_for
        self.learner_idle.phase(phase)
        self.flush_idle()
        self._recorder.phase()

    def flush_idle(self) -> None:
        """Bring the idle seconds in `status` up to this moment."""
        self.learner_idle.flush()
        self.engine_idle.flush()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
