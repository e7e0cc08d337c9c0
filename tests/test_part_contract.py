"""Simulated parts keep the promises of the real ones; the real engine is asked in `test_engine_vllm.py`."""

from __future__ import annotations

import itertools
import json
import random
import socket
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
import trio
import trio.testing
from part_contract import check_engine, check_environment, check_learner
from synthetic_groups import random_groups
from tiny_model import build_tiny_model

from asyncrl.children import Child, start_child
from asyncrl.engines import EnginePool, EngineSettings
from asyncrl.errors import LearnerError
from asyncrl.processes import LearnerProcess
from asyncrl.simulation import SimulationRates
from asyncrl.simulation.parts import SimulatedEngines, SimulatedEnvironment, World
from asyncrl.testing import FakeEngine, FakeEnvironment, FakeLearner, Rates
from asyncrl.testing_engines import FakeServer
from asyncrl.types import TokenIds


def test_the_fake_engine() -> None:
    async def main() -> None:
        rates = Rates()
        engine, learner = FakeEngine(rates, random.Random(0)), FakeLearner(rates, version=1)
        await check_engine(engine, engine, await learner.publish(), TokenIds([2, 3]))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_pool_of_simulated_servers() -> None:
    async def main() -> None:
        servers = [FakeServer(f"engine {n}", Rates(), itertools.count(2)) for n in range(2)]
        pool = EnginePool(servers, EngineSettings())
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.serve, {server.name: server.start for server in servers})
            await check_engine(pool, pool, await FakeLearner(Rates(), version=1).publish(), TokenIds([2, 3]))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_fake_learner(tmp_path: Path) -> None:
    async def main() -> None:
        rates = Rates()
        environment, engine = FakeEnvironment(rates, random.Random(0)), FakeEngine(rates, random.Random(1))
        task = environment.get_item()
        trajectories = await environment.collect_trajectories(task, engine, group_id="0", group_size=3)
        assert [t.trajectory_id for t in trajectories] == ["0-0", "0-1", "0-2"]
        await check_learner(FakeLearner(rates), random_groups(0, num_groups=2), tmp_path)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_fake_environments() -> None:
    async def main() -> None:
        rates, simulated = Rates(), SimulationRates()
        await check_environment(FakeEnvironment(rates, random.Random(0)), FakeEngine(rates, random.Random(1)))
        world = World(simulated, engines=1, engine_slots=8, seed=0, faults=())
        engines = SimulatedEngines(world)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.sharing.serve)
            await check_environment(SimulatedEnvironment(world, engines), engines)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.slow
def test_the_learner_process(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", tied=True, dtype=torch.bfloat16)
    job = {
        "model": str(model),
        "run_id": "contract",
        "weight_sync": {"transport": "filesystem", "directory": str(tmp_path / "published")},
        "learner": {"learning_rate": 1e-3, "threads": 1},
    }
    (tmp_path / "learner.json").write_text(json.dumps(job))

    async def main() -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "asyncrl.learner", "--fd", str(theirs.fileno())]
        argv += ["--settings", str(tmp_path / "learner.json")]
        child = start_child("learner", argv, log_path=tmp_path / "log", pass_fds=[theirs.fileno()])
        with trio.fail_after(120):
            async with child as process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
                theirs.close()
                learner = LearnerProcess(stream, process)
                await learner.wait_ready(0)
                (tmp_path / "saved").mkdir()
                await check_learner(learner, random_groups(0, num_groups=2), tmp_path / "saved")
                await learner.shut_down()

    trio.run(main)


def test_a_learner_that_does_not_publish_in_time_is_an_error_that_names_the_setting() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
                learner = LearnerProcess(stream, cast(Child, None), publish_timeout_s=5.0)
                with pytest.raises(LearnerError, match=r"not published its weights in 5 s .*publish_timeout_s"):
                    await learner.publish()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
