"""asyncrl's environments feed a trainer of Atropos, through the real server."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from atropos_rig import REGISTRATION, Server, run

from asyncrl.atropos.feeding import Feeder, Feeding
from asyncrl.cli import main
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.testing import FakeEngine, FakeEnvironment, Rates

RATES = Rates(token_s=0.0, mean_tokens=4, environment_s=0.0)


def feeder(*, num_tasks: int | None = None, reward: float | None = None, max_groups: int = 0) -> Feeder:
    """Return one whose episodes take no time; each is paid by a coin, or all alike."""
    environment = FakeEnvironment(RATES, random.Random(1), num_tasks=num_tasks)
    environment.rewards = lambda task_id: reward
    feeding = Feeding(name="coins", group_size=4, max_groups=max_groups, max_running=2, ask_every_s=0.01)
    return Feeder(environment, FakeEngine(RATES, random.Random(0)), feeding)


def fed(directory: Path, feeding: Feeder, trainer: Callable[[Server], Awaitable[None]]) -> None:
    """Feed a server until the feeder ends; `trainer` runs beside it."""

    async def body(server: Server) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer, server)
            await feeding.run(server.url)
            nursery.cancel_scope.cancel()

    run(directory, body)


def test_groups_come_as_tokens_with_log_probs_and_versions_until_the_last_step(tmp_path: Path) -> None:
    feeding = feeder()
    batches = []

    async def trainer(server: Server) -> None:
        await server.post("/register", {**REGISTRATION, "num_steps": 3})
        while len(batches) < 3:
            batches.extend([found] if (found := (await server.get("/batch"))["batch"]) else [])

    fed(tmp_path, feeding, trainer)
    assert len(batches) == 3
    assert feeding.posted >= 3
    for (group,) in batches:
        assert (len(group["tokens"]), group["env_id"]) == (4, 0)
        for tokens, mask, logprobs, spans in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], group["weight_versions"], strict=True
        ):
            assert mask == [-100] * 3 + tokens[3:]
            assert logprobs == [1.0] * 3 + [-1.0] * len(tokens[3:])
            assert spans == [[3, len(tokens), 0]]


async def _registers(server: Server) -> None:
    await server.post("/register", REGISTRATION)
    while (await server.get("/batch"))["batch"] is None:
        pass


def test_groups_without_two_scores_are_counted_and_stay_here(tmp_path: Path) -> None:
    feeding = feeder(reward=1.0, num_tasks=3)
    fed(tmp_path, feeding, _registers)
    assert (feeding.posted, feeding.dropped) == (0, {"no two different scores": 3})


def test_it_ends_after_so_many_groups_and_says_good_bye(tmp_path: Path) -> None:
    feeding = feeder(max_groups=2)

    async def body(server: Server) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_registers, server)
            await feeding.run(server.url)
            nursery.cancel_scope.cancel()
        assert [member.connected for member in server.store.roster.members] == [False]

    run(tmp_path, body)
    assert feeding.posted + feeding.dropped.total() == 2


def test_a_server_that_is_not_there_ends_it() -> None:
    async def main() -> None:
        with pytest.raises(EnvironmentFault, match="did not answer 5 times"):
            await feeder().run("http://127.0.0.1:9")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.1))


@pytest.mark.parametrize(("name", "value"), [("group_size", 1), ("max_running", 0), ("max_groups", -1)])
def test_settings_that_cannot_be_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be >= "):
        Feeding(**{"name": "coins", "group_size": 4, name: value})


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "atropos-environment", "configs/demo.toml", "--to", "localhost:8000"]) == 2
    assert "--to must begin with http" in capsys.readouterr().err
