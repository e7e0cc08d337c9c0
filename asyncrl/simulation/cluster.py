"""What a cluster would do: the period of a step, what limits it first, and what the others are left with.

Every part alone allows a step each so many seconds (`Load`), in closed form; the slowest is the least that the period
can be: the asymptotic bound of operational analysis (Denning and Buzen 1978; Lazowska et al. 1984, ch. 5). The gate is
one of the parts, and its load is the only one that is drawn (`gate`): by Little's law its B slots, held for W seconds
each, let B / W groups a second pass, but which step a long group holds up is a matter of the order. The period is what
the gate's rules make of the slowest of the others.

Symbols (as in buffers/STALENESS.md): P groups a step of G episodes, B slots, n the bound, T the period. Failures are
counted where they act: engines that are away sample less, and what ends the run takes its share of all time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.simulation.durations import EpisodeTimes, Lognormal, SharedRate, episode_times
from asyncrl.simulation.gate import Gate, step_interval
from asyncrl.simulation.rates import SimulationRates
from asyncrl.simulation.shapes import ClusterShape, check_shape

_ROUNDS = 8  # at most, in which period and episodes, which depend on each other, settle
_SETTLED = 0.005  # of the period: below what drawn lengths make of it
_WARM_UP = 20  # steps that are left out, since all groups of the first begin together
_FEWEST, _MOST, _GROUPS = 40, 120, 30_000  # steps that are drawn after them: as many as make so many groups
_STATE_BYTES = 12.0  # of a parameter in a checkpoint, beside the weights: a master and two moments in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one part needs for a step."""

    part: str
    seconds: float
    words: str
    """How it comes about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a cluster would come to. Shares are from 0 to 1, of the time between failures."""

    gpus: int
    period_s: float
    steps_per_hour: float
    """Failures included."""
    loads: tuple[Load, ...]
    """The slowest first."""
    idle_shares: Mapping[str, float]
    """part -> share of its time, or places, that nothing uses."""
    staleness_mean: float
    """Optimizer steps, of a group's oldest token."""
    staleness_max: int
    sampled_tokens_per_second: float
    read_tokens_per_second: float
    """By the learner, prompts and observations included."""
    episode_s: float
    """Mean."""
    longest_episode_s: float
    """Of one step's, expected."""
    rollouts_running: float
    rollouts_admitted: int
    """Running, or finished and in the buffer or in a step that is not pulled: the most."""
    sync_s: float
    """From the end of a step to the engines' having its weights."""
    sync_stall_s: float
    """Of those, in which an engine samples nothing."""
    publish_s: float
    failures_per_day: float
    lost_share: float
    """Of all time: failures that stop the run, and the steps done again."""
    best_checkpoint_every_steps: int
    """By Young's formula."""

    @property
    def bottleneck(self) -> Load:
        """The part that sets the period."""
        return self.loads[0]

    @property
    def next_bottleneck(self) -> Load:
        """The part that would set it if the first were no limit."""
        return self.loads[1]


def predict(shape: ClusterShape) -> Prediction:
    """Return what the cluster would come to, once it has run for a while.

    Raises: ConfigError for settings of [buffer] that the prediction does not know.
    """
    check_shape(shape)
    buffer, per_step = shape.buffer, _episodes_per_step(shape)
    period = learner_seconds(shape)
    for _ in range(_ROUNDS):
        before, times = period, _times(shape, period)
        period = _period(shape, times, max(load.seconds for load in _loads(shape, times)))
        if abs(period - before) < _SETTLED * period:
            break
        period = (period + before) / 2
    loads = [*_loads(shape, times), _gate_load(shape, times)]
    loads.sort(key=lambda load: -load.seconds)
    period = max(period, loads[0].seconds)
    lost = _lost_share(shape, period)
    return Prediction(
        gpus=shape.gpus,
        period_s=period,
        steps_per_hour=3600.0 / period * (1.0 - lost),
        loads=tuple(loads),
        idle_shares={load.part: 1.0 - load.seconds / period for load in loads if load.part != GATE},
        staleness_mean=buffer.num_slots / buffer.groups_per_step - 1.0,
        staleness_max=buffer.max_off_policyness,
        sampled_tokens_per_second=per_step * _tokens(shape).mean / period,
        read_tokens_per_second=read_tokens(shape) / period,
        episode_s=times.mean,
        longest_episode_s=times.longest(per_step),
        rollouts_running=min(per_step / period * times.mean, buffer.num_slots * buffer.group_size),
        rollouts_admitted=buffer.num_slots * buffer.group_size,
        sync_s=sync_seconds(shape),
        sync_stall_s=stall_seconds(shape),
        publish_s=publish_seconds(shape),
        failures_per_day=24.0 * shape.gpus / shape.failures.gpu_hours_between,
        lost_share=lost,
        best_checkpoint_every_steps=max(1, round(_best_checkpoint_s(shape) / period)),
    )


def _period(shape: ClusterShape, times: EpisodeTimes, interval_s: float) -> float:
    """Return the mean interval of steps that begin at least `interval_s` apart, where groups last as drawn."""
    buffer = shape.buffer
    gate = Gate(
        groups_per_step=buffer.groups_per_step,
        slots=buffer.num_slots,
        max_off_policyness=buffer.max_off_policyness,
        window=buffer.effective_window,
        step_s=learner_seconds(shape),
        interval_s=interval_s,
        sync_s=sync_seconds(shape),
    )
    steps = _WARM_UP + max(_FEWEST, min(_MOST, _GROUPS // buffer.groups_per_step))
    chances = np.random.default_rng(0).random(buffer.num_slots + steps * buffer.groups_per_step)
    return step_interval(gate, times.draw_longest(buffer.group_size, chances), warm_up=_WARM_UP)


# --- parts ----------------------------------------------------------------------------------------------------

GATE = "gate"
"""The part whose time is spent waiting: nothing of it is idle."""


def _gate_load(shape: ClusterShape, times: EpisodeTimes) -> Load:
    buffer, per_step, step = shape.buffer, _episodes_per_step(shape), learner_seconds(shape)
    return Load(
        part=GATE,
        seconds=_period(shape, times, 0.0),
        words=f"longest of {per_step} episodes {times.longest(per_step):.0f} s, step {step:.0f} s and sync "
        f"{sync_seconds(shape):.0f} s, over slots for {buffer.num_slots / buffer.groups_per_step:.2f} steps",
    )


def _loads(shape: ClusterShape, times: EpisodeTimes) -> Iterator[Load]:
    """Yield what every part but the gate needs."""
    per_step = _episodes_per_step(shape)
    yield Load(
        part="learner",
        seconds=learner_seconds(shape),
        words=f"{read_tokens(shape):,.0f} tokens read at {learner_rate(shape):,.0f} a second, weights published in "
        f"{publish_seconds(shape):.1f} s",
    )
    tokens = per_step * _tokens(shape).mean
    yield Load(
        part="engines",
        seconds=tokens / (capacity(shape) * _engine_availability(shape)) + stall_seconds(shape),
        words=f"{tokens:,.0f} tokens sampled at {capacity(shape):,.0f} a second",
    )
    if shape.sandboxes.count:
        held = times.mean + shape.sandboxes.start_s
        yield Load(
            part="sandboxes",
            seconds=per_step * held / shape.sandboxes.count,
            words=f"{per_step} episodes hold one for {held:.0f} s, {shape.sandboxes.count} places",
        )
    orchestrator, turns = shape.orchestrator, shape.episodes.turns
    each = orchestrator.message_ms if orchestrator.rollout_processes else orchestrator.turn_ms
    ms = orchestrator.loop_ms_per_trajectory + turns * each
    yield Load(
        part="orchestrator",
        seconds=per_step * ms / 1000.0,
        words=f"{per_step} episodes of {ms:.2f} ms of one processor",
    )
    if orchestrator.rollout_processes:
        ms = turns * orchestrator.turn_ms
        yield Load(
            part="rollout processes",
            seconds=per_step * ms / 1000.0 / orchestrator.rollout_processes,
            words=f"{per_step} episodes of {ms:.2f} ms over {orchestrator.rollout_processes} processors",
        )


def learner_rate(shape: ClusterShape) -> float:
    """Return the tokens a second that all ranks read.

    Forward and backward pass take 6 operations a parameter and token, a forward pass alone 2 (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1); attention over the context is left out, and thus in the utilisation.
    """
    learner = shape.learner
    if learner.tokens_per_second:
        return learner.tokens_per_second
    operations = (6.0 + 2.0 * learner.extra_forwards) * shape.model.active
    return learner.ranks * learner.peak_tflops * 1e12 * learner.utilisation_share / operations


def read_tokens(shape: ClusterShape) -> float:
    """Return the tokens of a step that the learner reads: a prompt once for its group, the rest for each episode."""
    episodes, buffer = shape.episodes, shape.buffer
    each = (episodes.observation_tokens + _tokens(shape).mean) * (1.0 - episodes.failure_share)
    return buffer.groups_per_step * (episodes.prompt_tokens + buffer.group_size * each)


def learner_seconds(shape: ClusterShape) -> float:
    """Return the learner's own seconds a step: its products, publishing, and its share of a checkpoint."""
    learner, failures = shape.learner, shape.failures
    products = read_tokens(shape) / learner_rate(shape)
    checkpoint = checkpoint_seconds(shape) / failures.checkpoint_every_steps
    return learner.step_overhead_s + products + publish_seconds(shape) + checkpoint


def checkpoint_seconds(shape: ClusterShape) -> float:
    """Return what writing a checkpoint takes, in which the learner waits."""
    num_bytes = shape.model.parameters * _STATE_BYTES + shape.model.num_bytes
    return num_bytes / (shape.failures.checkpoint_gbytes_per_second * 1e9)


def capacity(shape: ClusterShape) -> float:
    """Return the tokens a second that all engines sample at most; few places may be less than their rate."""
    engines = shape.engines
    return engines.count * min(engines.tokens_per_second, engines.max_num_seqs * engines.request_tokens_per_second)


# --- weights --------------------------------------------------------------------------------------------------


def publish_seconds(shape: ClusterShape) -> float:
    """Return what the learner takes to gather and write what is sent."""
    return _sent_bytes(shape) / (shape.weight_sync.publish_gbytes_per_second * 1e9)


def sync_seconds(shape: ClusterShape) -> float:
    """Return the seconds in which the engines get and load a version that is published.

    Where all hosts read from one source, its rate is shared by them, and none reads faster than its own. In a chain
    each host passes a chunk on while it gets the next: m bytes in chunks of c reach h hosts in (m + (h - 1) c) / rate
    (pipelined broadcast; Chan et al. 2007, Concurrency and Computation 19(13)).
    """
    sync = shape.weight_sync
    slowest = min(sync.host_gbytes_per_second, sync.source_gbytes_per_second) * 1e9
    if sync.way == "broadcast":
        sent = (_sent_bytes(shape) + (shape.hosts - 1) * sync.chunk_mbytes * 1e6) / slowest
    else:
        together = shape.hosts * _sent_bytes(shape) / (sync.source_gbytes_per_second * 1e9)
        sent = max(together, _sent_bytes(shape) / slowest)
    return sync.overhead_s + sent + stall_seconds(shape)


def stall_seconds(shape: ClusterShape) -> float:
    """Return the seconds of a sync in which an engine samples nothing."""
    return _sent_bytes(shape) / (shape.weight_sync.load_gbytes_per_second * 1e9)


def _sent_bytes(shape: ClusterShape) -> float:
    return shape.model.num_bytes * shape.weight_sync.changed_share


# --- failures -------------------------------------------------------------------------------------------------


def _engine_availability(shape: ClusterShape) -> float:
    """Return the share of engines that sample, on average: M / (M + R) of mean time between failures and to repair."""
    failures = shape.failures
    between = 3600.0 * failures.gpu_hours_between / shape.engines.gpus_each
    away = failures.detect_s + failures.engine_restart_s + sync_seconds(shape)
    return between / (between + away)


def _lost_share(shape: ClusterShape, period: float) -> float:
    """Return the share of all time that failures of the learner cost: until it goes on, and half of what lies between
    two checkpoints, which is done again. Finished episodes are in the journal and are not played again.
    """
    failures = shape.failures
    between = _learner_failure_s(shape)
    again = failures.checkpoint_every_steps * period / 2.0
    away = failures.detect_s + failures.learner_restart_s + again
    return away / (between + away)


def _best_checkpoint_s(shape: ClusterShape) -> float:
    """Return the seconds between checkpoints that lose least: sqrt(2 delta M) (Young 1974, CACM 17(9))."""
    return math.sqrt(2.0 * checkpoint_seconds(shape) * _learner_failure_s(shape))


def _learner_failure_s(shape: ClusterShape) -> float:
    return 3600.0 * shape.failures.gpu_hours_between / shape.learner.ranks


# --- episodes -------------------------------------------------------------------------------------------------


def _episodes_per_step(shape: ClusterShape) -> int:
    return shape.buffer.groups_per_step * shape.buffer.group_size


def _tokens(shape: ClusterShape) -> Lognormal:
    return Lognormal(median=shape.episodes.completion_tokens, sigma=shape.episodes.completion_sigma)


def _times(shape: ClusterShape, period: float) -> EpisodeTimes:
    """Return the durations of episodes where a step's worth of them begins every `period` seconds."""
    episodes, per_step = shape.episodes, _episodes_per_step(shape)
    return episode_times(
        _tokens(shape),
        Lognormal(median=episodes.environment_s, sigma=episodes.environment_sigma),
        SharedRate(
            request_rate=shape.engines.request_tokens_per_second,
            capacity=capacity(shape),
            together=per_step,
            every_s=period,
            most=shape.buffer.num_slots * shape.buffer.group_size,
        ),
        straggler_share=episodes.straggler_share,
        straggler_factor=episodes.straggler_factor,
        limit_s=shape.buffer.group_deadline_s or math.inf,
    )


def rates_of_cluster(shape: ClusterShape) -> SimulationRates:
    """Return the rates with which `simulate` runs the real loop on the cluster.

    Sandboxes, the orchestrator's own time and failures are not in it: the loop under it is the real one, on one clock.
    """
    episodes = shape.episodes
    trained = _tokens(shape).mean * _episodes_per_step(shape) * (1.0 - episodes.failure_share)
    per_token = (learner_seconds(shape) - shape.learner.step_overhead_s) / trained
    return SimulationRates(
        engine_tokens_per_second=capacity(shape) / shape.engines.count,
        request_tokens_per_second=shape.engines.request_tokens_per_second,
        completion_tokens=episodes.completion_tokens,
        completion_sigma=episodes.completion_sigma,
        environment_s=episodes.environment_s,
        environment_sigma=episodes.environment_sigma,
        straggler_share=episodes.straggler_share,
        straggler_factor=episodes.straggler_factor,
        failure_share=episodes.failure_share,
        learner_tokens_per_second=1.0 / per_token,
        step_overhead_s=shape.learner.step_overhead_s,
        sync_s=sync_seconds(shape),
        sync_stall_s=stall_seconds(shape),
    )


# --- what would help ------------------------------------------------------------------------------------------


def gains(shape: ClusterShape) -> dict[str, float]:
    """Return change -> how many times the steps an hour it would give, everything else left as it is."""
    before = predict(shape).steps_per_hour
    return {words: predict(changed).steps_per_hour / before for words, changed in _changes(shape)}


def _changes(shape: ClusterShape) -> Iterator[tuple[str, ClusterShape]]:
    engines, learner, buffer, sync = shape.engines, shape.learner, shape.buffer, shape.weight_sync
    yield "twice the engines", replace(shape, engines=replace(engines, count=2 * engines.count))
    ranks = replace(learner, ranks=2 * learner.ranks, tokens_per_second=2 * learner.tokens_per_second)
    yield "twice the learner's ranks", replace(shape, learner=ranks)
    more = replace(
        buffer,
        max_off_policyness=buffer.max_off_policyness + 1,
        slots=buffer.slots and buffer.slots + buffer.groups_per_step,
    )
    yield "one step more of staleness", replace(shape, buffer=more)
    faster = replace(
        sync,
        publish_gbytes_per_second=2 * sync.publish_gbytes_per_second,
        source_gbytes_per_second=2 * sync.source_gbytes_per_second,
        host_gbytes_per_second=2 * sync.host_gbytes_per_second,
        load_gbytes_per_second=2 * sync.load_gbytes_per_second,
    )
    yield "weights twice as fast", replace(shape, weight_sync=faster)
    if shape.sandboxes.count:
        yield "twice the sandboxes", replace(shape, sandboxes=replace(shape.sandboxes, count=2 * shape.sandboxes.count))
    episodes = shape.episodes
    if episodes.environment_s:
        quicker = replace(episodes, environment_s=episodes.environment_s / 2)
        yield "environments twice as fast", replace(shape, episodes=quicker)
    orchestrator = shape.orchestrator
    split = replace(orchestrator, rollout_processes=2 * orchestrator.rollout_processes or 8)
    yield "more rollout processes", replace(shape, orchestrator=split)
