"""Engines die and come back under a real pool: which weights they come back with, and how often they may."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from engine_fleet import RATES, START_S, Fleet, fails, run

from asyncrl.engines import Health
from asyncrl.errors import EngineError, WeightSyncError

# --- weights and engines that come and go ---------------------------------------------------------------------


def test_an_engine_that_dies_before_a_sync_is_left_out_and_takes_the_version_before_any_request() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[0].kill()
        await trio.sleep(0.5)
        await fleet.pull(1)
        assert [report.engine for report in fleet.reports[0]] == ["engine 1"]
        await trio.sleep(START_S + RATES.sync_s)
        assert fleet.health() == [Health.SERVING] * 2
        assert fleet.servers[0].pulled == [1]
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await fleet.wait_idle(8)
        assert {span.version for c in fleet.completions.values() for span in c.spans} == {1}
        assert fleet.servers[0].served

    run(body)


@pytest.mark.parametrize("seconds", [0.0, 2.0, 4.9])
def test_an_engine_that_dies_in_a_sync_is_taken_out_and_the_sync_of_the_others_counts(seconds: float) -> None:
    """It is paused then: what its requests had goes on at once, not when it is back."""

    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"t-{n}" for n in range(8)))
        began = trio.current_time()
        await trio.sleep(6.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(seconds)
            fleet.servers[0].kill()
        assert [report.engine for report in fleet.reports[0]] == ["engine 1"]
        await fleet.wait_idle(8)
        assert trio.current_time() - began < START_S, "nobody has waited for the dead one"
        moved = [c for c in fleet.completions.values() if c.moved_at]
        assert moved
        assert {tuple(span.version for span in c.spans) for c in moved} == {(0, 1)}
        await trio.sleep(START_S + RATES.sync_s)
        assert fleet.health() == [Health.SERVING] * 2
        assert fleet.servers[0].pulled == [1]

    run(body)


def test_an_engine_that_dies_right_after_its_pull_counts_and_comes_back_with_that_version() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        fleet.servers[0].kill()
        assert [report.engine for report in fleet.reports[0]] == ["engine 0", "engine 1"]
        await trio.sleep(START_S + RATES.sync_s + 1)
        assert fleet.servers[0].pulled == [1, 1]
        assert fleet.servers[0].held == 1

    fleet = run(body)
    assert fleet.servers[0].starts == [(0, False), (1, True)], "any weights will do: they are replaced"


def test_when_all_die_in_a_sync_the_learner_waits_for_the_first_to_come_back_with_the_version() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask("t-0", "t-1", "t-2", "t-3")
        await trio.sleep(3.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(1.0)
            fleet.servers[0].kill()
            await trio.sleep(2.0)
            fleet.servers[1].kill()
        assert [report.engine for report in fleet.reports[0]] == ["engine 0"], "it was started first"
        await fleet.wait_idle(4)
        assert not fleet.failures
        assert {tuple(span.version for span in c.spans) for c in fleet.completions.values()} == {(0, 1)}

    run(body)


def test_a_version_that_comes_while_an_engine_comes_back_is_pulled_before_it_serves() -> None:
    """Kills: serving what was newest when the pull began."""

    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        fleet.servers[0].kill()
        await trio.sleep(START_S + 3.0)  # it answers, and pulls version 1
        assert fleet.health()[0] is Health.STARTING
        await fleet.pull(2)
        assert [report.engine for report in fleet.reports[1]] == ["engine 1"]
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await fleet.wait_idle(8)
        assert fleet.servers[0].pulled == [1, 1, 2]
        assert {span.version for c in fleet.completions.values() for span in c.spans} == {2}

    run(body)


def test_a_version_that_is_gone_before_a_slow_engine_has_read_it_is_no_failure() -> None:
    """A publisher keeps two versions; whoever comes back more slowly takes a newer one."""

    async def body(fleet: Fleet) -> None:
        slow = fleet.servers[0]
        await fleet.pull(1)
        slow.kill()
        await trio.sleep(START_S + 3.0)
        slow.readable = lambda manifest: manifest.version == 2
        await fleet.pull(2)
        await trio.sleep(20.0)
        assert fleet.health() == [Health.SERVING] * 2
        assert slow.pulled == [1, 2]
        assert len(slow.starts) == 2

    run(body)


def test_an_engine_that_dies_again_while_it_comes_back_is_started_once_more() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        fleet.servers[0].kill()
        await trio.sleep(START_S / 2)
        fleet.servers[0].kill()  # while it starts
        await trio.sleep(START_S + RATES.sync_s / 2)
        fleet.servers[0].kill()  # while it pulls
        await trio.sleep(START_S + 2 * RATES.sync_s)
        assert fleet.health() == [Health.SERVING] * 2
        assert fleet.engines()[0].restarts == 3
        assert fleet.servers[0].pulled == [1, 1]

    run(body)


def test_an_engine_that_does_not_take_a_version_the_others_take_is_ended_and_started_again() -> None:
    async def body(fleet: Fleet) -> None:
        stubborn = fleet.servers[0]
        fleet.ask(*(f"t-{n}" for n in range(8)), max_tokens=40)
        await trio.sleep(5.5)
        stubborn.readable = lambda manifest: len(stubborn.starts) > 1
        await fleet.pull(1)
        assert [report.engine for report in fleet.reports[0]] == ["engine 1"]
        assert fleet.health()[0] is Health.LOST
        assert "cannot map the weights" in fleet.engines()[0].reason
        await fleet.wait_idle(8)
        await trio.sleep(60.0)
        assert fleet.health() == [Health.SERVING] * 2
        assert (len(stubborn.starts), stubborn.pulled) == (2, [1])
        assert "engine 0 was ended: engine 0, update of version 1: cannot map the weights" in fleet.said[0]

    run(body)


def test_an_engine_that_takes_a_version_at_the_second_try_stays_in_service() -> None:
    async def body(fleet: Fleet) -> None:
        tries = iter([False, True])
        fleet.servers[0].readable = lambda manifest: next(tries)
        await fleet.pull(1)
        assert [report.engine for report in fleet.reports[0]] == ["engine 0", "engine 1"]
        assert fleet.health() == [Health.SERVING] * 2

    assert run(body).said == []


def test_requests_do_not_go_on_under_old_weights_in_an_engine_that_refused_the_new_ones() -> None:
    """A server elsewhere, which is not ended. Kills: leaving its requests where they are."""

    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"t-{n}" for n in range(8)), max_tokens=40)
        await trio.sleep(5.5)
        fleet.servers[0].readable = lambda manifest: False
        await fleet.pull(1)
        delivered = len(fleet.servers[0].delivered)
        await fleet.wait_idle(8)
        assert len(fleet.servers[0].delivered) == delivered
        assert any(completion.moved_at for completion in fleet.completions.values())
        assert fleet.health()[0] is Health.LOST

    run(body, remote=True)


def test_a_version_that_no_engine_takes_ends_the_run_with_what_each_said() -> None:
    async def body(fleet: Fleet) -> None:
        for server in fleet.servers:
            server.readable = lambda manifest: False
        await fleet.pull(1)

    words = fails(body, WeightSyncError)
    assert words.count("update of version 1: cannot map the weights") == 2


def test_an_engine_that_hangs_in_a_sync_is_given_up_at_the_deadline_and_started_again() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await trio.sleep(3.5)
        fleet.servers[0].hangs = True
        began = trio.current_time()
        await fleet.pull(1)
        assert trio.current_time() - began == 60.0, "it is not tried twice"
        assert [report.engine for report in fleet.reports[0]] == ["engine 1"]
        await fleet.wait_idle(8)
        assert not fleet.failures
        await trio.sleep(200.0)
        assert fleet.health() == [Health.SERVING] * 2
        assert fleet.servers[0].pulled == [1]

    run(body)


# --- restarts -------------------------------------------------------------------------------------------------


def test_without_restarts_the_first_death_ends_the_run_and_names_the_engine() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[1].kill("was ended by signal 9; the last lines of engine-1.log:\nout of memory")
        await trio.sleep_forever()

    words = fails(body, EngineError, restarts=0)
    assert words == "engine 1 was ended by signal 9; the last lines of engine-1.log:\nout of memory"


def test_a_death_beyond_the_restarts_ends_the_run_and_says_how_many_there_were() -> None:
    async def body(fleet: Fleet) -> None:
        for _ in range(3):
            fleet.servers[1].kill()
            await trio.sleep(START_S + 1)
        await trio.sleep_forever()

    words = fails(body, EngineError, restarts=2)
    assert words == "engine 1 was ended by signal 9\nit was started again 2 times ([engine] restarts)"


def test_an_engine_that_has_never_served_is_not_started_again() -> None:
    async def body(fleet: Fleet) -> None:
        raise AssertionError("it may not get here")

    words = fails(body, EngineError, start_timeout_s=START_S / 2)
    assert "was ended: engine" in words
    assert words.endswith("did not become healthy in 15 s")


def test_deaths_and_returns_are_said_and_counted() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[0].kill()
        await trio.sleep(0.5)
        (lost, other) = fleet.engines()
        assert (lost.health, lost.health_seconds) == (Health.STARTING, 0.5)
        assert (other.health, other.restarts) == (Health.SERVING, 0)
        await trio.sleep(START_S + 1)
        assert fleet.engines()[0].restarts == fleet.pool.statistics().restarts == 1
        assert fleet.engines()[0].reason == ""

    assert run(body).said == ["engine 0 was ended by signal 9\nstarting it again, 1 of 3 times"]


def test_a_server_elsewhere_is_waited_for_and_gets_the_newest_weights() -> None:
    """It comes back with what its owner started it with, which is an old version here."""

    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        gone = fleet.servers[0]
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await trio.sleep(3.5)
        gone.kill()
        await fleet.pull(2)
        await fleet.wait_idle(8)
        async with gone.start(0, True):
            assert gone.held == 0
            await trio.sleep(START_S + 100.0)
            assert gone.pulled == [1, 2]
            assert fleet.health() == [Health.SERVING] * 2
        assert any(words.startswith("engine 0 is lost: engine 0") for words in fleet.said)
        assert fleet.said[-1] == "engine 0 is back"

    run(body, remote=True)
