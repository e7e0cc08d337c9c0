"""Bad input and bad clients: refused or survived, said why, and nobody else is held up."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import gateway_rig
import pytest
import trio
import trio.testing
from gateway_rig import Rig, user

from asyncrl.errors import ConfigError
from asyncrl.gateway import Gateway, GatewaySettings
from asyncrl.gateway.admission import CacheUse
from asyncrl.gateway.http import Refused, _Unpacker
from asyncrl.serving import listen

SMALL = GatewaySettings(max_body_mib=0.01)
MIB = 2**20


async def raw(rig: Rig, path: str, body: bytes = b"", headers: tuple[str, ...] = ()) -> trio.SocketStream:
    """Return a connection on which a request has been sent as it is."""
    host, port = rig.gateway.url.removeprefix("http://").split(":")
    stream = await trio.open_tcp_stream(host, int(port))
    head = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {rig.session.token}", *headers, "", ""]
    await stream.send_all("\r\n".join(head).encode() + body)
    return stream


async def status_of(stream: trio.SocketStream) -> int:
    """Return the status of the answer that comes."""
    return int((await stream.receive_some(64 * 1024)).split()[1])


def test_a_body_that_says_that_it_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        path = f"/sessions/{rig.session.session_id}/v1/completions"
        stream = await raw(rig, path, headers=(f"content-length: {200 * MIB}",))
        assert await status_of(stream) == 413
        await stream.aclose()

    gateway_rig.run(tmp_path, body)


def test_a_body_that_grows_too_large_is_refused(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        path = f"/sessions/{rig.session.session_id}/v1/completions"
        stream = await raw(rig, path, b"5000\r\n" + b"x" * 0x5000 + b"\r\n", headers=("transfer-encoding: chunked",))
        assert await status_of(stream) == 413
        await stream.aclose()

    gateway_rig.run(tmp_path, body, settings=SMALL)


@pytest.mark.slow
def test_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        bomb = gzip.compress(b" " * (32 * MIB), compresslevel=1)
        assert len(bomb) < MIB
        headers = {"content-encoding": "gzip"}
        reply = await rig.client.post(f"{rig.session.url}/v1/completions", content=bomb, headers=headers)
        assert reply.status_code == 413

    gateway_rig.run(tmp_path, body, settings=GatewaySettings(max_body_mib=1))


def test_a_gzip_bomb_is_never_held_unpacked() -> None:
    unpacker = _Unpacker("gzip", 1000)
    with pytest.raises(Refused, match="may have 1000 bytes"):
        unpacker.add(gzip.compress(b" " * MIB))
    assert sum(map(len, unpacker._parts)) == 1001


def test_gzip_is_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        whole = gzip.compress(json.dumps({"prompt": [1]}).encode())
        for content, encoding, status in (
            (whole, "gzip", 200),
            (whole[:-8], "gzip", 400),
            (b"no gzip", "gzip", 400),
            (whole, "br", 415),
        ):
            headers = {"content-encoding": encoding}
            reply = await rig.client.post(f"{rig.session.url}/v1/completions", content=content, headers=headers)
            assert reply.status_code == status, reply.text

    gateway_rig.run(tmp_path, body)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": NaN}', "not JSON"),
        (b'{"prompt": []}', "prompt must be"),
        (b'{"prompt": [1, "a"]}', "token ids"),
        (b'{"prompt": [-1]}', "from 0 to"),
        (b'{"prompt": [99999999999999999999]}', "from 0 to"),
        (b'{"prompt": [999999]}', "from 0 to"),
        (b'{"prompt": [[1], [[2]]]}', "prompt must be"),
        (b'{"prompt": [1], "n": 0}', "n must be"),
        (b'{"prompt": [1], "n": 1000}', "n must be"),
        (b'{"prompt": [1], "n": true}', "n must be"),
        (b'{"prompt": [1], "max_tokens": -5}', "max_tokens must be"),
        (b'{"prompt": [1], "stop": [""]}', "stop must be"),
        (b'{"prompt": [1], "stop": 3}', "stop must be"),
        (b'{"prompt": [1], "stream": "yes"}', "stream must be"),
        (b'{"prompt": [1], "logprobs": 5}', "logprobs must be"),
    ],
)
def test_bad_bodies_are_refused_with_what_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    async def body(rig: Rig) -> None:
        reply = await rig.client.post(f"{rig.session.url}/v1/completions", content=content)
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
        assert rig.sampler.asked == []

    gateway_rig.run(tmp_path, body)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("hi", "list of objects"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "function.name"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be"),
    ],
)
def test_bad_messages_are_refused_with_what_is_wrong(tmp_path: Path, messages: Any, words: str) -> None:
    async def body(rig: Rig) -> None:
        reply = await rig.post("/v1/chat/completions", {"messages": messages})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]

    gateway_rig.run(tmp_path, body)


def test_messages_that_the_template_refuses_are_the_clients_fault(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'odd' %}{{ raise_exception('no odd roles') }}{% endif %}"
        "{{ m['content'] + m.get('suffix', '') }}</s>{% endfor %}<|assistant|>"
    )

    async def body(rig: Rig) -> None:
        odd = await rig.chat({"role": "odd", "content": "x"})
        assert (odd.status_code, "no odd roles" in odd.text) == (400, True)
        number = await rig.chat({"role": "user", "content": "x", "suffix": 3})
        assert (number.status_code, "template fails" in number.text) == (400, True)
        assert (await rig.chat(user("x"))).status_code == 200

    gateway_rig.run(tmp_path, body, template=template)


def test_a_body_that_never_comes_is_given_up(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        path = f"/sessions/{rig.session.session_id}/v1/completions"
        stream = await raw(rig, path, b"{", headers=("content-length: 100",))
        assert await status_of(stream) == 408
        await stream.aclose()

    gateway_rig.run(tmp_path, body, settings=GatewaySettings(body_timeout_s=0.1))


def test_a_request_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.hold = trio.Event()
        reply = await rig.chat(user("hi"))
        assert (reply.status_code, "request_timeout_s" in reply.text) == (504, True)
        assert rig.session.num_running == 0

    gateway_rig.run(tmp_path, body, settings=GatewaySettings(request_timeout_s=0.1))


def test_more_requests_than_the_gateway_may_hold_are_told_to_come_back(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.sampler.hold = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.chat, user("one"))
            await rig.sampler.begun.wait()
            refused = await rig.chat(user("two"))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            rig.sampler.hold.set()

    gateway_rig.run(tmp_path, body, settings=GatewaySettings(max_requests=1))


async def stalled_client(rig: Rig) -> trio.SocketStream:
    """Return a client that has asked for more than all buffers take, and takes nothing of it."""
    wanted = json.dumps({"prompt": [1], "logprobs": 1, "return_token_ids": True, "n": 16}).encode()
    path = f"/sessions/{rig.session.session_id}/v1/completions"
    stream = await raw(rig, path, wanted, headers=(f"content-length: {len(wanted)}",))
    await rig.sampler.begun.wait()
    return stream


HUGE = ["x" * 4000] * 16


@pytest.mark.slow
def test_a_client_that_stops_reading_holds_nobody_up_and_is_let_go(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        stalled = await stalled_client(rig)
        assert (await rig.chat(user("hi"))).status_code == 200
        await trio.sleep(0.3)  # longer than the server waits for it
        taken = b""
        with suppress(trio.BrokenResourceError):
            while piece := await stalled.receive_some(2**20):
                taken += piece
        length = int(re.search(rb"content-length: (\d+)", taken)[1])  # type: ignore[index]
        assert len(taken) < length
        await stalled.aclose()

    gateway_rig.run(tmp_path, body, settings=GatewaySettings(stalled_client_s=0.1), replies=HUGE)


@pytest.mark.slow
def test_a_client_that_stops_reading_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The rig's end cancels the server, and fails after a minute where that does not end."""

    async def body(rig: Rig) -> None:
        stalled = await stalled_client(rig)
        await trio.testing.wait_all_tasks_blocked()
        rig.nursery.cancel_scope.cancel()
        await stalled.aclose()

    gateway_rig.run(tmp_path, body, replies=HUGE)


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 100_000])
def test_what_is_no_http_is_refused(tmp_path: Path, sent: bytes) -> None:
    async def body(rig: Rig) -> None:
        host, port = rig.gateway.url.removeprefix("http://").split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        await stream.send_all(sent)
        assert 400 <= await status_of(stream) < 500
        await stream.aclose()
        assert (await rig.chat(user("hi"))).status_code == 200

    gateway_rig.run(tmp_path, body)


def test_requests_that_follow_each_other_closely_are_answered_in_order(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        path = f"/sessions/{rig.session.session_id}/v1/completions"
        contents = [json.dumps({"prompt": [number], "return_token_ids": True}).encode() for number in (1, 2, 3)]
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.session.token}\r\n"
        rest = b"".join(f"{head}content-length: {len(c)}\r\n\r\n".encode() + c for c in contents[1:])
        stream = await raw(rig, path, contents[0] + rest, headers=(f"content-length: {len(contents[0])}",))
        answers = b""
        while answers.count(b"prompt_token_ids") < 3:
            answers += await stream.receive_some(2**16)
        places = [answers.index(f'"prompt_token_ids":[{number}]'.encode()) for number in (1, 2, 3)]
        assert places == sorted(places)
        await stream.aclose()

    gateway_rig.run(tmp_path, body)


def test_a_client_that_asks_whether_it_may_send_is_told_so(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        path = f"/sessions/{rig.session.session_id}/v1/completions"
        stream = await raw(rig, path, headers=("content-length: 15", "expect: 100-continue"))
        assert await status_of(stream) == 100
        await stream.send_all(b'{"prompt": [1]}')
        assert await status_of(stream) == 200
        await stream.aclose()

    gateway_rig.run(tmp_path, body)


@pytest.mark.slow
def test_sessions_that_have_begun_go_before_new_ones_where_the_caches_are_full(tmp_path: Path) -> None:
    uses = [0.5]

    async def look() -> list[float]:
        await trio.lowlevel.checkpoint()
        return uses

    async def body(rig: Rig) -> None:
        assert (await rig.chat(user("hi"))).status_code == 200
        uses[0] = 0.99
        while rig.gateway._cache_use.has_room:  # type: ignore[union-attr]  # noqa: ASYNC110 - until it has looked again
            await trio.sleep(0.05)
        assert (await rig.chat(user("hi"))).status_code == 200
        async with rig.gateway.session(rig.sampler, task=gateway_rig.TASK, trajectory_id="7-1") as new:
            headers = {"authorization": f"Bearer {new.token}"}
            reply = await rig.client.post(f"{new.url}/v1/completions", json={"prompt": [1]}, headers=headers)
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
            assert "99% full" in reply.json()["error"]["message"]

    gateway_rig.run(tmp_path, body, cache_use=CacheUse(look, limit=0.95))


def test_nothing_listens_beyond_the_loopback_address_unless_told_to() -> None:
    assert GatewaySettings().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70000}, "port must be from 0 to 65535"),
        ({"max_body_mib": 0}, "max_body_mib must be"),
        ({"max_cache_use": float("nan")}, "max_cache_use must be"),
        ({"request_timeout_s": 0}, "request_timeout_s must be > 0"),
        ({"public_url": "ftp://x"}, "public_url must begin"),
        ({"host": ""}, "host must not be empty"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GatewaySettings(**settings)


def test_a_bug_in_a_handler_ends_the_server(tmp_path: Path) -> None:
    """It is not caught and forgotten: a run must not go on with a gateway that answers 500."""

    async def main() -> None:
        renderer = gateway_rig.make_renderer(tmp_path)
        sampler = gateway_rig.Scripted(renderer, [RuntimeError("a bug")])
        async with gateway_rig.serving(renderer, GatewaySettings(), sampler) as rig:
            await rig.chat(user("hi"))

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main)
    assert caught.group_contains(RuntimeError, match="a bug")


def test_a_gateway_that_does_not_serve_opens_no_session(tmp_path: Path) -> None:
    async def main() -> None:
        renderer = gateway_rig.make_renderer(tmp_path)
        gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=100)
        with pytest.raises(Exception, match="does not serve"):
            gateway.open(gateway_rig.Scripted(renderer), task=gateway_rig.TASK, trajectory_id="0-0")

    trio.run(main)


def test_a_taken_port_is_refused_by_name() -> None:
    with listen("127.0.0.1", 0, setting="[gateway] port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"\[gateway\] port {port}"):
            listen("127.0.0.1", port, setting="[gateway] port")
