"""The table of metrics: what it says of itself, what a scrape of a run shows, and that its series do not grow."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from loop_simulation import Scrape, Simulation, simulate
from sandboxes import LIMITS, opened
from tree import ROOT

from asyncrl.buffers import BufferSettings
from asyncrl.commands.train import metrics_port
from asyncrl.configs import Config
from asyncrl.configs.loader import apply_overrides, build
from asyncrl.losses.reduction import RATIO_EDGES
from asyncrl.metering import MeteredBackend
from asyncrl.metrics import TABLES, Kind, Sampled, Source, collector, page
from asyncrl.metrics.sampling import memory_by_role, parse_engine
from asyncrl.protocols import PLAIN_STEP, BackendStatistics, StepOptions, StepResult
from asyncrl.run import Limits
from asyncrl.tallies import MAX_ENVIRONMENTS, OTHER, RATIO_BUCKETS, Names
from asyncrl.testing import FakeLearner, Rates
from asyncrl.types import Group

FAMILIES = [family for table in TABLES.values() for family in table]
_RATES = Rates(mean_tokens=6, step_s=1.0, sync_s=0.2)

_SUFFIXES = {"seconds": "_seconds", "bytes": "_bytes", "nats": "_nats", "share, 0 to 1": ("_ratio", "_probability")}
"""unit -> what a name in it ends in, quantiles, extremes and means left out."""


def test_names_are_the_projects_and_end_in_their_units() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch("asyncrl_[a-z][a-z0-9_]*", family.name), family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created")), family.name
        assert family.meaning.endswith("."), family.name
        assert "|" not in family.meaning + family.worry, f"{family.name}: it would end a cell of the page"
        bare = re.sub("_(max|min|mean|std|quantile|staleness_max)$", "", family.name)
        if bare == "asyncrl_importance_ratio":
            continue  # a ratio of probabilities, which is no share
        assert bare.endswith(_SUFFIXES.get(family.unit, "")), f"{family.name} is in {family.unit}"
        for unit, suffix in _SUFFIXES.items():
            assert not bare.endswith(suffix) or family.unit == unit, f"{family.name} is in {family.unit}, not {unit}"


def test_the_page_is_written_from_the_tables() -> None:
    written = "\n".join(page.lines())
    assert (ROOT / "configs" / "METRICS.md").read_text(encoding="utf-8") == written, (
        "run python -m asyncrl.metrics.page > configs/METRICS.md"
    )
    assert all(f"`{family.name}" in written for family in FAMILIES)


# --- what a run shows -------------------------------------------------------------------------------------------


class TellingLearner(FakeLearner):
    """A learner whose steps say as much as the real one's; their staleness goes up and down."""

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        """See `protocols.Learner`."""
        result = await super().step(groups, options)
        oldest = self.version % 12
        counts = [0.0] * (len(RATIO_EDGES) + 1)
        counts[len(RATIO_EDGES) // 2], counts[-1] = 90.0, 10.0
        metrics = {
            "num_loss_tokens": 100.0,
            "staleness_max": float(oldest),
            "importance_ratio_max": 3.0,
            "importance_ratio_p999": 2.5,
            f"token_weight_mean_staleness_{oldest}": 1.5,
            f"token_weight_max_staleness_{oldest}": 3.0,
            "clipped_low_frac": 0.25,
            "zero_variance_frac": 0.5,
            "zero_variance_all_fail_frac": 0.5,
            "grad_norm_nonfinite": 1.0,
            "entropy": 2.0 / self.version,
            "seconds_optimizer": 0.5,
            **{f"reward_variance_share_{name}": share for name, share in (("solved", 0.75), ("style", 0.25))},
            **{f"reward_variance_share_x{number}": 0.0 for number in range(99)},
        }
        bucket = next(name for name, least in (("9+", 9), ("5-8", 5), ("3-4", 3), ("2", 2), ("1", 1), ("0", 0))
                      if oldest >= least)  # fmt: skip
        histograms = {
            "staleness_tokens": {"edges": [], "counts": [100.0]},
            f"token_weight_staleness_{bucket}": {"edges": [*RATIO_EDGES], "counts": counts},
        }
        return replace(result, metrics={**result.metrics, **metrics}, histograms=histograms)


def told(directory: Path, *, steps: int) -> Simulation:
    """Return a simulation whose learner says everything."""
    buffer = BufferSettings(max_off_policyness=1, groups_per_step=4, group_size=4)
    simulation = Simulation(directory, buffer=buffer, limits=Limits(steps=steps), rates=_RATES)
    learner = TellingLearner(_RATES)
    simulation.run._parts = replace(simulation.run._parts, learner=learner)
    simulation.run.syncs._learner = learner
    return simulation


def test_a_step_is_shown_as_it_was_said(tmp_path: Path) -> None:
    simulation = simulate(told(tmp_path, steps=12))
    value = Scrape(simulation.run)
    assert value("asyncrl_steps_total") == value("asyncrl_policy_version") == 12
    assert value("asyncrl_staleness_bound_steps") == 1
    assert value("asyncrl_staleness_steps_count") == 1200
    assert value("asyncrl_staleness_steps_bucket", {"le": "3.0"}) == 400, "of versions 12, 1, 2 and 3"
    assert value("asyncrl_staleness_steps_sum") == 100 * sum(range(12))
    ratios = {"staleness": "3-4"}
    assert value("asyncrl_importance_ratio_count", ratios) == 200
    assert value("asyncrl_importance_ratio_bucket", {"le": "1.001", **ratios}) == 180
    assert value("asyncrl_importance_ratio_bucket", {"le": "60.1", **ratios}) == 180, "the rest lies above"
    assert value("asyncrl_importance_ratio_sum", ratios) == 300
    assert value("asyncrl_importance_ratio_quantile", {"quantile": "0.999"}) == 2.5
    assert value("asyncrl_importance_ratio_quantile", {"quantile": "0.5"}) is None, "what was not measured is absent"
    assert value("asyncrl_importance_ratio_staleness_max", {"staleness": "0"}) == 3.0
    assert value("asyncrl_tokens_masked_total", {"reason": "clipped_low"}) == 300
    assert value("asyncrl_zero_advantage_groups_total", {"kind": "all_fail"}) == 24
    assert value("asyncrl_groups_compared_total") == 48
    assert value("asyncrl_nonfinite_total", {"of": "gradient"}) == 12
    assert value("asyncrl_entropy_start_nats") == 2.0
    assert value("asyncrl_reward_variance_share", {"part": "solved"}) == 0.75
    assert value("asyncrl_reward_variance_share", {"part": "x98"}) is None, "the number of series is bounded"
    assert value("asyncrl_learner_busy_seconds_total", {"part": "optimizer"}) == 6.0
    assert value("asyncrl_weight_sync_phase_seconds_total", {"phase": "update"}) == pytest.approx(12 * 0.2)


def test_episodes_are_shown_by_environment_and_cost_is_shared_out(tmp_path: Path) -> None:
    simulation = told(tmp_path, steps=6)
    simulation.environment.failing = {"task-1"}.__contains__
    value = Scrape(simulate(simulation).run)
    fake = {"environment": "fake"}
    status = simulation.status
    assert value("asyncrl_trajectories_total", {"status": "failed_sandbox", **fake}) == 4
    assert value("asyncrl_trajectories_total", {"status": "completed", **fake}) == status.trajectories["completed"]
    assert value("asyncrl_episodes_scored_total", fake) == status.trajectories["completed"]
    trained = [t for group in simulation.recorder.groups for t in group.trajectories if t.reward is not None]
    assert value("asyncrl_episodes_solved_total", fake) == sum(t.is_solved for t in trained)
    assert value("asyncrl_environment_tokens_sampled_total", fake) == sum(t.num_sampled_tokens for t in trained)
    assert value("asyncrl_environment_tokens_trained_total", fake) == status.tokens_trained
    assert value("asyncrl_environment_reward_part", {"part": "solved", **fake}) == value(
        "asyncrl_environment_reward", fake
    )
    assert value("asyncrl_cost_engine_seconds", fake) == pytest.approx(simulation.run.seconds)
    assert value("asyncrl_cost_learner_seconds", fake) == 3.0
    solved = value("asyncrl_episodes_solved_total", fake)
    assert solved
    assert value("asyncrl_cost_per_solved_seconds", {"of": "learner", **fake}) == 3.0 / solved


def test_what_agents_were_seen_to_do_is_counted(tmp_path: Path) -> None:
    simulation = simulate(told(tmp_path, steps=2))
    (group, *_) = simulation.recorder.groups
    seen = replace(group.trajectories[0], extras={"malformed": 2, "behaviour": {"edits_tests": 3, "nothing": 0}})
    simulation.status.count_group(replace(group, trajectories=(seen,)))
    value = Scrape(simulation.run)
    assert value("asyncrl_malformed_replies_total", {"environment": "fake"}) == 2
    assert value("asyncrl_behaviour_seen_total", {"environment": "fake", "kind": "edits_tests"}) == 3
    assert value("asyncrl_behaviour_seen_total", {"environment": "fake", "kind": "nothing"}) is None


def series(simulation: Simulation) -> set[tuple[str, ...]]:
    """Return every series of a scrape."""
    metrics = collector(Source(run=simulation.run)).collect()
    return {(s.name, *map(str, sorted(s.labels.items()))) for metric in metrics for s in metric.samples}


@pytest.mark.slow
def test_the_series_of_a_run_stay_the_same_however_long_it_is(tmp_path: Path) -> None:
    simulation = told(tmp_path, steps=200)
    seen: dict[int, set[tuple[str, ...]]] = {}

    async def look() -> None:
        while True:
            seen.setdefault(simulation.status.steps, series(simulation))
            await trio.sleep(0.5)

    simulate(simulation, look)
    assert max(seen) >= 195
    last = [names for steps, names in seen.items() if steps > 30]
    everything = set.union(*last)
    assert len(everything) < 500
    # what is not there now is absent: a staleness that no token of the last step has, and a straggler
    assert {name for names in last for name, *_ in everything - names} <= {
        "asyncrl_importance_ratio_staleness_max",
        "asyncrl_straggler_group",
    }


def test_names_from_outside_are_bounded(tmp_path: Path) -> None:
    simulation = simulate(told(tmp_path, steps=2))
    (group, *_) = simulation.recorder.groups
    for number in range(3 * MAX_ENVIRONMENTS):
        foreign = replace(group.trajectories[0], environment=f"environment-{number}")
        simulation.status.count_group(replace(group, trajectories=(foreign,)))
    environments = simulation.status.tallies.environments
    assert len(environments) == MAX_ENVIRONMENTS + 1
    assert environments[OTHER].scored == 3 * MAX_ENVIRONMENTS + 1 - MAX_ENVIRONMENTS
    names = Names(2)
    assert [names(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]


def test_a_metric_that_is_no_number_is_shown_as_such(tmp_path: Path) -> None:
    simulation = simulate(told(tmp_path, steps=2))
    simulation.status.last_step = {**simulation.status.last_step, "loss": math.nan}
    assert math.isnan(Scrape(simulation.run)("asyncrl_loss") or 0.0)


def test_the_ratios_buckets_are_edges_of_the_learners_own() -> None:
    assert set(RATIO_BUCKETS) <= set(RATIO_EDGES)
    assert len(RATIO_BUCKETS) == 26
    assert [1.0 / edge for edge in reversed(RATIO_BUCKETS)] == pytest.approx(RATIO_BUCKETS)


# --- engines, sandboxes, the machine ----------------------------------------------------------------------------

_SAID = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:generation_tokens_total{engine="1",model_name="m"} 2.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
"""


def test_an_engines_own_metrics_are_added_up_over_its_ranks() -> None:
    assert parse_engine(_SAID) == {"kv_cache_usage": 0.75, "generation_tokens": 42.0}
    assert parse_engine("") == {}


def test_memory_is_told_by_role() -> None:
    sleep = "import sys, time; print(flush=True); time.sleep(600)"
    children = [
        subprocess.Popen([sys.executable, "-c", sleep, *words], stdout=subprocess.PIPE)
        for words in (["-m", "asyncrl.learner"], ["-m", "vllm.entrypoints.openai.api_server"], [])
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        found = memory_by_role(os.getpid())
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    assert all(found[role] > 2**20 for role in ("orchestrator", "learner", "engines", "other")), found
    assert memory_by_role(os.getpid())["learner"] == 0


def test_a_loop_that_is_late_is_seen(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampled._watch_lag)
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(0.25)
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(5.0)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert sampled.lag.counts[0] == 1
    assert sum(sampled.lag.counts) == 2
    assert sampled.lag.total == pytest.approx(4.75)


def test_disk_and_leases_are_looked_at(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path)
    sampled.look()
    assert sampled.leases == 0
    assert 0 < sampled.disk_free < sampled.disk_total
    (tmp_path / "sandboxes" / "leases").mkdir(parents=True)
    for name in ("1-2.a.json", "1-2.b.json", "1-2.c.new"):
        (tmp_path / "sandboxes" / "leases" / name).touch()
    sampled.look()
    assert sampled.leases == 2


@pytest.mark.slow
def test_sandboxes_are_counted_and_stay_what_they_are(tmp_path: Path) -> None:
    async def main() -> tuple[MeteredBackend, BackendStatistics]:
        async with opened(tmp_path) as backend:
            metered = MeteredBackend(backend)
            layer = await metered.prepare({"a.txt": b"a"})
            async with layer, await metered.open(layer, limits=LIMITS) as sandbox:
                await sandbox.write("b.txt", b"b")
                assert await sandbox.read("b.txt") == b"b"
                assert await sandbox.list() == ("a.txt", "b.txt")
                assert [entry.path for entry in await sandbox.walk()] == ["a.txt", "b.txt"]
                assert (await sandbox.exec(["cat", "a.txt"])).stdout == b"a"
                assert (await sandbox.exec(["sleep", "60"], wall_s=0.2)).outcome == "wall"
                assert (await sandbox.shell("echo hello; exit 3")).exit_code == 3
                async with await sandbox.fork() as forked:
                    assert await forked.read("b.txt") == b"b"
                    assert forked.sandbox_id != sandbox.sandbox_id
                    assert metered.statistics().open == 2
            return metered, metered.statistics()

    metered, after = trio.run(main)
    assert after.open == 0
    figures = metered.figures
    assert figures.starts == {"ok": 2, "failed": 0}
    assert figures.commands == {"ok": 2, "wall": 1}
    assert sum(figures.start_seconds.counts) == 2
    assert {kind: sum(buckets.counts) for kind, buckets in figures.command_seconds.items()} == {"exec": 2, "shell": 1}
    assert Kind.HISTOGRAM in {family.kind for family in TABLES["Sandboxes"]}


def test_a_run_that_serves_nothing_opens_no_port() -> None:
    def config(serve: str) -> Config:
        tables = {"model": {"path": "m"}, "environment": {"name": "bugfix"}}
        return build(Config, apply_overrides(tables, [f"metrics.serve={serve}"]))

    with metrics_port(config("true")) as listener:
        assert listener is not None
        assert listener.getsockname()[1] > 0
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000, "see test_serving.py"
    with metrics_port(config("false")) as listener:
        assert listener is None
