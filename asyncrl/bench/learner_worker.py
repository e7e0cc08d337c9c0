"""One process of `asyncrl bench learner`: a model, batches, and what can be timed on them.

    python -m asyncrl.bench.learner_worker '{"kind": "learner", "model": ..., ...}'

It is asked by the names of its methods (`asyncrl.bench.asked_process`). The kinds are "learner" (the learner's own
code, `learner_parts`), "padded" and "alone" (transformers' model with whole float32 logits: sequences padded to the
longest, or one at a time).

Gradients are added up where they stay: in float32 sums for the learner, in the parameters' own `.grad` for the others.
Both exist and are touched before the memory is looked at, so that a peak is activations, logits and what else comes and
goes in a forward and backward pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import torch

from asyncrl.bench.asked_process import answer_requests
from asyncrl.bench.learner_batches import Text, ragged_batch
from asyncrl.bench.learner_settings import LearnerBench
from asyncrl.bench.timing import Report, timed
from asyncrl.learner.products import has_fast_bfloat16


class Transformers:
    """Plain transformers: log-probs from whole float32 logits, the loss of `reinforce`, gradients in `.grad`."""

    def __init__(self, bench: LearnerBench, *, sequences: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            bench.model, dtype=torch.bfloat16, local_files_only=True
        ).eval()
        self._batch = ragged_batch(bench, Text(bench.model))
        self._sequences = sequences
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter).fill_(0.0)
        self._add_gradient(0, 1, until=min(bench.shortest, 64))  # the first call of every kernel
        self._empty()

    def ragged(self) -> Report:
        """Forward and backward of the batch."""

        def run() -> Report:
            count = self._batch.num_segments
            loss = sum(
                self._add_gradient(first, min(first + self._sequences, count))
                for first in range(0, count, self._sequences)
            )
            return {"loss": loss, "num_tokens": self._batch.num_tokens}

        report = timed(run)
        squares = [parameter.grad.double().square().sum() for parameter in self._model.parameters()]
        self._empty()
        return {**report, "grad_norm": float(torch.stack(squares).sum().sqrt())}

    def _empty(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad.zero_()

    def _add_gradient(self, first: int, last: int, until: int | None = None) -> float:
        """Add the gradient of segments `first` to `last`, padded to the longest, and return their part of the loss."""
        batch = self._batch
        rows = [slice(start, end) for start, end in pairwise(batch.cu_seqlens.tolist()[first : last + 1])]
        if until is not None:
            rows = [slice(row.start, row.start + until) for row in rows]

        def padded(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([values[row] for row in rows], batch_first=True)

        tokens = padded(batch.token_ids)
        real = padded(torch.ones_like(batch.token_ids))
        weights = padded(batch.advantages * batch.loss_mask)[:, 1:]
        mask = {} if len(rows) == 1 else {"attention_mask": real}
        logits = self._model(input_ids=tokens, use_cache=False, **mask).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[:, :, 0]
        loss = -(logprobs * weights).sum() / batch.num_loss_tokens
        loss.backward()
        return float(loss.detach())


def _open(bench: LearnerBench, kind: str) -> Any:
    if kind == "learner":
        from asyncrl.bench.learner_parts import LearnerParts

        return LearnerParts(bench)
    return Transformers(bench, sequences=bench.sequences if kind == "padded" else 1)


def main(job: Mapping[str, Any]) -> None:
    """Answer until the input ends."""
    bench = msgspec.convert(job["bench"], LearnerBench, dec_hook=lambda kind, value: kind(value))
    if bench.threads:
        torch.set_num_threads(bench.threads)
    worker = _open(bench, job["kind"])
    hello = {"threads": torch.get_num_threads(), "torch": torch.__version__, "has_fast_bfloat16": has_fast_bfloat16()}
    answer_requests(worker, hello)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
