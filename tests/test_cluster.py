"""`asyncrl simulate --cluster`: predictions against the real loop, against arithmetic, and against common sense."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree import ROOT

from asyncrl.buffers import BufferSettings
from asyncrl.cli import main
from asyncrl.commands.simulate_cluster import settings_help
from asyncrl.simulation import simulate
from asyncrl.simulation.cluster import Prediction, gains, predict, rates_of_cluster, sync_seconds
from asyncrl.simulation.durations import Lognormal, SharedRate, episode_times
from asyncrl.simulation.gate import Gate, step_interval
from asyncrl.simulation.shapes import (
    ClusterShape,
    EngineShape,
    FailureShape,
    LearnerShape,
    ModelShape,
    WeightSyncShape,
    read_cluster,
    sections,
)

SMALL = ClusterShape(
    model=ModelShape(parameters=1e9),
    buffer=BufferSettings(max_off_policyness=1, groups_per_step=8, group_size=4),
    engines=EngineShape(count=4, tokens_per_second=4000, request_tokens_per_second=80),
    learner=LearnerShape(ranks=4, peak_tflops=989),
    weight_sync=WeightSyncShape(
        publish_gbytes_per_second=50, source_gbytes_per_second=10, host_gbytes_per_second=10, load_gbytes_per_second=50
    ),
    failures=FailureShape(gpu_hours_between=1e12, checkpoint_gbytes_per_second=1e6),
)
CLUSTERS = sorted((ROOT / "configs" / "clusters").glob("*.toml"))
PAGE = (ROOT / "asyncrl" / "simulation" / "CLUSTERS.md").read_text(encoding="ascii")
WITHIN = 0.12
"""Of the real loop's steps an hour; what the page says."""


def changed(shape: ClusterShape = SMALL, **parts: dict[str, Any]) -> ClusterShape:
    """Return the cluster with settings of sections replaced."""
    return replace(shape, **{name: replace(getattr(shape, name), **values) for name, values in parts.items()})


# --- against the real loop ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "bottleneck"),
    [
        ("on policy", changed(buffer={"max_off_policyness": 0}), "gate"),
        ("a slow learner", changed(learner={"step_overhead_s": 20}, buffer={"max_off_policyness": 3}), "learner"),
        ("slots that fall short of it", changed(learner={"step_overhead_s": 20}), "gate"),
        ("busy engines", changed(engines={"tokens_per_second": 120}, buffer={"max_off_policyness": 2}), "engines"),
        ("slow environments", changed(episodes={"environment_s": 30}, buffer={"slots": 16}), "gate"),
        ("a deadline", changed(episodes={"environment_s": 30}, buffer={"group_deadline_s": 60}), "gate"),
        ("slow syncs", changed(weight_sync={"overhead_s": 10}, buffer={"max_off_policyness": 2}), "gate"),
    ],
)
def test_predictions_are_near_what_the_real_loop_comes_to(name: str, shape: ClusterShape, bottleneck: str) -> None:
    predicted = predict(shape)
    found = simulate(shape.buffer, rates_of_cluster(shape), steps=70, engines=4, engine_slots=256)
    print(
        f"{name}: {predicted.steps_per_hour:.1f} steps an hour predicted, {found.steps_per_hour:.1f} in the real loop"
    )
    assert predicted.bottleneck.part == bottleneck
    assert predicted.steps_per_hour == pytest.approx(found.steps_per_hour, rel=WITHIN)
    assert predicted.staleness_mean == pytest.approx(found.staleness_mean, abs=0.15)
    assert predicted.staleness_max >= found.staleness_max
    learner_idle = found.learner_idle_share + found.learner_sync_share
    assert predicted.idle_shares["learner"] == pytest.approx(learner_idle, abs=0.08)
    assert predicted.idle_shares["engines"] == pytest.approx(found.engine_idle_share, abs=0.12)


# --- against arithmetic ---------------------------------------------------------------------------------------


STEADY = changed(
    buffer={"max_off_policyness": 0},
    episodes={
        "completion_tokens": 400,
        "completion_sigma": 0,
        "environment_s": 3,
        "environment_sigma": 0,
        "straggler_share": 0,
    },
)


def test_where_nothing_varies_a_step_is_the_sum_of_its_parts() -> None:
    """8 groups of 4 episodes of 400 tokens at 80 a second; 2 GB of weights."""
    found = predict(STEADY)
    learner = 1.0 + 8 * (500 + 4 * 400) * 6e9 / (4 * 989e12 * 0.4) + 2 / 50
    sync = 0.5 + 2 / 10 * 4 + 2 / 50
    assert found.sync_s == pytest.approx(sync)
    assert found.period_s == pytest.approx(400 / 80 + 3 + learner + sync, rel=0.01)
    assert found.idle_shares["learner"] == pytest.approx(1 - learner / found.period_s, abs=0.01)
    assert (found.staleness_mean, found.staleness_max) == (0, 0)
    assert found.sampled_tokens_per_second == pytest.approx(32 * 400 / found.period_s)


def test_engines_that_all_share_take_all_their_tokens_time() -> None:
    """32 episodes of 400 tokens that begin together at 4 x 100 tokens a second end together, after 32 seconds."""
    found = predict(changed(STEADY, engines={"tokens_per_second": 100}))
    assert found.longest_episode_s == pytest.approx(32 + 3, rel=0.01)


@pytest.mark.parametrize(("count", "sigma"), [(8, 0.5), (1000, 1.0)])
def test_the_longest_of_many_is_that_of_drawn_ones(count: int, sigma: float) -> None:
    tokens, outside = Lognormal(median=100, sigma=sigma), Lognormal(median=4, sigma=0.8)
    rate = SharedRate(request_rate=50, capacity=1e9, together=count, every_s=100, most=count)
    times = episode_times(tokens, outside, rate, straggler_share=0.1, straggler_factor=5)
    draw = random.Random(0)

    def episode() -> float:
        waited = 20.0 if draw.random() < 0.1 else 4 * draw.lognormvariate(0, 0.8)
        return 2 * draw.lognormvariate(0, sigma) + waited

    drawn = fmean(max(episode() for _ in range(count)) for _ in range(400))
    assert times.longest(count) == pytest.approx(drawn, rel=0.05)


def test_a_deadline_cuts_the_longest_short() -> None:
    shape = changed(episodes={"environment_s": 100}, buffer={"group_deadline_s": 120})
    assert predict(shape).longest_episode_s <= 120 < predict(changed(episodes={"environment_s": 100})).longest_episode_s


def test_weights_are_read_by_all_from_one_source_or_passed_on() -> None:
    """2 GB to 4 hosts: from one source of 10 GB/s, or in a chain of chunks of 64 MB, at 10 GB/s."""
    assert sync_seconds(SMALL) == pytest.approx(0.5 + 8 / 10 + 2 / 50)
    assert sync_seconds(changed(weight_sync={"way": "broadcast"})) == pytest.approx(0.5 + (2 + 3 * 0.064) / 10 + 0.04)
    assert sync_seconds(changed(weight_sync={"host_gbytes_per_second": 1})) == pytest.approx(0.5 + 2 + 0.04)
    assert sync_seconds(changed(engines={"per_host": 4})) == pytest.approx(0.5 + 2 / 10 + 0.04)


def test_failures_take_their_share() -> None:
    """4 ranks fail once in 1,000 GPU hours: every 250 h; 630 s away, and 10 steps done again."""
    shape = changed(STEADY, failures={"gpu_hours_between": 1000, "checkpoint_gbytes_per_second": 0.14})
    found, whole = predict(shape), predict(STEADY)
    assert found.failures_per_day == pytest.approx(8 * 24 / 1000)
    away = 30 + 600 + 10 * found.period_s
    assert found.lost_share == pytest.approx(away / (250 * 3600 + away))
    assert found.period_s == pytest.approx(whole.period_s + 100 / 20, rel=0.01), (
        "14 GB written in 100 s, every 20 steps"
    )
    assert found.steps_per_hour == pytest.approx(3600 / found.period_s * (1 - found.lost_share))
    assert found.best_checkpoint_every_steps == round(math.sqrt(2 * 100 * 250 * 3600) / found.period_s)


def test_sandboxes_and_processors_are_parts_like_others() -> None:
    found = predict(changed(sandboxes={"count": 8, "start_s": 1}))
    assert found.bottleneck.part == "sandboxes"
    assert found.bottleneck.seconds == pytest.approx(32 * (found.episode_s + 1) / 8, rel=0.01)
    slow = predict(changed(orchestrator={"turn_ms": 2000}, episodes={"turns": 2}))
    assert slow.bottleneck.part == "orchestrator"
    assert slow.bottleneck.seconds == pytest.approx(32 * (0.0005 + 2 * 2), rel=0.01)
    away = predict(changed(orchestrator={"turn_ms": 2000, "rollout_processes": 16}, episodes={"turns": 2}))
    assert {load.part: load.seconds for load in away.loads}["rollout processes"] == pytest.approx(32 * 2 * 2 / 16)


def test_a_long_group_holds_up_the_steps_that_may_not_pass_it() -> None:
    """One group a step that lasts 1 s, but every fourth 9 s; two slots, no time for step and sync."""
    import numpy as np

    durations = np.array([1.0, 1.0, 1.0, 9.0] * 50)
    gate = Gate(groups_per_step=1, slots=2, max_off_policyness=1, window=None, step_s=0, interval_s=0, sync_s=0)
    # One passes the long one, the next may not; what came meanwhile follows at once, and of the other two one is waited
    # for where both began late: four steps in 9 s and in 10 s, in turns. Twice the slots would be 1.5 s for equal ones.
    assert step_interval(gate, durations, warm_up=20) == pytest.approx(9.5 / 4, rel=0.03)
    alone = replace(gate, slots=1, max_off_policyness=0)
    assert step_interval(alone, durations, warm_up=20) == pytest.approx(12 / 4, rel=0.05)


# --- against common sense -------------------------------------------------------------------------------------

SHAPES = st.builds(
    lambda n, per_step, size, engines, rate, ranks, environment, sandboxes, sync: changed(
        buffer={"max_off_policyness": n, "groups_per_step": per_step, "group_size": size},
        engines={"count": engines, "tokens_per_second": rate},
        learner={"ranks": ranks, "peak_tflops": 10},
        episodes={"environment_s": environment},
        sandboxes={"count": sandboxes},
        weight_sync={"overhead_s": sync, "source_gbytes_per_second": 1000},  # else more hosts share one source
    ),
    st.integers(0, 4),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 16),
    st.floats(20, 5000),
    st.integers(1, 16),
    st.floats(0, 60),
    st.integers(0, 64),
    st.floats(0, 20),
)
_CHANCE = 0.03  # a step may wait for other groups than before; what groups last is drawn once


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(SHAPES)
def test_more_is_never_slower_and_shares_are_shares(shape: ClusterShape) -> None:
    found = predict(shape)
    assert found.period_s >= max(load.seconds for load in found.loads) > 0
    assert all(0 <= share <= 1 for share in found.idle_shares.values())
    assert 0 <= found.staleness_mean <= found.staleness_max == shape.buffer.max_off_policyness
    assert 0 <= found.rollouts_running <= found.rollouts_admitted
    assert 0 <= found.lost_share < 1
    for section, name in (("engines", "count"), ("learner", "ranks"), ("sandboxes", "count")):
        more = changed(shape, **{section: {name: 2 * getattr(getattr(shape, section), name)}})
        assert predict(more).period_s <= found.period_s * (1 + _CHANCE), f"twice the {section}"


def test_what_would_help_is_the_bottleneck() -> None:
    busy = gains(changed(engines={"tokens_per_second": 60}, buffer={"max_off_policyness": 3}))
    assert busy["twice the engines"] == max(busy.values()) > 1.7
    waiting = gains(changed(buffer={"max_off_policyness": 0}, weight_sync={"source_gbytes_per_second": 1000}))
    assert waiting["one step more of staleness"] > 1.3
    assert waiting["twice the engines"] == pytest.approx(1, abs=0.02)


# --- files, command and page ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engines.count=0", "count must be > 0, got 0 ([engines])"),
        ("engines.cuont=1", "unknown setting 'cuont' in [engines]; did you mean 'count'?"),
        ("engines.per_host=9", "per_host must be at most count = 4, got 9 ([engines])"),
        ("learner.utilisation_share=1.5", "utilisation_share must be at most 1, got 1.5 ([learner])"),
        ("weight_sync.way=pigeon", "way must be one of read, broadcast, got 'pigeon' ([weight_sync])"),
        ("failures.gpu_hours_between=0", "gpu_hours_between must be > 0, got 0.0 ([failures])"),
        ("buffer.max_uses=2", "max_uses must be 1 for a prediction, got 2 ([buffer])"),
        ("model.active_parameters=9e9", "active_parameters must be at most parameters = 8.03e+09, got 9e+09 ([model])"),
        ("network.mbit=1", "unknown section 'network'"),
        ("episodes.turns=nan", "turns must be > 0, got nan ([episodes])"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_the_settings_name(
    override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--cluster", str(CLUSTERS[-1]), "--set", override]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert CLUSTERS[-1].name in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a configuration, or clusters (--cluster FILE)"),
        (["configs/demo.toml", "--cluster", "x.toml"], "leave out the configuration"),
        (["--cluster", "x.toml", "--rate", "sync_s=1"], "leave out --rate"),
        (["--cluster", "nowhere.toml"], "there is no configuration file nowhere.toml"),
        (["--cluster", str(CLUSTERS[-1]), "--replay", "-1"], "--replay must be >= 0 steps, got -1"),
        (["configs/demo.toml", "--replay", "5"], "--replay is for --cluster"),
        (["--cluster", str(CLUSTERS[0]), str(CLUSTERS[0])], "two files have one name"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_command_speaks_to_programs_and_replays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        "[model]\nparameters = 1e9\n[engines]\ncount = 1\ntokens_per_second = 4000\nrequest_tokens_per_second = 80\n"
        "[learner]\nranks = 1\npeak_tflops = 989\n[weight_sync]\nsource_gbytes_per_second = 1000\n"
    )
    assert main(["simulate", "--cluster", str(path), "--replay", "30", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["tiny"]
    assert report["predicted"]["gpus"] == 2
    assert report["predicted"]["loads"][0]["part"] == "gate"
    assert report["gains"]["twice the engines"] == pytest.approx(1, abs=0.05)
    assert report["replayed"]["steps_per_hour"] == pytest.approx(report["predicted"]["steps_per_hour"], rel=0.2)
    assert main(["simulate", "--cluster", str(path), "--replay", "5"]) == 0
    assert "steps an hour, real loop" in capsys.readouterr().out


def test_help_says_what_every_setting_is() -> None:
    help_text = settings_help()
    named = [name for name, _, _ in sections()]
    assert named == [name for name in ClusterShape.__dataclass_fields__ if name != "buffer"]
    for name, words, rows in sections():
        assert words
        assert f"[{name}]" in help_text
        for setting, _, what in rows:
            assert what, setting


def test_the_shipped_clusters_are_of_8_to_10000_gpus() -> None:
    found = {path.stem: read_cluster(path).gpus for path in CLUSTERS}
    assert found == {"gpus-8": 8, "gpus-256": 256, "gpus-10000": 10_000}
    for path in CLUSTERS:
        assert "# source:" in path.read_text()


@pytest.mark.slow
def test_the_tables_of_the_page_are_what_its_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(
        r"^```sh\n\.venv/bin/asyncrl (simulate --cluster [^\n]*)\n```\n\n```\n(.*?)^```$", PAGE, re.M | re.S
    )
    assert len(shown) == 3
    for command, printed in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out == printed, command


def test_the_page_is_linked_and_its_links_lead_somewhere() -> None:
    assert "asyncrl/simulation/CLUSTERS.md" in (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "asyncrl" / "simulation" / target).resolve().is_file(), target
    assert isinstance(predict(read_cluster(CLUSTERS[-1])), Prediction)
