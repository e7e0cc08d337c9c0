"""Every alert fires on what it is about, and not on what looks alike: by Prometheus' own rule tests."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_server import needs_promtool
from tree import ROOT

from asyncrl.dashboards import families_of

RULES = ROOT / "configs" / "prometheus" / "alerts.yml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}


@dataclass(frozen=True)
class Case:
    """Series of an hour or more, a value a minute, as promtool writes them, and the minute at which it is looked."""

    fires: Mapping[str, str]
    quiet: Mapping[str, str]
    at: int


_RATIO, _K3 = "asyncrl_importance_ratio_max", 'asyncrl_engine_mismatch_nats{measure="k3"}'
_ESS, _SEQUENCE = "asyncrl_effective_sample_size_ratio", "asyncrl_sequence_effective_sample_size_ratio"
_MEAN, _BOUND = "asyncrl_staleness_steps_mean", "asyncrl_staleness_bound_steps"
_EVALUATION, _REWARD = "asyncrl_evaluation_solve_ratio", "asyncrl_reward_mean"
_EQUAL = 'asyncrl_zero_advantage_groups_ratio{kind="all"}'
_GRADIENT = 'asyncrl_nonfinite_total{of="gradient"}'
_COMMANDS, _STARTS = "asyncrl_sandbox_commands_total", "asyncrl_sandbox_starts_total"
_LEASES, _OPEN = "asyncrl_sandbox_leases", "asyncrl_sandboxes_open"
_MALFORMED = 'asyncrl_malformed_replies_total{environment="bugfix"}'
_TURNS = 'asyncrl_episode_turns_total{environment="bugfix"}'
_GUARD = 'asyncrl_guard_actions_total{guard="ratio", action="%s"}'
_RISING = 'asyncrl_behaviour_rising{kind="network"}'
_ENDED = 'asyncrl_trajectories_total{environment="bugfix", status="%s"}'
_LAG = 'asyncrl_event_loop_lag_seconds_bucket{le="%s"}'
_REQUESTS = 'asyncrl_gateway_requests_total{face="openai", status="%s"}'
_FREE, _DISK = "asyncrl_disk_free_bytes", "asyncrl_disk_bytes"

CASES: dict[str, list[Case]] = {
    "AsyncrlRatioSpike": [
        # a step that is as large as all others is no spike
        Case({_RATIO: "2x59 40x5"}, {_RATIO: "40x65"}, 62),
        Case({_RATIO: "3x59 16"}, {_RATIO: "1.5x59 9x5"}, 60),
    ],
    "AsyncrlEssCollapse": [
        Case({_ESS: "0.9x10 0.4x20"}, {_ESS: "0.9x10 0.4x3 0.9x17"}, 30),
        # whole sequences' share is small in a healthy run too: it is its fall that counts
        Case({_SEQUENCE: "0.5x60 0.05x20"}, {_SEQUENCE: "0.05x80"}, 80),
    ],
    "AsyncrlStalenessNearBound": [
        Case({_MEAN: "1.9x40", _BOUND: "2x40"}, {_MEAN: "1.2x40", _BOUND: "2x40"}, 40),
        Case({_MEAN: "1x40", _BOUND: "1x40"}, {_MEAN: "0x40", _BOUND: "0x40"}, 40),
    ],
    "AsyncrlStalenessOverBound": [
        Case({"asyncrl_staleness_steps_max": "3x5", _BOUND: "2x5"}, {"asyncrl_staleness_steps_max": "2x5",
             _BOUND: "2x5"}, 5),
    ],
    "AsyncrlEngineMismatchJump": [
        Case({_K3: "0.002x60 0.02x10"}, {_K3: "0.02x70"}, 70),
        Case({_K3: "0.0005x60 0.0025x10"}, {_K3: "0.0001x60 0.0009x10"}, 70),
    ],
    "AsyncrlEngineMismatchFloor": [Case({_K3: "0.02x60"}, {_K3: "0.002x50 0.02x2 0.002x8"}, 60)],
    "AsyncrlSqrtTExponent": [
        Case({"asyncrl_sqrt_t_exponent": "0.9x20"}, {"asyncrl_sqrt_t_exponent": "0.5x20"}, 20),
        Case({"asyncrl_sqrt_t_exponent": "0.8x20"}, {"asyncrl_sqrt_t_exponent": "0.9x10 0.6 0.9x9"}, 20),
    ],
    "AsyncrlEntropyCollapse": [
        Case({"asyncrl_entropy_nats": "0.2x20", "asyncrl_entropy_start_nats": "1x20"},
             {"asyncrl_entropy_nats": "0.2x20", "asyncrl_entropy_start_nats": "0.4x20"}, 20),
    ],
    "AsyncrlRewardUpEvaluationDown": [
        Case({_REWARD: "0.2x120 0.6x60", _EVALUATION: "0.5x120 0.3x60"},
             {_REWARD: "0.2x120 0.6x60", _EVALUATION: "0.5x180"}, 170),
        Case({_REWARD: "0.2x120 0.4x60", _EVALUATION: "0.4x120 0.3x60"},
             {_REWARD: "0.4x120 0.2x60", _EVALUATION: "0.5x120 0.3x60"}, 170),
    ],
    "AsyncrlZeroAdvantage": [Case({_EQUAL: "0.9x60"}, {_EQUAL: "0.7x60"}, 60)],
    "AsyncrlTruncation": [Case({"asyncrl_truncated_ratio": "0.5x60"}, {"asyncrl_truncated_ratio": "0.2x60"}, 60)],
    "AsyncrlRepetition": [Case({"asyncrl_repetition_ratio": "0.5x60"}, {"asyncrl_repetition_ratio": "0.1x60"}, 60)],
    "AsyncrlNonfinite": [Case({_GRADIENT: "0x10 1x10"}, {_GRADIENT: "7x40"}, 15)],
    "AsyncrlStepsSkipped": [
        Case({"asyncrl_steps_skipped_total": "0x5 1x5 2x5 5x5"}, {"asyncrl_steps_skipped_total": "0x10 1x10"}, 20)
    ],
    "AsyncrlMalformedReplies": [
        Case({_MALFORMED: "0+30x70", _TURNS: "0+100x70"}, {_MALFORMED: "0+5x70", _TURNS: "0+100x70"}, 70),
    ],
    "AsyncrlGuardWarned": [Case({_GUARD % "warn": "0x5 1x10"}, {_GUARD % "skip": "0x5 1x10"}, 10)],
    "AsyncrlGuardActed": [
        Case({_GUARD % "skip": "0x5 1x10"}, {_GUARD % "warn": "0x5 1x10"}, 10),
        Case({_GUARD % "pause": "0x5 1x10"}, {_GUARD % "pause": "4x15"}, 10),
        Case({_GUARD % "stop": "0x5 1x2"}, {_GUARD % "stop": "0x15"}, 7),
    ],
    "AsyncrlPaused": [
        Case({'asyncrl_phase{phase="paused"}': "0x5 1x5"}, {'asyncrl_phase{phase="stepping"}': "0x5 1x5"}, 9),
    ],
    "AsyncrlBehaviourRising": [Case({_RISING: "0x5 1x10"}, {_RISING: "1x3 0x12"}, 12)],
    "AsyncrlStalled": [Case({"asyncrl_stalls_total": "0x5 1x10"}, {"asyncrl_stalls_total": "2x15"}, 10)],
    "AsyncrlUnaccounted": [
        Case({'asyncrl_accounted_tokens{state="missing"}': "0x5 -3x10"},
             {'asyncrl_accounted_tokens{state="missing"}': "0x5 9x2 0x8"}, 12),
        Case({'asyncrl_accounted_trajectories{state="missing"}': "1x15"},
             {'asyncrl_accounted_trajectories{state="dropped"}': "1x15"}, 12),
    ],
    "AsyncrlEpisodesFail": [
        Case({_ENDED % "failed_sandbox": "0+5x60", _ENDED % "failed_engine": "0+5x60", _ENDED % "completed": "0+60x60"},
             {_ENDED % "failed_sandbox": "0+5x60", _ENDED % "truncated_turns": "0+60x60"}, 60),
    ],
    "AsyncrlEngineRestarts": [
        Case({'asyncrl_engine_restarts_total{engine="engine 0"}': "0x10 1x10 2x10 4x20"},
             {'asyncrl_engine_restarts_total{engine="engine 0"}': "0x10 1x40"}, 50),
    ],
    "AsyncrlLoopLag": [
        Case({_LAG % "0.3": "0+95x40", _LAG % "1.0": "0+100x40", _LAG % "+Inf": "0+100x40"},
             {_LAG % "0.3": "0+100x40", _LAG % "1.0": "0+100x40", _LAG % "+Inf": "0+100x40"}, 40),
    ],
    "AsyncrlLearnerIdle": [
        Case({'asyncrl_learner_idle_seconds_total{cause="groups"}': "0+25x70",
              'asyncrl_learner_idle_seconds_total{cause="sync"}': "0+15x70"},
             {'asyncrl_learner_idle_seconds_total{cause="groups"}': "0+25x70"}, 70),
    ],
    "AsyncrlEnginesIdle": [
        Case({'asyncrl_engine_idle_seconds_total{cause="no_slot"}': "0+30x70"},
             {'asyncrl_engine_idle_seconds_total{cause="no_slot"}': "0+5x70"}, 70),
    ],
    "AsyncrlNoProgress": [
        Case({"asyncrl_steps_total": "7x80"}, {"asyncrl_steps_total": "7x40 8x40"}, 75),
        Case({"asyncrl_steps_total": "7x80", 'asyncrl_phase{phase="stepping"}': "1x80"},
             {"asyncrl_steps_total": "7x80", 'asyncrl_phase{phase="evaluating"}': "1x80"}, 75),
    ],
    "AsyncrlEngineDown": [
        Case({'asyncrl_engine_up{engine="engine 0"}': "1x5 0x15"},
             {'asyncrl_engine_up{engine="engine 0"}': "1x5 0x5 1x10"}, 18),
    ],
    "AsyncrlSyncUnverified": [
        Case({"asyncrl_weight_syncs_total": "5x10", "asyncrl_weight_syncs_verified_total": "4x10"},
             {"asyncrl_weight_syncs_total": "5x10", "asyncrl_weight_syncs_verified_total": "5x10"}, 10),
        Case({'asyncrl_engine_quarantines_total{engine="engine 0"}': "0x5 1x5"},
             {'asyncrl_engine_quarantines_total{engine="engine 0"}': "1x10"}, 10),
    ],
    "AsyncrlSyncSlow": [
        Case({"asyncrl_sync_seconds": "40x20", "asyncrl_step_seconds": "30x20"},
             {"asyncrl_sync_seconds": "20x20", "asyncrl_step_seconds": "30x20"}, 20),
        Case({"asyncrl_sync_seconds": "11x20", "asyncrl_step_seconds": "1x20"},
             {"asyncrl_sync_seconds": "3x20", "asyncrl_step_seconds": "1x20"}, 20),
    ],
    "AsyncrlGatewayFails": [
        Case({_REQUESTS % "504": "0+3x30", _REQUESTS % "200": "0+40x30"},
             {_REQUESTS % "503": "0+1x30", _REQUESTS % "429": "0+20x30", _REQUESTS % "200": "0+40x30"}, 30),
        Case({_REQUESTS % "left": "0+3x30", _REQUESTS % "200": "0+40x30"},
             {_REQUESTS % "left": "0x30", _REQUESTS % "200": "0+40x30"}, 30),
    ],
    "AsyncrlGatewayRefuses": [
        # turned away for a while is how a full cache is waited out, and no fault of the request
        Case({_REQUESTS % "400": "0+3x30", _REQUESTS % "200": "0+40x30"},
             {_REQUESTS % "400": "0+1x30", _REQUESTS % "429": "0+20x30", _REQUESTS % "200": "0+40x30"}, 30),
    ],
    "AsyncrlGatewayFull": [
        Case({"asyncrl_gateway_sessions_waiting": "3x40"}, {"asyncrl_gateway_sessions_waiting": "3x14 0 3x25"}, 31),
    ],
    "AsyncrlSandboxFailures": [
        Case({f'{_COMMANDS}{{outcome="infrastructure"}}': "0+3x30", f'{_COMMANDS}{{outcome="ok"}}': "0+60x30"},
             {f'{_COMMANDS}{{outcome="wall"}}': "0+30x30", f'{_COMMANDS}{{outcome="ok"}}': "0+60x30"}, 30),
        Case({f'{_STARTS}{{result="failed"}}': "0+3x30", f'{_STARTS}{{result="ok"}}': "0+60x30"},
             {f'{_STARTS}{{result="failed"}}': "0x30", f'{_STARTS}{{result="ok"}}': "0+60x30"}, 30),
    ],
    "AsyncrlLeaseLeak": [Case({_LEASES: "60x20", _OPEN: "2x20"}, {_LEASES: "60x20", _OPEN: "30x20"}, 20)],
    "AsyncrlDisk": [
        Case({_FREE: "5e9x20", _DISK: "1e11x20"}, {_FREE: "5e10x20", _DISK: "1e11x20"}, 20),
        # 50 GB left, half a gigabyte less every minute
        Case({_FREE: "8e10-5e8x60", _DISK: "1e11x60"}, {_FREE: "8e10-5e6x60", _DISK: "1e11x60"}, 60),
    ],
}  # fmt: skip


def rule_tests(rules: Path, alerts: Iterable[str] = tuple(CASES)) -> str:
    """Return promtool's file of the alerts' cases, each alone."""
    tests = []
    for alert in alerts:
        for case in CASES[alert]:
            for series, firing in ((case.fires, True), (case.quiet, False)):
                expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if firing else []
                tests.append(
                    {
                        "interval": "1m",
                        "input_series": [{"series": _with_target(s), "values": v} for s, v in series.items()],
                        "promql_expr_test": [
                            {
                                "expr": f'max by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                                "eval_time": f"{case.at}m",
                                "exp_samples": expected,
                            }
                        ],
                    }
                )
    return json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests})


def _with_target(series: str) -> str:
    labels = 'instance="127.0.0.1:9400", job="asyncrl"'
    return series[:-1] + f", {labels}}}" if series.endswith("}") else f"{series}{{{labels}}}"


def test_every_alert_has_series_that_fire_and_series_that_do_not() -> None:
    assert sorted(CASES) == sorted(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_to_do_and_names_metrics_that_there_are(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert len(rule["annotations"]["runbook"]) > 60
    assert rule["annotations"]["summary"].endswith(".")
    words = " ".join([rule["expr"], *re.findall(r"asyncrl_\w+", rule["annotations"]["runbook"])])
    assert families_of(words)


@needs_promtool
@pytest.mark.slow
def test_the_rules_are_valid_and_fire_as_they_should(tmp_path: Path) -> None:
    tests = tmp_path / "tests.json"
    tests.write_text(rule_tests(RULES))
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(tests)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.slow
def test_a_rule_that_is_another_is_found(tmp_path: Path) -> None:
    """The mutant: one threshold of the rules is ten times as high."""
    rules, tests = tmp_path / "alerts.yml", tmp_path / "tests.json"
    rules.write_text(RULES.read_text().replace("asyncrl_sqrt_t_exponent > 0.75", "asyncrl_sqrt_t_exponent > 7.5"))
    tests.write_text(rule_tests(rules, ["AsyncrlSqrtTExponent"]))
    done = subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "AsyncrlSqrtTExponent" in done.stdout + done.stderr
