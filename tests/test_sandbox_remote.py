"""Sandboxes at servers: the token, the queue, lost clients and lost servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from sandboxes import (
    LIMITS,
    cannot_sandbox,
    ended_within,
    groups_of,
    has_groups,
    opened,
    processes_with,
    settings,
    wait_started,
)

from asyncrl.cli import main
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.protocols import Outcome, Sandbox
from asyncrl.sandbox import SandboxSettings, messages, open_backend
from asyncrl.sandbox.server import SandboxServer
from asyncrl.serving import listen, serve

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-the-tests"
WEAK = () if has_groups() else ("--set", "sandbox.allow_weaker=true")


@contextmanager
def server(directory: Path, port: int = 0, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server in a process of its own, and its address."""
    if reason := cannot_sandbox():
        pytest.skip(reason)
    token = directory / "token"
    argv = ["sandbox", "serve", "--port", str(port), "--token-file", str(token), *WEAK, *more]
    with subprocess.Popen([sys.executable, "-m", "asyncrl", *argv], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("serving bubblewrap"), said
        try:
            yield process, said.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def remote(directory: Path, *urls: str, **changes: Any) -> SandboxSettings:
    return settings(backend="remote", urls=urls, token_file=str(directory / "token"), **changes)


CLIENT = """
import sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from sandboxes import LIMITS, wait_started
from test_sandbox_remote import remote
from asyncrl.sandbox import open_backend
async def main():
    directory = Path(sys.argv[1])
    opening = open_backend(remote(directory, sys.argv[2]), directory=directory)
    async with opening as backend, trio.open_nursery() as nursery:
        for _ in range(5):
            sandbox = await backend.open({}, limits=LIMITS)
            nursery.start_soon(sandbox.exec, ["/bin/sh", "-c", ": > started; sleep %(mark)s; true"])
            await wait_started(sandbox)
        print("ready", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


def test_nothing_of_a_killed_client_is_left_and_the_server_goes_on(tmp_path: Path) -> None:
    mark = f"3169{os.getpid()}"
    with server(tmp_path, 0, "--set", "sandbox.max_open=5") as (process, url):
        argv = [sys.executable, "-c", CLIENT % {"mark": mark}, str(tmp_path), url, os.path.dirname(__file__)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            running = [os.pidfd_open(pid) for pid in processes_with(mark)]
            assert len(running) >= 5
            client.kill()
            client.wait()
        for pidfd in running:
            assert ended_within(pidfd, 10)
            os.close(pidfd)
        assert processes_with(mark) == []

        async def again() -> None:
            with trio.fail_after(40):  # the killed one had all the places
                await use()

        async def use() -> None:
            async with open_backend(remote(tmp_path, url), directory=tmp_path) as backend:
                async with await backend.open({"a": b"1"}, limits=LIMITS) as sandbox:
                    assert (await sandbox.exec(["cat", "a"])).stdout == b"1"
                assert backend.wall == "remote:bubblewrap" if has_groups() else "remote:bubblewrap-rlimits"

        trio.run(again)
    assert process.returncode == 0
    assert groups_of(process.pid) == []


async def refuse_malformed(client: httpx.AsyncClient, token: dict[str, str]) -> None:
    """Every request that is not as the protocol has it is refused by itself; the session and its sandboxes go on."""
    limits = asdict(LIMITS)
    opening = {"new": "a", "paths": [], "snapshot": None, "places": {}, "work": "/task", "image": "", "limits": limits}
    caps = {"wall_s": 9.0, "output_bytes": 100, "kept_output_bytes": 100}
    command = {"sandbox": "a", "argv": ["echo", "hi"], "caps": caps}
    async with await trio.open_tcp_stream(client.base_url.host, client.base_url.port or 0) as session:
        request = f"GET /v1/session HTTP/1.1\r\nHost: x\r\nAuthorization: {token['Authorization']}\r\n\r\n"
        await session.send_all(request.encode())
        said = b""
        while not (found := re.search(rb'"session": "(\w+)"', said)):
            said += await session.receive_some()
        headers = {**token, "asyncrl-session": found[1].decode()}

        async def post(operation: str, content: bytes) -> httpx.Response:
            return await client.post(f"/v1/{operation}", content=content, headers=headers)

        opened_one = await post("open", messages.encode({**opening, "paths": ["x"]}, [b"x"]))
        assert opened_one.status_code == 200, opened_one.text
        for frame in (b"", b"\xff" * 9, b"abc", messages.PREFIX.pack(2, 0) + b"[]", messages.PREFIX.pack(2, 0) + b"{}"):
            assert (await post("open", frame)).status_code == 400
        for operation, header in (
            ("open", {**opening, "work": 5}),
            ("open", {**opening, "places": ["/x"]}),
            ("open", {**opening, "paths": ["a"]}),
            ("open", {**opening, "limits": {"wall": 3}}),
            ("exec", command),  # without its input
            ("exec", {**command, "argv": [1]}),
            ("read", {"sandbox": "a", "path": 7, "max_bytes": 9}),
            ("read", {"sandbox": "a", "path": "x", "max_bytes": "x"}),
            ("read", {"sandbox": ["a"], "path": "x", "max_bytes": 9}),
            ("walk", {"sandbox": "a", "path": None, "max_entries": 9}),
        ):
            answer = await post(operation, messages.encode(header))
            assert answer.status_code == 400, (operation, header, answer.text)
        answer = await post("exec", messages.encode(command, [b""]))
        assert messages.decode(answer.content)[1][0] == b"hi\n"


def test_a_malformed_request_is_refused_and_ends_nobodys_sandboxes(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as backend, trio.open_nursery() as nursery:
            listener = listen("127.0.0.1", 0, setting="port")
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await nursery.start(serve, SandboxServer(backend, token=TOKEN), listener)
            async with httpx.AsyncClient(base_url=url) as client:
                await refuse_malformed(client, {"Authorization": f"Bearer {TOKEN}"})
            nursery.cancel_scope.cancel()

    if reason := cannot_sandbox():
        pytest.skip(reason)
    trio.run(main)


def test_a_lost_server_fails_its_commands_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    results = []

    async def main() -> None:
        with server(tmp_path) as (process, url):
            port = int(url.rpartition(":")[2])
            async with open_backend(remote(tmp_path, url), directory=tmp_path) as backend:
                task = await backend.prepare({"a": b"1"})
                sandbox = await backend.open(task, limits=LIMITS)

                async def sleep() -> None:
                    results.append(await sandbox.exec(["/bin/sh", "-c", ": > started; sleep 60"]))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sleep)
                    await wait_started(sandbox)
                    process.kill()
                    await trio.to_thread.run_sync(process.wait)
                assert results[0].outcome is Outcome.INFRASTRUCTURE
                assert url in results[0].detail
                with pytest.raises(SandboxError, match=r"lost|reached|answer"):
                    await sandbox.read("a")
                await sandbox.aclose()
                with server(tmp_path, port):
                    async with await backend.open(task, limits=LIMITS) as other:  # files are brought there once more
                        assert await other.read("a") == b"1"
                        after = await sandbox.exec(["true"])
                        assert after.outcome is Outcome.INFRASTRUCTURE

    trio.run(main)


def test_who_has_no_token_gets_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "wrong").write_text("not-the-right-token")
        async with opened(tmp_path) as backend, trio.open_nursery() as nursery:
            listener = listen("127.0.0.1", 0, setting="port")
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await nursery.start(serve, SandboxServer(backend, token=TOKEN), listener)
            async with httpx.AsyncClient(base_url=url) as client:
                for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {TOKEN}"}):
                    for method, path in (("GET", "/v1/session"), ("POST", "/v1/open"), ("GET", "/")):
                        response = await client.request(method, path, headers=headers)
                        assert (response.status_code, response.text) == (401, "the token is missing or wrong")
                right = {"Authorization": f"Bearer {TOKEN}"}
                assert (await client.post("/v1/open", headers=right)).status_code == 410
                assert (await client.post("/v1/fetch", headers=right)).status_code == 404
                assert (await client.get("/", headers=right)).status_code == 404
            wrong = settings(backend="remote", urls=(url,), token_file=str(tmp_path / "wrong"))
            with pytest.raises(SandboxError, match="answered 401: the token is missing or wrong"):
                async with open_backend(wrong, directory=tmp_path):
                    pass
            nursery.cancel_scope.cancel()

    if reason := cannot_sandbox():
        pytest.skip(reason)
    trio.run(main)


def test_the_queue_is_bounded_and_those_beyond_it_come_back(tmp_path: Path) -> None:
    """With one place, and one who may wait: the third is sent away, asks again, and gets its turn."""
    refused: list[bytes] = []

    class Watched(SandboxServer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def watch(event: dict[str, Any]) -> None:
                if b"already" in event.get("body", b""):
                    refused.append(event["body"])
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(first.aclose)  # not before somebody was sent away
                await send(event)

            await super().__call__(scope, receive, watch)

    first: Sandbox

    async def main() -> None:
        nonlocal first
        (tmp_path / "token").write_text(TOKEN)
        async with opened(tmp_path, max_open=1) as served, trio.open_nursery() as nursery:
            listener = listen("127.0.0.1", 0, setting="port")
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await nursery.start(serve, Watched(served, token=TOKEN, max_waiting=1), listener)
            async with open_backend(remote(tmp_path, url), directory=tmp_path) as backend:
                first = await backend.open({}, limits=LIMITS)

                async def use() -> None:
                    async with await backend.open({}, limits=LIMITS) as sandbox:
                        assert (await sandbox.exec(["true"])).exit_code == 0

                with trio.fail_after(40):
                    async with trio.open_nursery() as users:
                        users.start_soon(use)
                        users.start_soon(use)
                assert backend.statistics().open == 0
            nursery.cancel_scope.cancel()

    if reason := cannot_sandbox():
        pytest.skip(reason)
    trio.run(main)
    assert refused == [b"1 requests wait for a sandbox already"] * len(refused) != []


def test_a_weaker_wall_at_the_server_is_taken_only_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "token").write_text(TOKEN)
        async with opened(tmp_path) as served, trio.open_nursery() as nursery:
            served.wall = "bubblewrap-rlimits"
            listener = listen("127.0.0.1", 0, setting="port")
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await nursery.start(serve, SandboxServer(served, token=TOKEN), listener)
            with pytest.raises(SandboxError, match="wall is 'bubblewrap-rlimits', a weaker one"):
                async with open_backend(remote(tmp_path, url, allow_weaker=False), directory=tmp_path):
                    pass
            async with (
                open_backend(remote(tmp_path, url, allow_weaker=True), directory=tmp_path) as backend,
                await backend.open({}, limits=LIMITS) as sandbox,
            ):
                assert sandbox.wall == backend.wall == "remote:bubblewrap-rlimits"
            nursery.cancel_scope.cancel()

    if reason := cannot_sandbox():
        pytest.skip(reason)
    trio.run(main)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "remote"}, "urls must name servers where backend is 'remote'"),
        ({"urls": ("http://a",)}, "urls must name servers where backend is 'remote', and only there"),
        ({"backend": "remote", "urls": ("a:1",)}, "urls must begin with http:// or https://, got 'a:1'"),
    ],
)
def test_servers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxSettings(**changes)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_backend(remote(tmp_path, "http://127.0.0.1:9"), directory=tmp_path):
            pass

    with pytest.raises(ConfigError, match=r"token_file: .*token cannot be read"):
        trio.run(main)
    (tmp_path / "token").write_text("short")
    with pytest.raises(ConfigError, match="must hold a token of at least 16 characters"):
        trio.run(main)
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(SandboxError, match=r"the sandbox server http://127.0.0.1:9 cannot be reached"):
        trio.run(main)


def test_what_cannot_be_served_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    for arguments, message in (
        (
            ["--set", 'sandbox.backend="remote"', "--set", 'sandbox.urls=["http://a"]'],
            "must be a local one to be served",
        ),
        (["--max-waiting", "-1"], "--max-waiting must be >= 0, got -1"),
        (["--host", "203.0.113.1"], "--port 8790 on 203.0.113.1 cannot be used"),
    ):
        assert main(["sandbox", "serve", "--token-file", token, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert os.stat(token).st_mode & 0o777 == 0o600
    assert main(["sandbox", "serve", "--token-file", str(tmp_path / "none" / "token")]) == 2
    assert "cannot be written" in capsys.readouterr().err
