"""What the dashboards show."""

from __future__ import annotations

from asyncrl.dashboards.chart import STEPS, WINDOW, Board, heatmap, lines, number, quantiles, stacked

_SOLVED = (
    "sum by (environment) (increase(asyncrl_episodes_solved_total[30m]))"
    " / sum by (environment) (increase(asyncrl_episodes_scored_total[30m]))"
)
_IDLE = f"rate(asyncrl_{{}}_idle_seconds_total{STEPS})"

OVERVIEW = Board(
    "asyncrl-overview",
    "asyncrl: overview",
    (
        (
            "Now",
            (
                number("policy version", "short", "asyncrl_policy_version"),
                number("steps per hour", "short", f"3600 * rate(asyncrl_steps_total{STEPS})"),
                number("solved, training", "percentunit", "asyncrl_solve_ratio"),
                number("solved, held out", "percentunit", "asyncrl_evaluation_solve_ratio"),
                number("largest staleness", "short", "asyncrl_staleness_steps_max"),
                number("largest ratio", "short", "asyncrl_importance_ratio_max", 5, 50),
                number("alerts that fire", "short", 'count(ALERTS{alertstate="firing"}) or vector(0)', 1, 3),
                number("engines in service", "short", "sum(asyncrl_engine_up)"),
            ),
        ),
        (
            "Learning",
            (
                lines(
                    "reward and solve rate",
                    "percentunit",
                    ("asyncrl_solve_ratio", "solved, training"),
                    ("asyncrl_evaluation_solve_ratio", "solved, held out"),
                    ("asyncrl_reward_mean", "reward"),
                ),
                lines("gradient norm", "short", ("asyncrl_gradient_norm", "before clipping"), logarithmic=True),
                lines("entropy", "short", ("asyncrl_entropy_nats", "now"), ("asyncrl_entropy_start_nats", "at start")),
                lines("loss", "short", ("asyncrl_loss", "loss"), ("asyncrl_loss_part", "{{part}}")),
                lines("learning rate", "sci", ("asyncrl_learning_rate", "learning rate")),
                lines(
                    "skipped steps and numbers that are not finite",
                    "short",
                    ("asyncrl_steps_skipped_total", "skipped steps"),
                    ("asyncrl_nonfinite_total", "not finite: {{of}}"),
                ),
                lines("what guards saw and did", "short", ("asyncrl_guard_actions_total", "{{guard}}: {{action}}")),
                lines(
                    "what the controller leaves of the learning rate or the slots",
                    "percentunit",
                    ("asyncrl_guard_scale", "share"),
                ),
            ),
        ),
        (
            "How off-policy",
            (
                lines(
                    "staleness",
                    "short",
                    ("asyncrl_staleness_steps_max", "largest"),
                    ("asyncrl_staleness_steps_mean", "mean"),
                    ("asyncrl_staleness_bound_steps", "bound"),
                ),
                lines(
                    "importance ratio",
                    "short",
                    ("asyncrl_importance_ratio_max", "largest"),
                    ("asyncrl_importance_ratio_quantile", "{{quantile}}"),
                    logarithmic=True,
                ),
                lines(
                    "effective sample size",
                    "percentunit",
                    ("asyncrl_effective_sample_size_ratio", "tokens"),
                    ("asyncrl_sequence_effective_sample_size_ratio", "sequences"),
                ),
            ),
        ),
        (
            "How fast",
            (
                lines(
                    "tokens per second",
                    "short",
                    (f"rate(asyncrl_tokens_generated_total{STEPS})", "sampled"),
                    (f"rate(asyncrl_tokens_trained_total{STEPS})", "trained on"),
                ),
                lines("a step", "s", ("asyncrl_step_seconds", "step"), ("asyncrl_publish_seconds", "publishing")),
                stacked("learner waits for", "percentunit", (_IDLE.format("learner"), "{{cause}}")),
                stacked("engines wait for", "percentunit", (_IDLE.format("engine"), "{{cause}}")),
                lines("cost of a solved episode", "s", ("asyncrl_cost_per_solved_seconds", "{{environment}}, {{of}}")),
            ),
        ),
    ),
)

OFF_POLICY = Board(
    "asyncrl-off-policy",
    "asyncrl: off-policyness and spikes",
    (
        (
            "Importance ratios",
            (
                lines(
                    "quantiles of the last step",
                    "short",
                    ("asyncrl_importance_ratio_max", "largest"),
                    ("asyncrl_importance_ratio_quantile", "{{quantile}}"),
                    ("asyncrl_importance_ratio_min", "smallest"),
                    ("asyncrl_importance_ratio_mean", "mean"),
                    logarithmic=True,
                ),
                lines(
                    "largest, by staleness",
                    "short",
                    ("asyncrl_importance_ratio_staleness_max", "{{staleness}} steps"),
                    logarithmic=True,
                ),
                quantiles("99th percentile, by staleness", "short", "asyncrl_importance_ratio", "staleness", 0.99,
                          window=STEPS),
                heatmap("all tokens", "short", "asyncrl_importance_ratio"),
                heatmap("fresh tokens: the engine's mismatch", "short", "asyncrl_importance_ratio",
                        '{staleness="0"}'),
                lines("beside a spike: the gradient norm", "short", ("asyncrl_gradient_norm", "before clipping"),
                      logarithmic=True),
            ),
        ),
        (
            "What is left of the batch",
            (
                lines(
                    "effective sample size",
                    "percentunit",
                    ("asyncrl_effective_sample_size_ratio", "tokens"),
                    ("asyncrl_sequence_effective_sample_size_ratio", "sequences"),
                ),
                lines("clipped", "percentunit", ("asyncrl_clip_ratio", "{{side}}")),
                lines(
                    "tokens without gradient",
                    "percentunit",
                    (f"rate(asyncrl_tokens_masked_total{STEPS}) / ignoring (reason) group_left"
                     f" rate(asyncrl_tokens_trained_total{STEPS})", "{{reason}}"),
                ),
                lines("KL of the policy from the behaviour", "short",
                      ("asyncrl_kl_behaviour_policy_nats", "{{estimator}}")),
            ),
        ),
        (
            "Staleness",
            (
                lines(
                    "of the last step",
                    "short",
                    ("asyncrl_staleness_steps_max", "largest"),
                    ("asyncrl_staleness_steps_mean", "mean"),
                    ("asyncrl_staleness_bound_steps", "bound"),
                ),
                heatmap("all tokens", "short", "asyncrl_staleness_steps"),
                lines("versions in one sequence", "short", ("asyncrl_sequence_versions_mean", "mean")),
            ),
        ),
        (
            "Engine against learner, at staleness 0",
            (
                lines("log-probs", "short",
                      (f"last_over_time(asyncrl_engine_mismatch_nats{STEPS})", "{{measure}}"), logarithmic=True),
                lines("probabilities", "percentunit",
                      (f"last_over_time(asyncrl_engine_mismatch_probability{STEPS})", "{{measure}}")),
                lines("tokens that the engine was sure of and the learner doubts", "short",
                      ("asyncrl_engine_mismatch_confident_tokens", "tokens")),
                lines("canary", "short", ("asyncrl_engine_canary_distance_nats", "{{engine}}")),
                lines("growth of the cumulative log-ratio", "short", ("asyncrl_sqrt_t_exponent", "exponent"),
                      ("asyncrl_sqrt_t_sigma_nats", "spread of the first token")),
            ),
        ),
    ),
)  # fmt: skip

REWARDS = Board(
    "asyncrl-rewards",
    "asyncrl: rewards and behaviour",
    (
        (
            "Rewards",
            (
                lines("reward", "short", ("asyncrl_environment_reward", "{{environment}}")),
                lines("parts of the reward", "short",
                      ("asyncrl_environment_reward_part", "{{environment}}, {{part}}")),
                lines("solved, over 30 minutes", "percentunit", (_SOLVED, "{{environment}}")),
                lines("held-out tasks against training", "percentunit",
                      ("asyncrl_evaluation_solve_ratio", "held out"), ("asyncrl_solve_ratio", "training")),
                lines("groups without a difference", "percentunit",
                      ("asyncrl_zero_advantage_groups_ratio", "{{kind}}")),
                lines("advantages and spread of rewards", "short",
                      ("asyncrl_advantage_abs_mean", "mean size of advantages"),
                      ("asyncrl_reward_std", "deviation of rewards")),
            ),
        ),
        (
            "What completions are like",
            (
                quantiles("tokens of an episode", "short", "asyncrl_episode_tokens", "environment", 0.5, 0.95,
                          window=STEPS),
                lines("cut at the limit on tokens", "percentunit", ("asyncrl_truncated_ratio", "last step")),
                lines("repetition", "percentunit", ("asyncrl_repetition_ratio", "3-grams said before"),
                      ("asyncrl_longest_run_ratio", "longest run of one token")),
                lines("turns", "short", ("asyncrl_turns_mean", "mean")),
                lines("is length paid?", "short", ("asyncrl_length_reward_correlation", "rank correlation")),
                lines("entropy and KL", "short", ("asyncrl_entropy_nats", "entropy"),
                      ("asyncrl_kl_reference_nats or vector(0)", "KL to the reference {{in}}")),
            ),
        ),
        (
            "What agents do",
            (
                stacked("how episodes end", "short",
                        (f"sum by (status) (rate(asyncrl_trajectories_total{STEPS}))", "{{status}}")),
                lines("replies that cannot be read, a turn", "percentunit",
                      (f"sum by (environment) (rate(asyncrl_malformed_replies_total{STEPS}))"
                       f" / sum by (environment) (rate(asyncrl_episode_turns_total{STEPS}))", "{{environment}}")),
                lines("seen by monitors, an hour", "short",
                      (f"3600 * sum by (kind) (rate(asyncrl_behaviour_seen_total{STEPS})) or vector(0)", "{{kind}}")),
                lines("seen by monitors, of the last step's episodes", "percentunit",
                      ("asyncrl_behaviour_ratio or vector(0)", "{{kind}}")),
                quantiles("seconds of an episode", "s", "asyncrl_episode_seconds", "environment", 0.5, 0.95,
                          window=STEPS),
                lines("attempts that another one followed", "short",
                      (f"rate(asyncrl_episodes_retried_total{STEPS})", "a second")),
            ),
        ),
    ),
)  # fmt: skip

PIPELINE = Board(
    "asyncrl-pipeline",
    "asyncrl: pipeline and waits",
    (
        (
            "Who waits for whom",
            (
                stacked("learner waits for", "percentunit", (_IDLE.format("learner"), "{{cause}}")),
                stacked("engines wait for", "percentunit", (_IDLE.format("engine"), "{{cause}}")),
                lines("phase", "short", ("asyncrl_phase == 1", "{{phase}}")),
                lines("waits longer than stall_minutes", "short", ("asyncrl_stalls_total", "stalls")),
                stacked("the learner's step", "percentunit",
                        (f"rate(asyncrl_learner_busy_seconds_total{STEPS})", "{{part}}")),
            ),
        ),
        (
            "Gate and buffer",
            (
                lines("slots", "short", ("asyncrl_gate_slots", "slots"), ("asyncrl_gate_slots_held", "held"),
                      ("asyncrl_buffer_groups_running", "groups under way"),
                      ("asyncrl_buffer_groups_ready", "groups ready")),
                lines("age of held slots", "s", ("asyncrl_gate_slot_age_seconds", "{{of}}")),
                lines("groups dropped, an hour", "short",
                      (f"3600 * rate(asyncrl_groups_dropped_total{STEPS}) or vector(0)", "{{reason}}")),
                lines("tokens dropped, of those sampled", "percentunit",
                      (f"rate(asyncrl_tokens_dropped_total{STEPS}) / ignoring (reason) group_left"
                       f" rate(asyncrl_tokens_generated_total{STEPS}) or vector(0)", "{{reason}}")),
                lines("where all tokens are", "short", ("asyncrl_accounted_tokens", "{{state}}")),
                lines("selection: what is trained on against what is generated", "percentunit",
                      ("asyncrl_selection_distance_ratio", "{{environment}}, {{quantity}}, {{stage}}")),
            ),
        ),
        (
            "Weight sync",
            (
                lines("a sync", "s", ("asyncrl_sync_seconds", "from the step's end"),
                      ("asyncrl_sync_stall_seconds", "standstill")),
                stacked("by phase", "percentunit",
                        (f"rate(asyncrl_weight_sync_phase_seconds_total{STEPS})", "{{phase}}")),
                lines("bytes", "Bps", (f"rate(asyncrl_weight_sync_bytes_total{STEPS})", "{{encoding}}")),
                lines("versions", "short", ("asyncrl_weight_syncs_total", "reached the engines"),
                      ("asyncrl_weight_syncs_verified_total", "verified"),
                      ("asyncrl_weight_versions_superseded_total", "passed over")),
                lines("engines behind", "short", ("asyncrl_versions_ahead", "versions")),
                lines("standstill of generation", "percentunit",
                      (f"rate(asyncrl_generation_stall_seconds_total{STEPS})", "share of the time")),
            ),
        ),
        (
            "Machine",
            (
                stacked("memory", "bytes", ("asyncrl_memory_bytes", "{{role}}")),
                quantiles("lag of the event loop", "s", "asyncrl_event_loop_lag_seconds", "", 0.5, 0.99),
                lines("disk", "bytes", ("asyncrl_disk_free_bytes", "free"),
                      ("asyncrl_journal_bytes", "journal")),
                lines("journal", "short", ("asyncrl_journal_unsynced_records", "records not on disk yet"),
                      (f"rate(asyncrl_journal_syncs_total{WINDOW})", "syncs a second")),
            ),
        ),
    ),
)  # fmt: skip

SANDBOXES = Board(
    "asyncrl-sandboxes",
    "asyncrl: sandboxes",
    (
        (
            "Sandboxes",
            (
                lines("open", "short", ("asyncrl_sandboxes_open", "open"), ("asyncrl_sandboxes_waiting", "waited for"),
                      ("asyncrl_sandbox_leases", "leases")),
                lines("starts a second", "short", (f"rate(asyncrl_sandbox_starts_total{WINDOW})", "{{result}}")),
                quantiles("seconds of a start", "s", "asyncrl_sandbox_start_seconds", "", 0.5, 0.95, window=STEPS),
            ),
        ),
        (
            "Commands",
            (
                stacked("a second, by outcome", "short",
                        (f"rate(asyncrl_sandbox_commands_total{WINDOW})", "{{outcome}}")),
                quantiles("seconds of a command", "s", "asyncrl_sandbox_command_seconds", "kind", 0.5, 0.95,
                          window=STEPS),
                lines("episodes that infrastructure ended", "short",
                      (f'sum by (status) (rate(asyncrl_trajectories_total{{status=~"failed_.*"}}{STEPS}))'
                       " or vector(0)", "{{status}}")),
            ),
        ),
    ),
)  # fmt: skip

ENGINES = Board(
    "asyncrl-engines",
    "asyncrl: engines",
    (
        (
            "Service",
            (
                lines("in service", "short", ("asyncrl_engine_up", "{{engine}}")),
                lines("version", "short", ("asyncrl_engine_policy_version", "{{engine}}"),
                      ("asyncrl_policy_version", "learner")),
                lines("restarts, quarantines, failed requests", "short",
                      ("asyncrl_engine_restarts_total", "{{engine}}, restarts"),
                      ("asyncrl_engine_quarantines_total", "{{engine}}, quarantines"),
                      ("asyncrl_engine_requests_failed_total", "{{engine}}, failed requests")),
                lines("tokens that were not kept", "short",
                      ("asyncrl_engine_tokens_unverified_total", "{{engine}}, of wrong weights"),
                      ("asyncrl_tokens_carried_total", "carried to another engine, kept")),
            ),
        ),
        (
            "Load",
            (
                lines("requests", "short", ("asyncrl_engine_requests_running", "{{engine}}, running"),
                      ("asyncrl_engine_queue_requests", "{{engine}}, in its queue"),
                      ("asyncrl_requests_waiting", "waiting for a place")),
                lines("batch", "short", ("asyncrl_engine_batch_requests", "{{engine}}")),
                lines("tokens sampled a second", "short",
                      (f"rate(asyncrl_engine_tokens_sampled_total{WINDOW})", "{{engine}}"),
                      (f"rate(asyncrl_engine_generation_tokens_total{WINDOW})", "{{engine}}, by its own account")),
                lines("prompt tokens a second", "short",
                      (f"rate(asyncrl_engine_prompt_tokens_total{WINDOW})", "{{engine}}")),
                stacked("why no engine has a request", "percentunit", (_IDLE.format("engine"), "{{cause}}")),
            ),
        ),
        (
            "Memory",
            (
                lines("key-value memory", "percentunit", ("asyncrl_engine_kv_cache_ratio", "{{engine}}")),
                lines("preemptions", "short", (f"rate(asyncrl_engine_preemptions_total{WINDOW})", "{{engine}}")),
                lines("found in the prefix cache", "percentunit",
                      (f"increase(asyncrl_engine_prefix_cache_hit_tokens_total{STEPS})"
                       f" / increase(asyncrl_engine_prefix_cache_query_tokens_total{STEPS})", "{{engine}}")),
            ),
        ),
        (
            "Gateway",  # a run without one has no series of it
            (
                lines("sessions and requests", "short",
                      ("asyncrl_gateway_sessions_open or vector(0)", "sessions open"),
                      ("asyncrl_gateway_sessions_waiting or vector(0)", "sessions turned away"),
                      ("asyncrl_gateway_requests_running or vector(0)", "requests running")),
                lines("requests a second", "short",
                      (f"rate(asyncrl_gateway_requests_total{WINDOW}) or vector(0)", "{{face}}, {{status}}")),
                lines("seconds of a request, 0.95", "s",
                      ("histogram_quantile(0.95, sum by (le, face)"
                       f" (rate(asyncrl_gateway_request_seconds_bucket{STEPS}))) or vector(0)", "{{face}}"),
                      ("histogram_quantile(0.95, sum by (le)"
                       f" (rate(asyncrl_gateway_admission_wait_seconds_bucket{STEPS}))) or vector(0)",
                       "waiting for room")),
                stacked("sessions that ended, an hour", "short",
                        (f"3600 * rate(asyncrl_gateway_sessions_ended_total{STEPS}) or vector(0)", "{{outcome}}")),
            ),
        ),
        (
            "Cost",
            (
                lines("engine time", "s", ("asyncrl_cost_engine_seconds", "{{environment}}")),
                lines("learner time", "s", ("asyncrl_cost_learner_seconds", "{{environment}}")),
                lines("of a solved episode", "s", ("asyncrl_cost_per_solved_seconds", "{{environment}}, {{of}}")),
                lines("tokens a second", "short",
                      (f"rate(asyncrl_environment_tokens_sampled_total{STEPS})", "{{environment}}, sampled"),
                      (f"rate(asyncrl_environment_tokens_trained_total{STEPS})", "{{environment}}, trained on")),
            ),
        ),
    ),
)  # fmt: skip

BOARDS = (OVERVIEW, OFF_POLICY, REWARDS, PIPELINE, SANDBOXES, ENGINES)
