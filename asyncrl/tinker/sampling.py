"""Sampling on the learner's own packed model, for a service without an engine: simple, exact and slow.

Every token of every completion is a forward pass over all that was sampled so far (what completions begin with alike is
read once), so a completion of n tokens costs n passes. There is no cache of keys and values: the log-probs are those
that a training pass finds, and a test of a training loop needs no second program. With an engine, vLLM samples.
"""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer

from asyncrl.packing import split, to_device
from asyncrl.tinker.adapters import Adapted, Adapters
from asyncrl.tinker.orders import SampleOrder, Sequence
from asyncrl.tinker.passes import lay_out
from asyncrl.types import Logprobs, TokenIds


def sample(
    adapters: Adapters,
    model: Adapted | None,
    order: SampleOrder,
    *,
    end_token_ids: list[int],
    tokenizer: Tokenizer,
    max_tokens: int,
    device: torch.device,
) -> list[Sequence]:
    """Return the completions that an order asks for; `max_tokens` bounds one forward."""
    generator = torch.Generator()
    generator.manual_seed(torch.seed() if order.seed is None else order.seed)
    ends = set(end_token_ids if order.stop_token_ids is None else order.stop_token_ids)
    tokens: list[list[int]] = [[] for _ in range(order.num_samples)]
    logprobs: list[list[float]] = [[] for _ in range(order.num_samples)]
    stopped = [False] * order.num_samples
    going = list(range(order.num_samples))
    with torch.no_grad():
        while going and len(tokens[going[0]]) < order.max_tokens:
            logits = _next_logits(adapters, model, [[*order.prompt, *tokens[i]] for i in going], max_tokens, device)
            chosen, chosen_logprobs = choose(logits, order, generator)
            for i, token, logprob in zip(going, chosen.tolist(), chosen_logprobs.tolist(), strict=True):
                tokens[i].append(token)
                logprobs[i].append(logprob)
                stopped[i] = token in ends or _ends_in_text(tokenizer, tokens[i], order.stop_texts)
            going = [i for i in going if not stopped[i]]
    return [
        Sequence(token_ids=TokenIds(ids), logprobs=Logprobs(found), stopped=end)
        for ids, found, end in zip(tokens, logprobs, stopped, strict=True)
    ]


def _next_logits(
    adapters: Adapters, model: Adapted | None, rows: list[list[int]], max_tokens: int, device: torch.device
) -> torch.Tensor:
    """Return [len(rows), V] float32 logits of the token after each row."""
    last = torch.zeros(sum(len(row) for row in rows), dtype=torch.bool)
    last[torch.tensor([len(row) for row in rows]).cumsum(0) - 1] = True
    batch = lay_out([TokenIds(row) for row in rows], last)
    found: dict[int, torch.Tensor] = {}
    for microbatch in split(batch, max_tokens=max_tokens, targets=torch.zeros_like(batch.token_ids)):
        hidden, head = adapters.hidden(model, to_device(microbatch, device))
        logits = torch.nn.functional.linear(hidden, head).float().cpu()
        for segment, place in zip(microbatch.segment_index.tolist(), microbatch.prediction_index.tolist(), strict=True):
            found[segment] = logits[place]
    return torch.stack([found[index] for index in range(len(rows))])


def choose(logits: torch.Tensor, order: SampleOrder, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([n] tokens, [n] log-probs in nats under what they were sampled from); temperature 0 takes the likeliest.

    The likeliest token's log-prob is that at temperature 1, as engines give it. `logits` [n, V].
    """
    if order.temperature == 0:
        logprobs, token = torch.log_softmax(logits, -1).max(-1)
        return token, logprobs
    logits = logits / order.temperature
    if 0 < order.top_k < logits.shape[1]:
        least = logits.topk(order.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if order.top_p < 1:
        ranked, index = logits.sort(descending=True)
        share = ranked.softmax(-1)
        outside = share.cumsum(-1) - share >= order.top_p  # the token that crosses the bound stays
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), -math.inf)
    logprobs = torch.log_softmax(logits, -1)
    token = torch.multinomial(logprobs.exp(), 1, generator=generator)
    return token[:, 0], logprobs.gather(1, token)[:, 0]


def _ends_in_text(tokenizer: Tokenizer, tokens: list[int], texts: list[str]) -> bool:
    if not texts:
        return False
    tail = tokenizer.decode(tokens[-2 * max(map(len, texts)) - 8 :], skip_special_tokens=False)
    return any(text in tail for text in texts)
