"""Forward and backward passes over rows, on the learner's own packed model. `T` tokens of all rows, end to end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from asyncrl.losses import LossInputs, evaluate, finalise, reduce
from asyncrl.packing import Batch, split, to_device
from asyncrl.tinker.adapters import Adapted, Adapters
from asyncrl.tinker.loss_names import loss_of
from asyncrl.tinker.orders import Row
from asyncrl.types import Logprobs, TokenIds


def run_pass(
    adapters: Adapters,
    model: Adapted | None,
    rows: Sequence[Row],
    loss: str,
    options: Mapping[str, float],
    *,
    backward: bool,
    max_tokens: int,
    device: torch.device,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return (log-probs of the targets by row, metrics by "name:reduction"); gradients are added to the model's.

    The loss is a sum over tokens, so passes over parts of a batch add up to a pass over all of it. A forward reads at
    most `max_tokens` tokens, and what rows begin with alike once.
    """
    name, settings = loss_of(loss, options)
    batch = lay_out([row.token_ids for row in rows])
    values = _values(rows)
    targets = _flat([row.target_ids for row in rows], np.int32).long()
    microbatches = split(batch, max_tokens=max_tokens, targets=targets)
    found = torch.zeros(batch.num_tokens)
    total, parts = 0.0, []
    with torch.set_grad_enabled(backward):
        for microbatch in microbatches:
            tokens = microbatch.token_index
            logprobs_T = adapters.logprobs(model, to_device(microbatch, device))
            given: dict[str, Any] = {key: value[tokens].to(device) for key, value in values.items()}
            inputs = LossInputs(policy_logprobs=logprobs_T, cu_seqlens=microbatch.cu_seqlens.to(device), **given)
            output = evaluate(name, inputs, **settings)
            if backward:
                output.loss.backward()
            total += float(output.loss.detach())
            parts.append(output.metrics)
            found[tokens] = logprobs_T.detach().float().cpu()
    kept = {"clipped_low_frac", "clipped_high_frac", "capped_frac", "policy_logprobs_nonfinite"}
    metrics = {f"{key}:mean": value for key, value in finalise(reduce(parts)).items() if key in kept}
    metrics |= {"loss:sum": total, "tokens:sum": float(batch.num_tokens)}
    if backward and model is not None:
        model.passes += 1
    bounds = batch.cu_seqlens.tolist()
    return [found[start:end] for start, end in pairwise(bounds)], metrics


def target_logprobs(
    adapters: Adapters, model: Adapted | None, tokens: TokenIds, *, max_tokens: int, device: torch.device
) -> Logprobs:
    """Return [len(tokens)] nats at temperature 1, of each token given those before it; NaN for the first."""
    row = Row(token_ids=TokenIds(tokens[:-1]), target_ids=TokenIds(tokens[1:]))
    if not len(row.token_ids):
        return Logprobs([math.nan])
    with torch.no_grad():
        ((found,), _) = run_pass(
            adapters, model, [row], "cross_entropy", {}, backward=False, max_tokens=max_tokens, device=device
        )
    return Logprobs([math.nan, *found.tolist()])


def _values(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return the loss's inputs by their names in `LossInputs`, [T].

    A token whose advantage is 0 adds nothing to any of the losses, so it is masked: its log-prob at the sampler may be
    anything. Weights multiply the advantages; where there are none of these they stand for them.
    """

    def flat(name: str, missing: float) -> torch.Tensor:
        return _flat([row.values.get(name, Logprobs([missing] * len(row.token_ids))) for row in rows], np.float32)

    advantages = flat("advantages", 1.0) * flat("weights", 1.0)
    return {"advantages": advantages, "behaviour_logprobs": flat("logprobs", 0.0), "loss_mask": advantages != 0}


def lay_out(rows: Sequence[TokenIds], scored: torch.Tensor | None = None) -> Batch:
    """Return the batch of some rows. `scored` [T] bool are the places that something is predicted at; None is all."""
    lengths = [len(row) for row in rows]
    total = sum(lengths)
    nothing = torch.zeros(total)
    return Batch(
        token_ids=_flat(rows, np.int32).long(),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        loss_mask=torch.ones(total, dtype=torch.bool) if scored is None else scored,
        observation_mask=torch.zeros(total, dtype=torch.bool),
        behaviour_logprobs=nothing,
        advantages=nothing,
        versions=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64),
        trajectory_index=torch.arange(len(rows)),
        group_index=torch.zeros(len(rows), dtype=torch.int64),  # one group: what rows begin with alike is read once
        rewards=torch.zeros(len(rows)),
        num_loss_tokens=total,
    )


def _flat(rows: Sequence[TokenIds] | Sequence[Logprobs], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.frombuffer(row, dtype) for row in rows]))
