"""What an optimizer step did, and how far off-policy its tokens were: of the last step, where it is no count."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.losses.reduction import STALENESS_BUCKETS
from asyncrl.metrics.family import Family, Source, Values, counter, gauge, histogram


def step(key: str) -> Callable[[Source], Values]:
    """Return a reader of one of the last step's metrics; absent where it was not measurable."""
    return lambda source: source.run.status.last_step.get(key)


def steps(keys: Mapping[str, str]) -> Callable[[Source], Values]:
    """Return a reader of several, by label."""
    return lambda source: {label: source.run.status.last_step.get(key) for label, key in keys.items()}


def _largest_by_staleness(source: Source) -> Values:
    found: dict[str, float] = {}
    for key, value in source.run.status.last_step.items():
        if key.startswith(_LARGEST) and (staleness := key.removeprefix(_LARGEST)).isdigit():
            bucket = [name for name, least in STALENESS_BUCKETS.items() if least <= int(staleness)][-1]
            found[bucket] = max(found.get(bucket, value), value)
    return found


_LARGEST = "token_weight_max_staleness_"


_LOSS_PARTS = {
    "policy": "policy_loss",
    "reference_kl": "reference_kl",
    "observation": "observation_loss",
    "log_ratio_sq": "log_ratio_sq",
    "teacher": "teacher_divergence",
    "value": "value_loss",
    "pairs": "pair_loss",
}

OFF_POLICY: tuple[Family, ...] = (
    histogram("asyncrl_staleness_steps", "steps", "Staleness of every token that was trained on.",
              "all of it at the bound", lambda source: source.run.status.tallies.staleness),
    gauge("asyncrl_staleness_bound_steps", "steps", "max_off_policyness: no token is trained on that is staler.", "",
          lambda source: source.run.max_off_policyness),
    gauge("asyncrl_staleness_steps_max", "steps", "Largest staleness in the last step.", "at the bound all the time",
          step("staleness_max")),
    gauge("asyncrl_staleness_steps_mean", "steps", "Mean staleness over the last step's tokens.", "near the bound",
          step("staleness_mean")),
    histogram("asyncrl_importance_ratio", "ratio",
              "Policy over behaviour probability of every token that was trained on, before any clip, by staleness.",
              "tails that grow with staleness: lower max_off_policyness or the learning rate; tails at 0: the engine",
              lambda source: source.run.status.tallies.ratios, "staleness"),
    gauge("asyncrl_importance_ratio_max", "ratio", "Largest token ratio of the last step.",
          "jumps to many times its usual value: `spikes.jsonl` names the tokens", step("importance_ratio_max")),
    gauge("asyncrl_importance_ratio_min", "ratio", "Smallest token ratio of the last step.", "",
          step("importance_ratio_min")),
    gauge("asyncrl_importance_ratio_mean", "ratio", "Mean token ratio; 1 where nothing has drifted.",
          "outside of 0.98 to 1.02: the log-probs are of another distribution than was sampled",
          step("importance_ratio_mean")),
    gauge("asyncrl_importance_ratio_quantile", "ratio", "Quantiles of the last step's token ratios, exact.",
          "0.99 beyond the clip bounds", steps({"0.5": "importance_ratio_p50", "0.95": "importance_ratio_p95",
          "0.99": "importance_ratio_p99", "0.999": "importance_ratio_p999"}), "quantile"),
    gauge("asyncrl_importance_ratio_staleness_max", "ratio", "Largest token ratio of the last step, by staleness.",
          "large at 0: the engine, not the policy's drift", _largest_by_staleness, "staleness"),
    gauge("asyncrl_effective_sample_size_ratio", "share, 0 to 1",
          "(sum r)^2 / (n sum r^2) of the token ratios: the part of the tokens that still counts.", "below 0.5",
          step("ess_token")),
    gauge("asyncrl_sequence_effective_sample_size_ratio", "share, 0 to 1",
          "The same of whole sequences' ratios; falls before a run collapses.", "below 0.1 with sequence ratios",
          step("seq_ess_frac")),
    gauge("asyncrl_clip_ratio", "share, 0 to 1", "Share of tokens that pass a clip bound and lose their gradient.",
          "above 0.2 on a side", steps({"low": "clip_fraction_low", "high": "clip_fraction_high",
          "dual": "clip_frac_dual"}), "side"),
    gauge("asyncrl_kl_behaviour_policy_nats", "nats", "KL of the policy from the behaviour, a token, by k1 and k3.",
          "k3 above 0.05", steps({"k1": "kl_k1", "k3": "kl_k3"}), "estimator"),
    gauge("asyncrl_engine_mismatch_nats", "nats",
          "Learner against engine at staleness 0, a token: k1, k3, and mean and largest distance of log-probs.",
          "jumps after a change of engine, dtype or kernel; k3 above 0.01", steps({"k1": "mismatch_k1",
          "k3": "mismatch_k3", "abs_mean": "mismatch_abs_mean", "abs_max": "mismatch_abs_max"}), "measure"),
    gauge("asyncrl_engine_mismatch_probability", "share, 0 to 1",
          "Distance of probabilities at staleness 0: mean and largest.", "mean above 0.02",
          steps({"mean": "mismatch_prob_mean", "max": "mismatch_prob_max"}), "measure"),
    gauge("asyncrl_engine_mismatch_confident_tokens", "tokens",
          "Tokens of staleness 0 that the engine was sure of and the learner finds e^2 times less likely.",
          "not 0: the engine holds other weights or read other tokens", step("mismatch_confident")),
    gauge("asyncrl_sqrt_t_exponent", "exponent",
          "Of the spread of the cumulative log-ratio over position: 0.5 where token errors are independent.",
          "above 0.75: something drifts the same way at every token", step("sqrt_t_exponent")),
    gauge("asyncrl_sqrt_t_sigma_nats", "nats", "Spread of the first token's log-ratio.", "", step("sqrt_t_sigma_1")),
    gauge("asyncrl_sequence_versions_mean", "versions", "Versions that one sequence was sampled under.", "",
          step("seq_versions_mean")),
)  # fmt: skip

LEARNER: tuple[Family, ...] = (
    gauge("asyncrl_loss", "loss", "The last step's loss, every term included.", "not finite: the step is skipped",
          step("loss")),
    gauge("asyncrl_loss_part", "loss", "Terms of the loss before their coefficients, where there are any.", "",
          steps(_LOSS_PARTS), "part"),
    gauge("asyncrl_gradient_norm", "norm", "Global gradient norm before clipping.",
          "grows by orders, or is always far above max_grad_norm", step("grad_norm")),
    counter("asyncrl_nonfinite", "times", "Numbers that were not finite where one was needed, by what they were of.",
            "not 0", lambda source: source.run.status.tallies.nonfinite, "of"),
    gauge("asyncrl_learning_rate", "rate", "Of the last step.", "", step("learning_rate")),
    gauge("asyncrl_entropy_nats", "nats", "Mean entropy of the policy at the trained tokens.",
          "falls to half of what the run began with", step("entropy")),
    gauge("asyncrl_entropy_start_nats", "nats", "Entropy in this run's first step, of this process.", "",
          lambda source: source.run.status.tallies.entropy_start),
    gauge("asyncrl_entropy_coefficient", "coefficient", "Of the entropy term, where there is one.", "",
          step("entropy_coef")),
    gauge("asyncrl_kl_reference_nats", "nats",
          "To the reference a token: `loss` of the loss's own term, `reward` where it is in the reward.", "grows fast",
          steps({"loss": "reference_kl", "reward": "reward_kl"}), "in"),
    gauge("asyncrl_advantage_abs_mean", "advantage", "Mean size of the advantages at the trained tokens.",
          "near 0: nothing is learned", step("advantage_abs_mean")),
    gauge("asyncrl_reward_mean", "reward", "Mean reward of the last step's episodes.", "falls",
          step("reward_mean")),
    gauge("asyncrl_reward_std", "reward", "Its standard deviation over the step.", "near 0", step("reward_std")),
    gauge("asyncrl_solve_ratio", "share, 0 to 1", "Share of the last step's episodes that solved their task.",
          "0 or 1 for long: tasks are too hard or too easy", step("solve_rate")),
    gauge("asyncrl_zero_advantage_groups_ratio", "share, 0 to 1",
          "Share of the last step's groups whose rewards are all equal, by kind; `expected` is chance's.",
          "above 0.8, or far above `expected`", steps({"all": "zero_variance_frac",
          "all_pass": "zero_variance_all_pass_frac", "all_fail": "zero_variance_all_fail_frac",
          "expected": "zero_variance_expected_frac"}), "kind"),
    counter("asyncrl_groups_compared", "groups", "Groups of all steps, used once more or not.", "",
            lambda source: source.run.status.tallies.groups_compared),
    counter("asyncrl_zero_advantage_groups", "groups", "Those of them whose rewards are all equal, by kind.", "",
            lambda source: source.run.status.tallies.groups_equal, "kind"),
    counter("asyncrl_tokens_masked", "tokens", "Tokens in the loss that had no gradient, by reason.",
            "most of asyncrl_tokens_trained_total", lambda source: source.run.status.tallies.tokens_masked, "reason"),
    gauge("asyncrl_step_seconds", "seconds", "Of the last optimizer step.", "grows", step("step_seconds")),
    gauge("asyncrl_publish_seconds", "seconds", "In which the last publishing of weights kept the learner.",
          "a large part of a step", step("publish_seconds")),
    counter("asyncrl_learner_busy_seconds", "seconds", "Time of the learner's steps by part.", "",
            lambda source: source.run.status.tallies.learner_seconds, "part"),
    gauge("asyncrl_learner_tokens_per_second", "tokens/second", "Tokens that the learner forwards and backwards.",
          "falls", step("tokens_per_second")),
)  # fmt: skip
