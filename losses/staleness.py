"""What staleness does to the ratios, and the engine mismatch without it. `T` packed tokens, `S` sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncrl.losses.inputs import LossInputs, Prepared
from asyncrl.losses.ratios import log_ratio
from asyncrl.losses.recording import Recorder
from asyncrl.losses.reduction import (
    LOG_EDGES,
    RATIO_EDGES,
    STALENESS_BUCKETS,
    Counts,
    EffectiveSampleSize,
    Histogram,
    Max,
    Mean,
    Record,
)

MAX_STALENESS_BUCKET = 64
"""Optimizer steps; older tokens are counted in this bucket, tokens newer than the weights being trained in -1."""

_CONFIDENT = 0.5  # a probability that the engine gave to the token it sampled
_DISAGREES = -2.0  # nats; a confident token that the trainer finds e^2 times less likely points to other weights


def record_staleness(
    record: Recorder, inputs: LossInputs, p: Prepared, L: torch.Tensor, r: torch.Tensor, weight_S: torch.Tensor
) -> None:
    """Record staleness by token and by sequence, what each bucket of it does, and the engine mismatch at 0.

    `L` and `r` [T] are the log ratios and ratios of the tokens, `weight_S` [S] their products. A sequence is in the
    bucket of its oldest token.
    """
    assert inputs.versions is not None
    assert p.behaviour is not None
    lowest = torch.iinfo(torch.int64).min
    version = torch.where(p.mask, inputs.versions.long(), lowest)
    current = version.max() if version.numel() else version.new_tensor(0)
    if inputs.policy_version is not None:
        current = version.new_tensor(inputs.policy_version)
    staleness = torch.where(p.mask, current - version, 0)
    record.max("staleness_max", staleness, p.mask)
    record.mean("staleness_mean", staleness, p.mask)
    record.sum("staleness_negative", (staleness < 0).sum())
    size = MAX_STALENESS_BUCKET + 2
    bucket = staleness.clamp(-1, MAX_STALENESS_BUCKET)[p.usable] + 1
    w, log_w = r[p.usable], L[p.usable]

    def by_bucket(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(size).index_add(0, bucket, values)

    columns = [
        by_bucket(torch.ones_like(w)),
        by_bucket(w),
        by_bucket(w.square()),
        by_bucket(torch.expm1(log_w) - log_w),
        w.new_full((size,), -torch.inf).scatter_reduce(0, bucket, w, "amax"),
    ]
    record.add(lambda v: _staleness_records(v, size), *columns)
    record.add(_histograms, _ratio_counts(log_w, bucket - 1))
    _sequence_versions(record, p, version, staleness, weight_S)

    trainer = p.policy if p.proximal is None else p.proximal
    fresh = p.usable & (staleness == 0)
    D = log_ratio(trainer, p.behaviour, fresh)
    record.mean("mismatch_k1", -D, fresh)
    record.mean("mismatch_k3", torch.expm1(D) - D, fresh)
    gap = (trainer.exp() - p.behaviour.exp()).abs()
    for name, values in (("abs", D.abs()), ("prob", gap)):
        record.mean(f"mismatch_{name}_mean", values, fresh)
        record.max(f"mismatch_{name}_max", values, fresh)
    confident = fresh & (p.behaviour >= math.log(_CONFIDENT)) & (D < _DISAGREES)
    record.sum("mismatch_confident", confident.sum())


def _staleness_records(numbers: Sequence[float], size: int) -> dict[str, Record]:
    count, total, squares, k3, top = (numbers[i * size : (i + 1) * size] for i in range(5))
    seen = [i for i in range(size) if count[i]]
    found: dict[str, Record] = {"staleness_tokens": Counts(tuple((i - 1, count[i]) for i in seen))}
    for i in seen:
        found[f"token_ess_staleness_{i - 1}"] = EffectiveSampleSize(total[i], squares[i], count[i])
        found[f"token_weight_mean_staleness_{i - 1}"] = Mean(total[i], count[i])
        found[f"token_weight_max_staleness_{i - 1}"] = Max(top[i])
        found[f"kl_k3_staleness_{i - 1}"] = Mean(k3[i], count[i])
    return found


def _ratio_counts(log_w: torch.Tensor, staleness: torch.Tensor) -> torch.Tensor:
    """Return, for each of STALENESS_BUCKETS one after the other, how many ratios lie between LOG_EDGES.

    What is newer than the weights being trained is counted with staleness 0.
    """
    bins = len(LOG_EDGES) + 1
    edges = torch.tensor(LOG_EDGES, dtype=torch.float64, device=log_w.device)
    least = torch.tensor([*STALENESS_BUCKETS.values()][1:], device=staleness.device)
    place = torch.bucketize(staleness, least, right=True) * bins + torch.bucketize(log_w, edges, right=True)
    return torch.bincount(place, minlength=bins * len(STALENESS_BUCKETS))


def _histograms(counts: Sequence[float]) -> dict[str, Record]:
    bins = len(LOG_EDGES) + 1
    parts = {name: tuple(counts[i * bins : (i + 1) * bins]) for i, name in enumerate(STALENESS_BUCKETS)}
    found = {name: Histogram(RATIO_EDGES, part) for name, part in parts.items() if any(part)}
    return {f"token_weight_staleness_{name}_histogram": histogram for name, histogram in found.items()}


def _sequence_records(numbers: Sequence[float], size: int) -> dict[str, Record]:
    count, total, squares = (numbers[i * size : (i + 1) * size] for i in range(3))
    return {
        f"seq_ess_staleness_{i - 1}": EffectiveSampleSize(total[i], squares[i], count[i])
        for i in range(size)
        if count[i]
    }


def _sequence_versions(
    record: Recorder, p: Prepared, version: torch.Tensor, staleness: torch.Tensor, weight_S: torch.Tensor
) -> None:
    filled = p.lengths > 0
    index, num = p.segments.index[p.mask], p.segments.num_sequences
    oldest = torch.full((num,), torch.iinfo(torch.int64).min, device=index.device)
    oldest = oldest.scatter_reduce(0, index, staleness[p.mask], "amax")
    seen, rank = torch.unique(version[p.mask], return_inverse=True)
    distinct = torch.unique(index * len(seen) + rank)  # one number a pair: unique over rows is 100 times slower
    span = torch.bincount(distinct // max(1, len(seen)), minlength=num)
    size = MAX_STALENESS_BUCKET + 2
    bucket, w = oldest[filled].clamp(-1, MAX_STALENESS_BUCKET) + 1, weight_S[filled]
    columns = [torch.zeros(size, dtype=w.dtype, device=w.device).index_add(0, bucket, v) for v in (w**0, w, w.square())]
    record.add(lambda v: _sequence_records(v, size), *columns)
    record.mean("seq_staleness_max_mean", oldest, filled)
    record.mean("seq_versions_mean", span, filled)
    record.max("seq_versions_max", span, filled)
    record.mean("seq_multi_version_frac", span > 1, filled)
