"""The door of an engine that others can reach: the token opens every route, and nothing else opens any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio

from asyncrl.engine_door import TOKEN_VARIABLE, TokenDoor
from asyncrl.engines import EngineSettings, command


async def _app(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "reached"})


def _sent(kind: str, *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def main() -> None:
        await TokenDoor(_app)({"type": kind, "path": "/pause", "headers": headers}, _no_body, send)

    trio.run(main)
    return sent


async def _no_body() -> dict[str, Any]:
    raise AssertionError("who is not let in is not listened to")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the-run's-own-token")


def test_who_shows_the_token_reaches_every_route() -> None:
    assert _sent("http", (b"authorization", b"Bearer the-run's-own-token")) == [{"type": "reached"}]


@pytest.mark.parametrize("shown", [b"", b"Bearer", b"Bearer another", b"Basic the-run's-own-token", b"Bearer \xff"])
def test_who_shows_no_token_or_another_reaches_nothing(shown: bytes) -> None:
    headers = [(b"authorization", shown)] if shown else []
    start, body = _sent("http", *headers)
    assert (start["status"], b"token" in body["body"]) == (401, True)
    assert _sent("websocket", *headers) == [{"type": "websocket.close", "code": 1008}]


def test_the_servers_own_start_needs_none() -> None:
    assert _sent("lifespan") == [{"type": "reached"}]


def test_a_server_that_was_given_no_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(KeyError):
        TokenDoor(_app)


def test_a_server_that_others_can_reach_is_started_behind_the_door_or_not_at_all() -> None:
    argv, environment = command(EngineSettings(), "m", 1, host="10.0.0.1", token="secret")
    assert argv[argv.index("--host") + 1] == "10.0.0.1"
    assert argv[argv.index("--middleware") + 1] == "asyncrl.engine_door.TokenDoor"
    assert environment[TOKEN_VARIABLE] == "secret"
    assert "secret" not in argv
    assert TOKEN_VARIABLE not in command(EngineSettings(), "m", 1)[1]
    with pytest.raises(AssertionError, match="needs a token"):
        command(EngineSettings(), "m", 1, host="10.0.0.1")
