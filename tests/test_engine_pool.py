"""Engines come and go under a real pool: nothing sampled is lost or doubled, and no request meets old weights."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import trio
import trio.testing
from engine_fleet import PROMPT, RATES, Fleet, fails, run

from asyncrl.buffers import BufferSettings
from asyncrl.checkpoint import CheckpointStore
from asyncrl.engines import Draft, EnginePool, EngineSettings, Health
from asyncrl.engines.line import Line
from asyncrl.engines.roster import Roster
from asyncrl.errors import EngineError
from asyncrl.run import Limits, Parts, Run
from asyncrl.status import RunStatus
from asyncrl.testing import FakeEnvironment, FakeLearner, MemoryRecorder, Rates
from asyncrl.testing_engines import FakeServer

# --- requests that outlive their engine -----------------------------------------------------------------------


def test_requests_of_an_engine_that_dies_go_on_elsewhere_behind_the_tokens_that_arrived() -> None:
    """Kills: sampling again from the prompt; taking a token that did not arrive; a wrong length of what is left."""

    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await trio.sleep(10.5)
        victim = fleet.servers[0]
        moved = set(victim.served)
        assert moved
        victim.kill()
        await fleet.wait_idle(8)
        assert not fleet.failures
        for trajectory_id, completion in fleet.completions.items():
            assert len(completion.token_ids) == 20
            if trajectory_id in moved:
                assert completion.engine == "engine 0, engine 1"
                assert completion.moved_at == (9,), "one token, then 4 and 4; the tenth had not arrived"
            else:
                assert completion.engine == "engine 1"
                assert completion.moved_at == ()
        statistics = fleet.pool.statistics()
        assert statistics.requests_moved == len(moved)
        assert statistics.tokens_carried == 9 * len(moved)
        assert sum(engine.tokens_sampled for engine in statistics.engines) == 160

    run(body)


def test_a_request_that_dies_before_its_first_token_arrives_is_sampled_once() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0")
        await trio.sleep(0.5)
        (home,) = (server for server in fleet.servers if server.served)
        home.kill()
        await fleet.wait_idle(1)
        assert fleet.completions["t-0"].moved_at == (0,)
        assert "," not in fleet.completions["t-0"].engine, "the dead engine sampled nothing of it"

    run(body)


def test_with_no_engine_left_requests_wait_for_one_to_come_back() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0", "t-1", "t-2")
        await trio.sleep(6.5)
        for server in fleet.servers:
            server.kill()
        await trio.sleep(1.0)
        statistics = fleet.pool.statistics()
        assert (statistics.in_line, statistics.waiting, statistics.serving) == (3, 3, 0)
        assert fleet.health() == [Health.STARTING] * 2
        assert all("was ended by signal 9" in engine.reason for engine in fleet.engines())
        fleet.ask("t-3")
        await fleet.wait_idle(4)
        assert not fleet.failures
        assert fleet.completions["t-0"].moved_at == (5,)
        assert fleet.pool.statistics().restarts == 2

    fleet = run(body)
    assert all(server.starts == [(0, False), (1, False)] for server in fleet.servers)


def test_requests_fail_when_no_engine_comes_back_in_time_and_then_the_run_ends() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0")
        await trio.sleep(6.5)
        fleet.servers[0].kill()
        await trio.sleep_forever()

    words = fails(body, EngineError, count=1, outage_timeout_s=10.0)
    assert words == (
        "no engine has served for 10 s ([engine] outage_timeout_s): engine 0 is starting "
        "(engine 0 was ended by signal 9)"
    )


def test_a_request_beyond_the_outages_deadline_is_an_engine_error() -> None:
    """The episode fails as data; without the pool's own watch, which ends the run at the same moment."""

    async def main() -> None:
        server = FakeServer("engine 0", RATES, itertools.count())
        pool = EnginePool([server], EngineSettings(outage_timeout_s=10.0))
        with pytest.raises(EngineError, match=r"no engine has served for 10 s .*: engine 0 is starting$"):
            await pool.sample(PROMPT, max_tokens=5, trajectory_id="t")
        assert trio.current_time() - started == 10.0

    clock = trio.testing.MockClock(autojump_threshold=0)
    started = clock.current_time()
    trio.run(main, clock=clock)


def test_a_request_that_ends_every_engine_is_given_up_before_it_has_ended_them_all() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("poison")
        for _ in range(4):
            await trio.sleep(2.5)
            (server,) = (server for server in fleet.servers if server.statistics().running)
            server.kill()
        await fleet.wait_idle(1)
        assert "given up after 4 engines failed it; the last: engine" in str(fleet.failures["poison"])

    run(body, count=5)


def test_a_request_is_not_blamed_for_engines_that_it_never_ran_in() -> None:
    """A whole host dies: each of its engines is found dead in turn."""

    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0")
        await trio.sleep(6.5)
        for server in fleet.servers:
            server.kill()
        await fleet.wait_idle(1)
        assert fleet.completions["t-0"].moved_at == (5,)

    run(body, count=6)


def test_a_request_that_is_given_up_while_it_waits_leaves_its_place_to_the_next() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0", max_tokens=10)
        async with trio.open_nursery() as nursery:
            await trio.sleep(1.0)
            nursery.start_soon(fleet.sample, "gone", 10)
            await trio.sleep(1.0)
            fleet.ask("t-1", max_tokens=10)
            await trio.sleep(1.0)
            assert fleet.pool.statistics().in_line == 2
            nursery.cancel_scope.cancel()
        await fleet.wait_idle(2)
        assert sorted(fleet.completions) == ["t-0", "t-1"]
        assert fleet.pool.statistics().running == fleet.pool.statistics().waiting == 0

    run(body, count=1, capacity=1)


def test_a_place_that_was_given_to_a_request_as_it_was_given_up_is_free_again() -> None:
    async def hold(line: Line) -> None:
        async with line.place(Draft(PROMPT, max_tokens=1, trajectory_id="gone")):
            raise AssertionError("it was given up")

    async def main() -> None:
        roster = Roster([FakeServer("engine 0", RATES, itertools.count(), capacity=1)], outage_timeout_s=10.0)
        line, (member,) = Line(roster), roster.members
        roster.put_in_service(member)
        async with trio.open_nursery() as nursery, line.place(Draft(PROMPT, max_tokens=1, trajectory_id="t")):
            nursery.start_soon(hold, line)
            await trio.testing.wait_all_tasks_blocked()
            assert (line.length, member.places_taken) == (1, 1)
            nursery.cancel_scope.cancel()
        assert (line.length, member.places_taken) == (0, 0)

    trio.run(main)


# --- an engine that fails a request and lives -----------------------------------------------------------------


def test_an_engine_that_failed_a_request_and_is_sound_serves_on() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0")
        await trio.sleep(6.5)
        (home,) = (server for server in fleet.servers if server.served)
        home.withdraw("one request fails")
        await fleet.wait_idle(1)
        assert fleet.completions["t-0"].moved_at == (5,)
        assert len(fleet.completions["t-0"].engine.split(", ")) == 2, "it did not wait for the one that is looked at"
        assert fleet.health() == [Health.SERVING] * 2
        assert len(home.starts) == 1

    run(body)


def test_a_doubted_engine_that_holds_other_weights_than_believed_is_brought_up_to_date() -> None:
    """A server elsewhere that was started anew between two requests. Kills: believing what the client remembers."""

    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        for server in fleet.servers:
            server.held = 0
            server.withdraw("nobody asked")
        fleet.ask("t-0", max_tokens=6)
        await trio.sleep(3.5)
        (home,) = (server for server in fleet.servers if server.served)
        home.withdraw("it failed")
        await fleet.wait_idle(1)
        await trio.sleep(10.0)
        assert home.pulled == [1, 1]

    run(body)


# --- everything at once ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_dies_when_no_token_is_lost_and_no_request_begins_under_old_weights(seed: int) -> None:
    rng = random.Random(seed)
    oldest_allowed: dict[str, int] = {}

    async def body(fleet: Fleet) -> None:
        synced = 0

        async def kill() -> None:
            for _ in range(12):
                await trio.sleep(rng.uniform(0.0, 40.0))
                rng.choice(fleet.servers).kill()

        async def sync() -> None:
            nonlocal synced
            for version in range(1, 9):
                await trio.sleep(rng.uniform(0.0, 30.0))
                await fleet.pull(version)
                synced = version

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            nursery.start_soon(sync)
            for n in range(80):
                oldest_allowed[f"t-{n}"] = synced
                fleet.ask(f"t-{n}", max_tokens=rng.randint(1, 40))
                await trio.sleep(rng.uniform(0.0, 6.0))
        await fleet.wait_idle(80)
        assert all("given up after 4 engines" in str(failure) for failure in fleet.failures.values())
        assert len(fleet.completions) >= 78

    fleet = run(body, count=3, capacity=6, restarts=1000)
    for trajectory_id, completion in fleet.completions.items():
        assert completion.spans[0].version >= oldest_allowed[trajectory_id]
        versions = [span.version for span in completion.spans]
        assert versions == sorted(versions), "an engine that comes back holds the newest"
    assert all(reports and all(report.verified for report in reports) for reports in fleet.reports)


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "pull_s"), [(0, 1.0), (2, 1.0), (3, 14.0)])
def test_the_bound_on_staleness_holds_in_the_whole_loop_while_engines_die(
    tmp_path: Path, bound: int, pull_s: float
) -> None:
    """The loop itself raises where a group is older than the bound. Slow pulls leave each engine at another version."""
    rng, rates = random.Random(bound), Rates(step_s=5.0, token_s=0.05, sync_s=1.0)
    numbers = itertools.count(100)

    async def main() -> RunStatus:
        servers = [FakeServer(f"engine {n}", rates, numbers, capacity=12, start_s=8.0) for n in range(3)]
        for number, server in enumerate(servers):
            server.pull_s = pull_s / (1 + number)
        pool = EnginePool(servers, EngineSettings(restarts=1000))
        environment = FakeEnvironment(rates, random.Random(1), max_tokens=60)
        loop = Run(
            Parts(environment=environment, sampler=pool, learner=FakeLearner(rates), engines=pool),
            BufferSettings(max_off_policyness=bound, groups_per_step=4, group_size=4),
            Limits(steps=12),
            recorder=MemoryRecorder(),
            checkpoints=CheckpointStore(tmp_path, keep=1),
            status=RunStatus(),
            stop=trio.Event(),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.serve, {server.name: server.start for server in servers})

            async def kill() -> None:
                while True:
                    await trio.sleep(rng.uniform(0.0, 12.0))
                    rng.choice(servers).kill()

            nursery.start_soon(kill)
            await loop.train()
            nursery.cancel_scope.cancel()
        assert pool.statistics().restarts > 3
        return loop.status

    status = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert status.steps == status.version == 12
    assert status.weight_syncs == status.weight_syncs_verified == 12 - status.versions_superseded > 0
    assert status.max_staleness_trained <= bound
    assert status.requests_moved > 0
    assert status.tokens_carried > 0
    assert status.groups_dropped == {}
