"""An engine that takes other weights than were published: quarantined, sent them once more, then the run ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import trio
from engine_fleet import RATES, START_S, Fleet, fails, run

from asyncrl.engines import Canary, Health
from asyncrl.errors import WeightMismatch
from asyncrl.types import TokenIds, WeightManifest

_TENSOR = "model.layers.3.mlp.up_proj.weight"


def _wrong_times(number: int) -> Callable[[WeightManifest], str]:
    """Return what takes so many versions otherwise than they were published."""
    sent = itertools.count()
    return lambda manifest: _TENSOR if next(sent) < number else ""


def test_it_is_quarantined_and_sent_the_version_once_more() -> None:
    async def body(fleet: Fleet) -> None:
        wrong = fleet.servers[0]
        fleet.ask(*(f"t-{n}" for n in range(8)), max_tokens=60)
        await trio.sleep(9.5)
        wrong.mismatches = _wrong_times(1)
        moved = set(wrong.served)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(RATES.sync_s + 1.0)
            assert fleet.health() == [Health.QUARANTINED, Health.SERVING]
            assert wrong.statistics().running == 0
            served = len(wrong.served)
            fleet.ask(*(f"new-{n}" for n in range(4)))
            await trio.sleep(2.0)
            assert len(wrong.served) == served, "nothing is asked of it"
        assert fleet.health() == [Health.SERVING] * 2
        assert [report.engine for report in fleet.reports[0]] == ["engine 0", "engine 1"]
        assert (wrong.held, len(wrong.starts)) == (1, 1)
        await fleet.wait_idle(12)
        assert {name for name, completion in fleet.completions.items() if completion.moved_at} == moved
        assert [engine.quarantines for engine in fleet.engines()] == [1, 0]
        fleet.ask(*(f"later-{n}" for n in range(8)))
        await fleet.wait_idle(20)
        assert len(wrong.served) > served, "it serves again"
        wrong.kill()
        await trio.sleep(1.0)
        assert fleet.health()[0] is Health.STARTING, "its end is seen as before"

    assert run(body).said[:2] == [
        f"engine 0 is quarantined: engine 0, report of version 1: {_TENSOR} has another digest\n"
        "it is sent the newest version once more",
        "engine 0 holds what was published, and is out of quarantine",
    ]


def test_a_second_mismatch_ends_the_run_with_the_tensors_name() -> None:
    async def body(fleet: Fleet) -> None:
        fleet.servers[0].mismatches = _wrong_times(2)
        await fleet.pull(1)

    words = fails(body, WeightMismatch)
    assert words == f"engine 0, report of version 1: {_TENSOR} has another digest; it was sent twice"


def test_an_engine_that_comes_back_and_takes_other_weights_twice_ends_the_run() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        fleet.servers[0].mismatches = _wrong_times(2)
        fleet.servers[0].kill()
        await trio.sleep_forever()

    assert fails(body, WeightMismatch).endswith("it was sent twice")


def test_one_elsewhere_that_comes_back_and_takes_other_weights_twice_ends_the_run() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        gone = fleet.servers[0]
        gone.mismatches = _wrong_times(2)
        gone.kill()
        fleet.ask(*(f"t-{n}" for n in range(8)))
        await fleet.wait_idle(8)
        async with gone.start(0, True):
            await trio.sleep_forever()

    assert fails(body, WeightMismatch, remote=True).endswith("it was sent twice")


def test_an_engine_that_comes_back_in_quarantine_and_out_of_it_serves() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.pull(1)
        fleet.servers[0].mismatches = _wrong_times(1)
        fleet.servers[0].kill()
        await trio.sleep(START_S + RATES.sync_s + 1.0)
        assert fleet.health()[0] is Health.QUARANTINED
        await trio.sleep(RATES.sync_s)
        assert fleet.health() == [Health.SERVING] * 2
        assert fleet.servers[0].pulled == [1, 1]

    run(body)


def test_a_death_in_quarantine_is_no_mismatch() -> None:
    """The engine goes on the road of every engine that dies. Kills: counting any second failure as a mismatch."""

    async def body(fleet: Fleet) -> None:
        wrong = fleet.servers[0]
        wrong.mismatches = _wrong_times(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(RATES.sync_s + 1.0)
            assert fleet.health()[0] is Health.QUARANTINED
            wrong.kill()
        assert [report.engine for report in fleet.reports[0]] == ["engine 1"]
        await trio.sleep(START_S + RATES.sync_s + 1.0)
        assert fleet.health() == [Health.SERVING] * 2
        assert (len(wrong.starts), wrong.held) == (2, 1)

    run(body)


def test_a_version_that_comes_while_an_engine_is_in_quarantine_is_what_it_is_sent() -> None:
    async def body(fleet: Fleet) -> None:
        wrong = fleet.servers[0]
        wrong.mismatches = lambda manifest: _TENSOR if manifest.version == 1 else ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(1.0)
            nursery.start_soon(fleet.pull, 2)
        assert wrong.pulled == [2]
        assert [[report.version for report in reports] for reports in fleet.reports] == [[2, 1], [2, 2]]

    run(body)


def test_a_version_that_is_published_while_an_engine_is_in_quarantine_follows_the_one_that_it_is_sent() -> None:
    """Kills: leaving an engine out that will be back with the version before."""

    async def body(fleet: Fleet) -> None:
        wrong = fleet.servers[0]
        wrong.mismatches = _wrong_times(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.pull, 1)
            await trio.sleep(RATES.sync_s + 1.0)
            assert fleet.health()[0] is Health.QUARANTINED
            nursery.start_soon(fleet.pull, 2)
        assert wrong.pulled == [1, 2]

    run(body)


def test_what_the_canary_may_differ_is_learnt_from_the_engine_that_is_furthest_away() -> None:
    async def body(fleet: Fleet) -> None:
        canary = Canary(TokenIds([5, 6, 7]))
        near, far = fleet.servers
        near.canary, far.canary = (-1.0, -2.0), (-1.1, -2.1)
        await fleet.pool.learn_canary(canary, (-1.0, -2.0))
        assert canary.tolerance == pytest.approx(0.5)
        far.canary = (-3.0, -4.0)
        with pytest.raises(WeightMismatch, match=r"^engine 1's log-probs of a text are 2\.000 nats"):
            await fleet.pool.learn_canary(canary, (-1.0, -2.0))

    run(body)
