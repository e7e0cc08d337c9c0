"""What roles serve is what the orchestrator would have at home: a learner, sandboxes and an environment, all real."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from roles_rig import EchoRole, Rig, run
from sandboxes import LIMITS, has_groups, skip_unless_possible
from scripted import ScriptedSampler
from synthetic_groups import random_groups
from tiny_model import build_tiny_model
from tiny_run import write_config

from asyncrl.commands.check import process_plan
from asyncrl.configs import Config, load_config, to_table
from asyncrl.errors import LearnerError
from asyncrl.processes import LearnerProcess
from asyncrl.protocols import Outcome
from asyncrl.role_services import EngineRole, EnvironmentRole, LearnerRole, SandboxRole
from asyncrl.roles import Guest
from asyncrl.run_directory import RunDirectory
from asyncrl.run_roles import guests_environment, guests_sandboxes, role_jobs
from asyncrl.tokens import ChatRenderer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(directory: Path, model: Path, **roles: Any) -> Config:
    """Return the configuration of a run with roles."""
    weights = directory / "weights"
    weights.mkdir(exist_ok=True)
    changes = {
        "run.directory": str(directory / "run"),
        "weight_sync.transport": "filesystem",
        "weight_sync.directory": str(weights),
        "sandbox.allow_weaker": not has_groups(),
        "roles.listen": "127.0.0.1:1",
        **{f"roles.{name}": value for name, value in roles.items()},
    }
    return load_config(write_config(directory / "config.toml", model, changes))


def jobs_of(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """Return what roles of the configuration's run are told."""
    directory = RunDirectory(config.run.directory)
    directory.path.mkdir(exist_ok=True)
    job = {
        "model": str(config.model.path),
        "run_id": "roles",
        "weight_sync": to_table(config.weight_sync),
        "learner": to_table(config.learner),
    }
    return role_jobs(config, directory, job)


# --- learner ----------------------------------------------------------------------------------------------------------


def test_a_learner_elsewhere_works_as_one_at_home_and_ends_its_run_when_it_dies(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path means the orchestrator's own working directory
    config = config_of(tmp_path, model, learner=True)

    async def main(rig: Rig) -> None:
        rig.come(LearnerRole(tmp_path / "logs"), name="l0")
        guest = await rig.guest("learner")
        async with guest.channel() as channel:
            learner = LearnerProcess(channel, None, place=f"{guest.name} at {guest.hello.host}")
            await learner.wait_ready(0)
            result = await learner.step(random_groups(0))
            assert (result.version, result.stepped) == (1, True)
            assert Path((await learner.publish()).location).is_file()
            Path("saved").mkdir()
            assert "model/model.safetensors" in await learner.save("saved")
            assert (tmp_path / "saved/model/model.safetensors").is_file()
            (pid,) = _learners(tmp_path / "logs" / "learner.json")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(LearnerError, match=r"the learner, l0 at .*, closed its connection"):
                await learner.step(random_groups(1))
            assert "learner was ended by signal 9" in await rig.wait_ended("l0")
            await rig.wait_said("learner l0 leaves: learner was ended by signal 9")

    run(main, jobs=jobs_of(config), learner=True, engines=0)
    assert list((tmp_path / "weights").iterdir()) == [], "what it had published is left behind"


def test_a_learner_whose_host_falls_silent_ends_the_run_instead_of_hanging_it() -> None:
    async def main(rig: Rig) -> None:
        rig.come(EchoRole("learner"), name="l0")
        guest = await rig.guest("learner")
        async with guest.channel() as channel:
            learner = LearnerProcess(channel, None, place=guest.name)
            rig.wire.hold()
            with pytest.raises(LearnerError, match="the learner, l0, closed its connection"):
                await learner.step(random_groups(0))
            assert guest.is_lost
            with pytest.raises(LearnerError):
                await learner.publish()
        rig.wire.flow()
        await rig.wait_said("learner l0 is back after")

    run(main, learner=True, engines=0)


def _learners(settings_path: Path) -> list[int]:
    """Return the learner processes that were started with a settings file, their keepers left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(settings_path).encode() in words and not any(word.endswith(b"keeper.py") for word in words):
            found.append(int(entry.name))
    return found


# --- engine -----------------------------------------------------------------------------------------------------------

_SERVER = """
import argparse, os, socket
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--seed")
known, _ = parser.parse_known_args()
listener = socket.create_server(("127.0.0.1", known.port))
while True:
    connection, _ = listener.accept()
    if connection.recv(100) == b"die":
        print("it was told to die", flush=True)
        os._exit(3)
    connection.sendall(known.seed.encode())
    connection.close()
"""
"""Stands for vLLM: tells its seed, or dies."""


def test_a_server_elsewhere_that_dies_is_started_again_as_often_as_the_settings_say(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "servers" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(_SERVER)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "servers"))
    job = dict(jobs_of(config_of(tmp_path, model, engines=1))["engine"])
    job["engine"] = {**job["engine"], "restarts": 1}

    async def ask(guest: Guest, words: bytes) -> bytes:
        while True:  # the server is being started, of which nothing tells
            async with await trio.open_tcp_stream("127.0.0.1", guest.port) as stream:
                try:
                    await stream.send_all(words)
                    if heard := await stream.receive_some():
                        return bytes(heard)
                except trio.BrokenResourceError:
                    pass
            await trio.sleep(0.02)

    async def main(rig: Rig) -> None:
        rig.come(EngineRole(tmp_path / "logs"))
        guest = await rig.guest()
        first = await ask(guest, b"seed")
        async with await trio.open_tcp_stream("127.0.0.1", guest.port) as stream:
            await stream.send_all(b"die")
            await rig.wait_said("starting it again, 1 of 1 times")
        assert any("it was told to die" in line for line in rig.said), "its last lines are not shown"
        assert await ask(guest, b"seed") != first, "the same seed samples the same"
        async with await trio.open_tcp_stream("127.0.0.1", guest.port) as stream:
            await stream.send_all(b"die")
            assert "it was started again 1 times ([engine] restarts)" in await rig.wait_ended("e0")
        await rig.wait_said("engine e0 leaves: engine 0 exited with code 3")

    run(main, jobs={"engine": job})


# --- sandboxes and environments ---------------------------------------------------------------------------------------


def test_sandboxes_elsewhere_run_commands_and_a_lost_host_is_a_failure_of_infrastructure(
    model: Path, tmp_path: Path
) -> None:
    skip_unless_possible("bubblewrap")
    config = config_of(tmp_path, model, sandboxes=1)

    async def main(rig: Rig) -> None:
        rig.come(SandboxRole(), name="s0")
        await rig.guest("sandbox")
        async with guests_sandboxes(config, rig.rendezvous) as backend:
            async with await backend.open({"a": b"1"}, limits=LIMITS) as sandbox:
                assert (await sandbox.exec(["cat", "a"])).stdout == b"1"
                rig.wire.hold()
                await rig.wait_said("sandbox s0 is lost")
                assert (await sandbox.exec(["cat", "a"])).outcome is Outcome.INFRASTRUCTURE
            rig.wire.flow()
            await rig.wait_said("sandbox s0 is back after")
            async with await backend.open({"a": b"2"}, limits=LIMITS) as sandbox:
                assert (await sandbox.exec(["cat", "a"])).stdout == b"2"

    run(main, jobs=jobs_of(config), sandboxes=1, engines=0)


def test_an_environment_elsewhere_plays_on_where_it_was_when_its_host_is_back(model: Path, tmp_path: Path) -> None:
    skip_unless_possible("bubblewrap")
    config = config_of(tmp_path, model, environments=1)
    renderer = ChatRenderer.load(model)
    said: list[str] = []

    async def main(rig: Rig) -> None:
        class Holding(ScriptedSampler):
            """Loses the host in the middle of the episode, once."""

            async def sample(self, *arguments: Any, **options: Any) -> Any:
                said.append(options["trajectory_id"])
                if len(said) == 2:
                    rig.wire.hold()
                    rig.nursery.start_soon(heal)
                return await super().sample(*arguments, **options)

        async def heal() -> None:
            await rig.wait_said("environment v0 is lost")
            rig.wire.flow()

        rig.come(EnvironmentRole(), name="v0")
        await rig.guest("environment")
        environment = guests_environment(config, rig.rendezvous, renderer)
        async with trio.open_nursery() as nursery:
            await nursery.start(environment.serve, tmp_path)
            await environment.wait_item()
            task = environment.get_item()
            sampler = Holding(renderer, lambda trajectory_id, number: ("aa", "ac")[number])
            (trajectory,) = await environment.collect_trajectories(task, sampler, group_id="0", group_size=1)
            nursery.cancel_scope.cancel()
        assert trajectory.reward == 1.0, trajectory

    run(main, jobs=jobs_of(config), environments=1, engines=0)
    assert said == ["0-0", "0-0"], "what was sampled before the host was lost was not sampled anew"


# --- what cannot be done on a host ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "kind", "job", "words"),
    [
        (EngineRole(Path("logs")), "engine", {"model": "/gone"}, "there is no model directory /gone (on this host: --"),
        (
            EngineRole(Path("logs")),
            "engine",
            {"weights": "/gone"},
            "there is no /gone on this host, which",
        ),
        (LearnerRole(Path("logs")), "learner", {"directory": "/gone"}, "the run directory /gone is not on this host"),
        (LearnerRole(Path("logs")), "learner", {"run_id": "another's"}, "is not on this host, which must share it"),
        (EnvironmentRole(), "environment", {"environment": "gone:Gone"}, "gone"),
        (SandboxRole(), "sandbox", {"sandbox": {"backend": "gone"}}, "backend must be one of bubblewrap, container"),
    ],
)
def test_what_a_host_lacks_is_named_on_both_sides(
    role: Any, kind: str, job: Mapping[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    whole = jobs_of(config_of(tmp_path, model, engines=1))[kind]

    async def main(rig: Rig) -> None:
        rig.come(role)
        assert words in await rig.wait_ended("e0")
        await rig.wait_said(words)

    names = {"engine": "engines", "learner": "learner", "environment": "environments", "sandbox": "sandboxes"}
    run(main, jobs={kind: {**whole, **job}}, **{"engines": 0, names[kind]: True if kind == "learner" else 1})


def test_the_jobs_of_a_run_are_plain_data(model: Path, tmp_path: Path) -> None:
    jobs = jobs_of(config_of(tmp_path, model, engines=2))
    assert json.loads(json.dumps(jobs)) == jobs
    assert jobs["engine"]["engine"]["count"] == 1


def test_the_plan_of_a_run_says_what_comes_from_elsewhere(model: Path, tmp_path: Path) -> None:
    plan = process_plan(config_of(tmp_path, model, engines=2, environments=1, learner=True))
    assert plan["engines"] == "vLLM; on 2 other hosts"
    assert plan["learner"].endswith("; on 1 other host")
    assert plan["sandboxes"] == "bubblewrap, of 1 other host"
