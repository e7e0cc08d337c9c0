"""`asyncrl simulate`: the real loop over simulated parts, and every fault that can be injected into it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from asyncrl.buffers import BufferSettings
from asyncrl.cli import main
from asyncrl.commands import arguments
from asyncrl.configs import load_config
from asyncrl.errors import (
    AsyncRLError,
    CheckpointError,
    ConfigError,
    EnvironmentFault,
    LearnerError,
    StalenessError,
    WeightSyncError,
    leaves,
)
from asyncrl.run_directory import RunDirectory
from asyncrl.simulation import FAULTS, Fault, Forecast, SimulationRates, measured_rates, simulate
from asyncrl.simulation.sharing import SharedEngines

BUFFER = BufferSettings(max_off_policyness=2, groups_per_step=4, group_size=4)
RATES = SimulationRates()


def forecast(steps: int = 30, *faults: Fault, buffer: BufferSettings = BUFFER, **changes: float) -> Forecast:
    rates = RATES.with_changes([f"{name}={value}" for name, value in changes.items()])
    return simulate(buffer, rates, steps=steps, engines=1, engine_slots=64, faults=faults)


def test_the_same_seed_gives_the_same_forecast() -> None:
    first, second = forecast(), forecast()
    assert (first.seconds, first.staleness_groups) == (second.seconds, second.staleness_groups)


def test_a_synchronous_run_is_never_stale_and_its_learner_waits() -> None:
    synchronous = forecast(buffer=BufferSettings(max_off_policyness=0, groups_per_step=4, group_size=4))
    asynchronous = forecast()
    assert synchronous.staleness_max == 0
    assert asynchronous.staleness_max == 2
    assert synchronous.steps_per_hour < asynchronous.steps_per_hour
    assert synchronous.learner_idle_share > asynchronous.learner_idle_share


def test_where_nothing_varies_the_forecast_is_arithmetic() -> None:
    """One group a step, on-policy: a step is rollout, learner and sync after each other."""
    result = forecast(
        20,
        buffer=BufferSettings(max_off_policyness=0, groups_per_step=1, group_size=2),
        completion_tokens=100,
        completion_sigma=0,
        request_tokens_per_second=50,
        environment_s=3,
        environment_sigma=0,
        straggler_share=0,
        learner_tokens_per_second=100,
        step_overhead_s=1,
        sync_s=0.5,
    )
    rollout, step = 100 / 50 + 3, 1 + 200 / 100
    assert result.seconds == pytest.approx(20 * (rollout + step + 0.5))
    assert result.learner_idle_share == pytest.approx(rollout / (rollout + step + 0.5))
    assert result.tokens_per_second == pytest.approx(200 / (rollout + step + 0.5))


def test_engines_that_have_no_idle_moment_sample_what_they_can() -> None:
    """Whoever ends leaves its share to the others, however long those are."""
    assert forecast(60, engine_tokens_per_second=200, completion_sigma=0.8, environment_s=0.1).engine_idle_share < 0.1


def test_requests_share_the_engines() -> None:
    """3 for 10, 20 and 30 tokens at 6 tokens a second together and at most 3 each; one of 20 tokens comes at 5 s."""
    ended: dict[str, float] = {}

    async def main() -> None:
        engines = SharedEngines(lambda n: min(3.0, 6.0 / n))

        def begin(name: str, tokens: int) -> int:
            return engines.sample_nowait(tokens, lambda: ended.__setitem__(name, trio.current_time() - started))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(engines.serve)
            await trio.testing.wait_all_tasks_blocked()
            started = trio.current_time()
            for tokens in (10, 20, 30):
                begin(str(tokens), tokens)
            aborted = begin("aborted", 10**6)
            engines.abort_nowait({aborted})
            await trio.sleep(5)  # each has 10 tokens
            begin("late", 20)
            await trio.sleep(50)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    # from 5 s on three share 6 a second until 20 has its 10 more; then two are given 3 each
    assert ended == pytest.approx({"10": 5.0, "20": 10.0, "30": 10 + 10 / 3, "late": 10 + 10 / 3})


def test_stragglers_cost_the_synchronous_run_more() -> None:
    few = BufferSettings(max_off_policyness=0, groups_per_step=4, group_size=4)
    without, slow = forecast(buffer=few, straggler_share=0), forecast(buffer=few, straggler_share=0.2)
    assert slow.learner_idle_share > without.learner_idle_share


END_OF_RUN: dict[str, tuple[type[AsyncRLError], str]] = {
    "engine_death": (EnvironmentFault, "3 groups in a row had no usable episode.*failed_engine"),
    "learner_death": (LearnerError, "signal 9"),
    "failed_sync": (WeightSyncError, "update of version"),
    "unverified_sync": (WeightSyncError, "verified: False"),
    "stale_engine": (StalenessError, "max_off_policyness is 2"),
    "full_disk": (CheckpointError, "No space left"),
    "duplicate_results": (EnvironmentFault, "4 trajectories of 3 different ids, 4 were asked for"),
    "short_group": (EnvironmentFault, "3 trajectories of 3 different ids, 4 were asked for"),
}
SURVIVED = {"slow_sync", "nan_logprobs", "no_more_tasks", "silent_worker"}


def test_every_fault_has_a_defined_end() -> None:
    assert set(FAULTS) == {*END_OF_RUN, *SURVIVED}


@pytest.mark.parametrize("kind", sorted(END_OF_RUN))
def test_a_fault_ends_the_run_and_is_named(kind: str) -> None:
    error, words = END_OF_RUN[kind]
    with pytest.raises((BaseExceptionGroup, AsyncRLError)) as caught:
        forecast(30, Fault(kind=kind, version=5))
    found = list(leaves(caught.value)) if isinstance(caught.value, BaseExceptionGroup) else [caught.value]
    assert [type(each) for each in found] == [error]
    assert pytest.raises(error, match=words).matches(found[0])


def test_the_run_goes_on_after_a_slow_sync_and_a_skipped_step() -> None:
    plain = forecast()
    slow = forecast(30, Fault(kind="slow_sync", version=5))
    assert slow.steps == 30
    assert slow.seconds > plain.seconds + 10 * RATES.sync_s
    assert slow.staleness_max <= 2
    assert forecast(30, Fault(kind="nan_logprobs", version=5)).steps_skipped == 1


def test_a_worker_that_never_returns_costs_its_own_episode_where_groups_have_a_deadline() -> None:
    fault = Fault(kind="silent_worker", version=5)
    result = forecast(30, fault, buffer=replace(BUFFER, group_deadline_s=600.0))
    assert (result.steps, result.groups_dropped) == (30, {})
    assert result.staleness_max <= 2
    with pytest.raises(ConfigError, match="set group_deadline_s"):
        forecast(30, fault)


def test_the_run_ends_when_the_tasks_do() -> None:
    assert 5 <= forecast(30, Fault(kind="no_more_tasks", version=5)).steps < 30


def test_rates_are_measured_from_a_run(tmp_path: Path) -> None:
    steps = [
        {
            "tokens_trained": 1000.0,
            "step_seconds": 2.0,
            "sync_seconds": 0.5,
            "sync_stall_seconds": 0.25,
            "completion_tokens_mean": 80.0,
            "solve_rate": 0.5,
            "generated_tokens_per_second": rate,
        }
        for rate in (600.0, 800.0)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rates = measured_rates(RunDirectory(tmp_path))
    assert rates.learner_tokens_per_second == 500.0
    assert rates.engine_tokens_per_second == 800.0
    assert (rates.sync_s, rates.sync_stall_s, rates.completion_tokens, rates.solve_share) == (0.5, 0.25, 80.0, 0.5)
    with pytest.raises(ConfigError, match="holds no steps to measure rates from"):
        measured_rates(RunDirectory(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--rate", "sync=1"], "unknown rate 'sync'"),
        (["--rate", "sync_s=fast"], "sync_s must be a number, got 'fast'"),
        (["--rate", "learner_tokens_per_second=0"], "learner_tokens_per_second must be > 0"),
        (["--rate", "solve_share=1.5"], "solve_share must be at most 1"),
        (["--rate", "sync_s=0.01"], "sync_stall_s = 0.1 is part of sync_s"),
        (["--fault", "fire@3"], "unknown fault 'fire'"),
        (["--fault", "slow_sync"], "KIND@VERSION"),
        (["--steps", "0"], "--steps must be >= 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "configs/demo.toml", *given]) == 2
    assert words in capsys.readouterr().err


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "configs/demo.toml", "--steps", "20", "--against", "buffer.max_off_policyness=0"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "staleness" in printed
    assert "times the steps per hour of buffer.max_off_policyness=0" in printed
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"]["steps"] == 20
    assert report["against"]["staleness_max"] == 0
    assert report["rates"]["sync_s"] == 0.5


def test_check_predicts_from_given_rates() -> None:
    parser = argparse.ArgumentParser()
    arguments.add_config_arguments(parser)
    arguments.add_rate_arguments(parser)
    parsed = parser.parse_args(["configs/demo.toml", "--rate", "sync_s=9", "--rate", "sync_stall_s=9"])
    config = load_config(parsed.config)
    result = arguments.forecast_of(config, arguments.rates_of(parsed, config), steps=5)
    assert result.learner_sync_share * result.seconds == pytest.approx(5 * 9)
