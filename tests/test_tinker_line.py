"""The order of what is asked of a model, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import permutations

import pytest
import trio
import trio.testing

from asyncrl.errors import ConfigError
from asyncrl.gateway.http import Refused
from asyncrl.tinker.futures import Futures
from asyncrl.tinker.line import Carry, Line
from asyncrl.tinker.loss_names import loss_of
from asyncrl.tinker.orders import PassReply, Refusal, Result, StepReply
from asyncrl.types import Logprobs

_GAP_S = 30.0


def ran(function: object) -> None:
    trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


class Rig:
    """A line whose orders say their number as they are carried out."""

    def __init__(self, max_waiting: int = 16, max_bytes: int = 10**6) -> None:
        self.done: list[int] = []
        self.futures = Futures(max_bytes)
        self.line = Line("m", self.futures, max_waiting=max_waiting, gap_timeout_s=_GAP_S)

    def carry(self, number: int, seconds: float = 0.0) -> Carry:
        async def carry() -> Result:
            await trio.sleep(seconds)
            self.done.append(number)
            return StepReply(metrics={"number": float(number)})

        return carry

    def ask(self, number: int, digest: int = 0, seconds: float = 0.0) -> str:
        return self.line.submit(number, digest, self.carry(number, seconds))

    async def result(self, number: int) -> Result:
        future = self.futures.get(f"m:{number}")
        assert future is not None
        assert await future.wait(1000.0)
        assert future.result is not None
        return future.result


@asynccontextmanager
async def serving(rig: Rig) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.line.serve)
        yield rig
        nursery.cancel_scope.cancel()


def test_whatever_the_order_of_arrival_the_numbers_are_followed() -> None:
    async def main() -> None:
        for order in permutations(range(4)):
            async with serving(Rig()) as rig:
                for number in order:
                    rig.ask(number, seconds=1.0)
                    await trio.testing.wait_all_tasks_blocked()
                await rig.result(3)
                assert rig.done == [0, 1, 2, 3]

    ran(main)


def test_a_repetition_gets_the_same_future_and_is_carried_out_once() -> None:
    async def main() -> None:
        async with serving(Rig()) as rig:
            first = rig.ask(0, digest=5, seconds=10.0)
            assert rig.ask(0, digest=5) == first, "while it waits"
            await trio.testing.wait_all_tasks_blocked()
            assert rig.ask(0, digest=5) == first, "while it is carried out"
            await rig.result(0)
            assert rig.ask(0, digest=5) == first, "when it is done"
            rig.ask(1)
            await rig.result(1)
            assert rig.done == [0, 1]
            with pytest.raises(Refused, match="was another request"):
                rig.ask(0, digest=6)

    ran(main)


def test_what_waits_for_a_number_that_does_not_come_fails_by_name_and_the_rest_goes_on() -> None:
    async def main() -> None:
        async with serving(Rig()) as rig:
            rig.ask(0)
            await rig.result(0)
            begun = trio.current_time()
            rig.ask(2)
            await trio.sleep(_GAP_S / 2)
            rig.ask(3)
            result = await rig.result(3)
            assert trio.current_time() - begun == pytest.approx(_GAP_S), "the first that waited decides"
            assert isinstance(result, Refusal)
            assert "SequenceGap: seq_id 1 of m has not come in 30 s" in result.message
            rig.ask(1)
            rig.ask(2)  # repeated: it has failed for good
            rig.ask(4)
            await rig.result(4)
            assert rig.done == [0, 1, 4]

    ran(main)


def test_a_line_that_is_ended_fails_what_waits_and_does_its_last_thing() -> None:
    async def main() -> None:
        rig, last = Rig(), trio.Event()

        async def unload() -> None:
            assert rig.done == [0], "what was under way came first"
            last.set()

        async with serving(rig):
            rig.ask(0, seconds=5.0)
            rig.ask(1)
            await trio.testing.wait_all_tasks_blocked()
            rig.line.end("it was unloaded", unload)
            await last.wait()
            result = await rig.result(1)
            assert isinstance(result, Refusal)
            assert "it was unloaded" in result.message
            with pytest.raises(Refused, match="unloaded"):
                rig.ask(2)

    ran(main)


def test_more_than_may_wait_is_turned_away() -> None:
    async def main() -> None:
        async with serving(Rig(max_waiting=2)) as rig:
            rig.ask(2)
            rig.ask(3)
            with pytest.raises(Refused) as refused:
                rig.ask(4)
            assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
            with pytest.raises(Refused, match="must be >= 0"):
                rig.ask(-1)
            for number in (0, 1, 4):
                rig.ask(number)
                await rig.result(number)
            assert rig.done == [0, 1, 2, 3, 4], "the one that all wait for is let in"

    ran(main)


def test_results_are_kept_within_their_bound_and_those_that_were_read_go_first() -> None:
    def result() -> Result:
        return PassReply(logprobs=[Logprobs([0.0] * 1000)], metrics={})

    async def main() -> None:
        futures = Futures(max_bytes=15_000)
        made = [futures.open(f"{number}") for number in range(5)]
        for future in made[:3]:
            futures.settle(future, result())
        futures.note_read(made[1])
        futures.settle(made[3], result())
        assert futures.get("1") is None
        assert made[1].result is None
        assert [futures.get(f"{number}") is not None for number in (0, 2, 3)] == [True] * 3
        futures.settle(made[4], result())
        assert futures.get("0") is None
        found = futures.statistics()
        assert (found.dropped_read, found.dropped_unread, found.open) == (1, 1, 0)
        assert found.kept_bytes <= 15_000
        assert found.settled == {"PassReply": 5}

    ran(main)


def test_losses_have_the_documented_thresholds() -> None:
    assert loss_of("ppo", {})[1] == pytest.approx({"aggregation": "sum", "clip_low": 0.2, "clip_high": 0.2}, abs=1e-12)
    assert loss_of("cispo", {}) == ("cispo", {"aggregation": "sum", "ratio_low": 0.0, "ratio_high": 4.0})
    with pytest.raises(ConfigError, match="must be one of cross_entropy"):
        loss_of("gspo", {})
