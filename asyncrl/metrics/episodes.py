"""What the agents do and earn, by environment. Of training only; held-out episodes are not counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.behaviour import BehaviourWatch
from asyncrl.metrics.family import Family, Source, Value, Values, counter, gauge, histogram
from asyncrl.metrics.learning import step
from asyncrl.tallies import MAX_PARTS, EnvironmentTally


def tally(read: Callable[[EnvironmentTally], Value]) -> Callable[[Source], Values]:
    """Return a reader of one value of every environment."""
    return lambda source: {name: read(tally) for name, tally in source.run.status.tallies.environments.items()}


def _by(read: Callable[[EnvironmentTally], Mapping[str, float]]) -> Callable[[Source], Values]:
    """Return a reader of several values of every environment."""
    return lambda source: {
        (name, label): value
        for name, tally in source.run.status.tallies.environments.items()
        for label, value in read(tally).items()
    }


def _of_watch(read: Callable[[BehaviourWatch], Mapping[str, float]]) -> Callable[[Source], Values]:
    """Return a reader of a value of every kind of behaviour."""
    return lambda source: read(source.run.status.behaviour)


_VARIANCE_SHARE = "reward_variance_share_"


def _variance_shares(source: Source) -> Values:
    found = source.run.status.last_step
    names = sorted(key for key in found if key.startswith(_VARIANCE_SHARE))
    return {key.removeprefix(_VARIANCE_SHARE): found[key] for key in names[:MAX_PARTS]}


EPISODES: tuple[Family, ...] = (
    counter("asyncrl_trajectories", "episodes", "Episodes by environment and how they ended.",
            "failed_* grow: infrastructure, never a reward", _by(lambda t: t.statuses), "environment", "status"),
    counter("asyncrl_groups_finished", "groups", "Groups whose last episode has ended, trained on or not.",
            "does not grow", tally(lambda t: t.groups), "environment"),
    counter("asyncrl_episodes_scored", "episodes", "Episodes that have a reward.", "", tally(lambda t: t.scored),
            "environment"),
    counter("asyncrl_episodes_solved", "episodes", "Episodes that solved their task.", "does not grow",
            tally(lambda t: t.solved), "environment"),
    counter("asyncrl_episodes_truncated", "episodes", "Scored episodes with a completion cut at the token limit.",
            "more than 20 % of asyncrl_episodes_scored_total", tally(lambda t: t.truncated), "environment"),
    counter("asyncrl_episode_turns", "turns", "Turns of the scored episodes.", "", tally(lambda t: t.turns),
            "environment"),
    counter("asyncrl_malformed_replies", "replies", "Replies that could not be read: no code, no valid tool call.",
            "more than a few percent of the turns", tally(lambda t: t.malformed), "environment"),
    counter("asyncrl_behaviour_seen", "times", "What a monitor saw agents do that it looks for, by kind.",
            "grows, and more so than the reward", _by(lambda t: t.behaviour), "environment", "kind"),
    gauge("asyncrl_behaviour_ratio", "share, 0 to 1", "Last step's watched episodes in which it was seen, by kind.",
          "rises", _of_watch(lambda watch: watch.shares), "kind"),
    gauge("asyncrl_behaviour_rising", "0 or 1", "Whether that share stands out from what is usual, beyond chance.",
          "is 1", _of_watch(lambda watch: watch.rising), "kind"),
    counter("asyncrl_behaviour_rises", "rises", "Times that the share began to rise.", "grows",
            _of_watch(lambda watch: watch.num_rises), "kind"),
    histogram("asyncrl_episode_tokens", "tokens", "Sampled tokens of a scored episode.",
              "drifts towards the limit", tally(lambda t: t.tokens), "environment"),
    histogram("asyncrl_episode_seconds", "seconds", "From an episode's start to its reward.", "a tail that grows",
              tally(lambda t: t.seconds), "environment"),
    gauge("asyncrl_environment_reward", "reward", "Mean reward of the environment's episodes in its last step.",
          "falls, or jumps to the most there is", tally(lambda t: t.reward), "environment"),
    gauge("asyncrl_environment_reward_part", "reward", "Mean of each part of the reward in its last step.",
          "one part rises while `solved` does not", _by(lambda t: t.reward_parts), "environment", "part"),
    gauge("asyncrl_reward_variance_share", "share, -1 to 1",
          "Of the last step's variance of rewards, what comes from each term of the reward.",
          "a term of conduct outweighs `solved`: it is what is learned", _variance_shares, "part"),
    gauge("asyncrl_truncated_ratio", "share, 0 to 1", "Last step's episodes with a completion cut at the limit.",
          "above 0.2 and rising", step("truncated_share")),
    gauge("asyncrl_repetition_ratio", "share, 0 to 1", "Share of a completion's 3-grams that it has said before.",
          "above 0.3 and rising", step("repetition_mean")),
    gauge("asyncrl_longest_run_ratio", "share, 0 to 1", "Longest run of one token over a completion's length.",
          "rises", step("longest_run_share_mean")),
    gauge("asyncrl_turns_mean", "turns", "Mean turns of the last step's episodes.", "", step("turns_mean")),
    gauge("asyncrl_completion_tokens_mean", "tokens", "Mean sampled tokens of the last step's episodes.",
          "rises without the reward", step("completion_tokens_mean")),
    gauge("asyncrl_length_reward_correlation", "-1 to 1", "Rank correlation of length and reward in the last step.",
          "near 1: length is paid", step("length_reward_rank_correlation")),
)  # fmt: skip


def _shares(source: Source, tokens: Callable[[EnvironmentTally], float], seconds: float) -> dict[str, float]:
    environments = source.run.status.tallies.environments
    total = sum(map(tokens, environments.values()))
    return {name: seconds * tokens(tally) / total for name, tally in environments.items()} if total else {}


def _engine_cost(source: Source) -> dict[str, float]:
    engines = len(source.engines().engines) if source.engines else 1
    return _shares(
        source, lambda t: t.tokens_sampled, engines * (source.run.seconds - source.run.status.seconds_before)
    )


def _learner_cost(source: Source) -> dict[str, float]:
    busy = sum(source.run.status.tallies.learner_seconds.values())
    return _shares(source, lambda t: t.tokens_trained, busy)


def _solved_cost(source: Source) -> Values:
    engine, learner = _engine_cost(source), _learner_cost(source)
    tallies = source.run.status.tallies.environments
    return {
        (name, part): cost.get(name, 0.0) / tally.solved
        for name, tally in tallies.items()
        if tally.solved
        for part, cost in (("engine", engine), ("learner", learner))
    }


COST: tuple[Family, ...] = (
    counter("asyncrl_environment_tokens_sampled", "tokens", "Tokens that the environment's episodes sampled.", "",
            tally(lambda t: t.tokens_sampled), "environment"),
    counter("asyncrl_environment_tokens_trained", "tokens", "Those of them that were trained on, each use.", "",
            tally(lambda t: t.tokens_trained), "environment"),
    gauge("asyncrl_cost_engine_seconds", "seconds", "Engine time so far, shared out by sampled tokens.", "",
          _engine_cost, "environment"),
    gauge("asyncrl_cost_learner_seconds", "seconds", "Learner time so far, shared out by trained tokens.", "",
          _learner_cost, "environment"),
    gauge("asyncrl_cost_per_solved_seconds", "seconds", "Engine and learner time for one solved episode.",
          "rises", _solved_cost, "environment", "of"),
)  # fmt: skip
