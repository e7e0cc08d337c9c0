"""Guards: what each sees, what it does by its setting, and that the run really does it."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from loop_simulation import Scrape, Simulation, simulate
from rich.console import Console

from asyncrl.buffers import BufferSettings
from asyncrl.commands.train import _listen_to_go_on, _say_how_it_ended
from asyncrl.errors import ConfigError
from asyncrl.guards import Action, Alarm, Controller, Guards, GuardSettings, actions
from asyncrl.progress import Progress
from asyncrl.protocols import PLAIN_STEP, StepOptions, StepResult
from asyncrl.recording import RunRecorder
from asyncrl.run import Limits
from asyncrl.run_directory import RunDirectory
from asyncrl.testing import FakeLearner, Rates
from asyncrl.types import Group

_HEALTHY = {"importance_ratio_max": 2.0, "ess_token": 0.9, "entropy": 1.0, "grad_norm_nonfinite": 0.0}
_SIGNS: dict[str, Sequence[Mapping[str, float]]] = {
    "ratio": [{"importance_ratio_max": 1001.0}],
    "ess": [{"ess_token": 0.19}],
    "entropy": [{"entropy": 0.19}],
    "nonfinite": [{"grad_norm_nonfinite": 1.0}] * 3,
    "behaviour": [{"behaviour_network_rising": 1.0}],
    "sync": [{"quarantines": 1}],
}
"""guard -> what the steps say that set it off, at last."""


def after(guards: Guards, *changes: Mapping[str, float], stepped: bool = True) -> list[Alarm]:
    """Return the alarms of the last of several steps, each healthy but for its changes."""
    alarms: Sequence[Alarm] = []
    for change in changes:
        record = {**_HEALTHY, **change}
        quarantines = int(record.pop("quarantines", 0))
        alarms = guards.check(record, stepped=stepped, quarantines=quarantines)
    return list(alarms)


@pytest.mark.parametrize("guard", _SIGNS)
def test_a_guard_sees_its_sign_and_no_other_does(guard: str) -> None:
    everything = {name: Action.WARN for name in _SIGNS}
    assert everything == actions(GuardSettings()), "by default all of them warn, and do no more"
    assert after(Guards(GuardSettings()), {}, {}, {}) == []
    alarms = after(Guards(GuardSettings()), {}, *_SIGNS[guard])
    assert [alarm.guard for alarm in alarms] == [guard]
    assert after(Guards(GuardSettings(**{guard: Action.OFF})), {}, *_SIGNS[guard]) == []


def test_a_limit_just_kept_is_no_alarm() -> None:
    kept = {"importance_ratio_max": 1000.0, "ess_token": 0.2, "entropy": 0.2}
    assert after(Guards(GuardSettings()), {}, kept) == []
    twice = [{"grad_norm_nonfinite": 1.0}] * 2
    assert after(Guards(GuardSettings()), {}, *twice, {}, *twice) == [], "a step in between ends the row"


def test_the_entropy_is_judged_by_the_first_step_also_after_a_resume() -> None:
    first, resumed = Guards(GuardSettings()), Guards(GuardSettings())
    after(first, {"entropy": 4.0})
    resumed.restore(first.state())
    assert [alarm.guard for alarm in after(resumed, {"entropy": 0.7})] == ["entropy"]
    assert after(Guards(GuardSettings()), {"entropy": 0.7}) == [], "without it, this is the first"


@pytest.mark.parametrize("action", [Action.SKIP, Action.PAUSE, Action.STOP])
def test_limits_on_a_step_go_with_it_where_more_than_a_warning_is_asked(action: Action) -> None:
    assert Guards(GuardSettings()).options() == PLAIN_STEP
    guards = Guards(GuardSettings(ratio=action, ratio_max=10.0, ess=action, ess_min=0.3, entropy=action))
    limits = {"importance_ratio_max": (-math.inf, 10.0), "ess_token": (0.3, math.inf)}
    assert guards.options().limits == limits
    after(guards, {"entropy": 2.0})
    assert guards.options().limits == {**limits, "entropy": (0.2 * 2.0, math.inf)}


@pytest.mark.parametrize("guard", ["behaviour", "sync"])
def test_what_is_seen_between_steps_holds_back_the_next_one(guard: str) -> None:
    guards = Guards(GuardSettings(**{guard: Action.SKIP}))
    (alarm,) = after(guards, {}, *_SIGNS[guard])
    assert not alarm.skipped
    assert "the next step leaves the weights as they are" in alarm.words
    assert not guards.options().update
    after(guards, {"quarantines": 1})
    assert guards.options().update, "once the sign is gone, learning goes on"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ratio_max": 0.5}, "ratio_max must be from 1"),
        ({"ess_min": 1.5}, "ess_min must be from 0 to 1, got 1.5"),
        ({"entropy_fall": math.nan}, "entropy_fall"),
        ({"nonfinite_steps": 0}, "nonfinite_steps"),
        ({"ess_target": 2.0}, "ess_target"),
        ({"least_scale": 0.0}, "least_scale"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GuardSettings(**change)


# --- in the loop ------------------------------------------------------------------------------------------------


class SickLearner(FakeLearner):
    """Says of the step to version 3 that its ratio is huge; keeps what it was asked for."""

    def __init__(self, rates: Rates) -> None:
        super().__init__(rates)
        self.options: list[StepOptions] = []

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """See `protocols.Learner`."""
        self.options.append(options)
        result = await super().step(groups, options)
        ratio = 5000.0 if result.version == 3 else 2.0
        most = options.limits.get("importance_ratio_max", (0.0, math.inf))[1]
        metrics = {**result.metrics, "importance_ratio_max": ratio, "ess_token": 0.5, "entropy": 1.0}
        return replace(result, metrics=metrics, stepped=options.update and ratio <= most)


def guarded(directory: Path, settings: GuardSettings, *, steps: int = 6) -> tuple[Simulation, SickLearner]:
    """Return a simulation with guards, and its learner."""
    learner = SickLearner(Rates())
    simulation = Simulation(
        directory,
        limits=Limits(steps=steps),
        buffer=BufferSettings(max_off_policyness=2, groups_per_step=4, group_size=4),
        watch=lambda parts: replace(parts, learner=learner),
        guards=Guards(settings),
    )
    return simulation, learner


def test_a_warning_is_told_counted_and_changes_nothing(tmp_path: Path) -> None:
    simulation, learner = guarded(tmp_path, GuardSettings())
    simulate(simulation)
    (alarm,) = simulation.recorder.alarms
    assert (alarm.guard, alarm.action, alarm.value, alarm.limit) == ("ratio", Action.WARN, 5000.0, 1000.0)
    assert simulation.status.steps == 6
    assert simulation.status.steps_skipped == 0
    assert set(map(str, learner.options)) == {str(PLAIN_STEP)}
    shown = Scrape(simulation.run)("asyncrl_guard_actions_total", {"guard": "ratio", "action": "warn"})
    assert shown == 1


def test_a_scrape_shows_what_guards_may_do_before_they_do_it(tmp_path: Path) -> None:
    """Prometheus tells growth from 0 only where it has seen the 0: an alert on the first deed needs it."""
    settings = GuardSettings(ratio=Action.PAUSE, ess=Action.OFF, ratio_max=10_000.0)
    simulation, _ = guarded(tmp_path, settings)
    simulate(simulation)
    scrape = Scrape(simulation.run)
    assert scrape("asyncrl_guard_actions_total", {"guard": "ratio", "action": "pause"}) == 0
    assert scrape("asyncrl_guard_actions_total", {"guard": "sync", "action": "warn"}) == 0
    assert scrape("asyncrl_guard_actions_total", {"guard": "ess", "action": "off"}) is None


def test_alarms_are_printed_and_written_down_and_cut_back_on_resuming(tmp_path: Path) -> None:
    directory, output = RunDirectory(tmp_path), io.StringIO()
    progress = Progress(Console(file=output, width=200), title="run", max_steps=3)
    recorder = RunRecorder(directory, progress, lambda token_ids: "", version=0)
    (alarm,) = after(Guards(GuardSettings(ratio=Action.PAUSE)), *_SIGNS["ratio"], stepped=False)
    recorder.alarm(alarm)
    (line,) = map(json.loads, directory.guards.read_text().splitlines())
    assert (line["guard"], line["action"], line["value"], line["limit"]) == ("ratio", "pause", 1001.0, 1000.0)
    assert f"the run is paused; kill -USR1 {os.getpid()} goes on" in output.getvalue()
    with directory.guards.open("a") as file:
        file.write(json.dumps({**line, "version": 7}) + "\n")
    RunRecorder(directory, progress, lambda token_ids: "", version=3)
    assert len(directory.guards.read_text().splitlines()) == 1


def test_a_skipped_step_counts_and_the_run_goes_on(tmp_path: Path) -> None:
    simulation, _ = guarded(tmp_path, GuardSettings(ratio=Action.SKIP))
    simulate(simulation)
    (alarm,) = simulation.recorder.alarms
    assert alarm.skipped
    assert alarm.words == "largest ratio 5000 is above ratio_max = 1000: the weights stayed as they were"
    assert (simulation.status.steps, simulation.status.steps_skipped) == (6, 1)


def test_a_guard_that_stops_saves_and_says_why(tmp_path: Path) -> None:
    simulation, _ = guarded(tmp_path, GuardSettings(ratio=Action.STOP))
    simulate(simulation)
    assert simulation.status.steps == 3
    assert simulation.status.stopped_by.startswith("largest ratio 5000 is above ratio_max = 1000")
    checkpoint = simulation.checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.version == 3
    assert simulation.stop.is_set()


def test_a_paused_run_saves_waits_and_goes_on_when_it_is_told(tmp_path: Path) -> None:
    simulation, _ = guarded(tmp_path, GuardSettings(ratio=Action.PAUSE))
    seen: list[tuple[str, int]] = []

    async def operate() -> None:
        await trio.sleep(10_000.0)  # by the mock clock; by then there is nothing else to do
        checkpoint = simulation.checkpoints.newest()
        assert checkpoint is not None
        seen.append((simulation.status.phase, checkpoint.version))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_listen_to_go_on, simulation.run)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGUSR1)
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()

    simulate(simulation, operate)
    assert seen == [("paused", 3)]
    assert simulation.status.steps == 6
    assert simulation.status.phase == "finished"


def test_the_exit_code_tells_a_guard_from_a_person() -> None:
    output = io.StringIO()
    console = Console(file=output)
    assert _say_how_it_ended(console, stopped_by="", stopped=False) == 0
    assert _say_how_it_ended(console, stopped_by="", stopped=True) == 130
    assert _say_how_it_ended(console, stopped_by="largest ratio 5000", stopped=True) == 1
    assert "stopped by a guard: largest ratio 5000; go on with --resume" in output.getvalue()


def test_a_paused_run_can_be_stopped(tmp_path: Path) -> None:
    simulation, _ = guarded(tmp_path, GuardSettings(ratio=Action.PAUSE))

    async def operate() -> None:
        await trio.sleep(10_000.0)
        assert simulation.status.phase == "paused"
        simulation.stop.set()

    simulate(simulation, operate)
    assert simulation.status.steps == 3
    assert simulation.status.phase == "stopped"


def test_the_controller_takes_smaller_steps_while_the_sample_is_thin(tmp_path: Path) -> None:
    settings = GuardSettings(controller=Controller.LEARNING_RATE, ess_target=0.7, least_scale=0.2)
    simulation, learner = guarded(tmp_path, settings, steps=8)
    simulate(simulation)
    scales = [options.learning_rate_scale for options in learner.options]
    assert scales == pytest.approx([max(0.2, 0.7**k) for k in range(8)])
    guards = Guards(settings)
    guards.restore(simulation.run._guards.state())
    for _ in range(100):
        after(guards, {})
    assert guards.options().learning_rate_scale == 1.0, "it comes back"


def test_the_controller_lets_fewer_groups_run_while_the_sample_is_thin(tmp_path: Path) -> None:
    settings = GuardSettings(controller=Controller.MAX_OFF_POLICYNESS, ess_target=0.7)
    simulation, learner = guarded(tmp_path, settings, steps=12)
    first = simulation.run.gate.statistics
    slots: list[int] = []

    async def look() -> None:
        while True:
            slots.append(first().num_slots)
            await trio.sleep(1.0)

    simulate(simulation, look)
    assert slots[0] > 4
    assert slots[-1] == 4, "a step's groups at least"
    assert simulation.status.steps == 12
    assert {options.learning_rate_scale for options in learner.options} == {1.0}
    late = [step["staleness_max"] for step in simulation.recorder.steps[-3:]]
    assert max(late) <= 1 < max(step["staleness_max"] for step in simulation.recorder.steps)
