"""The gateway's figures: each request once, by face and status; sessions by how they ended; waits for admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import gateway_rig
import pytest
import trio
import trio.testing
from gateway_rig import Rig, user
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.errors import EngineError
from asyncrl.gateway import CacheUse, Gateway
from asyncrl.metrics import Source
from asyncrl.metrics.family import TableCollector
from asyncrl.metrics.gateway import GATEWAY
from asyncrl.run import Run
from asyncrl.types import TrajectoryStatus


class Full(CacheUse):
    """Caches that are full until a test says otherwise."""

    has_room = False  # type: ignore[assignment]

    def __init__(self) -> None:
        async def look() -> list[float]:
            return []

        super().__init__(look, limit=1.0)


def scraped(gateway: Gateway | None) -> dict[tuple[str, ...], float]:
    """Return what Prometheus finds: (name, label values...) -> value, without what is 0."""
    registry = CollectorRegistry()
    registry.register(TableCollector([GATEWAY], Source(run=cast(Run, None), gateway=gateway)))
    found = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name.removeprefix("asyncrl_gateway_"), *sample.labels.values()): sample.value
        for family in found
        for sample in family.samples
        if sample.value and not sample.name.endswith(("_bucket", "_created", "_sum"))
    }


def test_each_request_is_counted_once_by_face_and_status(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.replies = ["fine", EngineError("gone"), "abcdef", EngineError("gone")]
        await rig.chat(user("one"))
        await rig.chat(user("one"))
        rig.sampler.step = 2
        await rig.chat(user("one"), stream=True)
        await rig.chat(user("one"), stream=True)
        await rig.chat(user("one"), temperature=0.3)
        await rig.chat(user("one"), temperature=0.3, stream=True)
        await rig.post("/v1/messages", {})
        await rig.client.post(f"{rig.gateway.url}/generate", json={}, headers={"authorization": "Bearer no"})
        await rig.client.get(f"{rig.gateway.url}/no_such_thing")
        assert scraped(rig.gateway) == {
            ("sessions_open",): 1,
            ("requests_total", "chat", "200"): 2,
            ("requests_total", "chat", "503"): 2,
            ("requests_total", "chat", "400"): 2,
            ("requests_total", "messages", "400"): 1,
            ("requests_total", "generate", "401"): 1,
            ("request_seconds_count", "chat"): 2,
        }

    gateway_rig.run(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_nobody_waits_for_is_counted_as_left(tmp_path: Path, stream: bool) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.hold = trio.Event()
        with trio.move_on_after(0.2):
            await rig.chat(user("one"), stream=stream)
        while rig.session.num_running:
            await trio.testing.wait_all_tasks_blocked()
        assert scraped(rig.gateway) == {("sessions_open",): 1, ("requests_total", "chat", "left"): 1}

    gateway_rig.run(tmp_path, body)


def test_sessions_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        await rig.chat(user("one"))
        rig.session.close(reward=1.0)
        more: dict[str, Any] = {"task": gateway_rig.TASK, "trajectory_id": "8-0"}
        async with rig.gateway.session(rig.sampler, **more):
            assert scraped(rig.gateway)["sessions_open",] == 2
        async with rig.gateway.session(rig.sampler, **more) as session:
            session.fail(TrajectoryStatus.FAILED_DEADLINE, "late")
        rig.gateway.forget(rig.session)
        found = scraped(rig.gateway)
        ended = {key[1:]: value for key, value in found.items() if key[0] == "sessions_ended_total"}
        assert ended == {("completed",): 1, ("left",): 1, ("failed_deadline",): 1}
        assert ("sessions_open",) not in found
        rig.gateway._by_id[rig.session.session_id] = rig.gateway._by_token[rig.session.token] = rig.session

    gateway_rig.run(tmp_path, body)


def test_a_session_that_is_turned_away_waits_until_it_is_taken(tmp_path: Path) -> None:
    use = Full()

    async def body(rig: Rig) -> None:
        for _ in range(3):
            assert (await rig.chat(user("one"))).status_code == 429
        found = scraped(rig.gateway)
        assert (found["admissions_refused_total",], found["sessions_waiting",]) == (3, 1)
        assert ("admission_wait_seconds_count",) not in found
        use.has_room = True
        for _ in range(2):
            assert (await rig.chat(user("one"))).status_code == 200
        found = scraped(rig.gateway)
        assert found["admission_wait_seconds_count",] == 1
        assert ("sessions_waiting",) not in found
        assert found["requests_total", "chat", "429"] == 3

    gateway_rig.run(tmp_path, body, cache_use=use)


def test_a_run_without_a_gateway_shows_none() -> None:
    assert scraped(None) == {}
