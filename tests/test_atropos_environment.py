"""Environments of Atropos in a run: they sample at its gateway, post groups, and the run takes them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from atropos_client import environment_command
from atropos_rig import ENVIRONMENT
from gateway_rig import MAX_MODEL_LEN, Scripted, make_renderer
from scripted import NoSandboxes
from tree import ROOT

from asyncrl.collecting import GroupCollector
from asyncrl.environments.atropos import AtroposEnvironment
from asyncrl.environments.loading import EnvironmentSettings, load_environment
from asyncrl.errors import ConfigError, EnvironmentFault
from asyncrl.gateway import Gateway, GatewaySettings
from asyncrl.serving import listen
from asyncrl.tokens import ChatRenderer
from asyncrl.types import Trajectory


@dataclass
class Rig:
    """A run's environment and gateway, and what a process elsewhere has of them."""

    environment: AtroposEnvironment
    sampler: Scripted
    client: httpx.AsyncClient
    nursery: trio.Nursery
    access: Path
    groups: dict[str, Sequence[Trajectory]]
    changed: trio.Event = field(default_factory=trio.Event)
    """Set when a group has come."""

    def ask(self, group_id: str) -> None:
        """Ask for a group, as a run does."""

        async def collect() -> None:
            collector = GroupCollector(self.environment)
            task = self.environment.get_item()
            self.groups[group_id] = await collector.collect(task, self.sampler, group_id=group_id, group_size=8)
            self.changed.set()
            self.changed = trio.Event()

        self.nursery.start_soon(collect)

    async def wait_asked(self) -> None:
        """Return when the run has asked for all that it was told to."""
        await trio.testing.wait_all_tasks_blocked()

    @property
    def addresses(self) -> dict[str, str]:
        return json.loads(self.access.read_text())  # type: ignore[no-any-return]

    async def call(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """Say something to the trainer's door."""
        answer = await self.client.request(method, self.addresses["rollout_server_url"] + path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def generate(self, prompt: Sequence[int], n: int) -> list[dict[str, Any]]:
        """Sample as a client of vLLM does that has the base URL."""
        url = self.addresses["base_url"].replace("/v1", "")
        assert (await self.client.get(f"{url}/health")).status_code == 200
        body = {"prompt": {"prompt_token_ids": list(prompt)}, "logprobs": 0, "n": n, "max_tokens": 64}
        headers = {"authorization": f"Bearer {self.addresses['api_key']}"}
        answer = await self.client.post(f"{url}/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found = []
        for logprobs in answer.json()["logprobs"]:
            pairs = [next(iter(one[0].items())) for one in logprobs]
            ids = [int(token_id) for token_id, _ in pairs]
            found.append(
                {
                    "tokens": [*prompt, *ids],
                    "masks": [-100] * len(prompt) + ids,
                    "inference_logprobs": [1.0] * len(prompt) + [logprob for _, logprob in pairs],
                }
            )
        return found

    async def wait_groups(self, number: int) -> None:
        """Return when the run has so many groups."""
        while len(self.groups) < number:
            await self.changed.wait()


def scored(rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a group of sequences, paid by their places."""
    names = ("tokens", "masks", "inference_logprobs")
    group = {name: [row[name] for row in rows] for name in names}
    return {**group, "scores": [float(place) for place in range(len(rows))], "env_id": 0, **more}


@asynccontextmanager
async def running(
    directory: Path, replies: Sequence[str], make: Callable[[Path], ChatRenderer], **options: Any
) -> AsyncIterator[Rig]:
    renderer = make(directory / "model")
    access = directory / "atropos.json"
    settings = EnvironmentSettings(name="atropos", options={"access": str(access), **options})
    environment: Any = load_environment(settings, renderer=renderer, sandboxes=NoSandboxes(), seed=0)  # type: ignore[arg-type]
    gateway = Gateway(renderer, GatewaySettings(), temperature=1.0, max_model_len=MAX_MODEL_LEN)
    environment.use_gateway(gateway)
    async with trio.open_nursery() as nursery, httpx.AsyncClient(trust_env=False, verify=False) as client:
        await nursery.start(gateway.serve, listen("127.0.0.1", 0, setting="[gateway] port"))
        yield Rig(environment, Scripted(renderer, list(replies)), client, nursery, access, {})
        await environment.aclose()
        assert not access.exists()
        nursery.cancel_scope.cancel()


def run(
    directory: Path,
    body: Callable[[Rig], Awaitable[None]],
    *replies: str,
    make: Callable[[Path], ChatRenderer] = make_renderer,
    **options: Any,
) -> None:
    """Run an async test body with a rig; the engine says the replies one after the other."""

    async def main() -> None:
        with trio.fail_after(120):
            async with running(directory, replies, make, **options) as rig:
                await body(rig)

    trio.run(main)


PROMPT = (104, 105)


def test_a_group_that_is_posted_is_the_next_that_the_run_asked_for(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        for group_id in ("7", "8"):
            rig.ask(group_id)
            await rig.wait_asked()
        assert (await rig.call("POST", "/register-env", ENVIRONMENT))["env_id"] == 0
        rows = await rig.generate(PROMPT, 3)
        assert [asked["id"] for asked in rig.sampler.asked_with] == ["7-sampled"] * 3
        assert await rig.call("POST", "/scored_data", scored(rows)) == {"status": "received"}
        await rig.wait_groups(1)
        (group,) = rig.groups.values()
        assert [t.trajectory_id for t in group] == ["7-0", "7-1", "7-2"]
        assert [t.reward for t in group] == [0.0, 1.0, 2.0]
        for trajectory, row in zip(group, rows, strict=True):
            (segment,) = trajectory.segments
            assert list(segment.token_ids) == row["tokens"]
            assert list(segment.behaviour_logprobs)[2:] == row["inference_logprobs"][2:]
            assert [span.version for span in segment.spans] == [3, 4]  # which the environment never heard of
        await rig.call("POST", "/scored_data", scored(await rig.generate(PROMPT, 1)))
        await rig.wait_groups(2)
        assert [t.trajectory_id for t in rig.groups["8"]] == ["8-0"]  # a group of another size
        assert (await rig.call("GET", "/status"))["current_step"] == 4

    run(tmp_path, body, "one", "two", "three", "four")


def test_nothing_is_sampled_while_the_run_asks_for_nothing(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.ask("7")
        await rig.wait_asked()
        rows = await rig.generate(PROMPT, 1)
        await rig.call("POST", "/scored_data", scored(rows))
        await rig.wait_groups(1)
        more: list[dict[str, Any]] = []

        async def sample_more() -> None:
            more.extend(await rig.generate(PROMPT, 1))

        rig.nursery.start_soon(sample_more)
        await rig.wait_asked()
        assert (len(rig.sampler.asked), more) == (1, [])
        rig.ask("8")
        while not more:
            await trio.testing.wait_all_tasks_blocked()
        assert rig.sampler.asked_with[-1]["id"] == "8-sampled"

    run(tmp_path, body)


def test_text_that_is_tokenised_again_is_recognised_by_its_tokens(tmp_path: Path) -> None:
    """As environments do that know chats alone, and send no log-probs: more than half of those that exist."""

    async def body(rig: Rig) -> None:
        rig.ask("7")
        await rig.wait_asked()
        messages = [{"role": "user", "content": "Say yes."}]
        headers = {"authorization": f"Bearer {rig.addresses['api_key']}"}
        chat = {"model": "any", "messages": messages, "n": 2}
        answer = await rig.client.post(f"{rig.addresses['base_url']}/chat/completions", json=chat, headers=headers)
        replies = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert sorted(replies) == ["no", "yes"]  # sampled beside each other
        renderer = rig.sampler.renderer
        prompt = renderer.start(messages)
        (end,) = renderer.end_token_ids
        rows = [[*prompt, *renderer.encode(reply), end, 10] for reply in replies]
        group = {
            "tokens": rows,
            "masks": [[-100] * len(prompt) + row[len(prompt) :] for row in rows],
            "scores": [1.0, 0.0],
            "advantages": [],
            "group_overrides": {},
        }
        await rig.call("POST", "/scored_data", group)
        await rig.wait_groups(1)
        for trajectory, row in zip(rig.groups["7"], rows, strict=True):
            (segment,) = trajectory.segments
            assert list(segment.token_ids) == row[:-1]  # the end of the line was not sampled
            assert trajectory.extras == {"unsampled_tokens": 1}
            assert segment.behaviour_logprobs[len(prompt)] == -0.25

    run(tmp_path, body, "yes", "no")


def test_what_was_not_sampled_here_is_refused_and_takes_no_place(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.ask("7")
        await rig.wait_asked()
        rows = await rig.generate(PROMPT, 2)
        changed = [{**row, "tokens": [*row["tokens"][:-2], 99, 257]} for row in rows]
        wrong = [{**row, "masks": [-100, -100, *row["tokens"][2:]]} for row in changed]
        refused = await rig.call("POST", "/scored_data", scored(wrong), status=422)
        assert "none of the 2 completions" in refused["detail"][0]["msg"]
        labels = [{**row, "masks": [-100] * 2 + [5] * (len(row["tokens"]) - 2)} for row in rows]
        refused = await rig.call("POST", "/scored_data", scored(labels), status=422)
        assert "-100 or the token's own id" in refused["detail"][0]["msg"]
        outside = [{**row, "tokens": [300, *row["tokens"][1:]]} for row in rows]
        assert "ids are from" in str(await rig.call("POST", "/scored_data", scored(outside), status=422))
        teacher = scored(rows, distill_token_ids=[[[1]] * 5] * 2)
        assert "learner.teacher" in str(await rig.call("POST", "/scored_data", teacher, status=422))
        assert rig.groups == {}
        await rig.call("POST", "/scored_data", scored(rows))
        await rig.wait_groups(1)

    run(tmp_path, body)


def test_what_an_environment_says_of_tokens_and_sequences_reaches_the_learner(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.ask("7")
        await rig.wait_asked()
        await rig.call("POST", "/register-env", ENVIRONMENT)
        rows = await rig.generate(PROMPT, 2)
        length = [len(row["tokens"]) for row in rows]
        group = scored(
            rows,
            advantages=[[0.5] * n for n in length],
            overrides=[{"set_advantage_to_zero": True}, {}],
            ref_logprobs=[[-1.0] * n for n in length],
            my_weights=[[2.0] * n for n in length],
            my_words=["first", "second"],
            my_word="shared",
            messages=[[{"role": "user", "content": "hi"}]] * 2,
        )
        await rig.call("POST", "/scored_data", group)
        await rig.wait_groups(1)
        segments = [t.segments[0] for t in rig.groups["7"]]
        assert [list(segment.advantages or ()) for segment in segments] == [[0.0] * length[0], [0.5] * length[1]]
        assert all({*segment.token_fields} == {"ref_logprobs", "my_weights"} for segment in segments)
        assert rig.groups["7"][1].extras == {
            "atropos_environment": "sums_0",
            "overrides": {},
            "my_words": "second",
            "my_word": "shared",
        }

    run(tmp_path, body)


def test_an_environment_runs_as_many_groups_as_the_run_has_places_for(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        for group_id in range(12):
            rig.ask(str(group_id))
        await rig.wait_asked()
        await rig.call("POST", "/register-env", {**ENVIRONMENT, "group_size": 4})
        assert (await rig.call("GET", "/info"))["batch_size"] == 12 * 4 // 3  # of which it runs three at a time
        await rig.call("POST", "/register", {}, status=404)  # the run is the trainer, and there is no other
        await rig.call("GET", "/batch", status=404)

    run(tmp_path, body)


def test_environments_end_after_the_last_step(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.ask("7")
        await rig.wait_asked()
        assert (await rig.call("POST", "/register-env", ENVIRONMENT))["num_steps"] == 4
        assert (await rig.call("GET", "/status-env?env_id=0"))["current_step"] == 0
        await rig.generate(PROMPT, 1)  # under versions 3 and 4
        assert (await rig.call("GET", "/status-env?env_id=0"))["current_step"] > 1000

    run(tmp_path, body, num_steps=4)


def test_without_a_gateway_the_run_is_told(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path / "model")
    settings = EnvironmentSettings(name="atropos", options={"access": str(tmp_path / "access")})
    environment = load_environment(settings, renderer=renderer, sandboxes=NoSandboxes(), seed=0)  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(EnvironmentFault, match="needs a gateway"):
            await environment.collect_trajectories(
                environment.get_item(), Scripted(renderer), group_id="0", group_size=1
            )

    trio.run(main)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch_size": -1}, "batch_size must be >= 0, got -1"),
        ({"ghost_s": 0.0}, "ghost_s must be > 0"),
        ({"access": "/nowhere/atropos.json"}, "there is no directory /nowhere"),
        ({"checkpoint_interval": 5}, "needs a checkpoint_directory"),
        ({"batchsize": 5}, "did you mean 'batch_size'"),
    ],
)
def test_what_was_typed_wrong_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EnvironmentSettings(name="atropos", options=options)


def test_the_page_on_environments_shows_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "asyncrl" / "environments" / "ENVIRONMENTS.md").read_text(encoding="ascii")
    tables = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
    (table,) = [table for table in tables if table["environment"]["name"] == "atropos"]
    monkeypatch.chdir(tmp_path)
    assert EnvironmentSettings(**table["environment"]).name == "atropos"
    GatewaySettings(**table["gateway"])
    (shown,) = re.findall(r"^python my_environment.py (.*?)^```$", page, re.DOTALL | re.MULTILINE)
    access = {"rollout_server_url": "URL", "base_url": "URL", "api_key": "KEY"}
    used = environment_command("python", access, Path("MODEL"))
    assert set(re.findall(r"--[\w.]+", shown)) <= set(used)
