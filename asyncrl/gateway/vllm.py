"""vLLM's own API: `/generate`, as environments of Atropos ask it, and `/inference/v1/generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from asyncrl.gateway.fields import Fields
from asyncrl.gateway.http import Answer, Refused, event, json_answer
from asyncrl.gateway.live import Live
from asyncrl.gateway.model import ServedModel
from asyncrl.gateway.openai import DONE, prompts_of, response_headers
from asyncrl.gateway.sampling import wanted_of
from asyncrl.gateway.session import Session
from asyncrl.gateway.streaming import Piece, Stream
from asyncrl.types import Logprobs, TokenIds, TokenSpan

_LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens")


async def generate(model: ServedModel, session: Session, fields: Fields, live: Live | None) -> Answer | None:
    """Answer `POST /generate`: text or ids in; texts, ids and log-probs of `n` choices out."""
    found = fields.take("prompt")
    if isinstance(found, dict):
        found = found.get("prompt_token_ids", found.get("prompt"))
    prompts = await prompts_of(model, found)
    if len(prompts) != 1:
        raise Refused(400, f"prompt must be one prompt, got {len(prompts)}")
    if live is not None:
        raise Refused(400, "stream must be false: /v1/completions streams")
    if fields.integer("logprobs", 0, high=20) > 1:
        raise Refused(400, "logprobs must be 0 or 1: only the sampled token's log-prob is known")
    if "prompt_logprobs" in fields:
        raise Refused(400, "prompt_logprobs are not served: nothing but sampled tokens is recorded")
    wanted = wanted_of(
        fields,
        model.settings,
        temperature=model.temperature,
        vocab_size=model.renderer.vocab_size,
        limits=_LIMITS,
    )
    choices = await model.complete(session, prompts[0], wanted)
    body = {
        "text": [choice.text for choice in choices],
        "prompt": found if isinstance(found, str) else model.renderer.decode(prompts[0], keep_special=True),
        "finish_reasons": [choice.finish_reason for choice in choices],
        # the client takes the first entry of each token's as the sampled one
        "logprobs": [
            [
                [{str(token_id): logprob}]
                for token_id, logprob in zip(c.completion.token_ids, c.completion.behaviour_logprobs, strict=True)
            ]
            for c in choices
        ],
        "prompt_token_ids": list(prompts[0]),
        "token_ids": [list(choice.completion.token_ids) for choice in choices],
    }
    return json_answer(body, headers=response_headers(choices, wanted))


async def inference_generate(model: ServedModel, session: Session, fields: Fields, live: Live | None) -> Answer | None:
    """Answer `POST /inference/v1/generate`: ids in, ids, log-probs and versions out."""
    prompt = fields.token_ids("token_ids", vocab_size=model.renderer.vocab_size)
    parameters = fields.object("sampling_params")
    fields.take("return_token_ids")
    shows_logprobs = "logprobs" in parameters
    if parameters.integer("logprobs", 0, high=20) > 1:
        raise Refused(400, "logprobs must be 0 or 1: only the sampled token's log-prob is known")
    wanted_of(fields, model.settings, temperature=model.temperature, vocab_size=model.renderer.vocab_size)
    wanted = wanted_of(parameters, model.settings, temperature=model.temperature, vocab_size=model.renderer.vocab_size)
    head = {"request_id": f"generate-tokens-{secrets.token_hex(12)}"}

    def say(piece: Piece, finish_reason: str | None = None) -> None:
        assert live is not None
        logprobs = piece.logprobs if shows_logprobs else None
        each = _shown(piece.index, piece.token_ids, logprobs, piece.spans, finish_reason)
        live.say(event({**head, "choices": [each]}))

    if live is not None:
        stream = Stream(live, model.renderer, wanted, say)
        for place, choice in enumerate(await model.complete(session, prompt, wanted, stream.watches())):
            say(stream.rest(place, choice, choice.text), choice.finish_reason)
        live.say(DONE)
        session.streams_left += live.left
        return None
    choices = await model.complete(session, prompt, wanted)
    shown = []
    for index, choice in enumerate(choices):
        completion = choice.completion
        logprobs = completion.behaviour_logprobs if shows_logprobs else None
        shown.append(_shown(index, completion.token_ids, logprobs, completion.spans, choice.finish_reason))
    return json_answer({**head, "choices": shown}, headers=response_headers(choices, wanted))


def _shown(
    index: int,
    token_ids: TokenIds,
    logprobs: Logprobs | None,
    spans: Sequence[TokenSpan],
    finish_reason: str | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": list(token_ids),
        "finish_reason": finish_reason,
        "logprobs": None if logprobs is None else {"content": _logprobs(token_ids, logprobs)},
        "weight_versions": [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans],
    }


def _logprobs(token_ids: TokenIds, logprobs: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "top_logprobs": []}
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
