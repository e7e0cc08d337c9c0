"""A tensor-parallel engine that guesses tokens: one real server of two ranks, which every test here uses in turn."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
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
    distances,
    model_of,
    perturbed,
    prompt_of,
    run,
    sample_many,
    wait_begun,
)
from engine_server import Server, running_server
from tiny_model import state_of

from asyncrl.engines import EngineSettings, KVOnSync
from asyncrl.errors import WeightMismatch
from asyncrl.types import Completion, FinishReason, TokenIds

pytestmark = pytest.mark.engine

GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OF_TWO_RANKS: EngineSettings = replace(
    SETTINGS, extra={"tensor_parallel_size": 2, "speculative_config": GUESSING}, start_timeout_s=600.0
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("tiny"), OF_TWO_RANKS) as started:
        yield started


def sure_of_few(rig: Rig, seed: int, *, how_sure: float = 2.5) -> Mapping[str, torch.Tensor]:
    """Return weights that repeat themselves: some guesses come true."""
    state = perturbed(state_of(rig.directory), seed=seed)
    state["lm_head.weight"] = state["lm_head.weight"] * how_sure
    return state


def surprise(rig: Rig, prompt: TokenIds, completion: Completion) -> tuple[float, float]:
    """Return how far the tokens' log-probs lie from what is expected of them, summed, and the variance of that sum."""
    (span,) = completion.spans
    model = model_of(rig.directory, rig.versions[span.version])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
    every = torch.log_softmax(logits.double(), -1)
    mean = (every.exp() * every).sum(-1)
    variance = (every.exp() * every.square()).sum(-1) - mean.square()
    return float((torch.tensor([*completion.behaviour_logprobs]) - mean).sum()), float(variance.sum())


def change_last_byte(path: str) -> None:
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7e")


async def guesses(rig: Rig) -> tuple[float, float]:
    """Return how many tokens the server has guessed, and how many of them were accepted."""
    counts = {}
    for line in (await rig.engine.metrics()).splitlines():
        for name in ("draft", "accepted"):
            if line.startswith(f"vllm:spec_decode_num_{name}_tokens_total"):
                counts[name] = float(line.rsplit(" ", 1)[1])
    return counts["draft"], counts["accepted"]


@asynccontextmanager
async def asked_again_and_again(
    rig: Rig, prompts: Sequence[TokenIds], *, max_tokens: int
) -> AsyncIterator[list[tuple[TokenIds, Completion]]]:
    """Have requests under way all the time, however fast the server is; each prompt and completion is in the list."""
    completions: list[tuple[TokenIds, Completion]] = []
    ended = trio.Event()

    async def ask(prompt: TokenIds, place: int) -> None:
        while not ended.is_set():
            one = await rig.pool.sample(prompt, max_tokens=max_tokens, trajectory_id=f"t-{place}")
            completions.append((prompt, one))

    async with trio.open_nursery() as nursery:
        for place, prompt in enumerate(prompts):
            nursery.start_soon(ask, prompt, place)
        yield completions
        ended.set()


def test_guessed_tokens_are_distributed_as_without_guesses_and_have_the_log_probs_of_that(server: Server) -> None:
    """Kills: guesses that are always accepted, log-probs of a step's last token alone."""

    async def body(rig: Rig) -> None:
        await rig.engine.pull(rig.publish(2, sure_of_few(rig, 2)))
        prompts = [prompt_of("abcd" * 20 + "." * place) for place in range(8)]
        completions = await sample_many(rig.pool, prompts, 150)
        guessed, accepted = await guesses(rig)
        assert guessed > 300
        assert accepted > 20, "some of a step's tokens were guessed, so that it had several"
        sums = []
        for place, completion in completions.items():
            assert [span.version for span in completion.spans] == [2]
            assert distances(rig, prompts[place], completion)[:, 0].max() < TOLERANCE
            sums.append(surprise(rig, prompts[place], completion))
        deviations = sum(total for total, _ in sums) / math.sqrt(sum(variance for _, variance in sums))
        assert abs(deviations) < 5.0  # of a standard normal: one run in two million

    # the server starts: four processes read vLLM
    run(server, body, limit_s=900.0, start_timeout_s=OF_TWO_RANKS.start_timeout_s, extra=OF_TWO_RANKS.extra)


def test_labels_are_exact_where_a_step_brings_several_tokens_and_each_rank_holds_the_version(server: Server) -> None:
    async def body(rig: Rig) -> None:
        prompts = [prompt_of(f"long {place} " + "." * place) for place in range(6)]
        async with asked_again_and_again(rig, prompts, max_tokens=300) as completions:
            for version in (2, 3):
                await wait_begun(rig.engine, 6)
                report = await rig.engine.pull(rig.publish(version, sure_of_few(rig, version)))
                assert report.num_bytes == 2 * sum(tensor.nbytes for tensor in rig.versions[version].values())
                reports = await rig.engine.control.reports()
                assert [(held["version"], held["placed"]) for held in reports] == [(version, "exchange")] * 2
        met = [{span.version for span in completion.spans} for _, completion in completions]
        assert any(len(versions & {2, 3}) == 2 for versions in met)
        assert any(len(versions - {3}) == 2 for versions in met)
        for prompt, completion in completions:
            assert len(completion.token_ids) == 300
            assert_labels_tell_the_truth(rig, prompt, completion)

    run(server, body, extra=OF_TWO_RANKS.extra)


def test_an_end_token_that_was_guessed_ends_the_completion_there(server: Server) -> None:
    """Kills: tokens or log-probs of the step's rest, which come after the end."""

    async def body(rig: Rig) -> None:
        await rig.engine.pull(rig.publish(2, sure_of_few(rig, 2, how_sure=8.0)))
        ends = frozenset(range(0, 384, 12))
        prompt, completions = prompt_of("abcd" * 20), []

        async def ask(place: int) -> None:
            ask_for = {"max_tokens": 60, "trajectory_id": f"t-{place}", "stop_token_ids": sorted(ends)}
            completions.append(await rig.pool.sample(prompt, **ask_for))

        accepted_before = (await guesses(rig))[1]
        async with trio.open_nursery() as nursery:
            for place in range(16):
                nursery.start_soon(ask, place)
        assert (await guesses(rig))[1] > accepted_before + 10
        ended = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
        assert len(ended) > 3
        for completion in ended:
            assert [place for place, token in enumerate(completion.token_ids) if token in ends] == [
                len(completion.token_ids) - 1
            ]
        for completion in completions:
            assert distances(rig, prompt, completion)[:, 0].max() < TOLERANCE

    run(server, body, extra=OF_TWO_RANKS.extra)


def test_keys_and_values_are_computed_again_under_guessed_tokens(server: Server) -> None:
    async def body(rig: Rig) -> None:
        prompts = [prompt_of(f"again {place} " + "." * 30) for place in range(4)]
        manifest = rig.publish(2, sure_of_few(rig, 2))
        async with asked_again_and_again(rig, prompts, max_tokens=250) as completions:
            await wait_begun(rig.engine, 4)
            await rig.engine.pull(manifest)
        assert any(len(completion.spans) == 2 for _, completion in completions)
        for prompt, completion in completions:
            assert len(completion.token_ids) == 250
            assert_labels_tell_the_truth(rig, prompt, completion, recomputed=True)

    run(server, body, extra=OF_TWO_RANKS.extra, kv_on_sync=KVOnSync.RECOMPUTE)


def test_an_update_that_both_ranks_refuse_leaves_them_in_step(server: Server) -> None:
    """Kills: the second rank's answer left in its queue, which the next call takes for its own."""

    async def body(rig: Rig) -> None:
        wrong = rig.publish(2)
        change_last_byte(wrong.location)
        with pytest.raises(WeightMismatch, match=r"version 2: .*has digest"):
            await rig.engine.pull(wrong)
        assert rig.engine.broken == ""
        for version in (3, 4):
            assert (await rig.engine.pull(rig.publish(version))).verified
            completion = await rig.pool.sample(prompt_of("on"), max_tokens=8, trajectory_id="t")
            assert [span.version for span in completion.spans] == [version]
            assert_labels_tell_the_truth(rig, prompt_of("on"), completion)

    run(server, body, extra=OF_TWO_RANKS.extra)


def test_a_killed_server_of_two_ranks_leaves_nothing(server: Server) -> None:
    """The last test here: it kills the server."""
    scratch = Path(server.scratch)
    meetings = [path.name for path in scratch.glob("vllm_dist_*")]
    assert [path for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(meetings))]
    server.kill()
    server.process.wait(60)
    assert not scratch.exists()
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(meetings))]
