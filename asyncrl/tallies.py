"""Amounts and distributions that a scrape shows beyond the counters of `RunStatus`: by environment or by staleness.

They begin at 0 with every process, which Prometheus takes for what it is. Names that come from outside, of
environments, parts of rewards and kinds of behaviour, are at most so many; later ones are counted together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from asyncrl.losses.reduction import RATIO_EDGES, STALENESS_BUCKETS
from asyncrl.protocols import StepResult, SyncReport
from asyncrl.types import Group, Trajectory

OTHER = "other"
MAX_ENVIRONMENTS = 32
MAX_PARTS = 16
"""Of a reward, and kinds of behaviour, over all environments."""

RATIO_BUCKETS = (*RATIO_EDGES[4:29:2], *RATIO_EDGES[29:54:2])
"""[26] importance ratios: from 0.001 to 4.1 nats in steps of 2, on both sides of 1."""
STALENESS_STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
TOKENS = tuple(2.0**power for power in range(3, 18))
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Buckets:
    """A histogram as Prometheus keeps it: how many values were at most each edge, and their sum.

    Example:
        >>> buckets = Buckets((1.0, 2.0))
        >>> for value in (1.0, 1.5, 7.0):
        ...     buckets.add(value)
        >>> buckets.counts, buckets.total
        ([1.0, 1.0, 1.0], 9.5)
    """

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0.0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float, count: float = 1.0) -> None:
        """Count a value."""
        self.counts[bisect_left(self.edges, value)] += count
        self.total += value * count


class Names:
    """At most so many names, and `OTHER` for whatever comes later."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name under which `name` is counted."""
        if name in self._known:
            return name
        if len(self._known) < self._most:
            self._known.add(name)
            return name
        return OTHER


class EnvironmentTally:
    """What became of one environment's episodes of training."""

    def __init__(self) -> None:
        self.groups = self.scored = self.solved = self.truncated = 0
        self.turns = self.tokens_sampled = self.tokens_trained = self.malformed = 0
        self.statuses: Counter[str] = Counter()
        self.tokens, self.seconds = Buckets(TOKENS), Buckets(SECONDS)
        self.behaviour: Counter[str] = Counter()
        self.reward: float | None = None
        """Mean over its episodes in the last step that had one."""
        self.reward_parts: dict[str, float] = {}
        """name -> mean, as `reward`."""


class Tallies:
    """What the loop has seen, told by the calls of `RunStatus`."""

    def __init__(self) -> None:
        self.environments: defaultdict[str, EnvironmentTally] = defaultdict(EnvironmentTally)
        self.staleness = Buckets(STALENESS_STEPS)
        """Of every token that was trained on, in optimizer steps."""
        self.ratios = {name: Buckets(RATIO_BUCKETS) for name in STALENESS_BUCKETS}
        """staleness -> importance ratios of the tokens that were trained on, before any clip."""
        self.tokens_masked: Counter[str] = Counter()
        """reason -> tokens whose gradient the loss has set to zero."""
        self.groups_compared = 0
        """Groups of steps; and of them, by kind, those whose rewards were all equal."""
        self.groups_equal: Counter[str] = Counter()
        self.nonfinite: Counter[str] = Counter({of: 0 for of in _NONFINITE})
        """what -> numbers that were not finite where one was needed."""
        self.entropy_start: float | None = None
        """Nats, of the first step that had one."""
        self.learner_seconds: defaultdict[str, float] = defaultdict(float)
        self.sync_seconds: defaultdict[str, float] = defaultdict(float)
        """phase -> seconds, of the slowest engine."""
        self.syncs_unverified = 0
        self._environment, self._part, self._behaviour = Names(MAX_ENVIRONMENTS), Names(MAX_PARTS), Names(MAX_PARTS)

    def of(self, environment: str) -> EnvironmentTally:
        """Return where an environment's episodes are counted."""
        return self.environments[self._environment(environment)]

    def count_group(self, group: Group) -> None:
        """Count a finished group, trained on later or not."""
        self.of(group.task.environment).groups += 1
        for trajectory in group.trajectories:
            tally, tokens = self.of(trajectory.environment), trajectory.num_sampled_tokens
            tally.statuses[trajectory.status.value] += 1
            tally.tokens_sampled += tokens
            tally.seconds.add(trajectory.seconds)
            tally.malformed += int(trajectory.extras.get("malformed", 0))
            for kind, times in _behaviour(trajectory):
                tally.behaviour[self._behaviour(kind)] += times
            if trajectory.reward is not None:
                tally.scored += 1
                tally.solved += trajectory.is_solved
                tally.truncated += trajectory.truncated
                tally.turns += trajectory.num_turns
                tally.tokens.add(tokens)

    def count_trained(self, groups: Sequence[Group], result: StepResult) -> None:
        """Count what an optimizer step was taken on, and what it says of it."""
        by_environment: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for group in groups:
            for trajectory in group.trajectories:
                if trajectory.reward is not None:
                    by_environment[self._environment(trajectory.environment)].append(trajectory)
        for name, trajectories in by_environment.items():
            tally = self.environments[name]
            tally.tokens_trained += sum(t.num_sampled_tokens for t in trajectories)
            tally.reward = fmean(t.reward or 0.0 for t in trajectories)
            parts: defaultdict[str, list[float]] = defaultdict(list)
            for trajectory in trajectories:
                for part, value in trajectory.reward_parts.items():
                    parts[self._part(part)].append(value)
            tally.reward_parts |= {part: fmean(values) for part, values in parts.items()}
        self._count_ratios(result.metrics, result.histograms)
        self._count_step(result.metrics, sum(any(t.reward is not None for t in g.trajectories) for g in groups))

    def _count_ratios(
        self, metrics: Mapping[str, float], histograms: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> None:
        staleness = histograms.get("staleness_tokens", {"edges": (), "counts": ()})
        for steps, count in _integers(staleness, metrics):
            self.staleness.add(steps, count)
        for name, least in STALENESS_BUCKETS.items():
            fine = histograms.get(f"token_weight_staleness_{name}")
            if fine is None:
                continue
            buckets = self.ratios[name]
            for count, above in zip(fine["counts"], (*fine["edges"], float("inf")), strict=True):
                buckets.counts[bisect_left(RATIO_BUCKETS, above)] += count
            later = min((other for other in STALENESS_BUCKETS.values() if other > least), default=1 << 30)
            buckets.total += sum(
                count * metrics.get(f"token_weight_mean_staleness_{steps:.0f}", 0.0)
                for steps, count in _integers(staleness, metrics)
                if least <= max(steps, 0) < later
            )

    def _count_step(self, metrics: Mapping[str, float], num_groups: int) -> None:
        tokens = metrics.get("num_loss_tokens", 0.0)
        for reason, key in _MASKS.items():
            self.tokens_masked[reason] += round(metrics.get(key, 0.0) * tokens)
        self.groups_compared += num_groups
        for kind in ("all_pass", "all_fail", "other"):
            self.groups_equal[kind] += round(num_groups * metrics.get(f"zero_variance_{kind}_frac", 0.0))
        for of, key in _NONFINITE.items():
            self.nonfinite[of] += round(metrics.get(key, 0.0))
        if self.entropy_start is None:
            self.entropy_start = metrics.get("entropy")
        for part in ("packing", "forward_backward", "diagnostics", "optimizer"):
            self.learner_seconds[part] += metrics.get(f"seconds_{part}", 0.0)

    def count_sync(self, reports: Sequence[SyncReport]) -> None:
        """Count one version's way into the engines."""
        self.syncs_unverified += bool(reports) and not all(report.verified for report in reports)
        for phase in {phase.partition(".")[0] for report in reports for phase in report.seconds}:
            self.sync_seconds[phase] += max(report.seconds.get(phase, 0.0) for report in reports)


_NONFINITE = {
    "gradient": "grad_norm_nonfinite",
    "critic_gradient": "critic_grad_norm_nonfinite",
    "policy_logprobs": "policy_logprobs_nonfinite",
    "behaviour_logprobs": "bad_logprobs_nonfinite",
    "values": "value_nonfinite",
}
"""what -> their number in a step's metrics."""

_MASKS = {
    "clipped_low": "clipped_low_frac",
    "clipped_high": "clipped_high_frac",
    "clipped_dual": "clipped_dual_frac",
    "dropped": "dropped_frac",
    "zero_advantage": "zero_adv_token_frac",
}
"""reason -> the share in a step's metrics."""


def _integers(histogram: Mapping[str, Sequence[float]], metrics: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Yield (integer, count) of a histogram with one bin an integer, whose edges lie between them."""
    edges, counts = histogram["edges"], histogram["counts"]
    first = edges[0] - 0.5 if edges else metrics.get("staleness_max", 0.0)
    for place, count in enumerate(counts):
        if count:
            yield first + place, count


def _behaviour(trajectory: Trajectory) -> Iterator[tuple[str, int]]:
    """Yield (kind, number) of what a monitor saw an agent do."""
    seen = trajectory.extras.get("behaviour")
    if isinstance(seen, Mapping):
        yield from ((str(kind), int(count)) for kind, count in seen.items() if count)
