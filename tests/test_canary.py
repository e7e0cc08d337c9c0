"""The canary finds what digests cannot, and of what was sampled meanwhile nothing is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from test_engine import GENERATE, Script, draft_of, event, manifest, report, scripted, stream_of
from tiny_model import build_tiny_model

from asyncrl.engines import Canary, VLLMEngine
from asyncrl.engines.draft import Part
from asyncrl.errors import EngineError, WeightMismatch, WeightSyncError
from asyncrl.learner.canary import canary_logprobs
from asyncrl.learner.model import load_model
from asyncrl.types import FinishReason, Logprobs, TokenIds, TokenSpan, WeightManifest

_TOKENS = TokenIds([5, 6, 7])
_EXPECTED = (-1.0, -2.0)


def _answer(*logprobs: float) -> tuple[int, bytes]:
    entries = [None, *({str(token): {"logprob": value}} for token, value in zip(_TOKENS[1:], logprobs, strict=True))]
    return 200, json.dumps({"choices": [], "prompt_logprobs": entries}).encode()


class _Singing(Script):
    """A server that answers the canary's request otherwise than those for tokens, and may hold it back."""

    canary: tuple[int, bytes] = _answer(*_EXPECTED)
    heard: int = 0
    hold_canary: trio.Event | None = None
    hold_request: trio.Event | None = None

    def answer(self, path: str) -> tuple[int, bytes]:
        self.hold = self.hold_request
        if path == GENERATE and "prompt_logprobs" in self.asked[-1][1]["sampling_params"]:
            self.hold = self.hold_canary
            self.heard += 1
            return self.canary
        return super().answer(path)


def _manifest() -> WeightManifest:
    from dataclasses import replace

    return replace(manifest(1), canary_logprobs=_EXPECTED)


def _run(script: Script, body: Any, **changes: Any) -> None:
    async def main() -> None:
        canary = Canary(_TOKENS)
        canary.learn({"engine-0": 0.0})
        with trio.fail_after(20):
            async with scripted(script, canary=canary, **changes) as engine:
                await body(engine)

    trio.run(main)


def _script(**answers: Any) -> _Singing:
    return _Singing(answers={"/collective_rpc": (200, report(1, _manifest().digest)), **answers})


def test_what_is_allowed_is_learnt_from_the_weights_that_both_begin_with() -> None:
    canary = Canary(_TOKENS)
    canary.check("engine 0", 0, 3.0)  # nothing is known yet
    canary.learn({"engine 0": 0.02, "engine 1": 0.03})
    assert canary.tolerance == pytest.approx(0.15)
    canary.check("engine 1", 1, 0.149)
    with pytest.raises(WeightMismatch, match=r"engine 1, canary of version 7: .* 0\.151 nats .* 0\.150 are allowed"):
        canary.check("engine 1", 7, 0.151)
    canary.learn({"engine 0": 1e-6})
    assert canary.tolerance == 0.05
    for wrong in (0.51, math.nan, math.inf):
        with pytest.raises(WeightMismatch, match=r"engine 1's log-probs .* same model\? canary = false"):
            canary.learn({"engine 0": 0.01, "engine 1": wrong})
    assert canary.distance([-1.0, math.nan], _EXPECTED) == math.inf


def test_the_learner_says_what_transformers_says_at_temperature_1(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build_tiny_model(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), temperature=0.7)
    tokens = list(range(40, 72))
    found = canary_logprobs(model, tokens, device=torch.device("cpu"))
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        every = torch.log_softmax(other(torch.tensor([tokens])).logits[0, :-1], -1)
    wanted = every.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)


def test_a_canary_that_sings_as_the_learner_does_is_in_the_report_and_pauses_nothing() -> None:
    script = _script()

    async def body(engine: VLLMEngine) -> None:
        done = await engine.pull(_manifest())
        assert done.canary_distance == 0.0
        assert done.seconds.keys() >= {"resume", "canary"}
        assert engine.statistics().canary_distance == 0.0
        await engine.pull(_manifest())

    _run(script, body)
    paths = [path for path, _ in script.asked]
    assert paths.index(GENERATE) > paths.index("/resume"), "the engine goes on meanwhile"
    salts = [body["cache_salt"] for path, body in script.asked if path == GENERATE]
    assert len(set(salts)) == 2, "no load reads blocks of another"


@pytest.mark.parametrize("wrong", [(-1.0, -2.2), (-9999.0, -2.0)])
def test_one_that_does_not_puts_the_engine_out_of_service(wrong: tuple[float, float]) -> None:
    script = _script()
    script.canary = _answer(*wrong)

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightMismatch, match=r"engine-0, canary of version 1: .*digests of all tensors are right"):
            await engine.pull(_manifest())
        assert "canary of version 1" in engine.broken
        script.canary = _answer(*_EXPECTED)
        await engine.pull(_manifest())
        assert engine.broken == ""

    _run(script, body)


def test_without_a_canary_none_is_asked() -> None:
    script = _script()

    async def body(engine: VLLMEngine) -> None:
        assert (await engine.pull(manifest(1))).canary_distance is None

    _run(script, body)
    assert script.heard == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, b"no"), "answers 500: no"),
        ((200, b"{}"), "gives no log-probs of the canary: None"),
        ((200, b'{"prompt_logprobs": [null, {"6": {"logprob": -1}}]}'), "gives no log-probs of the canary"),
    ],
)
def test_a_server_that_does_not_sing_is_no_mismatch(answer: tuple[int, bytes], words: str) -> None:
    script = _script()
    script.canary = answer

    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(WeightSyncError, match=f"engine-0, canary of version 1: .*{words}") as caught:
            await engine.pull(_manifest())
        assert not isinstance(caught.value, WeightMismatch)
        assert engine.broken

    _run(script, body)


def test_a_sync_that_is_given_up_before_the_canary_is_heard_puts_the_engine_out_of_service() -> None:
    """Kills: weights that nobody has compared, under which an engine goes on."""
    script = _script()

    async def body(engine: VLLMEngine) -> None:
        script.hold_canary = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.pull, _manifest())
            while not script.heard:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert engine.broken == "the canary of version 1: the sync was given up before its answer"
        script.hold_canary = None
        await engine.pull(_manifest())
        assert engine.broken == ""

    _run(script, body)


def test_of_what_is_sampled_while_the_canary_is_waited_for_nothing_is_kept_if_it_is_wrong() -> None:
    """One request has ended by then, with a token of the new version in it. Kills: handing it out before the verdict;
    cutting off what older weights have sampled.
    """
    whole = event([7, 8, 9], [-0.5, -0.25, -1.0], "stop", [("0", 0, 2), ("1", 2, 3)])
    script = _script(**{GENERATE: (200, stream_of(whole))})
    script.canary = _answer(-5.0, -5.0)

    async def body(engine: VLLMEngine) -> None:
        ended, failures = draft_of(), list[EngineError]()

        async def ask() -> None:
            try:
                await engine.generate(ended)
            except EngineError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            script.hold_canary, script.hold_request = trio.Event(), trio.Event()
            nursery.start_soon(ask)
            while not script.asked:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(_fails, engine)
            while not script.heard:
                await trio.lowlevel.checkpoint()
            script.hold_request.set()
            while engine.statistics().tokens_sampled < 3:
                await trio.lowlevel.checkpoint()
            for _ in range(20):  # its end has come, too
                await trio.lowlevel.checkpoint()
            assert (engine.statistics().running, len(ended.token_ids)) == (1, 0), "it waits for the verdict"
            script.hold_canary.set()
        assert list(ended.token_ids) == [7, 8]
        assert [(span.start, span.end, span.version) for span in ended.spans] == [(0, 2, 0)]
        assert not ended.is_whole
        assert "canary of version 1" in str(failures[0])
        assert engine.statistics().tokens_unverified == 1

    _run(script, body)


async def _fails(engine: VLLMEngine) -> None:
    with pytest.raises(WeightMismatch):
        await engine.pull(_manifest())


def test_a_part_is_cut_before_the_first_token_of_a_version() -> None:
    part = Part(
        token_ids=TokenIds([1, 2, 3]),
        behaviour_logprobs=Logprobs([-1.0, -2.0, -3.0]),
        spans=(TokenSpan(start=0, end=2, version=4), TokenSpan(start=2, end=3, version=5)),
        finish_reason=FinishReason.STOP,
    )
    assert part.before(6) is part
    cut = part.before(5)
    assert (list(cut.token_ids), list(cut.behaviour_logprobs), cut.finish_reason) == ([1, 2], [-1.0, -2.0], None)
    assert cut.spans == part.spans[:1]
    assert not part.before(4).token_ids
