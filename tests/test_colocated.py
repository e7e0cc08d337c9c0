"""Learner and engines in turns on one card: the order of it all, and what ends it. No GPU: servers are scripted."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from engine_fleet import fails
from synthetic_groups import random_groups
from test_engine import GENERATE, GOOD, Script, manifest, report, run, sample
from tiny_model import build_tiny_model, state_of

from asyncrl.buffers import BufferSettings
from asyncrl.card_memory import card_shares, check_card
from asyncrl.checkpoint import CheckpointStore
from asyncrl.colocation import SharedCard
from asyncrl.configs import Config, build
from asyncrl.engines import EnginePool, EngineSettings, KVOnSync, SamplingSettings, VLLMEngine, command
from asyncrl.engines.nap import Nap
from asyncrl.engines.requests import Request
from asyncrl.errors import ConfigError, EngineError, WeightSyncError
from asyncrl.learner.critic_settings import CriticSettings
from asyncrl.learner.lora_settings import LoraSettings
from asyncrl.learner.process import Learner
from asyncrl.learner.settings import LearnerJob, LearnerSettings
from asyncrl.processes import _check_card
from asyncrl.protocols import PLAIN_STEP, StepOptions, StepResult
from asyncrl.run import Limits, Parts, Run
from asyncrl.status import RunStatus
from asyncrl.testing import FakeEnvironment, FakeLearner, MemoryRecorder, Rates
from asyncrl.testing_engines import FakeServer
from asyncrl.types import Group
from asyncrl.weight_sync.settings import WeightSyncSettings
from asyncrl.wire import PublishReply, PublishRequest, SaveRequest, StepReply, StepRequest

AWAKE = b'{"status": "awake", "tags": null}'

# --- one server ---------------------------------------------------------------------------------------------------


def asleep(**answers: tuple[int, bytes]) -> Script:
    """Return a server that takes version 1; `answers` by route name."""
    usual = {"/collective_rpc": (200, report(1, manifest().digest)), "/wake_up": (200, AWAKE), GENERATE: (200, GOOD)}
    return Script(answers={**usual, **{f"/{name}": answer for name, answer in answers.items()}})


def control(script: Script) -> list[str]:
    return [path for path, _ in script.asked if path != GENERATE]


@pytest.mark.parametrize(("kv_on_sync", "mode"), [(KVOnSync.RECOMPUTE, "keep"), (KVOnSync.FINISH, "wait")])
def test_a_server_that_sleeps_is_woken_by_its_next_weights_in_the_one_order_that_fits(
    kv_on_sync: KVOnSync, mode: str
) -> None:
    """Kills: keys and values that come back before the weights are there, and a scheduler that goes on without them."""
    script = asleep()

    async def body(engine: VLLMEngine) -> None:
        await engine.sleep()
        assert engine.nap is not None
        done = await engine.pull(manifest())
        assert engine.nap is None
        assert list(done.seconds) == ["wake", "start", "update", "finish", "report"]
        assert engine.version == 1
        await engine.pull(manifest(1))  # and then it is paused and resumed as ever

    run(script, body, kv_on_sync=kv_on_sync)
    asked = control(script)
    assert asked[:8] == [
        f"/sleep?level=1&mode={mode}", "/wake_up?tags=weights",
        "/start_weight_update", "/update_weights", "/collective_rpc",
        "/finish_weight_update", "/collective_rpc", "/wake_up?tags=kv_cache",
    ]  # fmt: skip
    assert asked[-1] == "/resume"


def test_what_is_asked_of_a_server_that_sleeps_waits_until_it_has_pulled() -> None:
    script = asleep()

    async def body(engine: VLLMEngine) -> None:
        await engine.sleep()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample, engine)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.statistics().waiting == 1
            await engine.pull(manifest())
        assert [path for path, _ in script.asked][-1] == GENERATE
        assert engine.statistics().completed == 1

    run(script, body, kv_on_sync=KVOnSync.RECOMPUTE)


def test_a_request_is_not_timed_while_its_server_sleeps() -> None:
    async def main() -> None:
        request = Request("engine 0")
        request.scope.deadline = trio.current_time() + 10.0
        await trio.sleep(4.0)
        nap = Nap([request])
        assert request.scope.deadline == math.inf
        await trio.sleep(1000.0)
        nap.end()
        assert request.scope.deadline == pytest.approx(trio.current_time() + 6.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("wake", "words"),
    [
        ((200, b'{"status": "sleeping"}'), r"^engine-0, wake of version 1: it says that it is 'sleeping'"),
        ((500, b"CUDA out of memory"), r"^engine-0, wake of version 1: CUDA out of memory; 0 of 4 bytes loaded"),
    ],
)
def test_a_server_that_does_not_wake_is_named_and_out_of_service(wake: tuple[int, bytes], words: str) -> None:
    script = asleep(wake_up=wake)

    async def body(engine: VLLMEngine) -> None:
        await engine.sleep()
        with pytest.raises(WeightSyncError, match=words):
            await engine.pull(manifest())
        assert engine.broken
        with pytest.raises(EngineError, match="out of service"):
            await sample(engine)

    run(script, body, kv_on_sync=KVOnSync.RECOMPUTE)
    assert "/resume" not in control(script), "nothing may run on memory that is not there"


def test_a_server_that_cannot_load_what_it_wakes_for_wakes_with_what_it_held() -> None:
    script = asleep(update_weights=(500, b"version 1 lacks a"), collective_rpc=(200, report(0, "")))

    async def body(engine: VLLMEngine) -> None:
        await engine.sleep()
        with pytest.raises(WeightSyncError, match="update of version 1: version 1 lacks a"):
            await engine.pull(manifest())
        assert (engine.broken, engine.nap) == ("", None)
        await sample(engine)

    run(script, body, kv_on_sync=KVOnSync.RECOMPUTE)
    assert control(script)[-1] == "/wake_up"


def test_a_server_that_does_not_go_to_sleep_is_named() -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineError, match=r"^engine-0 does not go to sleep: Sleep mode is off \(colocated, \[eng"):
            await engine.sleep()
        assert engine.nap is None

    run(asleep(sleep=(500, b"Sleep mode is off")), body, kv_on_sync=KVOnSync.RECOMPUTE)

    async def mute() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        settings = EngineSettings(sync_timeout_s=0.05)
        async with listener, VLLMEngine("mute", url, settings, SamplingSettings(), end_token_ids=()) as engine:
            with pytest.raises(EngineError, match=r"mute does not go to sleep: no answer in 0.05 s \(\[engine\] sync_"):
                await engine.sleep()

    trio.run(mute)


# --- turns --------------------------------------------------------------------------------------------------------


class WatchedLearner(FakeLearner):
    """Notes whether every server slept while it computed."""

    def __init__(self, rates: Rates, servers: Sequence[FakeServer]) -> None:
        super().__init__(rates)
        self._servers = servers
        self.alone: list[bool] = []

    async def step(self, groups: Sequence[Group], options: StepOptions = PLAIN_STEP) -> StepResult:
        before = all(server.sleeps for server in self._servers)
        result = await super().step(groups, options)
        self.alone.append(before and all(server.sleeps for server in self._servers))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_in_a_whole_run_the_learner_steps_only_while_all_engines_sleep(tmp_path: Path, bound: int) -> None:
    rates = Rates(step_s=5.0, token_s=0.05, sync_s=1.0)
    numbers = itertools.count(100)

    async def main() -> tuple[RunStatus, list[bool], list[FakeServer]]:
        servers = [FakeServer(f"engine {n}", rates, numbers, capacity=12, start_s=8.0) for n in range(2)]
        pool = EnginePool(servers, EngineSettings(colocated=True, kv_on_sync=KVOnSync.RECOMPUTE, count=2))
        learner = WatchedLearner(rates, servers)
        card = SharedCard(learner, pool)
        loop = Run(
            Parts(
                environment=FakeEnvironment(rates, random.Random(1), max_tokens=60),
                sampler=pool,
                learner=card,
                engines=card,
            ),
            BufferSettings(max_off_policyness=bound, groups_per_step=4, group_size=4),
            Limits(steps=8, checkpoint_every_steps=3),
            recorder=MemoryRecorder(),
            checkpoints=CheckpointStore(tmp_path, keep=1),
            status=RunStatus(),
            stop=trio.Event(),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.serve, {server.name: server.start for server in servers})
            await loop.train()
            nursery.cancel_scope.cancel()
        return loop.status, learner.alone, servers

    status, alone, servers = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert alone == [True] * 8
    assert status.versions_superseded == 0, "each version is pulled before the learner has the card again"
    assert all(server.pulled == [*range(1, 9)] and not server.sleeps for server in servers)
    assert status.max_staleness_trained <= bound
    assert (status.max_staleness_trained > 0) == (bound > 0)


def test_a_step_waits_until_the_engines_hold_what_was_published() -> None:
    """A second step right behind a publication, and one that needs no engine awakened in between."""
    events: list[str] = []

    class Engines:
        async def sleep(self) -> None:
            events.append("sleep")

        async def make_room(self) -> tuple[()]:
            return ()

        async def pull_all(self, manifest: Any) -> tuple[()]:
            await trio.sleep(7.0)
            events.append(f"hold {manifest.version}")
            return ()

    async def main() -> None:
        learner = FakeLearner(Rates(step_s=1.0))
        card = SharedCard(learner, Engines())
        for _ in range(2):
            await card.supervised_step([], learning_rate=0.1)
            events.append("step")
        published = await card.publish()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(card.pull_all, published)
            await card.supervised_step([], learning_rate=0.1)
            events.append("step")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert events == ["sleep", "step", "step", "hold 2", "sleep", "step"]


def test_a_server_that_dies_ends_the_run_whatever_restarts_says() -> None:
    async def body(fleet: Any) -> None:
        fleet.servers[0].kill()
        await trio.sleep_forever()

    words = fails(body, EngineError, colocated=True, kv_on_sync=KVOnSync.RECOMPUTE, restarts=5)
    assert words == "engine 0 was ended by signal 9"


# --- the learner's state ------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda model: {"loss": "grpo", "loss_settings": {"kl_coef": 0.1}},
    "adapters": lambda model: {"lora": LoraSettings(enabled=True, rank=4, alpha=8), "loss": "grpo",
                               "loss_settings": {"kl_coef": 0.1}},
    "value model": lambda model: {"critic": CriticSettings(kind="model", path=model)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_leaves_the_card_and_comes_back_learns_the_same(kind: str, tmp_path: Path) -> None:
    """Kills: a tensor that is forgotten, moments that come back as others', hooks that are lost on the way."""
    model = build_tiny_model(tmp_path / "model")
    before = {id(tensor) for tensor in tensors()}

    def learner(colocated: bool) -> Learner:
        directory = tmp_path / str(colocated)
        options = {"dtype": "float32", "learning_rate": 1e-2, "threads": 1, **KINDS[kind](model)}
        return Learner(
            LearnerJob(
                model=model,
                run_id="test",
                colocated=colocated,
                canary=(5, 6, 7),
                max_off_policyness=9,
                weight_sync=WeightSyncSettings(transport="filesystem", directory=directory),
                learner=LearnerSettings(**options),  # type: ignore[arg-type]
            )
        )

    one = learner(colocated=True)
    one.hello()
    for seed in (1, 2):
        one.answer(StepRequest(groups=random_groups(seed)))
        published = one.answer(PublishRequest())
        assert one._offload is not None
        elsewhere = {copy.data_ptr() for copy in one._offload._host.values()}
        left = [t for t in tensors() if id(t) not in before and t.data_ptr() not in elsewhere]
        assert not left, [(tuple(t.shape), t.dtype) for t in left]
    (tmp_path / "saved").mkdir()
    one.answer(SaveRequest(directory=str(tmp_path / "saved")))
    other = learner(colocated=False)
    for seed in (1, 2):
        wanted = other.answer(StepRequest(groups=random_groups(seed)))
        known = other.answer(PublishRequest())
    assert isinstance(wanted, StepReply)
    assert isinstance(known, PublishReply)
    assert isinstance(published, PublishReply)
    assert published.manifest.digest == known.manifest.digest
    assert published.manifest.canary_logprobs == known.manifest.canary_logprobs
    (tmp_path / "known").mkdir()
    other.answer(SaveRequest(directory=str(tmp_path / "known")))
    for name in ("learner/optimizer.safetensors", "learner/critic.safetensors"):
        if (tmp_path / "known" / name).exists():
            assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "known" / name).read_bytes()
    one.close()
    other.close()


def tensors() -> list[torch.Tensor]:
    """Return every tensor of a matrix's size that anybody holds."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)
            and found.numel() >= 1024]  # fmt: skip


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_on_sync": KVOnSync.KEEP}, 'kv_on_sync must be "recompute" or "finish" with colocated = true, got "keep"'),
        ({"urls": ("http://there",)}, "colocated = true is for servers that the run starts: leave urls empty"),
        ({"extra": {"enable_sleep_mode": True}}, r"extra may not set enable_sleep_mode \(\[engine\]\); \[engine\] col"),
    ],
)
def test_engines_that_cannot_take_turns_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineSettings(**{"colocated": True, "kv_on_sync": KVOnSync.RECOMPUTE, **settings})


def test_a_server_is_started_so_that_it_can_sleep() -> None:
    argv, _ = command(EngineSettings(colocated=True, kv_on_sync=KVOnSync.RECOMPUTE), "model", 1)
    assert "--enable-sleep-mode" in argv
    assert "--enable-sleep-mode" not in command(EngineSettings(), "model", 1)[0]


def config(model: Path, **sections: Any) -> Config:
    tables = {"model": {"path": str(model)}, "environment": {"name": "bugfix"}, **sections}
    return build(Config, tables)


TURNS = {"colocated": True, "kv_on_sync": "recompute"}


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"ranks": 2}, r"ranks = 2 \(\[learner\]\) does not go with colocated = true"),
        (
            {"device": "cpu"},
            r'device = "cpu" \(\[learner\]\) does not go with colocated = true \(\[engine\]\): both share one',
        ),
    ],
)
def test_a_learner_that_has_no_card_to_share_is_refused(tmp_path: Path, learner: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, engine=TURNS, learner=learner)
    shared = {"transport": "filesystem", "directory": "published"}
    with pytest.raises(ConfigError, match=r"engines = 1 \(\[roles\]\) does not go with colocated = true"):
        config(tmp_path, engine=TURNS, roles={"engines": 1, "listen": "127.0.0.1:0"}, weight_sync=shared)
    with pytest.raises(ConfigError, match="shares a GPU, and the learner computes on cpu"):
        _check_card("cpu, attention by tiles")
    _check_card("cuda:0, attention by flash_attn")


# --- the split of memory ------------------------------------------------------------------------------------------


def test_what_engines_and_learner_take_of_a_card_is_told_and_checked(tmp_path: Path) -> None:
    """Of 1e6 numbers in bfloat16: weights 2 bytes each, and 16 for the master, two moments and the sum of gradients."""
    model = build_tiny_model(tmp_path / "model")
    numbers = sum(tensor.numel() for tensor in state_of(model).values())
    gib = numbers * 18 / 2**30
    beside = {"card_gib": 4 * gib, "kv_cache_gib": 0.0, "extra": {"gpu_memory_utilization": 0.5}}
    shares = card_shares(config(model, engine=beside))
    assert shares is not None
    assert shares.learner == numbers * 18
    assert shares.engines == pytest.approx(2 * numbers * 18)
    assert shares.left == pytest.approx(numbers * 18)
    check_card(config(model, engine=beside))
    crowded = {**beside, "extra": {"gpu_memory_utilization": 0.8}}
    words = r"the GPU does not hold both, .*side by side: .* lower extra.gpu_memory_utilization \(\[engine\]\), or let"
    with pytest.raises(ConfigError, match=words):
        check_card(config(model, engine=crowded))
    check_card(config(model, engine={**crowded, **TURNS}))
    small = config(model, engine={**crowded, **TURNS, "card_gib": 0.9 * gib})
    with pytest.raises(ConfigError, match=r"in turns: .* or train adapters alone"):
        check_card(small)
    check_card(replace(small, learner=replace(small.learner, lora=LoraSettings(enabled=True, rank=4))))
    for elsewhere in ({"urls": ["http://there"]}, {"devices": ["3"]}):
        assert card_shares(config(model, engine={**beside, **elsewhere})) is None
    assert card_shares(config(model, engine=beside, learner={"device": "cpu"})) is None


def test_what_the_learner_holds_besides_the_policy_counts(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")

    def held(**learner: Any) -> float:
        shares = card_shares(config(model, engine={"card_gib": 80.0}, learner=learner))
        assert shares is not None
        return shares.learner

    bare = held()
    numbers = bare / 18
    assert held(loss="grpo", loss_settings={"kl_coef": 0.1}) == bare + 2 * numbers
    assert held(critic={"kind": "model"}) == 2 * bare
    assert held(dtype="float32") == numbers * 20
    lora = {"enabled": True, "rank": 2, "alpha": 2, "target_modules": ["q_proj"]}
    assert held(lora=lora, loss="grpo", loss_settings={"kl_coef": 0.1}) == 2 * numbers + 2 * (2 * (128 + 128)) * 18
