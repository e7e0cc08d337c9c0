"""Roles find the orchestrator, are known again, and lose nothing by a connection that breaks."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from roles_rig import TOKEN, EchoRole, Rig, run, settings, speaking

from asyncrl import wire
from asyncrl.cli import main
from asyncrl.errors import ConfigError, RoleError
from asyncrl.roles import Door, Rendezvous, RoleSettings, messages
from asyncrl.roles.clocks import compare, now_s
from asyncrl.roles.settings import tls_context
from asyncrl.serving import listen

pytestmark = pytest.mark.slow


def test_a_service_is_reached_through_its_role_by_many_at_once() -> None:
    role = EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(role)
        guest = await rig.guest()
        assert guest.token == "echo"
        async with trio.open_nursery() as nursery:

            async def talk(number: int) -> None:
                async with speaking(guest) as say:
                    await say(bytes([number]) * 200_000)
                    await say(b"once more")

            for number in range(8):
                nursery.start_soon(talk, number)

    rig = run(body)
    assert rig.ended == {"e0": "the run ends"}
    assert role.jobs == [{"do": "engine"}]
    assert any("engine e0 has come from" in line for line in rig.said)


def test_a_broken_conversation_interrupts_nothing_and_the_role_is_recognised() -> None:
    role = EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(role)
        guest = await rig.guest()
        async with speaking(guest) as say:
            await say(b"before")
            await rig.wire.cut(0)  # the conversation came first
            await say(b"while it is away")
            await rig.wait_said("engine e0 is back after")
            await say(b"after")
            async with speaking(guest) as other:
                await other(b"a new one")

    rig = run(body)
    assert len(role.jobs) == 1
    assert not any("lost" in line for line in rig.said)


def test_who_is_silent_for_too_long_is_lost_and_comes_back_to_its_place() -> None:
    role = EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(role)
        guest = await rig.guest()
        port = guest.port
        async with speaking(guest) as say:
            await say(b"before")
            rig.wire.hold()
            await rig.wait_said("engine e0 is lost")
            with pytest.raises((EOFError, BaseExceptionGroup)):
                await say(b"is anybody there?")
            assert guest.is_lost
            rig.wire.flow()
            await rig.wait_said("engine e0 is back after")
        assert not guest.is_lost
        assert (await rig.guest(), guest.port) == (guest, port)
        async with speaking(guest) as say:
            await say(b"back")

    run(body)
    assert len(role.jobs) == 1


def test_a_connection_that_is_asked_for_while_the_role_is_away_is_made_when_it_is_back() -> None:
    role = EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(role)
        guest = await rig.guest()
        rig.wire.hold()
        async with trio.open_nursery() as nursery:

            async def talk() -> None:
                async with speaking(guest) as say:
                    await say(b"at last")

            nursery.start_soon(talk)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await rig.wire.cut(0)
            rig.wire.flow()

    rig = run(body)
    assert not any("lost" in line for line in rig.said)


def test_two_of_one_name_at_once_are_refused_and_the_first_goes_on() -> None:
    async def body(rig: Rig) -> None:
        rig.come(EchoRole())
        guest = await rig.guest()
        async with speaking(guest) as say:
            await say(b"before")
            rig.nursery.start_soon(rig.attend, _other(rig, "another"), EchoRole(), trio.Event())
            assert "another engine of this name is connected" in await rig.wait_ended("e0")
            await say(b"after")
        rig.failed.clear()

    rig = run(body)
    assert rig.ended == {"e0": "the run ends"}


def _other(rig: Rig, instance: str) -> Door:
    """Return the door of another process of the same name, which does not go by the wire."""
    return replace(rig.door, instance=instance, port=rig.wire._target)


def test_a_name_whose_owner_is_silent_goes_to_its_successor() -> None:
    first, second = EchoRole(), EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(first)
        guest = await rig.guest()
        rig.wire.hold()
        rig.nursery.start_soon(rig.attend, _other(rig, "successor"), second, trio.Event())
        await rig.wait_said("engine e0 is back as a new process")
        while not guest.is_ready:
            await guest.wait_changed()
        async with speaking(guest) as say:
            await say(b"to the successor")
        rig.nursery.cancel_scope.cancel()  # the first is held, and would try again for its patience

    rig = run(body, lost_s=30.0)
    assert len(second.jobs) == 1
    assert first.seeds != second.seeds, "two processes would sample alike"
    assert not any("lost" in line for line in rig.said)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"token": "another-token-of-the-tests"}, "engine", "the token is wrong"),
        ({}, "sandbox", r"this run asks for no sandbox from elsewhere"),
    ],
)
def test_who_is_not_expected_is_refused_by_name(changes: Mapping[str, Any], kind: str, words: str) -> None:
    async def body(rig: Rig) -> None:
        rig.come(EchoRole(kind), **changes)
        ended = await rig.wait_ended("e0")
        assert ended.startswith(f"ConfigError: the orchestrator refuses {kind} e0: ")
        assert words in ended

    rig = run(body)
    assert any(words in line for line in rig.said)


def test_another_version_of_asyncrl_is_refused_and_both_are_named() -> None:
    async def body(rig: Rig) -> None:
        hello = rig.door.hello("engine")
        async with await trio.open_tcp_stream("127.0.0.1", rig.wire.port) as stream:
            await wire.send_async(stream, messages.Hello(**{**_fields(hello), "asyncrl": "0.0.9"}))
            answer = await wire.receive_async(stream, messages.Welcome | messages.Refused)
        assert isinstance(answer, messages.Refused)
        assert "it has asyncrl 0.0.9 and the orchestrator 0." in answer.reason

    run(body)


def _fields(hello: messages.Hello) -> dict[str, Any]:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}


def test_a_role_more_than_the_run_asks_for_is_refused_unless_it_is_an_engine() -> None:
    async def body(rig: Rig) -> None:
        rig.come(EchoRole("environment"), name="here")
        rig.come(EchoRole("engine"), name="first")
        await rig.rendezvous.wait_all()
        rig.come(EchoRole("environment"), name="there")
        assert "this run has the 1 that it asks for: here" in await rig.wait_ended("there")
        rig.come(EchoRole("environment"), name="first")
        assert "its name is taken by engine first: take another one (--name)" in await rig.wait_ended("first")
        rig.come(EchoRole("engine"), name="second")
        (later,) = await rig.rendezvous.wait_later(["first"])
        assert later.name == "second"

    run(body, environments=1)


def test_a_clock_that_is_off_is_said_and_does_no_harm() -> None:
    assert compare(now_s()) == ""
    assert "3600 s ahead" in compare(now_s() + 3600)
    assert "3600 s behind" in compare(now_s() - 3600)

    async def body(rig: Rig) -> None:
        hello = messages.Hello(**{**_fields(rig.door.hello("engine")), "clock_s": now_s() + 86400})
        async with await trio.open_tcp_stream("127.0.0.1", rig.wire.port) as stream:
            await wire.send_async(stream, hello)
            assert isinstance(await wire.receive_async(stream, messages.Welcome), messages.Welcome)
        await rig.wait_said("its clock is 86400 s ahead")

    run(body)


def test_strangers_are_closed_upon_and_disturb_nobody() -> None:
    async def body(rig: Rig) -> None:
        rig.come(EchoRole())
        guest = await rig.guest()
        async with speaking(guest) as say:
            for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
                async with await trio.open_tcp_stream("127.0.0.1", rig.wire.port) as stream:
                    await stream.send_all(noise)
                    await stream.send_eof()
                    with trio.fail_after(5):
                        assert await stream.receive_some() == b""
            async with await trio.open_tcp_stream("127.0.0.1", rig.wire.port) as stream:
                await wire.send_async(stream, messages.Channel(key="guessed"))
                assert await stream.receive_some() == b""
            await say(b"undisturbed")

    run(body)


def test_who_does_not_come_is_named() -> None:
    async def alone(rig: Rig) -> None:
        with pytest.raises(RoleError, match=r"2 engines \(asyncrl engine .*, 1 sandbox .* did not come in 0\.3 s"):
            await rig.rendezvous.wait_all()

    run(alone, engines=2, sandboxes=1, wait_s=0.3)


def test_a_service_that_cannot_go_on_ends_its_role_and_is_said_at_the_orchestrator() -> None:
    role = EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(role)
        guest = await rig.guest()
        role.fails.set()
        assert await rig.wait_ended("e0") == "EngineError: the echo died away"
        await rig.wait_said("engine e0 leaves: the echo died away")
        assert guest.is_lost

    run(body)


def test_a_role_that_is_stopped_takes_its_leave() -> None:
    stop = trio.Event()

    async def body(rig: Rig) -> None:
        rig.come(EchoRole(), stop=stop)
        await rig.guest()
        stop.set()
        assert await rig.wait_ended("e0") == "it was told to stop"
        await rig.wait_said("engine e0 leaves: it was told to stop")

    run(body)


@pytest.mark.parametrize("same_job", [True, False])
def test_a_service_outlives_its_orchestrator_and_goes_on_for_the_same_job(same_job: bool) -> None:
    """The first orchestrator is killed: it says no farewell, and another one comes to its port."""
    role = EchoRole()

    async def body(rig: Rig) -> None:
        rig.come(role)
        await rig.guest()
        rig.wire._target = 1  # nobody listens there
        await rig.wire.cut(0)
        said: list[str] = []
        job = {"engine": {"do": "engine" if same_job else "more"}}
        second = Rendezvous(settings(), job, token=TOKEN, tls=None, say=said.append)
        listener = listen("127.0.0.1", 0, setting="a test's port")
        rig.wire._target = listener.getsockname()[1]
        async with second.opened(listener):
            (guest,) = (await second.wait_all())["engine"]
            async with speaking(guest) as say:
                await say(b"to the second")
        assert await rig.wait_ended("e0") == "the run ends"

    run(body)
    assert len(role.jobs) == (1 if same_job else 2)


def test_an_orchestrator_that_is_nowhere_is_given_up_after_a_while() -> None:
    async def body(rig: Rig) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            rig.come(EchoRole(), port=closed.getsockname()[1], give_up_s=0.5)
            assert "was out of reach for 0.5 s (--give-up-s)" in await rig.wait_ended("e0")

    run(body)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, and its key beside it."""
    directory = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=orchestrator", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*make, *subject, *files], check=True, capture_output=True)
    return directory / "cert.pem"


def server_context(certificate: Path) -> ssl.SSLContext:
    tls = {"tls_certificate": str(certificate), "tls_key": str(certificate.with_name("key.pem"))}
    context = tls_context(settings(**tls))
    assert context is not None
    return context


def test_channels_and_conversations_are_encrypted(certificate: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate))

    async def body(rig: Rig) -> None:
        rig.come(EchoRole(), tls=trusted)
        async with speaking(await rig.guest()) as say:
            await say(b"secret" * 50_000)
            await rig.wire.cut(0)
            await rig.wait_said("is back after")
            await say(b"still")

    rig = run(body, tls=server_context(certificate))
    assert rig.ended == {"e0": "the run ends"}
    assert "with TLS" in rig.said[0]


def test_a_certificate_that_is_not_trusted_is_refused_by_the_role(certificate: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.come(EchoRole(), tls=ssl.create_default_context(), name="strange")
        assert "(--tls-ca)" in (ended := await rig.wait_ended("strange"))
        assert ended.startswith("ConfigError: the orchestrator's certificate is not that of 127.0.0.1")
        rig.come(EchoRole(), name="plain", give_up_s=1.0)
        assert "does it want TLS (--tls-ca)?" in await rig.wait_ended("plain")

    run(body, tls=server_context(certificate))


def test_an_orchestrator_without_tls_is_told_apart(certificate: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.come(EchoRole(), tls=ssl.create_default_context(cafile=str(certificate)), give_up_s=1.0)
        assert "TLS" in await rig.wait_ended("e0")

    run(body)


# --- what is typed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engines": -1}, "engines must be from 0 to 1024, got -1"),
        ({"listen": ""}, "listen must be given where roles are asked for"),
        ({"listen": "8780"}, "must be \"HOST:PORT\", got '8780'"),
        ({"engines": 0}, "and no role is asked for"),
        ({"listen": "0.0.0.0:8780"}, "token_file must be given where listen is not on the loopback, got '0.0.0.0'"),
        ({"heartbeat_s": 1.0, "lost_s": 2.0}, "lost_s must be at least 3 * heartbeat_s = 3, got 2"),
        ({"heartbeat_s": 60.0, "lost_s": 300.0}, "heartbeat_s must be at most 10 seconds, got 60"),
        ({"wait_s": 0.0}, "wait_s must be > 0 and finite seconds, got 0"),
        ({"tls_key": "key.pem"}, "tls_key is given without a tls_certificate"),
    ],
)
def test_settings_that_cannot_be_are_named(changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**changes)
    assert words in str(caught.value)
    assert "[roles]" in str(caught.value)


def test_a_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_certificate: .*gone\.pem and its key cannot be used"):
        tls_context(RoleSettings(listen="127.0.0.1:1", engines=1, tls_certificate=str(tmp_path / "gone.pem")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine", "--connect", "nowhere"], "--connect must be \"HOST:PORT\", got 'nowhere'"),
        (["sandbox"], "an action (self-test, serve, reap) or --connect HOST:PORT must be given"),
        (["sandbox", "--connect", "h:1", "--token-file", "/gone"], "/gone cannot be read"),
        (["environment", "--connect", "h:1", "--name", "a b"], "--name must be up to 60 letters"),
        (["learner", "--connect", "h:1", "--tls-ca", "/gone"], "--tls-ca: /gone cannot be used"),
        (["learner", "--connect", "h:1", "--give-up-s", "0"], "--give-up-s must be > 0 and finite seconds, got 0"),
    ],
)
def test_what_is_typed_wrong_at_a_role_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
