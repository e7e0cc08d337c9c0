"""Who runs which request: trajectories stay where their prefix is cached, and nobody waits while there is a place."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import trio
import trio.testing
from engine_fleet import PROMPT, START_S, Fleet, run

from asyncrl.engines import Draft, EnginePool, EngineSettings, Health
from asyncrl.engines.line import Line, _score
from asyncrl.engines.roster import Roster
from asyncrl.testing import Rates
from asyncrl.testing_engines import FakeServer


def home_of(trajectory_id: str) -> str:
    """Return which of the first two engines is a trajectory's own."""
    return max(["engine 0", "engine 1"], key=lambda name: _score(trajectory_id, name))


def of_home(name: str, number: int) -> list[str]:
    """Return so many trajectories that are at home in an engine."""
    return [f"{n}-0" for n in range(100) if home_of(f"{n}-0") == name][:number]


def test_the_turns_of_one_trajectory_go_to_one_engine_and_trajectories_are_shared_out() -> None:
    async def body(fleet: Fleet) -> None:
        for _ in range(3):
            for n in range(12):
                fleet.ask(f"t-{n}", max_tokens=2)
                await trio.sleep(3.0)
        for n in range(12):
            homes = [server.name for server in fleet.servers if f"t-{n}" in server.served]
            assert len(homes) == 1, homes
        assert all(len(server.served) >= 6 for server in fleet.servers)

    run(body, count=3)


def test_trajectories_are_shared_evenly_and_an_engine_that_goes_moves_only_its_own() -> None:
    """Kills: a hash that is linear in the names."""
    homes: dict[int, dict[str, str]] = {}

    async def body(fleet: Fleet) -> None:
        if fleet.settings.restarts:
            fleet.servers[1].kill()
            await trio.sleep(0.5)
        for n in range(120):
            fleet.ask(f"{n}-0", max_tokens=1)
            await trio.sleep(1.5)
            if fleet.settings.restarts and fleet.health()[1] is Health.SERVING:
                fleet.servers[1].kill()
                await trio.sleep(0.5)
        homes[fleet.settings.restarts] = {key: value.engine for key, value in fleet.completions.items()}

    run(body, count=3, restarts=0)
    run(body, count=3, restarts=1000)
    shares = Counter(homes[0].values())
    assert all(25 <= share <= 55 for share in shares.values()), shares
    assert all(homes[1000][key] == home for key, home in homes[0].items() if home != "engine 1")
    assert Counter(homes[1000].values()).keys() == {"engine 0", "engine 2"}


def test_no_request_waits_while_any_engine_has_a_place() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"t-{n}" for n in range(12)))
        await trio.sleep(0.5)
        assert [engine.running for engine in fleet.engines()] == [4, 4]
        assert fleet.pool.statistics().in_line == fleet.pool.statistics().waiting == 4
        await fleet.wait_idle(12)

    run(body, capacity=4)


def test_an_overloaded_home_is_routed_around() -> None:
    async def body(fleet: Fleet) -> None:
        first = [n for n in range(100) if home_of(f"{n}-0") == "engine 0"][:8]
        fleet.ask(*(f"{n}-0" for n in first))
        await trio.sleep(0.5)
        running = [engine.running for engine in fleet.engines()]
        assert sum(running) == 8
        assert 4 <= running[0] <= 6, "a quarter of its capacity more than the other, and no more"

    run(body)


@pytest.mark.parametrize("slowness", [10.0, math.inf])
def test_a_slow_engine_and_one_that_hangs_are_routed_around(slowness: float) -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"warm-{n}" for n in range(8)), max_tokens=10)
        await fleet.wait_idle(8)
        slow = fleet.servers[0]
        slow.slowness, slow.hangs = min(slowness, 1e6), slowness == math.inf
        fleet.ask(*(f"slow-{n}" for n in range(4)), max_tokens=10)
        await trio.sleep(60.0)  # it shows
        before = len(slow.served)
        for n in range(20):
            fleet.ask(f"t-{n}", max_tokens=10)
            await trio.sleep(5.0)
        assert len(slow.served) - before <= 3
        assert sum(f"t-{n}" in fleet.completions for n in range(20)) >= 15
        slow.slowness, slow.hangs = 1.0, False
        if slowness == math.inf:
            slow.kill()
        await fleet.wait_idle(32)

    run(body)


def test_a_new_engine_takes_its_share_of_those_who_wait() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[1].kill()
        await trio.sleep(0.5)
        fleet.ask(*(f"t-{n}" for n in range(12)), max_tokens=50)
        await trio.sleep(START_S)
        assert [engine.running for engine in fleet.engines()] == [4, 4]
        assert fleet.pool.statistics().in_line == 4
        await fleet.wait_idle(12)

    run(body, capacity=4)


def test_a_pool_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool([], EngineSettings())


def test_a_place_that_frees_goes_first_to_who_is_at_home_there() -> None:
    async def body(fleet: Fleet) -> None:
        (first, waits), (other,) = of_home("engine 0", 2), of_home("engine 1", 1)
        fleet.ask(other, max_tokens=30)
        fleet.ask(first, max_tokens=10)
        await trio.sleep(1.5)
        away = of_home("engine 1", 2)[1]
        fleet.ask(away, max_tokens=1)
        await trio.sleep(1.0)
        fleet.ask(waits, max_tokens=1)
        await fleet.wait_idle(4)
        assert fleet.servers[0].served == [first, waits, away], "and then to who waits longest"

    run(body, capacity=1)


def test_an_engine_that_comes_is_home_to_its_share_of_those_who_wait() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[1].kill()
        await trio.sleep(0.5)
        theirs, own = of_home("engine 0", 2), of_home("engine 1", 1)
        for trajectory_id in (*theirs, *own):
            fleet.ask(trajectory_id, max_tokens=50)
            await trio.sleep(0.5)
        await fleet.wait_idle(3)
        assert fleet.servers[1].served == own, "though another had waited longer"

    run(body, capacity=1)


def test_a_place_that_is_called_out_to_someone_who_has_just_given_up_is_not_lost() -> None:
    async def main() -> None:
        roster = Roster([FakeServer("engine 0", Rates(), itertools.count(), capacity=1)], outage_timeout_s=60.0)
        line = Line(roster)
        (member,) = roster.members
        roster.put_in_service(member)

        async def wait_for_place() -> None:
            async with line.place(draft()):
                raise AssertionError("it has given up")

        async with trio.open_nursery() as nursery, line.place(draft()):
            nursery.start_soon(wait_for_place)
            await trio.testing.wait_all_tasks_blocked()
            assert line.length == 1
            nursery.cancel_scope.cancel()
            # the place has been called out, and who was called has not run since
        assert (line.length, member.places_taken) == (0, 0)

    def draft() -> Draft:
        return Draft(PROMPT, max_tokens=1, trajectory_id="t")

    trio.run(main)
