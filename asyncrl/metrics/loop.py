"""How far the run is, what waits for what, and how weights travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.buffers import Amount
from asyncrl.metrics.family import Family, Source, Values, counter, gauge
from asyncrl.status import RunStatus

PHASES = (
    "starting",
    "evaluating",
    "warm start",
    "waiting for groups",
    "stepping",
    "syncing",
    "publishing",
    "saving",
    "paused",
    "finished",
    "stopped",
)
"""What the learner's side may be doing; `asyncrl_phase` is 1 for the present one."""


def status(read: Callable[[RunStatus], Values]) -> Callable[[Source], Values]:
    """Return a reader of the run's status."""
    return lambda source: read(source.run.status)


def _idle(who: str) -> Callable[[Source], Values]:
    def read(source: Source) -> Values:
        source.run.flush_idle()
        seconds: Values = getattr(source.run.status, f"{who}_idle_seconds")
        return seconds

    return read


def _last_sync(key: str) -> Callable[[Source], Values]:
    return lambda source: source.run.status.last_sync.get(key)


def _warm(key: str) -> Callable[[Source], Values]:
    return lambda source: source.run.status.last_warm_step.get(key)


def _accounted(unit: str) -> Callable[[Source], Values]:
    def read(source: Source) -> Values:
        statement = source.run.ledger.statement()
        states = {
            "generated": statement.generated,
            "trained": statement.trained,
            "in_buffer": statement.in_buffer,
            "in_flight": statement.in_flight,
            "dropped": sum(statement.dropped.values(), start=Amount()),
            "missing": statement.difference,
        }
        return {state: getattr(amount, unit) for state, amount in states.items()}

    return read


def _dropped(unit: str) -> Callable[[Source], Values]:
    return lambda source: {
        reason: getattr(amount, unit) for reason, amount in source.run.ledger.statement().dropped.items()
    }


def _journal(read: Callable[[Any], float]) -> Callable[[Source], Values]:
    def from_journal(source: Source) -> Values:
        statistics = source.run.journal.statistics()
        return None if statistics is None else read(statistics)

    return from_journal


def _phase(source: Source) -> Values:
    return {phase: float(phase == source.run.status.phase) for phase in PHASES}


def _ages(source: Source) -> Values:
    ages = source.run.gate.statistics().holders.values()
    return {"oldest": max(ages, default=0.0), "mean": sum(ages) / len(ages) if ages else 0.0}


PROGRESS: tuple[Family, ...] = (
    gauge("asyncrl_policy_version", "steps", "Optimizer steps applied to the weights.", "stands still",
          status(lambda s: s.version)),
    counter("asyncrl_steps", "steps", "Optimizer steps taken, skipped ones included.", "does not grow for minutes",
            status(lambda s: s.steps)),
    counter("asyncrl_steps_skipped", "steps", "Steps whose gradient norm was not finite or that had no token.",
            "grows", status(lambda s: s.steps_skipped)),
    counter("asyncrl_stalls", "times", "Waits of the learner for groups that were longer than stall_minutes.",
            "grows: `asyncrl status` says who waits for whom", status(lambda s: s.stalls)),
    counter("asyncrl_guard_actions", "alarms", "What guards saw, by guard and what they did; see [guards].", "grows",
            status(lambda s: s.guard_actions), "guard", "action"),
    gauge("asyncrl_guard_scale", "share", "Of the learning rate or the gate's slots that the controller leaves.",
          "stays low", status(lambda s: s.guard_scale)),
    gauge("asyncrl_phase", "0 or 1", "What the learner's side does: 1 for the present phase.", "", _phase, "phase"),
    gauge("asyncrl_training_seconds", "seconds", "Time of training, before a resume included.", "",
          lambda source: source.run.seconds),
    counter("asyncrl_tokens_generated", "tokens", "Tokens that the engines sampled, trained on or not.",
            "does not grow", status(lambda s: s.tokens_generated)),
    counter("asyncrl_tokens_trained", "tokens", "Sampled tokens that were trained on.",
            "far below asyncrl_tokens_generated_total", status(lambda s: s.tokens_trained)),
    counter("asyncrl_groups_trained", "groups", "Groups that were trained on, each once.", "",
            status(lambda s: s.groups_trained)),
    counter("asyncrl_groups_reused", "groups", "Groups that were trained on once more.", "",
            status(lambda s: s.groups_reused)),
    counter("asyncrl_expired_reuse", "groups", "Groups used less often than they may be: too old.", "",
            status(lambda s: s.expired_reuse)),
    counter("asyncrl_lost_reuse", "groups", "Groups used less often than they may be: lost at a resume.", "",
            status(lambda s: s.lost_reuse)),
    counter("asyncrl_warm_start_steps", "steps", "Steps on demonstrations, not among asyncrl_steps_total.", "",
            status(lambda s: s.warm_start.get("steps", 0))),
    counter("asyncrl_warm_start_tokens", "tokens", "Tokens of demonstrations that were trained on.", "",
            status(lambda s: s.warm_start.get("tokens", 0))),
    gauge("asyncrl_warm_start_loss_nats", "nats", "Loss of the last step on demonstrations, a token.",
          "does not fall", _warm("loss")),
    gauge("asyncrl_warm_start_held_out_loss_nats", "nats", "Held-out demonstrations' loss, where just measured.",
          "rises while the loss falls", _warm("held_out_loss")),
    gauge("asyncrl_evaluation_solve_ratio", "share, 0 to 1", "Held-out solve rate, last measured.",
          "falls while the training reward rises",
          status(lambda s: s.evaluations[-1].solve_rate if s.evaluations else None)),
    gauge("asyncrl_evaluation_version", "steps", "Policy version that was last measured.", "",
          status(lambda s: s.evaluations[-1].version if s.evaluations else None)),
)  # fmt: skip

PIPELINE: tuple[Family, ...] = (
    gauge("asyncrl_gate_slots", "groups", "Slots of the gate: groups that may be between start and pull.", "",
          lambda source: source.run.gate.statistics().num_slots),
    gauge("asyncrl_gate_slots_held", "groups", "Slots held by groups.", "all held, and no token is sampled",
          lambda source: source.run.gate.statistics().held),
    gauge("asyncrl_gate_slot_age_seconds", "seconds", "Age of the held slots: the oldest, and the mean.",
          "the oldest is many times the mean: a straggler", _ages, "of"),
    gauge("asyncrl_buffer_groups_ready", "groups", "Finished groups that wait for the learner.",
          "always 0: the learner waits for rollouts; near all slots: rollouts wait for the learner",
          lambda source: source.run.buffer.statistics().num_ready),
    gauge("asyncrl_buffer_groups_running", "groups", "Groups under way.", "0 for minutes",
          lambda source: source.run.buffer.statistics().num_running),
    gauge("asyncrl_buffer_groups_reusable", "groups", "Groups that may be trained on once more.", "",
          lambda source: source.run.buffer.statistics().num_reusable),
    gauge("asyncrl_straggler_group", "id", "Group that a step waits for; absent where any would do.", "",
          lambda source: source.run.learner_idle.straggler),
    counter("asyncrl_learner_idle_seconds", "seconds", "Time in which the learner waited, by cause.",
            "`groups` or `straggler` is most of the time", _idle("learner"), "cause"),
    counter("asyncrl_engine_idle_seconds", "seconds", "Time in which no engine had a request, by cause.",
            "`no_slot`: the learner is too slow for the bound", _idle("engine"), "cause"),
    counter("asyncrl_episodes_retried", "episodes", "Failed attempts that another one followed.", "grows steadily",
            status(lambda s: s.episodes_retried)),
    counter("asyncrl_groups_dropped", "groups", "Groups not trained on, by reason.", "all_failed or group_deadline",
            status(lambda s: s.groups_dropped), "reason"),
    counter("asyncrl_trajectories_dropped", "episodes", "Episodes not trained on, by reason.", "",
            _dropped("trajectories"), "reason"),
    counter("asyncrl_tokens_dropped", "tokens", "Sampled tokens not trained on, by reason.",
            "a large share of asyncrl_tokens_generated_total", _dropped("tokens"), "reason"),
    *(gauge(f"asyncrl_accounted_{unit}", words, f"What was generated, in {words}, and where it is.",
            "`missing` is not 0: a bug", _accounted(unit), "state")
      for unit, words in (("groups", "groups"), ("trajectories", "episodes"), ("tokens", "tokens"))),
    gauge("asyncrl_selection_distance_ratio", "share, 0 to 1",
          "Kolmogorov-Smirnov distance between episodes trained on, or dropped, and those generated; 0 is no bias.",
          "large for `trained`: long, slow or failing episodes are not learned from",
          status(lambda s: {labels: found.distance for labels, found in s.selection.distances().items()}),
          "environment", "quantity", "stage"),
    gauge("asyncrl_journal_bytes", "bytes", "The journal's files on disk.", "grows without end",
          _journal(lambda j: j.num_bytes)),
    counter("asyncrl_journal_syncs", "times", "Waits for the disk.", "", _journal(lambda j: j.num_syncs)),
    gauge("asyncrl_journal_unsynced_records", "records",
          "Records that a power failure may take; a kill of the process takes none.", "",
          _journal(lambda j: j.next_position - j.durable_position)),
)  # fmt: skip

SYNC: tuple[Family, ...] = (
    counter("asyncrl_weight_syncs", "versions", "Versions that reached the engines.", "does not grow with the steps",
            status(lambda s: s.weight_syncs)),
    counter("asyncrl_weight_syncs_verified", "versions", "Versions whose digest every engine confirmed.",
            "below asyncrl_weight_syncs_total", status(lambda s: s.weight_syncs_verified)),
    counter("asyncrl_weight_versions_superseded", "versions",
            "Published versions that no engine pulled: a newer one came first.", "most of them: pulls are too slow",
            status(lambda s: s.versions_superseded)),
    counter("asyncrl_weight_sync_phase_seconds", "seconds", "Time of the slowest engine in each phase of a sync.", "",
            status(lambda s: s.tallies.sync_seconds), "phase"),
    counter("asyncrl_weight_sync_bytes", "bytes", "Bytes that engines read of the versions published.", "",
            status(lambda s: s.weight_sync_bytes), "encoding"),
    counter("asyncrl_weight_sync_chain_breaks", "times", "Whole versions read although deltas are sent.",
            "grows with every version", status(lambda s: s.weight_sync_chain_breaks), "reason"),
    counter("asyncrl_generation_stall_seconds", "seconds",
            "Time in which syncs kept the engines from producing tokens.", "more than a few percent of the time",
            status(lambda s: s.generation_stall_seconds)),
    gauge("asyncrl_sync_seconds", "seconds", "Of the last sync, from the end of its step, publishing included.",
          "longer than a step", _last_sync("seconds")),
    gauge("asyncrl_sync_stall_seconds", "seconds", "In which the last sync paused an engine, at most.",
          "seconds", _last_sync("stall_seconds")),
    gauge("asyncrl_sync_bytes", "bytes", "That the last sync moved, into all engines.", "", _last_sync("bytes")),
    gauge("asyncrl_versions_ahead", "steps", "Versions that the engines were behind after the last step.",
          "at max_off_policyness", lambda source: source.run.status.last_step.get("versions_ahead")),
)  # fmt: skip
