"""Engines are added to a pool and removed from it while it samples."""

from __future__ import annotations

import pytest
import trio
from engine_fleet import RATES, START_S, Fleet, run

from asyncrl.engines import Health
from asyncrl.errors import ConfigError, EngineError
from asyncrl.testing_engines import FakeServer


def more(fleet: Fleet, name: str = "engine 9") -> FakeServer:
    server = FakeServer(name, RATES, fleet.servers[0]._tokens, start_s=START_S)
    fleet.servers.append(server)
    return server


def test_an_added_engine_gets_the_newest_weights_and_then_its_share() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        added = more(fleet)
        await fleet.pool.add(added, added.start)
        assert [engine.name for engine in fleet.engines()] == ["engine 0", "engine 1", "engine 9"]
        assert fleet.health() == [Health.SERVING] * 3
        assert added.pulled == [1]
        fleet.ask(*(f"t-{n}" for n in range(24)))
        await fleet.wait_idle(24)
        assert len(added.served) >= 4
        assert {span.version for c in fleet.everything for span in c.spans} == {1}
        await fleet.pull(2)
        assert {report.engine for report in fleet.reports[-1]} == {"engine 0", "engine 1", "engine 9"}

    run(body)


def test_a_removed_engine_loses_no_token_and_is_ended() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await trio.sleep(6.5)
        fleet.pool.remove("engine 0")
        await fleet.wait_idle(8)
        assert [engine.name for engine in fleet.engines()] == ["engine 1"]
        moved = [completion for completion in fleet.everything if completion.moved_at]
        assert moved
        assert all(completion.engine == "engine 0, engine 1" for completion in moved)
        assert not fleet.failures
        assert not fleet.servers[0]._is_there
        assert len(fleet.servers[0].starts) == 1
        await fleet.pull(1)
        assert [report.engine for report in fleet.reports[-1]] == ["engine 1"]

    run(body)


def test_an_engine_that_never_comes_up_is_left_out_again_and_said() -> None:
    async def body(fleet: Fleet) -> None:
        added = more(fleet)
        added.hangs = True
        with pytest.raises(EngineError, match="engine 9 did not become healthy"):
            await fleet.pool.add(added)
        assert fleet.health() == [Health.SERVING] * 2
        fleet.ask("t-0")
        await fleet.wait_idle(1)

    run(body)


def test_an_engine_removed_in_the_middle_of_a_pull_is_left_out_of_its_reports() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[0].pull_s = 50.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(1.0)
            fleet.pool.remove("engine 0")
        assert [report.engine for report in fleet.reports[-1]] == ["engine 1"]

    run(body)


def test_the_last_engine_that_serves_stays_and_names_are_told_apart() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.pool.remove("engine 1")
        with pytest.raises(ConfigError, match="no other engine serves"):
            fleet.pool.remove("engine 0")
        with pytest.raises(ConfigError, match="no engine 'engine 7'; there are engine 0"):
            fleet.pool.remove("engine 7")
        with pytest.raises(ConfigError, match="there is an engine 'engine 0' already"):
            await fleet.pool.add(more(fleet, "engine 0"))

    run(body)
