"""The service over HTTP, with real models in a process of their own: two people's loops, broken connections, kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from tinker_rig import COMMAND, PAGE, Breaking, Service, sdk_python, service
from tree import ROOT

from asyncrl.cli import main
from asyncrl.errors import LearnerError
from asyncrl.tinker.client import TinkerClient, TrainedModel, connect, next_token_row, sampled_row
from asyncrl.tinker.orders import Row
from asyncrl.types import Logprobs, TokenIds

_TEXT = b"pack my box with jugs"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("tinker"), "--max-tokens", "600", "--max-snapshots", "1") as running:
        yield running


@asynccontextmanager
async def client_of(served: Service, **options: Any) -> AsyncIterator[TinkerClient]:
    patience_s = 30.0  # a service that has died fails the test instead of the suite
    async with connect(served.url, token=served.token, patience_s=patience_s, **options) as client:
        yield client


def supervised(shift: int = 0) -> list[Row]:
    return [next_token_row([256, *(byte + shift for byte in _TEXT), 257])]


async def loop(model: TrainedModel, shift: int, steps: int, then: Any = None) -> list[float]:
    """Return the loss of each step; nothing is awaited before the next thing is asked."""
    futures = []
    for _ in range(steps):
        futures.append(model.forward_backward(supervised(shift), "cross_entropy"))
        model.optim_step(learning_rate=5e-3)
        if then is not None:
            await then()
    return [(await future.result()).metrics["loss:sum"] for future in futures]


@pytest.mark.slow
def test_a_loop_lowers_the_loss_and_its_samples_say_what_it_learned(served: Service) -> None:
    async def run() -> None:
        async with client_of(served) as client:
            model = await client.create_model(rank=8, seed=1)
            losses = await loop(model, 0, 60)
            assert losses[0] > 5.5 * len(_TEXT)
            assert losses[-1] < losses[0] / 20
            sampler = await model.sampler().result()
            (greedy,) = await sampler.sample([256], max_tokens=60, temperature=0.0).result()
            assert bytes(greedy.token_ids.tolist()[:-1]) == _TEXT
            assert greedy.stopped
            (cut,) = await sampler.sample([256], max_tokens=60, temperature=0.0, stop=["box"]).result()
            assert bytes(cut.token_ids.tolist()).endswith(b"box")
            assert cut.stopped

    trio.run(run)


@pytest.mark.slow
def test_importance_sampling_raises_the_reward_of_what_it_samples(served: Service) -> None:
    async def run() -> None:
        async with client_of(served) as client:
            model = await client.create_model(rank=4, seed=2)
            prompt, rewards = [256, 10, 20], []
            for step in range(9):
                sampler = await model.sampler().result()
                sampled = await sampler.sample(prompt, max_tokens=6, num_samples=16, seed=step, stop=[]).result()
                scores = [sum(token < 128 for token in one.token_ids) / len(one.token_ids) for one in sampled]
                mean = sum(scores) / len(scores)
                rewards.append(mean)
                rows = [sampled_row(prompt, one, score - mean) for one, score in zip(sampled, scores, strict=True)]
                future = model.forward_backward(rows, "importance_sampling")
                await model.optim_step(learning_rate=2e-2).result()
                found = await future.result()
                for row, one in zip(found.logprobs, sampled, strict=True):
                    assert list(row[2:]) == pytest.approx(list(one.logprobs), abs=2e-4), "on-policy: ratios of 1"
            assert rewards[-1] > rewards[0] + 0.2, rewards

    trio.run(run)


async def trained(client: TinkerClient, shift: int, seed: int, path: str, then: Any = None) -> tuple[list[float], str]:
    model = await client.create_model(rank=4, seed=seed)
    losses = await loop(model, shift, 6, then)
    return losses, await model.save(path).result()


def files_of(served: Service, path: str) -> dict[str, bytes]:
    """Return the arrays of what is saved under a path."""
    place = served.directory / path.removeprefix("tinker://")
    return {name: (place / name).read_bytes() for name in ("adapter_model.safetensors", "optimizer.safetensors")}


@pytest.mark.slow
def test_two_loops_beside_each_other_get_what_each_gets_alone(served: Service) -> None:
    async def alone() -> list[Any]:
        async with client_of(served) as client:
            return [await trained(client, shift, seed, "alone") for shift, seed in ((0, 5), (1, 6))]

    async def together() -> list[Any]:
        found: list[Any] = [None, None]

        async def one(index: int) -> None:
            async with client_of(served) as client:
                found[index] = await trained(client, index, 5 + index, "together")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 0)
            nursery.start_soon(one, 1)
        return found

    for (losses, path), (other_losses, other_path) in zip(trio.run(alone), trio.run(together), strict=True):
        assert losses == other_losses
        assert files_of(served, path) == files_of(served, other_path), "bit for bit"


@pytest.mark.slow
def test_what_a_broken_connection_repeats_is_carried_out_once(served: Service) -> None:
    transport = Breaking()

    async def run(transport: httpx.AsyncBaseTransport | None) -> tuple[list[float], str]:
        async with client_of(served, transport=transport) as client:
            return await trained(client, 0, 7, "broken" if transport else "whole")

    losses, path = trio.run(run, None)
    broken_losses, broken_path = trio.run(run, transport)
    assert sum(where.endswith("/forward_backward") for where in transport.lost) == 6
    assert sum(where.endswith("/optim_step") for where in transport.lost) == 6
    assert losses == broken_losses
    assert files_of(served, path) == files_of(served, broken_path)


@pytest.mark.slow
def test_the_fault_of_one_request_is_its_own(served: Service) -> None:
    async def run() -> None:
        async with client_of(served) as client:
            model, other = [await client.create_model(rank=2, seed=1) for _ in range(2)]
            bad = model.forward_backward([Row(token_ids=TokenIds([999]), target_ids=TokenIds([1]))], "cross_entropy")
            step = model.optim_step(learning_rate=1e-3)
            large = model.forward_backward(supervised() * 28, "cross_entropy")
            good = model.forward(supervised(), "cross_entropy")
            taken = model.save("../../up")
            for future, words in (
                (bad, "tokens from 0 to 383"),
                (step, "no forward_backward"),
                (large, "616 tokens, at most 600 are allowed .max_tokens"),
                (taken, "a name of saved weights"),
                (model.load("tinker://nobody/weights/nothing"), "no saved model"),
                (model.load("elsewhere/x"), "a path is tinker://"),
                (model.forward(supervised(), "dro"), "must be one of"),
            ):
                with pytest.raises(LearnerError, match=words):
                    await future.result()
            assert (await good.result()).metrics["tokens:sum"] == 22
            assert (await other.forward(supervised(), "cross_entropy").result()).metrics["tokens:sum"] == 22
            first = await model.sampler().result()
            second = await model.sampler().result()
            with pytest.raises(LearnerError, match="max_snapshots"):
                await first.sample([256], max_tokens=1).result()
            assert len(await second.sample([256], max_tokens=1).result()) == 1
            await model.unload()
            with pytest.raises(LearnerError, match="unloaded"):
                await model.forward(supervised(), "cross_entropy").result()
            found = await client.statistics()
            assert found["futures"]["settled"]["Refusal"] >= 7

    trio.run(run)


@pytest.mark.slow
def test_requests_of_strangers_and_of_no_shape_are_refused(served: Service) -> None:
    assert served.get("get_server_capabilities", token="tml-" + "0" * 32).status_code == 401
    assert served.get("get_server_capabilities", token="").status_code == 401
    assert served.get("get_server_capabilities", token=f"tml-{served.token}").status_code == 200
    assert served.get("nowhere").status_code == 404
    assert served.get("optim_step").status_code == 405
    refused = served.post("optim_step", {"model_id": "m"})
    assert refused.status_code == 400
    assert "seq_id" in refused.json()["detail"]
    assert served.post("optim_step", {"model_id": "m", "seq_id": 1}).status_code == 404
    assert served.post("retrieve_future", {"request_id": "m:1"}).status_code == 410
    assert served.post("create_session", {"tags": ["x" * 40_000_000]}).status_code == 413
    session = served.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 4}}
    assert "base_model must be base" in served.post("create_model", body).json()["detail"]
    muon = {**body, "base_model": "base", "optimizer_config": {"type": "dimuon"}}
    assert "adamw" in served.post("create_model", muon).json()["detail"]


def children_of(pid: int) -> list[int]:
    """Return the pids of all that came from a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            found += [int(stat.parent.name), *children_of(int(stat.parent.name))]
    return found


async def wait_gone(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        await trio.lowlevel.wait_readable(descriptor)
        os.close(descriptor)


@pytest.mark.slow
def test_a_kill_leaves_nothing_behind_and_what_was_saved_goes_on(tmp_path: Path) -> None:
    async def first(running: Service) -> tuple[str, list[float]]:
        async with client_of(running) as client:
            model = await client.create_model(rank=4, seed=3)
            await loop(model, 0, 3)
            path = await model.save("state").result()
            rest = await loop(model, 0, 3)
            with pytest.raises(LearnerError, match="there is a saved model state already"):
                await model.save("state").result()
            return path, rest

    async def second(running: Service, path: str) -> list[float]:
        async with client_of(running) as client:
            assert [saved["tinker_path"] for saved in await client.saved()] == [path]
            model = await client.load_model(path)
            return await loop(model, 0, 3)

    with service(tmp_path) as running:
        path, rest = trio.run(first, running)
        family = children_of(running.process.pid)
        assert len(family) >= 2
        partial = running.directory / path.removeprefix("tinker://").replace("/state", "/other.partial")
        partial.mkdir()
        again = subprocess.run(
            running.process.args, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        )  # fmt: skip
        assert again.returncode == 2
        assert "another service's" in again.stderr
        os.kill(running.process.pid, signal.SIGKILL)
        trio.run(wait_gone, family)
    with service(tmp_path) as running:
        assert any("removed other.partial" in line for line in running.said)
        assert not partial.exists()
        assert trio.run(second, running, path) == rest
    assert running.process.returncode == 0


def example(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_command_of_the_page_parses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND.split()[1:], "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for option in re.findall(r"`(--[a-z-]+)`", PAGE):
        assert option in said


@pytest.mark.slow
def test_the_example_of_the_page_runs(served: Service, capsys: pytest.CaptureFixture[str]) -> None:
    text = example("python")[0].replace("http://127.0.0.1:8797", served.url)
    text = text.replace('open("token").read().strip()', repr(served.token))
    exec(compile(text, "TINKER.md", "exec"), {"__name__": "__main__"})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_sdk_of_tinker_trains_samples_saves_and_loads(served: Service) -> None:
    python = sdk_python()
    environment: Mapping[str, str] = {
        **os.environ, "TINKER_BASE_URL": served.url, "TINKER_API_KEY": f"tml-{served.token}", "TINKER_TELEMETRY": "0"
    }  # fmt: skip
    done = subprocess.run(
        [python, str(ROOT / "tests" / "tinker_sdk_loop.py")], capture_output=True, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it" in done.stdout


def test_rows_of_the_client_are_shifted_once() -> None:
    row = next_token_row([1, 2, 3], weights=[0.0, 1.0])
    assert (row.token_ids.tolist(), row.target_ids.tolist(), row.values["weights"]) == (
        [1, 2],
        [2, 3],
        Logprobs([0, 1]),
    )
