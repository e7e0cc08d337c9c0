"""Engines that pull beside the learner: each goes from what it holds to the newest, and no file goes from under it."""

from __future__ import annotations

import pytest
import trio
from engine_fleet import RATES, START_S, Fleet, fails, run

from asyncrl.engines import Health
from asyncrl.errors import WeightSyncError


def test_each_engine_goes_to_the_newest_version_and_passes_over_the_others() -> None:
    """Kills: pulling every version in turn; a fast engine that waits for a slow one."""

    async def body(fleet: Fleet) -> None:
        fast, slow = fleet.servers
        slow.pull_s = 38.0
        async with trio.open_nursery() as nursery:
            for version in (1, 2, 3, 4):
                nursery.start_soon(fleet.pull, version)
                await trio.sleep(10.0)
                assert fast.held == version
                assert slow.held == (0 if version < 4 else 1)
        assert fast.pulled == [1, 2, 3, 4]
        assert slow.pulled == [1, 4]
        assert [[report.version for report in reports] for reports in fleet.reports] == [[1, 1], [2, 4], [3, 4], [4, 4]]

    run(body)


def test_several_engines_pull_beside_each_other() -> None:
    async def body(fleet: Fleet) -> None:
        began = trio.current_time()
        await fleet.pull(1)
        assert trio.current_time() - began == RATES.sync_s
        assert len(fleet.reports[0]) == 6

    run(body, count=6)


def test_a_version_may_be_replaced_while_only_one_other_is_being_read() -> None:
    async def body(fleet: Fleet) -> None:
        slow = fleet.servers[1]
        slow.pull_s = 40.0
        async with trio.open_nursery() as nursery:
            assert not await fleet.pool.make_room()
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(10.0)
            began = trio.current_time()
            assert fleet.pool.statistics().absent == ("engine 1: serving for 10 s, holds version 0 and pulls 1",)
            assert list(await fleet.pool.make_room()) == [1]
            assert trio.current_time() == began, "the learner did not wait"
            nursery.start_soon(fleet.pull, 2)
            await trio.sleep(10.0)
            assert list(await fleet.pool.make_room()) == [1], "the fast one has read version 2, which may go"
            nursery.start_soon(fleet.pull, 3)
        assert slow.pulled == [1, 3]

    run(body)


def test_the_learner_waits_while_both_versions_that_are_kept_are_being_read() -> None:
    """Kills: replacing a file that an engine reads; an engine that begins to read what is about to go."""

    async def body(fleet: Fleet) -> None:
        first, second = fleet.servers
        first.pull_s = 55.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(10.0)
            second.pull_s = 30.0
            nursery.start_soon(fleet.pull, 2)
            await trio.sleep(10.0)  # one has read version 1 for 20 s, the other version 2 for 10 s
            began = trio.current_time()
            assert list(await fleet.pool.make_room()) == [1]
            assert trio.current_time() - began == 20.0
            await trio.sleep(40.0)
            assert first.pulled == [1], "it has not begun to read version 2: that one is being replaced"
            nursery.start_soon(fleet.pull, 3)
        assert first.pulled == [1, 3]
        assert second.pulled == [1, 2, 3]

    run(body)


def test_a_wait_for_room_ends_at_its_deadline_and_names_who_reads_what() -> None:
    async def body(fleet: Fleet) -> None:
        first, second = fleet.servers
        first.pull_s = 59.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(10.0)
            second.pull_s = 59.0
            nursery.start_soon(fleet.pull, 2)
            await trio.sleep(10.0)
            await fleet.pool.make_room()

    words = fails(body, WeightSyncError, outage_timeout_s=20.0)
    assert words == (
        "no room for another version in 20 s ([engine] outage_timeout_s): both that are kept are still being read: "
        "engine 0 version 1, engine 1 version 2"
    )


@pytest.mark.parametrize("late_s", [1.0, 20.0])
def test_an_engine_that_comes_back_while_a_version_is_published_takes_that_one(late_s: float) -> None:
    """Kills: reading the version before, whose file may be the one that goes."""

    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        fleet.servers[0].kill()
        await trio.sleep(START_S - late_s)
        assert not await fleet.pool.make_room()
        await trio.sleep(2 * late_s)
        assert fleet.health()[0] is Health.STARTING
        assert fleet.servers[0].pulled == [1]
        await fleet.pull(2)
        await trio.sleep(2 * START_S)
        assert fleet.servers[0].pulled == [1, 2]
        assert fleet.health() == [Health.SERVING] * 2

    run(body)


def test_an_engine_that_is_looked_at_on_its_way_to_the_newest_version_stays_in_service() -> None:
    async def body(fleet: Fleet) -> None:
        slow = fleet.servers[0]
        slow.pull_s = 40.0
        fleet.ask(*(f"t-{n}" for n in range(8)), max_tokens=80)
        await trio.sleep(5.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(1.0)
            nursery.start_soon(fleet.pull, 2)
            slow.withdraw("one request fails")
            await trio.sleep(1.0)
            assert fleet.health()[0] is Health.DOUBTED
            await trio.sleep(45.0)
            assert (slow.held, fleet.health()[0]) == (1, Health.SERVING), "version 2 is still on its way"
        await fleet.wait_idle(8)
        assert fleet.health() == [Health.SERVING] * 2
        assert slow.pulled == [1, 2]
        assert len(slow.starts) == 1

    run(body)
