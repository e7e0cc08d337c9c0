"""The operator's routes over a pool of simulated engines: sessions opened from outside, engines that come and go."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import gateway_rig
import httpx
import pytest
import trio

from asyncrl.engines import EnginePool, EngineSettings
from asyncrl.gateway import Gateway, GatewaySettings, Operating, cache_use_of
from asyncrl.metrics import TABLES, Source
from asyncrl.run import Run
from asyncrl.serving import listen
from asyncrl.testing import Rates
from asyncrl.testing_engines import FakeServer
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Trajectory, TrajectoryStatus

RATES = Rates(token_s=0.001, sync_s=0.01)


@dataclass
class Scene:
    """A gateway with an operator, over a pool."""

    gateway: Gateway
    pool: EnginePool
    servers: dict[str, FakeServer]
    client: httpx.AsyncClient
    ended: list[Trajectory]

    async def open(self, **more: Any) -> dict[str, Any]:
        """Open a session."""
        reply = await self.client.post("/sessions", json=more)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def complete(self, session: dict[str, Any], **more: Any) -> httpx.Response:
        """Ask for a completion with a session's own key."""
        headers = {"authorization": f"Bearer {session['token']}"}
        body = {"prompt": [1, 2], "max_tokens": 20, **more}
        return await self.client.post(f"{session['base_url']}/completions", json=body, headers=headers)


@asynccontextmanager
async def scene(renderer: ChatRenderer, settings: GatewaySettings) -> AsyncIterator[Scene]:
    tokens = itertools.cycle(range(10, 200))
    servers = {f"engine {number}": FakeServer(f"engine {number}", RATES, tokens, start_s=0.0) for number in range(2)}
    pool = EnginePool(list(servers.values()), EngineSettings())

    def make_engine(name: str, url: str) -> FakeServer:
        servers[name] = FakeServer(name, RATES, tokens, start_s=0.0)
        servers[name].hangs = "nobody" in url
        return servers[name]

    gateway = Gateway(
        renderer,
        settings,
        temperature=1.0,
        max_model_len=200,
        cache_use=cache_use_of(pool, limit=settings.max_cache_use),
    )
    ended: list[Trajectory] = []
    operating = Operating(gateway, pool, pool=pool, make_engine=make_engine, on_trajectory=ended.append)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(pool.serve, {name: server.start for name, server in servers.items()}))
        await nursery.start(operating.serve)
        listener = listen("127.0.0.1", 0, setting="[gateway] port")
        await nursery.start(partial(gateway.serve, listener, routes=operating.routes()))
        headers = {"authorization": f"Bearer {gateway.token}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=30) as client:
            yield Scene(gateway=gateway, pool=pool, servers=servers, client=client, ended=ended)
        nursery.cancel_scope.cancel()


def run(directory: Path, body: Callable[[Scene], Awaitable[None]], settings: GatewaySettings | None = None) -> None:
    renderer = gateway_rig.make_renderer(directory)

    async def main() -> None:
        with trio.fail_after(60):
            async with scene(renderer, settings or GatewaySettings()) as ready:
                await body(ready)

    trio.run(main)


def test_a_session_from_outside_becomes_a_trajectory(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        session = await scene.open(task_id="sum", trajectory_id="7-3")
        reply = await scene.complete(session, return_token_ids=True)
        sampled = reply.json()["choices"][0]["token_ids"]
        assert (await scene.client.get(f"/sessions/{session['session_id']}")).json()["sampled_tokens"] == 20
        closed = await scene.client.post(
            f"/sessions/{session['session_id']}/close", json={"reward": 0.5, "reward_parts": {"form": 0.5}}
        )
        trajectory = closed.json()
        (segment,) = trajectory["segments"]
        assert segment["token_ids"] == [1, 2, *sampled]
        assert segment["loss_mask"] == [0, 0] + [1] * 20
        assert segment["behaviour_logprobs"] == [0.0, 0.0] + [-1.0] * 20
        assert segment["spans"] == [{"start": 2, "end": 22, "version": 0}]
        assert (trajectory["reward"], trajectory["reward_parts"]) == (0.5, {"form": 0.5})
        assert (trajectory["task_id"], trajectory["trajectory_id"]) == ("sum", "7-3")
        assert [one.trajectory_id for one in scene.ended] == ["7-3"]
        again = await scene.client.post(f"/sessions/{session['session_id']}/close", json={"reward": 1.0})
        assert again.status_code == 404
        assert (await scene.complete(session)).status_code == 404
        assert scene.gateway.statistics().sessions_ended == {"truncated_length": 1}

    run(tmp_path, body)


@pytest.mark.slow
def test_an_abandoned_session_ends_at_its_deadline_with_its_reason(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        session = await scene.open(trajectory_id="7-3", deadline_s=0.2)
        assert (await scene.complete(session)).status_code == 200
        while not scene.ended:  # noqa: ASYNC110 - its deadline is real
            await trio.sleep(0.02)
        (trajectory,) = scene.ended
        assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.FAILED_DEADLINE, None)
        assert "within its deadline of 0.2 s" in trajectory.detail
        assert (trajectory.num_turns, trajectory.extras["discarded_tokens"]) == (1, 20)
        assert scene.gateway.statistics().sessions == 0

    run(tmp_path, body)


def test_who_answers_after_the_deadline_is_told_so_and_counts_for_nothing(tmp_path: Path) -> None:
    """Kills: a reward that comes late and makes a second trajectory of the session."""

    async def body(scene: Scene) -> None:
        session = await scene.open(trajectory_id="7-3", deadline_s=0.2)
        assert (await scene.complete(session)).status_code == 200
        while not scene.ended:  # noqa: ASYNC110 - its deadline is real
            await trio.sleep(0.02)
        late = await scene.client.post(f"/sessions/{session['session_id']}/close", json={"reward": 1.0})
        assert (late.status_code, late.json()["error"]["code"]) == (404, "no_session")
        assert (await scene.complete(session)).status_code == 404
        assert [trajectory.reward for trajectory in scene.ended] == [None]
        assert scene.gateway.statistics().sessions_ended == {"failed_deadline": 1}

    run(tmp_path, body)


def test_a_session_that_failed_has_no_reward(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        session = await scene.open()
        await scene.complete(session)
        for wrong in ({}, {"reward": 1.0, "failed": "x"}, {"reward": "1"}, {"reward": 1, "reward_parts": {"a": "b"}}):
            refused = await scene.client.post(f"/sessions/{session['session_id']}/close", json=wrong)
            assert refused.status_code == 400, wrong
        closed = await scene.client.post(f"/sessions/{session['session_id']}/close", json={"failed": "no disk"})
        assert (closed.json()["status"], closed.json()["reward"]) == ("failed_environment", None)
        assert closed.json()["detail"] == "no disk"

    run(tmp_path, body)


def test_only_the_operator_opens_closes_and_lists(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        session = await scene.open()
        headers = {"authorization": f"Bearer {session['token']}"}
        for method, path in (
            ("POST", "/sessions"),
            ("GET", f"/sessions/{session['session_id']}"),
            ("POST", f"/sessions/{session['session_id']}/close"),
            ("GET", "/engines"),
            ("POST", "/engines"),
            ("DELETE", "/engines/engine%200"),
        ):
            reply = await scene.client.request(method, path, json={"reward": 1.0}, headers=headers)
            assert reply.status_code == 401, path
        assert not scene.ended

    run(tmp_path, body)


def test_engines_are_added_listed_and_removed(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        added = await scene.client.post("/engines", json={"url": "http://elsewhere:1"})
        assert (added.status_code, added.json()) == (201, {"name": "engine 2"})
        listed = (await scene.client.get("/engines")).json()["engines"]
        assert [(engine["name"], engine["health"]) for engine in listed] == [
            (f"engine {number}", "serving") for number in range(3)
        ]
        for number in range(2):
            assert (await scene.client.delete(f"/engines/engine%20{number}")).status_code == 200
        session = await scene.open()
        assert (await scene.complete(session)).status_code == 200
        assert scene.servers["engine 2"].served == [session["trajectory_id"]]
        assert (await scene.client.delete("/engines/engine%202")).status_code == 409
        assert (await scene.client.delete("/engines/engine%207")).status_code == 404
        assert (await scene.client.post("/engines", json={"url": "elsewhere"})).status_code == 400

    run(tmp_path, body)


def test_engines_that_come_and_go_bring_no_new_series(tmp_path: Path) -> None:
    """A name that one has left is the next one's, so that a run has as many as it ever had engines at a time."""
    seen: set[str] = set()

    def scrape(scene: Scene) -> set[str]:
        source = Source(run=cast(Run, None), engines=scene.pool.statistics)  # what is by engine reads no run
        found = [f.metric(source) for f in TABLES["Engines"] if f.labels == ("engine",)]
        return {sample.labels["engine"] for metric in found if metric for sample in metric.samples}

    async def body(scene: Scene) -> None:
        for number in range(6):
            added = await scene.client.post("/engines", json={"url": f"http://elsewhere:{number + 1}"})
            assert added.status_code == 201
            seen.update(scrape(scene))
            leaves = added.json()["name"] if number % 2 else "engine 0"
            assert (await scene.client.delete(f"/engines/{leaves}")).status_code == 200
            assert leaves not in scrape(scene), "who has left is not shown as it was"

    run(tmp_path, body)
    assert seen == {"engine 0", "engine 1", "engine 2"}


@pytest.mark.slow
def test_a_request_goes_on_elsewhere_when_its_engine_is_removed(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        session = await scene.open()
        replies = []

        async def ask() -> None:
            replies.append(await scene.complete(session, max_tokens=150, return_token_ids=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not any(server.delivered for server in scene.servers.values()):  # noqa: ASYNC110
                await trio.sleep(0.005)
            (running,) = [name for name, server in scene.servers.items() if server.served]
            await scene.client.delete(f"/engines/{running}")
        assert replies[0].status_code == 200
        assert len(replies[0].json()["choices"][0]["token_ids"]) == 150
        assert scene.pool.statistics().requests_moved == 1

    run(tmp_path, body)


@pytest.mark.slow
def test_new_sessions_wait_while_every_engine_says_that_its_cache_is_full(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        for server in scene.servers.values():
            server.cache_use = 0.99
        session = await scene.open()
        while (reply := await scene.complete(session)).status_code == 200:
            session = await scene.open()
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "engines_full")
        scene.servers["engine 0"].cache_use = 0.5
        while (await scene.complete(session)).status_code == 429:  # noqa: ASYNC110 - until it has looked again
            await trio.sleep(0.1)

    run(tmp_path, body)


@pytest.mark.parametrize("deadline_s", [0, -1, 1e9])
def test_a_deadline_that_cannot_be_is_refused(tmp_path: Path, deadline_s: float) -> None:
    async def body(scene: Scene) -> None:
        reply = await scene.client.post("/sessions", json={"deadline_s": deadline_s})
        assert (reply.status_code, "deadline_s must be" in reply.text) == (400, True)

    run(tmp_path, body)
