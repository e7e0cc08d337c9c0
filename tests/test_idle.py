"""Idle seconds by cause, on trio's clock: each second is where it belongs, and the straggler named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
import trio.testing
from loop_simulation import Simulation, simulate
from prometheus_client import CollectorRegistry

from asyncrl.buffers import BufferSettings, Order
from asyncrl.idle import EngineIdle, IdleClock, LearnerIdle
from asyncrl.metrics import Source, collector
from asyncrl.run import Limits
from asyncrl.testing import Rates

_EXACT = Rates(token_s=1.0, mean_tokens=10, sigma=0.0, environment_s=2.0, step_s=5.0, sync_s=0.5)


def _by_cause(record: Mapping[str, float], who: str) -> dict[str, float]:
    prefix, suffix = f"{who}_idle_", "_seconds"
    return {
        key.removeprefix(prefix).removesuffix(suffix): pytest.approx(value)
        for key, value in record.items()
        if key.startswith(prefix)
    }


def test_an_on_policy_run_spends_each_second_where_it_says(tmp_path: Path) -> None:
    """A step is 10 s of sampling, 2 s of environment, 5 s of learning and 0.5 s of sync, one after the other.

    A line is written before its step's sync, which is in the next one.
    """
    buffer = BufferSettings(max_off_policyness=0, groups_per_step=2, group_size=2)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_EXACT, limits=Limits(steps=3))
    simulate(simulation)
    for step, record in enumerate(simulation.recorder.steps):
        sync = 0.5 if step else 0
        assert _by_cause(record, "learner") == {
            "straggler": 0, "groups": 12, "sync": sync, "evaluation": 0, "saving": 0
        }  # fmt: skip
        assert _by_cause(record, "engine") == {"no_slot": 5, "no_requests": 2, "sync": sync}
        assert "straggler_group" not in record
    assert simulation.status.learner_idle_seconds["groups"] == 36
    assert simulation.status.learner_idle_seconds["sync"] == simulation.status.engine_idle_seconds["sync"] == 1.5
    assert simulation.status.engine_idle_seconds["no_slot"] == 15


def test_the_straggler_is_named_and_its_time_told_from_waiting_for_anybody(tmp_path: Path) -> None:
    """Group 1 hangs until its deadline of 60 s; the other group of the step is ready after 12."""
    buffer = BufferSettings(max_off_policyness=0, groups_per_step=2, group_size=3, group_deadline_s=60.0)
    simulation = Simulation(tmp_path, buffer=buffer, rates=_EXACT, limits=Limits(steps=2))
    simulation.environment.hanging = {"1-0"}.__contains__
    registry = CollectorRegistry()
    registry.register(collector(Source(run=simulation.run)))
    seen: list[object] = []

    async def look() -> None:
        await trio.sleep(40)
        seen.append(registry.get_sample_value("asyncrl_straggler_group"))
        seen.append(registry.get_sample_value("asyncrl_learner_idle_seconds_total", {"cause": "straggler"}))
        seen.append(simulation.run.explain()[0])
        simulation.run.flush_idle()

    simulate(simulation, look)
    first, second = simulation.recorder.steps
    assert (first["learner_idle_groups_seconds"], first["learner_idle_straggler_seconds"]) == (12, 48)
    assert first["straggler_group"] == 1
    assert first["engine_idle_no_requests_seconds"] == 50
    assert "straggler_group" not in second
    assert seen[:2] == [1, 28]
    assert str(seen[2]).endswith("(1 of the 2 that a step eats are finished; it cannot do without group 1)")


def test_evaluating_and_saving_are_causes_of_their_own(tmp_path: Path) -> None:
    buffer = BufferSettings(max_off_policyness=0, groups_per_step=2, group_size=2)
    limits = Limits(steps=4, evaluation_samples=1, evaluate_before=False, evaluate_every_steps=2)
    simulation = simulate(Simulation(tmp_path, buffer=buffer, rates=_EXACT, limits=limits))
    # three held-out tasks, two at a time, 12 s each, after step 2 and at the end
    assert simulation.status.learner_idle_seconds["evaluation"] == 48
    assert simulation.recorder.steps[2]["learner_idle_evaluation_seconds"] == 24
    # steps 1, 2 and 4; with the first tasks of the first evaluation, those of step 3; and the last evaluation's four
    assert simulation.status.engine_idle_seconds["no_requests"] == pytest.approx(3 * 2 + 2 + 4)


@pytest.mark.parametrize("order", Order)
def test_engines_wait_for_slots_less_where_the_bound_is_larger(tmp_path: Path, order: Order) -> None:
    waited = []
    for bound in (0, 2):
        buffer = BufferSettings(max_off_policyness=bound, groups_per_step=2, group_size=2, order=order)
        simulation = Simulation(tmp_path / str(bound), buffer=buffer, rates=_EXACT, limits=Limits(steps=6))
        waited.append(simulate(simulation).status.engine_idle_seconds["no_slot"])
    assert waited == [30, 5], "all groups of the first version end at once, and wait for the first step"


def test_seconds_go_on_after_a_resume(tmp_path: Path) -> None:
    buffer = BufferSettings(max_off_policyness=0, groups_per_step=2, group_size=2)
    simulate(Simulation(tmp_path, buffer=buffer, rates=_EXACT, limits=Limits(steps=2)))
    second = Simulation(tmp_path, buffer=buffer, rates=_EXACT, limits=Limits(steps=3), resume=True)
    simulate(second)
    assert second.status.learner_idle_seconds["groups"] == 36
    assert second.recorder.steps[0]["learner_idle_groups_seconds"] == 12


def test_clocks_count_one_cause_at_a_time() -> None:
    async def main() -> None:
        seconds: dict[str, float] = {}
        clock = IdleClock(seconds, {"a": "", "b": ""})
        clock.switch("a")
        await trio.sleep(2)
        clock.switch("b")
        await trio.sleep(3)
        clock.switch(None)
        await trio.sleep(10)
        assert clock.lap() == seconds == {"a": 2, "b": 3}
        assert clock.lap() == {"a": 0, "b": 0}
        learner = LearnerIdle({})
        learner.wait_for(3)
        await trio.sleep(1)
        learner.flush()
        learner.wait_for(4)
        await trio.sleep(1.5)
        learner.flush()
        await trio.sleep(1)
        learner.wait_for(3)
        await trio.sleep(1)
        learner.phase("stepping")
        assert learner.worst_straggler() == 4
        assert learner.worst_straggler() is None
        engine = EngineIdle({})
        with engine.gate():
            await trio.sleep(1)
            with engine.group():
                await trio.sleep(2)
                with engine.request():
                    await trio.sleep(4)
                    with engine.sync():
                        await trio.sleep(8)
        assert engine.lap() == {"no_slot": 1, "no_requests": 2, "sync": 0}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
