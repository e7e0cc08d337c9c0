"""What a run has done and what it is doing, in one object that the loop owns and everybody else may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.behaviour import BehaviourWatch
from asyncrl.buffers import EpisodeFigures, SelectionStatistics, Stage
from asyncrl.protocols import StepResult, SyncReport
from asyncrl.tallies import Tallies
from asyncrl.types import Completion, Group, PolicyVersion, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Held-out tasks, measured at one version."""

    version: PolicyVersion
    solve_rate: float
    """From 0 to 1: share of the episodes that were solved, failed ones left out."""
    mean_reward: float
    num_tasks: int
    num_samples: int
    """Episodes that carry a reward."""
    num_failed: int
    """Episodes that infrastructure ended; not in the rates."""
    by_task: Mapping[str, float]
    """task id, of a mixture with its part before it -> share of its episodes that were solved."""
    seconds: float
    interval: Sequence[float] = (0.0, 1.0)
    """95 % of the solve rate, over tasks like these."""
    pass_at: Sequence[float] = ()
    """Place k - 1: the chance that one of k episodes solves a task."""


@dataclass(slots=True, kw_only=True)
class RunStatus:
    """Counters and the present phase. Times are seconds on the orchestrator's clock."""

    version: PolicyVersion = 0
    steps: int = 0
    """Optimizer steps on rollouts in the whole run, those before a resume included."""
    warm_start: dict[str, float] = field(default_factory=dict)
    """Of the warm start so far: steps, tokens, and the held-out perplexity before and after (where measured)."""
    phase: str = "starting"
    """What the learner's side does: starting, evaluating, warm start, waiting for groups, stepping, publishing, syncing
    (waiting for the engines), saving, paused (by a guard), finished, stopped."""
    waiting_for: str = ""
    """Who is waited for, in words; empty when nobody waits."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    groups_trained: int = 0
    """Each once."""
    groups_reused: int = 0
    """Uses after a group's first."""
    expired_reuse: int = 0
    """Groups that were used less often than `max_uses`, because once more would have broken the bound."""
    lost_reuse: int = 0
    """Groups that were used less often than `max_uses`, because too little of them outlived an interruption."""
    max_staleness_trained: int = 0
    max_importance_ratio: float = 0.0
    weight_syncs: int = 0
    weight_syncs_verified: int = 0
    weight_sync_bytes: Counter[str] = field(default_factory=Counter)
    """encoding -> bytes that engines read of what the learner published."""
    weight_sync_chain_breaks: Counter[str] = field(default_factory=Counter)
    """reason -> times that an engine read a whole version although deltas are sent."""
    versions_superseded: int = 0
    """Published versions that no engine pulled: a newer one came first."""
    last_sync: Mapping[str, float] = field(default_factory=dict)
    """Of the last version that reached the engines: seconds from the end of its step, stall_seconds, bytes, and with a
    canary the largest canary_distance of an engine."""
    generation_stall_seconds: float = 0.0
    learner_idle_seconds: dict[str, float] = field(default_factory=dict)
    """cause -> seconds; the causes are `asyncrl.idle.LEARNER_CAUSES`."""
    engine_idle_seconds: dict[str, float] = field(default_factory=dict)
    """cause -> seconds in which no engine had a request; the causes are `asyncrl.idle.ENGINE_CAUSES`."""
    steps_skipped: int = 0
    requests_moved: int = 0
    """Times that a request went on in another engine, because the one that ran it failed."""
    tokens_carried: int = 0
    """Tokens that such requests had already, each time: none of them was sampled again."""
    guard_actions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(guard, action) -> times, in this process."""
    guard_scale: float = 1.0
    """Share of the learning rate, or of the gate's slots, that the guards' controller leaves."""
    stopped_by: str = ""
    """What a guard said when it stopped the run."""
    stalls: int = 0
    """Times that the learner waited for groups longer than the limit."""
    trajectories: Counter[str] = field(default_factory=Counter)
    """status -> episodes of training that ended so."""
    episodes_retried: int = 0
    """Failed attempts at an episode that another one followed."""
    groups_dropped: Counter[str] = field(default_factory=Counter)
    """reason -> groups that were generated and not trained on."""
    selection: SelectionStatistics = field(default_factory=SelectionStatistics)
    """Of the episodes of training: how far what is trained on lies from what was generated."""
    tallies: Tallies = field(default_factory=Tallies)
    """Of this process alone."""
    behaviour: BehaviourWatch = field(default_factory=BehaviourWatch)
    """Of the episodes that were trained on, where their environment watches."""
    evaluations: list[EvaluationResult] = field(default_factory=list)
    last_step: Mapping[str, float] = field(default_factory=dict)
    last_warm_step: Mapping[str, float] = field(default_factory=dict)
    seconds_before: float = 0.0
    """Of training, in the processes that this run resumed."""

    def count_completion(self, completion: Completion) -> None:
        """Count what an engine generated, trained on later or not."""
        self.tokens_generated += len(completion.token_ids)
        self.requests_moved += len(completion.moved_at)
        self.tokens_carried += sum(completion.moved_at)

    def count_group(self, group: Group) -> None:
        """Count how the group's episodes ended."""
        self.tallies.count_group(group)
        self.trajectories.update(trajectory.status.value for trajectory in group.trajectories)
        retries = [trajectory.extras.get("retries") for trajectory in group.trajectories]  # as `asyncrl.rollout` notes
        self.episodes_retried += sum(number for number in retries if isinstance(number, int))

    def select(self, stage: Stage, trajectories: Iterable[Trajectory], version: PolicyVersion) -> None:
        """Count what became of episodes while the newest weights were of `version`.

        One that failed has no tokens to train on, so that it is dropped whatever becomes of its group.
        """
        for trajectory in trajectories:
            failed, oldest = trajectory.reward is None, trajectory.oldest_version
            figures = EpisodeFigures(
                tokens=None if failed else trajectory.num_sampled_tokens,
                reward=trajectory.reward,
                staleness=None if oldest is None else max(0, version - oldest),
                seconds=trajectory.seconds,
            )
            reached = Stage.DROPPED if failed and stage is Stage.TRAINED else stage
            self.selection.count(trajectory.environment, reached, figures)

    def count_step(self, result: StepResult, staleness: int, *, num_groups: int, num_reused: int = 0) -> None:
        """Count one optimizer step, on so many groups for the first time and so many once more."""
        self.version = result.version
        self.steps += 1
        self.steps_skipped += not result.stepped
        self.groups_trained += num_groups
        self.groups_reused += num_reused
        self.tokens_trained += int(result.metrics.get("tokens_trained", 0))
        self.max_staleness_trained = max(self.max_staleness_trained, staleness)
        ratio = result.metrics.get("importance_ratio_max", 0.0)
        self.max_importance_ratio = max(self.max_importance_ratio, ratio)

    def count_warm_step(self, record: Mapping[str, float]) -> None:
        """Count one optimizer step on demonstrations."""
        self.version = int(record["version"])
        self.steps_skipped += not record["stepped"]
        tokens = self.warm_start.get("tokens", 0) + record.get("tokens_trained", 0)
        self.warm_start |= {"steps": record["step"], "tokens": tokens}
        for name, key in (("before", "held_out_perplexity_before"), ("after", "held_out_perplexity")):
            if key in record:
                self.warm_start[f"held_out_perplexity_{name}"] = record[key]
        self.last_warm_step = record

    def count_sync(self, reports: Sequence[SyncReport]) -> None:
        """Count one version's way into the engines; it is verified when every engine's digest agreed."""
        self.tallies.count_sync(reports)
        self.weight_syncs += bool(reports)
        self.weight_syncs_verified += bool(reports) and all(report.verified for report in reports)
        for report in reports:
            self.weight_sync_bytes[report.encoding] += report.num_bytes
            if report.chain_break:
                self.weight_sync_chain_breaks[report.chain_break] += 1
        self.generation_stall_seconds += max((report.stall_seconds for report in reports), default=0.0)

    def counters(self) -> dict[str, Any]:
        """Return what a checkpoint keeps (JSON-like)."""
        return {name: dict(value) if isinstance(value := getattr(self, name), dict) else value for name in _KEPT} | {
            "evaluations": [asdict(result) for result in self.evaluations]
        }

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Go on counting from what `counters` returned."""
        for name in _KEPT:
            value = counters.get(name, getattr(self, name))
            value = dict(value) if isinstance(value, dict) else value
            setattr(self, name, Counter(value) if isinstance(getattr(self, name), Counter) else value)
        self.evaluations = [EvaluationResult(**result) for result in counters["evaluations"]]


_KEPT = (
    "version",
    "steps",
    "warm_start",
    "tokens_generated",
    "tokens_trained",
    "groups_trained",
    "groups_reused",
    "expired_reuse",
    "lost_reuse",
    "max_staleness_trained",
    "max_importance_ratio",
    "weight_syncs",
    "weight_syncs_verified",
    "weight_sync_bytes",
    "weight_sync_chain_breaks",
    "versions_superseded",
    "generation_stall_seconds",
    "learner_idle_seconds",
    "engine_idle_seconds",
    "steps_skipped",
    "requests_moved",
    "tokens_carried",
    "stalls",
    "trajectories",
    "episodes_retried",
    "groups_dropped",
    "seconds_before",
)
