"""An engine of a real server under test, and whether what it says of its tokens is true."""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import trio
from engine_server import Server
from tiny_model import state_of

from asyncrl.engines import (
    Canary,
    Draft,
    EnginePool,
    EngineSettings,
    SamplingSettings,
    VLLMEngine,
)
from asyncrl.errors import EngineError
from asyncrl.types import Completion, TokenIds, TokenSpan, WeightManifest
from asyncrl.weight_sync.shared_memory import SharedMemoryPublisher

SETTINGS = EngineSettings(
    dtype="float32", max_model_len=1024, max_num_seqs=8, kv_cache_gib=0.125, threads=1, request_timeout_s=120.0
)
TOLERANCE = 2e-3  # nats, float32 on both sides; kernels differ. Another version's log-prob is off by 0.5 on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """An engine and a publisher of one run, and every version's weights."""

    engine: VLLMEngine
    pool: EnginePool
    """Of this engine alone, in service."""
    run_id: str
    publisher: SharedMemoryPublisher
    directory: Path
    versions: dict[int, dict[str, torch.Tensor]]

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor] | None = None) -> WeightManifest:
        """Publish `tensors`, or weights that are far from every other version's."""
        self.versions[version] = dict(tensors or perturbed(state_of(self.directory), seed=version))
        return self.publisher.publish(self.versions[version], version)


def perturbed(state: Mapping[str, torch.Tensor], *, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights with every matrix drawn anew, so wide that versions differ by half a nat a token and more."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor.clone() if tensor.ndim == 1 else torch.randn(tensor.shape, generator=generator) * 0.1
        for name, tensor in state.items()
    }


def run(server: Server, body: Callable[[Rig], Awaitable[None]], *, limit_s: float = 240.0, **changes: Any) -> None:
    """Run an async test body with a fresh client, bound to a fresh run, holding version 1."""

    async def main() -> None:
        with trio.fail_after(limit_s):
            async with rig(server, **changes) as ready:
                await body(ready)

    trio.run(main)


@asynccontextmanager
async def rig(server: Server, canary: Canary | None = None, **changes: Any) -> Any:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    settings = replace(SETTINGS, **changes)
    async with VLLMEngine(
        "engine-0", server.url, settings, SamplingSettings(), end_token_ids=(), run_id=run_id, canary=canary
    ) as engine:
        with SharedMemoryPublisher(run_id=run_id) as publisher:
            await healthy(server, engine, settings.start_timeout_s)
            pool = EnginePool([engine], settings)
            ready = Rig(
                engine=engine,
                pool=pool,
                run_id=run_id,
                publisher=publisher,
                directory=server.model_directory,
                versions={},
            )
            await engine.pull(ready.publish(1))
            async with trio.open_nursery() as nursery:
                await nursery.start(pool.serve)
                yield ready
                nursery.cancel_scope.cancel()


async def healthy(server: Server, engine: VLLMEngine, timeout_s: float = SETTINGS.start_timeout_s) -> None:
    assert server.process.poll() is None, "an earlier test has ended the server: that one must come last"
    try:
        await engine.wait_healthy(timeout_s)
    except EngineError as error:
        raise AssertionError(f"{error}\n{server.log.read_text()[-3000:]}") from error


async def sample_many(pool: EnginePool, prompts: Sequence[TokenIds], max_tokens: int) -> dict[int, Completion]:
    """Return a completion of every prompt, all asked for at once."""
    completions: dict[int, Completion] = {}

    async def one(place: int) -> None:
        completions[place] = await pool.sample(prompts[place], max_tokens=max_tokens, trajectory_id=f"t-{place}")

    async with trio.open_nursery() as nursery:
        for place in range(len(prompts)):
            nursery.start_soon(one, place)
    return completions


async def sample_by(engine: VLLMEngine, prompt: TokenIds, max_tokens: int) -> Completion:
    """Return what one engine makes of a prompt, without a pool."""
    draft = Draft(prompt, max_tokens=max_tokens, trajectory_id="t")
    await engine.generate(draft)
    return draft.completion()


async def wait_begun(engine: VLLMEngine, number: int) -> None:
    """Return when that many of the rig's requests have sampled their first token."""
    # only a test waits for this, so the engine offers no event for it
    while (now := engine.statistics()).begun + now.completed < number:  # noqa: ASYNC110
        await trio.sleep(0.005)


async def wait_sampled(engine: VLLMEngine, number: int) -> None:
    """Return when that many tokens have arrived."""
    while engine.statistics().tokens_sampled < number:  # noqa: ASYNC110 - as above
        await trio.sleep(0.005)


def model_of(directory: Path, state: Mapping[str, torch.Tensor]) -> Any:
    """Return transformers' model with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).float().eval()
    model.load_state_dict(dict(state))
    return model


def pieces(completion: Completion) -> Iterator[TokenSpan]:
    """Yield the spans, cut where another engine went on."""
    for span in completion.spans:
        cuts = [span.start, *(place for place in completion.moved_at if span.start < place < span.end), span.end]
        for start, end in itertools.pairwise(cuts):
            yield TokenSpan(start=start, end=end, version=span.version)


def distances(rig: Rig, prompt: TokenIds, completion: Completion, *, recomputed: bool = False) -> torch.Tensor:
    """Return [n, 3], nats: how far each recorded log-prob is from its version's and its neighbours', given the history.

    The columns are the version on the label, the one before it and the one after it; infinite where there is none.

    The keys and values of a token are written in the step that samples the next one, so by the version that labels
    the next one: a span's inputs begin one token before it. With `recomputed`, each span starts from keys and values
    that its own version wrote; so does what another engine sampled behind the tokens of one that died.
    """
    from transformers import DynamicCache

    models = {version: model_of(rig.directory, state) for version, state in rig.versions.items()}
    everything = list(prompt) + list(completion.token_ids)
    rows = []
    cache = DynamicCache()
    with torch.no_grad():
        for span in pieces(completion):
            begin = cache.get_seq_length()
            recompute = recomputed or span.start in completion.moved_at
            inputs = torch.tensor([everything[begin : len(prompt) + span.end - 1]])
            targets = torch.tensor(list(completion.token_ids[span.start : span.end]))
            found = torch.tensor(list(completion.behaviour_logprobs[span.start : span.end]))
            columns = []
            for version in (span.version, span.version - 1, span.version + 1):
                if version not in models:
                    columns.append(torch.full((len(targets),), torch.inf))
                    continue
                model = models[version]
                past = copy.deepcopy(cache)
                if recompute and begin:
                    past = model(torch.tensor([everything[:begin]]), use_cache=True).past_key_values
                output = model(inputs, past_key_values=past, use_cache=True)
                logits = output.logits[0, -len(targets) :].float()
                logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
                columns.append((logprobs - found).abs())
                if version == span.version:
                    kept = output.past_key_values
            cache = kept
            rows.append(torch.stack(columns, 1))
    return torch.cat(rows)


def assert_labels_tell_the_truth(
    rig: Rig, prompt: TokenIds, completion: Completion, *, recomputed: bool = False
) -> None:
    """Every token agrees with the version on its label and, as sharply as numbers can tell, with neither neighbour."""
    gaps = distances(rig, prompt, completion, recomputed=recomputed)
    own, nearest = gaps[:, 0], gaps.argmin(1)
    assert own.max() < TOLERANCE, (
        f"token {int(own.argmax())} of {len(own)} is {own.max():.4f} nats from its own version"
    )
    assert (nearest == 0).float().mean() > 0.98
    for span in completion.spans:
        assert nearest[span.start] == 0, f"the first token of {span}"
        assert nearest[span.end - 1] == 0, f"the last token of {span}"


def prompt_of(text: str) -> TokenIds:
    return TokenIds(list(text.encode()))


def told(rig: Rig, canary: Canary, version: int) -> tuple[float, ...]:
    """Return what a learner with a version's weights makes of the canary."""
    tokens = torch.tensor(list(canary.token_ids))
    with torch.no_grad():
        every = torch.log_softmax(
            model_of(rig.directory, rig.versions[version])(tokens[None]).logits[0, :-1].float(), -1
        )
    return tuple(every.gather(1, tokens[1:, None])[:, 0].tolist())
