"""Promises of the engines' side that only a real vLLM can keep. One server, started once for all tests here.

Long because one server, which takes half a minute to start, serves every test; `engine_rig` has what they measure with.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from engine_rig import (
    SETTINGS,
    TOLERANCE,
    Rig,
    assert_labels_tell_the_truth,
    model_of,
    perturbed,
    prompt_of,
    run,
    sample_by,
    sample_many,
    told,
    wait_begun,
    wait_sampled,
)
from engine_server import Server, running_server
from part_contract import check_engine
from synthetic_groups import random_groups
from tiny_model import state_of

from asyncrl.engine_processes import ServerProcess, start_server
from asyncrl.engines import (
    Canary,
    Draft,
    EnginePool,
    Health,
    KVOnSync,
    SamplingSettings,
    VLLMEngine,
)
from asyncrl.errors import ConfigError, EngineError, LearnerError, WeightMismatch, WeightSyncError
from asyncrl.learner.credit import select
from asyncrl.learner.served import ServedModel
from asyncrl.learner.settings import LearnerSettings
from asyncrl.types import Completion, FinishReason, TokenIds, WeightManifest
from asyncrl.weight_sync import combined_digest, manifest_to_json
from asyncrl.weight_sync.filesystem import FilesystemPublisher

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("tiny"), SETTINGS) as started:
        yield started


def test_tokens_go_in_and_come_out_with_the_log_probs_they_were_sampled_under(server: Server) -> None:
    async def body(rig: Rig) -> None:
        prompts = [prompt_of("def add(a, b):\n" + "#" * extra) for extra in (0, 1, 40, 200)]
        for place, completion in (await sample_many(rig.pool, prompts, 24)).items():
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(completion.token_ids) == len(completion.behaviour_logprobs) == 24
            assert [span.version for span in completion.spans] == [1]
            assert completion.engine == "engine-0"
            assert completion.seconds > 0
            assert_labels_tell_the_truth(rig, prompts[place], completion)
        statistics = rig.engine.statistics()
        assert (statistics.completed, statistics.failed, statistics.running) == (4, 0, 0)
        assert statistics.tokens_sampled == 96

    run(server, body)


def test_log_probs_are_those_after_temperature(server: Server) -> None:
    async def body(rig: Rig) -> None:
        engine = VLLMEngine(
            "warm", server.url, SETTINGS, SamplingSettings(temperature=2.0), end_token_ids=(), version=1
        )
        async with engine:
            prompt = prompt_of("x = ")
            completion = await sample_by(engine, prompt, 16)
        model = model_of(rig.directory, rig.versions[1])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        wanted = torch.log_softmax(logits / 2.0, -1).gather(1, torch.tensor([*completion.token_ids])[:, None])[:, 0]
        assert (wanted - torch.tensor([*completion.behaviour_logprobs])).abs().max() < TOLERANCE

    run(server, body)


def test_an_end_token_given_here_ends_the_completion_and_the_models_own_does_not(server: Server) -> None:
    async def body(rig: Rig) -> None:
        sure = perturbed(state_of(rig.directory), seed=9)
        sure["lm_head.weight"] = torch.zeros_like(sure["lm_head.weight"])  # every token is as likely as any other
        await rig.engine.pull(rig.publish(2, sure))
        every_token = tuple(range(384))
        async with VLLMEngine("e", server.url, SETTINGS, SamplingSettings(), end_token_ids=every_token) as engine:
            completion = await sample_by(engine, prompt_of("a"), 9)
        assert completion.finish_reason is FinishReason.STOP
        assert len(completion.token_ids) == 1, "the end token itself is sampled and kept"
        completions = await sample_many(rig.pool, [prompt_of("a")] * 8, 200)
        ended_by_257 = [257 in completion.token_ids for completion in completions.values()]
        assert any(ended_by_257), "in 1600 tokens of 384 equally likely ones the model's own end token comes up"
        assert all(len(completion.token_ids) == 200 for completion in completions.values())

    run(server, body)


def test_new_weights_in_the_middle_of_completions_abort_nothing_and_every_label_is_exact(server: Server) -> None:
    """Kills: labels set before or after the pause, an update that is only partly in place, a restart of requests."""

    async def body(rig: Rig) -> None:
        prompts = [prompt_of(f"long {place} " + "." * place) for place in range(8)]
        completions: dict[int, Completion] = {}

        async def ask() -> None:
            completions.update(await sample_many(rig.pool, prompts, 900))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_begun(rig.engine, 8)
            for version in (2, 3, 4):
                await trio.sleep(0.1)  # lets some steps under the version before pass, however slow they are
                report = await rig.engine.pull(rig.publish(version))
                assert report.verified
                assert report.version == version
                assert report.num_bytes == sum(tensor.nbytes for tensor in rig.versions[version].values())
                assert 0 < report.stall_seconds < 30
                assert {"pause", "start", "update", "finish", "resume"} <= report.seconds.keys()
        assert all(len(completion.token_ids) == 900 for completion in completions.values())
        spans = {place: [span.version for span in completion.spans] for place, completion in completions.items()}
        assert any(len(versions) >= 3 for versions in spans.values()), spans
        for place, completion in completions.items():
            assert_labels_tell_the_truth(rig, prompts[place], completion)
        statistics = rig.engine.statistics()
        assert (statistics.completed, statistics.failed) == (8, 0)

    run(server, body)


def test_keys_and_values_are_computed_again_where_that_is_asked_for(server: Server) -> None:
    async def body(rig: Rig) -> None:
        prompts = [prompt_of(f"again {place} " + "." * 30) for place in range(4)]
        manifest = rig.publish(2)
        completions: dict[int, Completion] = {}

        async def ask() -> None:
            completions.update(await sample_many(rig.pool, prompts, 900))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_begun(rig.engine, 4)
            await rig.engine.pull(manifest)
        assert any(len(completion.spans) == 2 for completion in completions.values())
        for place, completion in completions.items():
            assert len(completion.token_ids) == 900
            assert_labels_tell_the_truth(rig, prompts[place], completion, recomputed=True)

    run(server, body, kv_on_sync=KVOnSync.RECOMPUTE)


def test_running_requests_end_under_the_old_weights_where_that_is_asked_for(server: Server) -> None:
    async def body(rig: Rig) -> None:
        completions: dict[int, Completion] = {}

        async def ask() -> None:
            completions.update(await sample_many(rig.pool, [prompt_of(f"end {n}") for n in range(4)], 300))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_begun(rig.engine, 4)
            await rig.engine.pull(rig.publish(2))
        assert all(len(completion.spans) == 1 for completion in completions.values())
        assert all(len(completion.token_ids) == 300 for completion in completions.values())

    run(server, body, kv_on_sync=KVOnSync.FINISH)


def test_the_prefix_cache_never_serves_another_versions_blocks(server: Server) -> None:
    """Under a running request, where vLLM cannot empty its cache. Kills: one salt for all versions."""

    async def body(rig: Rig) -> None:
        prompt = prompt_of("".join(chr(33 + place % 90) for place in range(400)))  # three whole blocks of 128
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample_many, rig.pool, [prompt] * 2, 600)
            first = await rig.pool.sample(prompt, max_tokens=8, trajectory_id="a")
            await rig.engine.pull(rig.publish(2))
            second = await rig.pool.sample(prompt, max_tokens=8, trajectory_id="b")
            nursery.cancel_scope.cancel()
        assert [span.version for span in first.spans] == [1]
        assert [span.version for span in second.spans] == [2]
        assert_labels_tell_the_truth(rig, prompt, first)
        assert_labels_tell_the_truth(rig, prompt, second)

    run(server, body)


def test_a_request_that_has_not_begun_when_weights_come_begins_under_the_new_ones(server: Server) -> None:
    """A paused server queues requests: those must not start under a salt that names the version before."""

    async def body(rig: Rig) -> None:
        prompt = prompt_of("q" * 300)
        async with VLLMEngine("control", server.url, SETTINGS, SamplingSettings(), end_token_ids=()) as other:
            await other.control.post("/pause", None, {"mode": "keep"})
            completions: dict[int, Completion] = {}

            async def ask() -> None:
                completions.update(await sample_many(rig.pool, [prompt] * 3, 6))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(0.5)  # they are on their way, and wait in the server's queue
                await rig.engine.pull(rig.publish(2))
        assert rig.engine.statistics().withdrawn == 3
        for completion in completions.values():
            assert [span.version for span in completion.spans] == [2]
            assert_labels_tell_the_truth(rig, prompt, completion)

    run(server, body)


def broken_manifests(rig: Rig) -> Iterator[tuple[WeightManifest, str]]:
    """Yield updates that must be refused, with what the refusal must say."""
    whole = perturbed(state_of(rig.directory), seed=5)
    name = "model.layers.1.mlp.up_proj.weight"

    manifest = rig.publisher.publish(whole, 10)
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    with open(manifest.location, "r+b") as stream:
        stream.seek(os.path.getsize(manifest.location) - manifest.num_bytes + entry.offset + 40)
        stream.write(b"\x7f")
    yield manifest, rf"{name} of version 10 has digest"

    lacking = {key: tensor for key, tensor in whole.items() if key != name}
    yield rig.publisher.publish(lacking, 11), rf"version 11 lacks {name}"

    yield rig.publisher.publish({**whole, "model.extra.weight": torch.zeros(3)}, 12), r"has model\.extra\.weight"

    yield rig.publisher.publish({**whole, name: whole[name].t()}, 13), rf"{name} of version 13 has shape \[128, 256\]"

    stale = rig.publisher.publish(perturbed(state_of(rig.directory), seed=6), 14)
    entries = tuple(
        replace(entry, digest="0" * 16) if entry.name == "model.norm.weight" else entry for entry in stale.tensors
    )
    yield (
        replace(stale, tensors=entries, digest=combined_digest(entries)),
        r"model\.norm\.weight of version 14 has digest",
    )

    manifest = rig.publisher.publish(whole, 15)
    os.truncate(manifest.location, os.path.getsize(manifest.location) - 100)
    yield manifest, "cut short inside"

    manifest = rig.publisher.publish(whole, 16)
    os.unlink(manifest.location)
    yield manifest, "cannot map the weights of version 16"

    yield replace(rig.publisher.publish(whole, 17), run_id="another"), "the manifest is of run another"

    yield replace(rig.publisher.publish(whole, 18), version=0), "version 0 was sent to an engine that holds 1"


def test_what_is_wrong_with_an_update_is_named_and_the_old_version_is_still_served(server: Server) -> None:
    async def body(rig: Rig) -> None:
        prompt = prompt_of("still here")
        completions: dict[int, Completion] = {}

        async def ask() -> None:
            completions.update(await sample_many(rig.pool, [prompt] * 4, 300))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for manifest, words in broken_manifests(rig):
                with pytest.raises(WeightSyncError, match=words) as caught:
                    await rig.engine.pull(manifest)
                assert "engine-0, update of version" in str(caught.value)
                assert rig.engine.broken == ""
                assert rig.engine.version == 1
        completions[4] = await rig.pool.sample(prompt, max_tokens=8, trajectory_id="after")
        for completion in completions.values():
            assert [span.version for span in completion.spans] == [1]
            assert_labels_tell_the_truth(rig, prompt, completion)
        await rig.engine.pull(rig.publish(20))
        last = await rig.pool.sample(prompt, max_tokens=8, trajectory_id="last")
        assert [span.version for span in last.spans] == [20]
        assert_labels_tell_the_truth(rig, prompt, last)

    run(server, body)


def change_last_byte(path: str) -> None:
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7e")


def test_deltas_in_the_middle_of_completions_and_a_wrong_one_that_is_named(server: Server, tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        name, prompts = "lm_head.weight", [prompt_of("delta"), prompt_of("another delta")]
        state, completions, reports = dict(rig.versions[1]), {}, []
        with FilesystemPublisher(run_id=rig.run_id, directory=tmp_path, delta=True) as publisher:

            def publish(version: int) -> WeightManifest:
                generator = torch.Generator().manual_seed(version)
                state[name] = torch.randn(state[name].shape, generator=generator) * 0.1
                rig.versions[version] = dict(state)
                return publisher.publish(state, version)

            async def ask() -> None:
                completions.update(await sample_many(rig.pool, prompts, 600))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await wait_begun(rig.engine, 2)
                for version in (2, 3, 4):
                    await wait_sampled(rig.engine, rig.engine.statistics().tokens_sampled + 16)
                    reports.append(await rig.engine.pull(publish(version)))
            found = [(report.encoding, report.chain_break) for report in reports]
            assert found == [("full", "no_copy"), ("delta", ""), ("delta", "")]
            assert reports[0].num_bytes == sum(tensor.nbytes for tensor in state.values())
            assert [report.num_bytes for report in reports[1:]] == [state[name].nbytes] * 2, "that tensor, whole"
            for place, prompt in enumerate(prompts):
                assert_labels_tell_the_truth(rig, prompt, completions[place])
            damaged = publish(5)
            assert damaged.delta is not None
            change_last_byte(damaged.delta.location)
            with pytest.raises(WeightMismatch, match=f"engine-0, update of version 5: {name}") as caught:
                await rig.engine.pull(damaged)
            assert caught.value.tensor == name
            report = await rig.engine.pull(damaged)
            assert (report.encoding, report.chain_break) == ("full", "mismatch")

    run(server, body)


def test_exchanged_layers_that_no_digest_shows_are_caught_by_the_canary_and_nothing_they_sampled_is_kept(
    server: Server,
) -> None:
    """Under running requests, which end with the weights of the next version. Kills: a canary that reads cached blocks
    of another version, or waits for a place.
    """
    canary = Canary(TokenIds(range(40, 72)))

    async def body(rig: Rig) -> None:
        canary.learn({"engine-0": canary.distance(await rig.engine.canary_logprobs(), told(rig, canary, 1))})
        assert canary.tolerance == 0.05, "float32 on both sides"
        drafts = [Draft(prompt_of(f"on {n} " + "." * n), max_tokens=900, trajectory_id="t") for n in range(8)]

        async def ask(draft: Draft) -> None:
            while not draft.is_whole:
                try:
                    await rig.engine.generate(draft)
                except EngineError:
                    draft.moved_at.append(len(draft.token_ids))
                    await mended.wait()

        mended = trio.Event()
        async with trio.open_nursery() as nursery:
            for draft in drafts:
                nursery.start_soon(ask, draft)
            await wait_begun(rig.engine, 8)
            manifest = rig.publish(2)
            report = await rig.engine.pull(replace(manifest, canary_logprobs=told(rig, canary, 2)))
            assert report.canary_distance is not None
            assert report.canary_distance < TOLERANCE

            good = perturbed(state_of(rig.directory), seed=3)
            first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
            manifest = rig.publish(3, {**good, first: good[second], second: good[first]})
            rig.versions[3] = good
            for _ in range(2):  # sent once more it is what it was
                with pytest.raises(WeightMismatch, match=r"engine-0, canary of version 3: .* nats a token"):
                    await rig.engine.pull(replace(manifest, canary_logprobs=told(rig, canary, 3)))
                assert "canary of version 3" in rig.engine.broken
            manifest = rig.publish(4)
            await rig.engine.pull(replace(manifest, canary_logprobs=told(rig, canary, 4)))
            assert rig.engine.broken == ""
            mended.set()
        assert any(draft.moved_at for draft in drafts)
        for draft in drafts:
            assert {span.version for span in draft.spans} <= {1, 2, 4}
            assert_labels_tell_the_truth(rig, draft.prompt, draft.completion())

    run(server, body, canary=canary)


def test_a_paused_engine_survives_requests_that_are_given_up(server: Server) -> None:
    async def body(rig: Rig) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample_many, rig.pool, [prompt_of("gone")] * 6, 900)
            await wait_begun(rig.engine, 6)
            await rig.engine.control.post("/pause", None, {"mode": "keep"})
            nursery.cancel_scope.cancel()
        await rig.engine.pull(rig.publish(2))
        completion = await rig.pool.sample(prompt_of("back"), max_tokens=8, trajectory_id="t")
        assert_labels_tell_the_truth(rig, prompt_of("back"), completion)

    run(server, body)


def test_a_pull_that_is_given_up_leaves_the_engine_serving(server: Server) -> None:
    async def body(rig: Rig) -> None:
        manifest = rig.publish(2)
        for _ in range(3):
            with trio.move_on_after(0.02):
                await rig.engine.pull(manifest)
        await rig.engine.pull(manifest)
        completion = await rig.pool.sample(prompt_of("on"), max_tokens=8, trajectory_id="t")
        assert [span.version for span in completion.spans] == [2]
        assert_labels_tell_the_truth(rig, prompt_of("on"), completion)

    run(server, body)


def test_a_pull_that_is_given_up_when_all_is_loaded_changes_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an update that stays open in the server, a shadow that is used again half loaded."""

    async def body(rig: Rig) -> None:
        manifest = rig.publish(2)
        with trio.CancelScope() as scope, monkeypatch.context() as patch:
            patch.setattr(rig.engine, "hold_requests", scope.cancel)  # the last thing before the pause
            await rig.engine.pull(manifest)
        assert scope.cancelled_caught
        completion = await rig.pool.sample(prompt_of("on"), max_tokens=8, trajectory_id="t")
        assert [span.version for span in completion.spans] == [1]
        assert_labels_tell_the_truth(rig, prompt_of("on"), completion)
        await rig.engine.pull(rig.publish(3))
        completion = await rig.pool.sample(prompt_of("on"), max_tokens=8, trajectory_id="t")
        assert [span.version for span in completion.spans] == [3]
        assert_labels_tell_the_truth(rig, prompt_of("on"), completion)

    run(server, body)


def test_a_server_that_a_killed_run_left_in_the_middle_of_an_update_serves_the_next_run(server: Server) -> None:
    async def body(rig: Rig) -> None:
        await rig.engine.control.post("/start_weight_update", None, {})
        update = {"manifest": manifest_to_json(rig.publish(2))}
        await rig.engine.control.post("/update_weights", {"update_info": update}, {})

    async def next_run(rig: Rig) -> None:
        completion = await rig.pool.sample(prompt_of("on"), max_tokens=8, trajectory_id="t")
        assert_labels_tell_the_truth(rig, prompt_of("on"), completion)

    run(server, body)
    run(server, next_run)


@pytest.mark.parametrize("staged", [True, False])
def test_a_version_is_in_place_however_it_was_loaded(server: Server, staged: bool) -> None:
    async def body(rig: Rig) -> None:
        for version in (2, 3):
            await rig.engine.pull(rig.publish(version))
            completion = await rig.pool.sample(prompt_of("on"), max_tokens=8, trajectory_id="t")
            assert_labels_tell_the_truth(rig, prompt_of("on"), completion)

    run(server, body, staged_sync=staged)


def test_a_prompt_that_fills_the_context_is_refused_with_the_setting(server: Server) -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(EngineError, match=r"1024 tokens leaves no room in max_model_len = 1024"):
            await rig.pool.sample(TokenIds([5] * 1024), max_tokens=4, trajectory_id="t")
        completion = await rig.pool.sample(TokenIds([5] * 1020), max_tokens=40, trajectory_id="t")
        assert len(completion.token_ids) == 4
        assert completion.finish_reason is FinishReason.LENGTH

    run(server, body)


def test_the_real_engine_keeps_the_promises_that_the_fake_keeps(server: Server) -> None:
    async def body(rig: Rig) -> None:
        await check_engine(rig.pool, rig.pool, rig.publish(2), TokenIds(range(40, 60)))

    run(server, body)


def test_a_teachers_server_tells_the_log_probs_of_given_tokens(server: Server) -> None:
    async def body(rig: Rig) -> None:
        rows = select(random_groups(3), LearnerSettings()).batch
        model = model_of(rig.directory, rig.versions[1])
        teacher = ServedModel(server.url, timeout_s=60.0, section="[learner.teacher]", entries_per_request=100)
        teacher.check(rig.directory, top_k=7)
        found, (ids, values) = teacher.logprobs(rows), teacher.top_k(rows, 7)
        bounds = rows.cu_seqlens.tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007
            mask, tokens = rows.loss_mask[start:end], rows.token_ids[start:end]
            with torch.no_grad():
                every = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
            wanted = every.gather(1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(found[start:end][mask], wanted[mask[1:]], rtol=0, atol=TOLERANCE)
            theirs = every.gather(1, ids[start + 1 : end])[mask[1:]]
            torch.testing.assert_close(values[start:end][mask], theirs, rtol=0, atol=TOLERANCE)
            best = every.topk(7).values[mask[1:]]
            torch.testing.assert_close(values[start:end][mask], best, rtol=0, atol=TOLERANCE)
        with pytest.raises(ConfigError, match=r"top_k = 21: .*answers 400"):
            teacher.check(rig.directory, top_k=21)
        with pytest.raises(LearnerError, match="/v1/completions answers 400"):
            teacher._ask([[5] * 1025], 0)
        teacher.close()

    run(server, body)


def vllm_below(keeper: int) -> int:
    """Return the process id of the server that a keeper keeps."""
    (child,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(child)


async def wait_health(pool: EnginePool, *health: Health) -> None:
    # only a test waits for this, so the pool offers no event for it
    while tuple(engine.health for engine in pool.statistics().engines) != health:  # noqa: ASYNC110
        await trio.sleep(0.05)


def test_completions_of_a_killed_server_go_on_in_another_and_it_comes_back_with_the_newest_weights(
    server: Server, tmp_path: Path
) -> None:
    """Kills: labels that lag behind a sync, tokens sampled twice, a server that comes back with its first weights."""

    async def body(rig: Rig) -> None:
        started: list[ServerProcess] = []

        @asynccontextmanager
        async def start(restarts: int, published: bool) -> AsyncIterator[ServerProcess]:
            log = tmp_path / "engine-1.log"
            async with start_server(SETTINGS, 1, rig.directory, 0, seed=1 + restarts, log_path=log) as process:
                started.append(process)
                yield process

        other = VLLMEngine("engine-1", "", SETTINGS, SamplingSettings(), end_token_ids=(), run_id=rig.run_id)
        async with other, trio.open_nursery() as nursery:
            pool = EnginePool([rig.engine, other], SETTINGS)
            await nursery.start(pool.serve, {"engine-1": start})
            assert len(await pool.pull_all(rig.publish(2))) == 2
            prompts = [prompt_of(f"long {place} " + "." * place) for place in range(8)]
            completions: dict[int, Completion] = {}

            async def ask() -> None:
                completions.update(await sample_many(pool, prompts, 600))

            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await wait_begun(other, 2)
                await pool.pull_all(rig.publish(3))
                await wait_sampled(other, other.statistics().tokens_sampled + 40)
                os.kill(vllm_below(started[0].child.pid), signal.SIGKILL)
                await wait_health(pool, Health.SERVING, Health.STARTING)
                reports = await pool.pull_all(rig.publish(4))
                assert [report.engine for report in reports] == ["engine-0"]
            moved = {place: completion for place, completion in completions.items() if completion.moved_at}
            assert moved
            for place, completion in completions.items():
                assert len(completion.token_ids) == 600
                assert_labels_tell_the_truth(rig, prompts[place], completion)
            for completion in moved.values():
                assert completion.engine == "engine-1, engine-0"
                assert completion.moved_at[0] > 0
            assert any({2, 3} <= {span.version for span in completion.spans} for completion in moved.values())
            statistics = pool.statistics()
            assert statistics.requests_moved == len(moved)
            assert statistics.tokens_carried == sum(completion.moved_at[0] for completion in moved.values())

            await wait_health(pool, Health.SERVING, Health.SERVING)
            assert pool.statistics().restarts == 1
            completion = await sample_by(other, prompts[0], 12)
            assert [span.version for span in completion.spans] == [4]
            assert_labels_tell_the_truth(rig, prompts[0], completion)
            nursery.cancel_scope.cancel()

    run(server, body, limit_s=900.0)  # starts a server twice, on a machine that may be busy


def test_a_server_that_dies_fails_its_requests_and_its_sync_at_once(server: Server) -> None:
    """The last test here: it kills the server (see `healthy`)."""

    async def body(rig: Rig) -> None:
        drafts = [Draft(prompt_of("last words"), max_tokens=900, trajectory_id="t") for _ in range(4)]
        failures: list[EngineError] = []

        async def one(draft: Draft) -> None:
            try:
                await rig.engine.generate(draft)
            except EngineError as error:
                failures.append(error)

        manifest = rig.publish(2)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for draft in drafts:
                    nursery.start_soon(one, draft)
                await wait_begun(rig.engine, 4)
                server.kill()
        assert len(failures) == 4
        assert all("does not answer" in str(failure) for failure in failures)
        for draft in drafts:
            assert [span.version for span in draft.spans] == [1]
            assert len(draft.token_ids) == len(draft.behaviour_logprobs) > 0
        with pytest.raises(WeightSyncError, match="engine-0, start of version 2: the server does not answer"):
            await rig.engine.pull(manifest)
        assert "after a failed sync to version 2" in rig.engine.broken
        with pytest.raises(EngineError, match="out of service"):
            await sample_by(rig.engine, prompt_of("anyone"), 1)

    run(server, body)
