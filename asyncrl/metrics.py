"""The run as Prometheus sees it: one table, read from `RunStatus` at the moment of the scrape.

Nothing is kept twice: counters live in the status object, and a scrape turns them into samples. The registry is the
caller's; importing this module registers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.buffers import Amount, SelectionStatistics, Statement
from asyncrl.engines import EngineStatistics, Health, PoolStatistics
from asyncrl.run import Run
from asyncrl.status import RunStatus

_COUNTERS: tuple[tuple[str, str, Callable[[RunStatus], float]], ...] = (
    ("asyncrl_steps", "Optimizer steps taken, skipped ones included.", lambda s: s.steps),
    (
        "asyncrl_steps_skipped",
        "Steps whose gradient norm was not finite or that had no token.",
        lambda s: s.steps_skipped,
    ),
    (
        "asyncrl_warm_start_steps",
        "Optimizer steps on demonstrations, not among asyncrl_steps_total.",
        lambda s: s.warm_start.get("steps", 0),
    ),
    (
        "asyncrl_warm_start_tokens",
        "Tokens of demonstrations that were trained on.",
        lambda s: s.warm_start.get("tokens", 0),
    ),
    ("asyncrl_stalls", "Times the learner waited for groups longer than stall_minutes.", lambda s: s.stalls),
    ("asyncrl_tokens_generated", "Tokens that the engines sampled, trained on or not.", lambda s: s.tokens_generated),
    ("asyncrl_tokens_trained", "Sampled tokens that were trained on.", lambda s: s.tokens_trained),
    ("asyncrl_episodes_retried", "Failed attempts that another one followed.", lambda s: s.episodes_retried),
    ("asyncrl_groups_trained", "Groups that were trained on, each once.", lambda s: s.groups_trained),
    ("asyncrl_groups_reused", "Groups that were trained on once more.", lambda s: s.groups_reused),
    ("asyncrl_expired_reuse", "Groups used less often than they may be: too old.", lambda s: s.expired_reuse),
    ("asyncrl_lost_reuse", "Groups used less often than they may be: lost at a resume.", lambda s: s.lost_reuse),
    ("asyncrl_weight_syncs", "Versions that reached the engines.", lambda s: s.weight_syncs),
    (
        "asyncrl_weight_syncs_verified",
        "Versions whose digest every engine confirmed.",
        lambda s: s.weight_syncs_verified,
    ),
    (
        "asyncrl_generation_stall_seconds",
        "Time in which weight syncs kept the engines from producing tokens.",
        lambda s: s.generation_stall_seconds,
    ),
    (
        "asyncrl_weight_versions_superseded",
        "Published versions that no engine pulled: a newer one came first.",
        lambda s: s.versions_superseded,
    ),
    ("asyncrl_requests_moved", "Requests that another engine went on with.", lambda s: s.requests_moved),
    ("asyncrl_tokens_carried", "Tokens that moved requests had already.", lambda s: s.tokens_carried),
)

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("reward_mean", "asyncrl_reward", "Mean reward of the step's episodes."),
    ("solve_rate", "asyncrl_solve_ratio", "Share of the step's episodes that solved their task."),
    ("staleness_max", "asyncrl_staleness_steps_max", "Largest staleness in the step, in optimizer steps."),
    ("staleness_mean", "asyncrl_staleness_steps_mean", "Mean staleness over the step's tokens."),
    ("importance_ratio_max", "asyncrl_importance_ratio_max", "Largest token ratio of the step, before any clip."),
    ("importance_ratio_p99", "asyncrl_importance_ratio_p99", "99th percentile of the token ratios."),
    ("importance_ratio_mean", "asyncrl_importance_ratio_mean", "Mean token ratio; 1 where nothing has drifted."),
    (
        "ess_token",
        "asyncrl_effective_sample_size_ratio",
        "Effective sample size of the token ratios over their number.",
    ),
    (
        "seq_ess_frac",
        "asyncrl_sequence_effective_sample_size_ratio",
        "Effective sample size of whole sequences' ratios over their number; falls before a run collapses.",
    ),
    ("kl_k3", "asyncrl_kl_behaviour_policy_nats", "k3 estimate of KL(behaviour || policy)."),
    ("clip_fraction_low", "asyncrl_clip_low_ratio", "Share of tokens whose gradient the lower bound zeroes."),
    ("clip_fraction_high", "asyncrl_clip_high_ratio", "Share of tokens whose gradient the upper bound zeroes."),
    ("entropy", "asyncrl_entropy_nats", "Mean entropy of the policy at the trained tokens."),
    ("entropy_coef", "asyncrl_entropy_coefficient", "Of the entropy term, where there is one."),
    ("reward_kl", "asyncrl_kl_behaviour_reference_nats", "k1 estimate a token, where it is in the reward."),
    ("zero_variance_frac", "asyncrl_zero_variance_groups_ratio", "Share of groups whose rewards are all equal."),
    ("repetition_mean", "asyncrl_repetition_ratio", "Share of a completion's 3-grams that it has said before."),
    ("loss", "asyncrl_loss", "The step's loss."),
    ("grad_norm", "asyncrl_gradient_norm", "Global gradient norm before clipping."),
    ("learning_rate", "asyncrl_learning_rate", "Of the step."),
    ("tokens_per_second", "asyncrl_learner_tokens_per_second", "Tokens that the learner forwards and backwards."),
    ("step_seconds", "asyncrl_step_seconds", "Of the last optimizer step."),
    ("publish_seconds", "asyncrl_publish_seconds", "In which the last publishing of weights kept the learner."),
    ("versions_ahead", "asyncrl_versions_ahead", "Versions that the engines were behind after the last step."),
    ("truncated_share", "asyncrl_truncated_ratio", "Share of episodes with a completion cut at the token limit."),
    ("turns_mean", "asyncrl_turns", "Mean turns of an episode."),
)

_WARM_START_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("loss", "asyncrl_warm_start_loss_nats", "Loss of the last step on demonstrations, a token."),
    ("held_out_loss", "asyncrl_warm_start_held_out_loss_nats", "Held-out demonstrations' loss, where just measured."),
)

_SYNC_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("seconds", "asyncrl_sync_seconds", "Of the last weight sync, from the end of its step, publishing included."),
    ("stall_seconds", "asyncrl_sync_stall_seconds", "In which the last weight sync paused an engine, at most."),
    ("bytes", "asyncrl_sync_bytes", "That the last weight sync moved, into all engines."),
)

PHASES = (
    "starting",
    "evaluating",
    "warm start",
    "waiting for groups",
    "stepping",
    "syncing",
    "publishing",
    "saving",
    "finished",
)
"""What the learner's side may be doing; `asyncrl_phase` is 1 for the present one."""


class RunCollector(Collector):
    """Turns one run into Prometheus samples."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def collect(self) -> Iterable[Metric]:
        """Yield every family of the table."""
        status = self._run.status
        yield GaugeMetricFamily(
            "asyncrl_policy_version", "Optimizer steps applied to the weights.", value=status.version
        )
        for name, help_text, read in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=read(status))
        for key, name, help_text in _GAUGES:
            if key in status.last_step:
                yield GaugeMetricFamily(name, help_text, value=status.last_step[key])
        for key, name, help_text in _WARM_START_GAUGES:
            if key in status.last_warm_step:
                yield GaugeMetricFamily(name, help_text, value=status.last_warm_step[key])
        for key, name, help_text in _SYNC_GAUGES:
            if key in status.last_sync:
                yield GaugeMetricFamily(name, help_text, value=status.last_sync[key])
        yield _labelled(
            CounterMetricFamily, "asyncrl_trajectories", "Episodes by how they ended.", "status", status.trajectories
        )
        yield _labelled(
            CounterMetricFamily,
            "asyncrl_groups_dropped",
            "Groups not trained on, by reason.",
            "reason",
            status.groups_dropped,
        )
        for name, words, label, counts in (
            ("bytes", "Bytes that engines read of the versions published.", "encoding", status.weight_sync_bytes),
            (
                "chain_breaks",
                "Whole versions read although deltas are sent.",
                "reason",
                status.weight_sync_chain_breaks,
            ),
        ):
            yield _labelled(CounterMetricFamily, f"asyncrl_weight_sync_{name}", words, label, counts)
        yield from _accounting(self._run.ledger.statement())
        yield _selection(status.selection)
        journal = self._run.journal.statistics()
        if journal is not None:
            yield GaugeMetricFamily("asyncrl_journal_bytes", "The journal's files on disk.", value=journal.num_bytes)
            yield CounterMetricFamily("asyncrl_journal_syncs", "Waits for the disk.", value=journal.num_syncs)
            yield GaugeMetricFamily(
                "asyncrl_journal_unsynced_records",
                "Records that a power failure may take; a kill of the process takes none.",
                value=journal.next_position - journal.durable_position,
            )
        self._run.flush_idle()
        for who, seconds in (("learner", status.learner_idle_seconds), ("engine", status.engine_idle_seconds)):
            family = f"asyncrl_{who}_idle_seconds"
            yield _labelled(CounterMetricFamily, family, f"Idle time of the {who}.", "cause", seconds)
        straggler = self._run.learner_idle.straggler
        if straggler is not None:
            yield GaugeMetricFamily("asyncrl_straggler_group", "Group that a step waits for.", value=straggler)
        gate, buffer = self._run.gate.statistics(), self._run.buffer.statistics()
        yield GaugeMetricFamily("asyncrl_gate_slots", "Slots of the gate.", value=gate.num_slots)
        yield GaugeMetricFamily("asyncrl_gate_slots_held", "Slots held by groups.", value=gate.held)
        yield GaugeMetricFamily("asyncrl_buffer_groups_ready", "Finished groups that wait.", value=buffer.num_ready)
        yield GaugeMetricFamily("asyncrl_buffer_groups_reusable", "Trained on, once more.", value=buffer.num_reusable)
        yield GaugeMetricFamily("asyncrl_buffer_groups_running", "Groups under way.", value=buffer.num_running)
        oldest = max(gate.holders.values(), default=0.0)
        yield GaugeMetricFamily("asyncrl_gate_oldest_slot_seconds", "Age of the oldest held slot.", value=oldest)
        phases = {phase: float(phase == status.phase) for phase in PHASES}
        yield _labelled(GaugeMetricFamily, "asyncrl_phase", "What the learner's side does.", "phase", phases)
        if status.evaluations:
            rate = status.evaluations[-1].solve_rate
            yield GaugeMetricFamily("asyncrl_evaluation_solve_ratio", "Held-out solve rate, last measured.", value=rate)


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineStatistics], float]], ...] = (
    ("asyncrl_engine_up", "1 where the engine is in service.", lambda e: e.health is Health.SERVING),
    ("asyncrl_engine_health_seconds", "Since it came into service, or went out of it.", lambda e: e.health_seconds),
    ("asyncrl_engine_policy_version", "Of the weights that it holds.", lambda e: e.version),
    ("asyncrl_engine_requests_running", "Requests in the engine.", lambda e: e.running),
    ("asyncrl_engine_tokens_per_second", "Sampled recently.", lambda e: e.tokens_per_second),
)

_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStatistics], float]], ...] = (
    (
        "asyncrl_engine_tokens_unverified",
        "Tokens not kept: sampled under weights that were found to be wrong.",
        lambda e: e.tokens_unverified,
    ),
    ("asyncrl_engine_quarantines", "Times that it took other weights than were sent.", lambda e: e.quarantines),
    ("asyncrl_engine_restarts", "Times that its server was started again.", lambda e: e.restarts),
    ("asyncrl_engine_tokens_sampled", "Tokens that have arrived from it.", lambda e: e.tokens_sampled),
    ("asyncrl_engine_requests_failed", "Requests that it failed; they go on elsewhere.", lambda e: e.failed),
    ("asyncrl_engine_syncs", "Versions that it has pulled.", lambda e: e.syncs),
)


class EngineCollector(Collector):
    """Turns the engines' statistics into Prometheus samples, one of each family for every engine."""

    def __init__(self, statistics: Callable[[], PoolStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        """Yield every family of the tables."""
        pool = self._statistics()
        for family, table in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
            for name, help_text, read in table:
                values = {engine.name: float(read(engine)) for engine in pool.engines}
                yield _labelled(family, name, help_text, "engine", values)
        distances = {engine.name: d for engine in pool.engines if (d := engine.canary_distance) is not None}
        yield _labelled(
            GaugeMetricFamily,
            "asyncrl_engine_canary_distance_nats",
            "Between the engine's and the learner's log-probs of a text, a token, after the last sync.",
            "engine",
            distances,
        )
        yield GaugeMetricFamily(
            "asyncrl_requests_waiting",
            "Requests that wait for a place, an engine, or the end of a sync.",
            value=pool.waiting,
        )


def _accounting(statement: Statement) -> Iterable[Metric]:
    dropped = sum(statement.dropped.values(), start=Amount())
    states = {
        "generated": statement.generated,
        "trained": statement.trained,
        "in_buffer": statement.in_buffer,
        "in_flight": statement.in_flight,
        "dropped": dropped,
        "missing": statement.difference,
    }
    for unit in ("groups", "trajectories", "tokens"):
        yield _labelled(
            GaugeMetricFamily,
            f"asyncrl_accounted_{unit}",
            "What was generated, and where it is: trained, in_buffer, in_flight, dropped; missing is always 0.",
            "state",
            {state: getattr(amount, unit) for state, amount in states.items()},
        )
        if unit != "groups":  # those are counted above
            yield _labelled(
                CounterMetricFamily,
                f"asyncrl_{unit}_dropped",
                f"Sampled {unit} that were not trained on, by reason.",
                "reason",
                {reason: getattr(amount, unit) for reason, amount in statement.dropped.items()},
            )


def _selection(selection: SelectionStatistics) -> Metric:
    family = GaugeMetricFamily(
        "asyncrl_selection_distance_ratio",
        "Kolmogorov-Smirnov distance between the episodes trained on, or dropped, and those generated; 0 is no bias.",
        labels=["environment", "quantity", "stage"],
    )
    for labels, distance in selection.distances().items():
        family.add_metric(labels, distance.distance)
    return family


def _labelled(family: Any, name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = family(name, help_text, labels=[label])
    for value, count in sorted(values.items()):
        metric.add_metric([value], count)
    return metric  # type: ignore[no-any-return]
