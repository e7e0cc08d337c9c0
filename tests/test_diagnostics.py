"""Diagnostics against their definitions in plain floats, on batches with empty sequences, holes and extreme ratios."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from loss_reference import Batch, actives, clamp, hard_batch, replace, sequence_log_ratio
from test_loss_invariances import subset
from test_loss_values import packed

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses import LossInputs, diagnostics, finalise, reduce, top_ratios
from asyncrl.losses.reduction import RATIO_EDGES, Counts, Growth, Histogram, Mean, Sum
from asyncrl.losses.statistics import quantiles, rank_correlation
from asyncrl.losses.text import compression_ratio, longest_run_share, repetition_n

CURRENT = 7


def versions_of(batch: Batch, seed: int = 0) -> list[int]:
    """Return a version for every token; a nonsense one where it must not be read."""
    rng = random.Random(seed)
    return [CURRENT - rng.choice([0, 0, 1, 3]) if t.active else 10**9 for t in batch.tokens]


def measured(batch: Batch, **settings: Any) -> dict[str, float]:
    inputs = packed(batch, versions=torch.tensor(versions_of(batch)), policy_version=CURRENT)
    return dict(diagnostics(inputs, **settings).values)


def token_ratios(batch: Batch) -> list[float]:
    return [math.exp(clamp(t.policy - t.behaviour)[0]) for t in batch.tokens if t.active]


def ess(weights: list[float]) -> float:
    top = max(weights)
    scaled = [w / top for w in weights]
    return math.fsum(scaled) ** 2 / math.fsum(w * w for w in scaled)


@pytest.mark.parametrize("seed", range(4))
def test_weights_and_effective_sample_sizes(seed: int) -> None:
    batch = hard_batch(seed)
    found = measured(batch)
    full = [s for s in batch.sequences if actives(s)]
    kinds = {
        "token": token_ratios(batch),
        "seq": [math.exp(clamp(sequence_log_ratio(s))[0]) for s in full],
        "geo": [math.exp(sequence_log_ratio(s) / len(actives(s))) for s in full],
    }
    for kind, weights in kinds.items():
        assert found[f"{kind}_weight_max"] == pytest.approx(max(weights), rel=1e-12)
        assert found[f"{kind}_weight_min"] == pytest.approx(min(weights), rel=1e-12)
        assert found[f"{kind}_weight_mean"] == pytest.approx(math.fsum(weights) / len(weights), rel=1e-12)
        for share in (50, 95, 99):
            assert found[f"{kind}_weight_p{share}"] == pytest.approx(np.percentile(weights, share), rel=1e-12)
    for kind in ("token", "seq"):
        assert found[f"{kind}_ess"] == pytest.approx(ess(kinds[kind]), rel=1e-12)
        assert found[f"{kind}_ess_frac"] == pytest.approx(ess(kinds[kind]) / len(kinds[kind]), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_divergences_and_clip_fractions(seed: int) -> None:
    batch = hard_batch(seed)
    found = measured(batch, clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    active = [t for t in batch.tokens if t.active]
    ratios, n = token_ratios(batch), len(active)
    logs = [clamp(t.policy - t.behaviour)[0] for t in active]
    expected = {
        "kl_k1": math.fsum(-x for x in logs) / n,
        "kl_k3": math.fsum(math.expm1(x) - x for x in logs) / n,
        "chi2": math.fsum(r * r for r in ratios) / n - 1,
        "frac_ratio_below": sum(r < 0.9 for r in ratios) / n,
        "frac_ratio_above": sum(r > 1.3 for r in ratios) / n,
        "clip_frac_low": sum(r < 0.9 and t.advantage < 0 for r, t in zip(ratios, active, strict=True)) / n,
        "clip_frac_high": sum(r > 1.3 and t.advantage > 0 for r, t in zip(ratios, active, strict=True)) / n,
        "clip_frac_dual": sum(r > 2.0 and t.advantage < 0 for r, t in zip(ratios, active, strict=True)) / n,
        "zero_adv_token_frac": sum(t.advantage == 0 for t in active) / n,
        "entropy": math.fsum(t.entropy for t in active) / n,
        "sampled_entropy": math.fsum(-t.behaviour for t in active) / n,
        "log_ratio_clamped": sum(abs(t.policy - t.behaviour) > 20 for t in active),
        "num_loss_tokens": n,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_staleness_buckets_and_engine_mismatch(seed: int) -> None:
    batch = hard_batch(seed)
    found = measured(batch)
    versions = versions_of(batch)
    active = [(t, CURRENT - v) for t, v in zip(batch.tokens, versions, strict=True) if t.active]
    for lag in (0, 1, 3):
        weights = [math.exp(clamp(t.policy - t.behaviour)[0]) for t, at in active if at == lag]
        assert found[f"staleness_tokens_{lag}"] == len(weights)
        assert found[f"token_ess_staleness_{lag}"] == pytest.approx(ess(weights), rel=1e-12)
        assert found[f"token_weight_max_staleness_{lag}"] == pytest.approx(max(weights), rel=1e-12)
    assert "staleness_tokens_2" not in found
    assert found["staleness_max"] == 3.0
    fresh = [t for t, at in active if at == 0]
    gaps = [clamp(t.proximal - t.behaviour)[0] for t in fresh]
    probabilities = [abs(math.exp(t.proximal) - math.exp(t.behaviour)) for t in fresh]
    assert found["mismatch_k1"] == pytest.approx(-math.fsum(gaps) / len(gaps), rel=1e-10)
    assert found["mismatch_k3"] == pytest.approx(math.fsum(math.expm1(d) - d for d in gaps) / len(gaps), rel=1e-10)
    assert found["mismatch_abs_mean"] == pytest.approx(math.fsum(map(abs, gaps)) / len(gaps), rel=1e-10)
    assert found["mismatch_abs_max"] == pytest.approx(max(map(abs, gaps)), rel=1e-12)
    assert found["mismatch_prob_max"] == pytest.approx(max(probabilities), rel=1e-12)
    assert found["mismatch_confident"] == sum(
        math.exp(t.behaviour) >= 0.5 and d < -2 for t, d in zip(fresh, gaps, strict=True)
    )
    spans, oldest, at = [], [], 0
    for sequence in batch.sequences:
        lags = [CURRENT - versions[at + i] for i in actives(sequence)]
        at += len(sequence)
        if lags:
            spans.append(len(set(lags)))
            oldest.append(max(lags))
    assert found["seq_versions_mean"] == pytest.approx(sum(spans) / len(spans))
    assert found["seq_multi_version_frac"] == pytest.approx(sum(s > 1 for s in spans) / len(spans))
    assert found["seq_staleness_max_mean"] == pytest.approx(sum(oldest) / len(oldest))
    full = [s for s in batch.sequences if actives(s)]
    for lag in {*oldest}:
        weights = [math.exp(clamp(sequence_log_ratio(s))[0]) for s, at in zip(full, oldest, strict=True) if at == lag]
        assert found[f"seq_ess_staleness_{lag}"] == pytest.approx(ess(weights), rel=1e-10)
        assert found[f"seq_ess_staleness_{lag}_frac"] == pytest.approx(ess(weights) / len(weights), rel=1e-10)


@pytest.mark.parametrize("seed", range(2))
def test_the_ratios_histogram_is_kept_apart_by_staleness(seed: int) -> None:
    batch = hard_batch(seed)
    versions = versions_of(batch)
    active = [(t, CURRENT - v) for t, v in zip(batch.tokens, versions, strict=True) if t.active]
    records = diagnostics(packed(batch, versions=torch.tensor(versions), policy_version=CURRENT)).records
    whole = records["token_weight_histogram"]
    for name, lags in (("0", {0}), ("1", {1}), ("3-4", {3, 4})):
        weights = sorted(math.exp(clamp(t.policy - t.behaviour)[0]) for t, at in active if at in lags)
        found = records[f"token_weight_staleness_{name}_histogram"]
        assert isinstance(found, Histogram)
        assert sum(found.counts) == len(weights) > 0
        assert found.quantile(0.5) >= weights[(len(weights) - 1) // 2]
    assert "token_weight_staleness_2_histogram" not in records
    assert isinstance(whole, Histogram)
    parts = [r for n, r in records.items() if n.startswith("token_weight_staleness_") and isinstance(r, Histogram)]
    assert tuple(map(sum, zip(*(part.counts for part in parts), strict=True))) == whole.counts


def test_a_token_newer_than_the_weights_is_counted() -> None:
    batch = hard_batch(0)
    inputs = packed(batch, versions=torch.tensor(versions_of(batch)), policy_version=CURRENT - 1)
    found = diagnostics(inputs)
    assert found["staleness_negative"] == found["staleness_tokens_-1"] > 0
    newest = diagnostics(packed(batch, versions=torch.tensor(versions_of(batch))))
    assert newest["staleness_negative"] == 0.0


def test_zero_variance_groups_are_split_and_compared_with_chance() -> None:
    batch = hard_batch(0, (2,) * 11)
    rewards = [0, 0, 1, 1, 1, 0, 0.4, 0.4, 1, 0, math.nan]  # the last one failed
    batch = replace(batch, pairs=[], rewards=rewards, groups=[5, 5, 9, 9, 2, 2, 3, 3, 4, 4, 5])
    found = measured(batch)
    assert found["zero_variance_frac"] == pytest.approx(3 / 5)
    assert found["zero_variance_all_fail_frac"] == pytest.approx(1 / 5)
    assert found["zero_variance_all_pass_frac"] == pytest.approx(1 / 5)
    assert found["zero_variance_other_frac"] == pytest.approx(1 / 5)
    assert found["success_rate"] == pytest.approx(0.4)
    assert found["zero_variance_expected_frac"] == pytest.approx(0.4**2 + 0.6**2)
    assert found["groups_kept"] == 2.0


def drifting(exponent: float, num: int = 300, length: int = 256) -> LossInputs:
    """Return sequences whose log ratio grows like t^0.5 (noise) or t (one drift per sequence)."""
    generator = torch.Generator().manual_seed(1)
    steps = 0.02 * torch.randn(num, length if exponent == 0.5 else 1, dtype=torch.float64, generator=generator)
    gaps = steps.expand(num, length).reshape(-1)
    return LossInputs(
        policy_logprobs=gaps - 1.0,
        behaviour_logprobs=torch.full_like(gaps, -1.0),
        loss_mask=torch.ones_like(gaps, dtype=torch.bool),
        cu_seqlens=torch.arange(0, num * length + 1, length),
    )


def test_the_growth_exponent_tells_noise_from_drift() -> None:
    noise, drift = diagnostics(drifting(0.5)), diagnostics(drifting(1.0))
    assert noise["sqrt_t_exponent"] == pytest.approx(0.5, abs=0.05)
    assert drift["sqrt_t_exponent"] == pytest.approx(1.0, abs=1e-9)
    assert noise["sqrt_t_sigma_1"] == pytest.approx(0.02, rel=0.1)
    sigma = noise["sqrt_t_sigma_1"]
    assert noise["sqrt_t_predicted_ess_frac"] == pytest.approx(math.exp(-(sigma**2) * 256))


def test_growth_counts_action_tokens_of_sequences_that_reach_them() -> None:
    batch = hard_batch(3)
    inputs = packed(batch)
    record = diagnostics(inputs).records["sqrt_t"]
    assert isinstance(record, Growth)
    lengths = [len(actives(s)) for s in batch.sequences]
    assert list(record.counts) == [sum(n >= 2**k for n in lengths) for k in range(len(record.counts))]
    fours = [
        math.fsum(clamp(s[i].policy - s[i].behaviour)[0] for i in actives(s)[:4])
        for s in batch.sequences
        if len(actives(s)) >= 4
    ]
    assert record.totals[2] == pytest.approx(math.fsum(fours), rel=1e-12)
    assert dict(record.spreads())[4.0] == pytest.approx(float(np.std(fours, ddof=1)), rel=1e-9)


def test_reduced_parts_equal_the_whole_batch_exactly() -> None:
    batch = hard_batch(8)
    versions = versions_of(batch)
    offsets = [0]
    for sequence in batch.sequences:
        offsets.append(offsets[-1] + len(sequence))

    def records(chosen: list[int]) -> Any:
        picked = [v for i in chosen for v in versions[offsets[i] : offsets[i + 1]]]
        inputs = packed(subset(batch, chosen), versions=torch.tensor(picked), policy_version=CURRENT)
        return diagnostics(inputs, truncated=torch.tensor([i % 3 == 0 for i in chosen])).records

    whole = finalise(records(list(range(10))))
    for cut in ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[9], [3, 0], [1, 8, 2], [4, 6], [5, 7]]):
        parts = [records(chosen) for chosen in cut]
        assert finalise(reduce(parts)) == pytest.approx(whole, rel=1e-12, nan_ok=True)
        assert finalise(reduce([reduce(parts[:1]), reduce(parts[1:])])) == pytest.approx(whole, rel=1e-12, nan_ok=True)


def test_histogram_quantiles_bound_the_exact_ones() -> None:
    found = measured(hard_batch(9))
    for kind in ("token", "seq", "geo"):
        for share in (95, 99):
            exact, bound = found[f"{kind}_weight_p{share}"], found[f"{kind}_weight_histogram_p{share}_bound"]
            assert bound >= exact * (1 - 1e-12) or bound == RATIO_EDGES[-1]
    assert list(RATIO_EDGES) == sorted(RATIO_EDGES)
    assert Histogram((1.0, 2.0), (0.0, 0.0, 3.0)).quantile(0.5) == math.inf
    assert math.isnan(Histogram((1.0, 2.0), (0.0, 0.0, 0.0)).quantile(0.5))
    assert Histogram((1.0, 2.0), (1.0, 3.0, 0.0)).quantile(0.25) == 1.0


def test_records_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(TypeError, match="'x' is a Sum in one part"):
        reduce([{"x": Sum(1.0)}, {"x": Mean(1.0, 2.0)}])
    assert reduce([{"x": Sum(1.0)}, {"y": Sum(2.0)}]) == {"x": Sum(1.0), "y": Sum(2.0)}
    merged = reduce([{"c": Counts(((1, 2.0),))}, {"c": Counts(((0, 1.0), (1, 3.0)))}])
    assert merged == {"c": Counts(((0, 1.0), (1, 5.0)))}


def test_the_largest_ratios_are_named_with_their_place() -> None:
    batch = hard_batch(6)
    versions = versions_of(batch)
    inputs = packed(batch, versions=torch.tensor(versions))
    rows = top_ratios(inputs, k=5)
    ratios = sorted(token_ratios(batch), reverse=True)
    assert [row["ratio"] for row in rows] == pytest.approx(ratios[:5], rel=1e-12)
    for row in rows:
        token = batch.tokens[int(row["token"])]
        assert token.active
        assert row["version"] == versions[int(row["token"])]
        assert row["policy_logprob"] == token.policy
        assert row["behaviour_logprob"] == token.behaviour
        assert row["advantage"] == token.advantage
        sequence = batch.sequences[int(row["sequence"])]
        assert sequence[actives(sequence)[int(row["position"]) - 1]] is token
    assert len(top_ratios(inputs, k=10**6)) == len(ratios)
    with pytest.raises(ConfigError, match="top_ratios needs"):
        top_ratios(packed(batch, behaviour_logprobs=None))


def test_lengths_and_truncation() -> None:
    batch = hard_batch(2)
    cut = torch.tensor([True, False] * 5)
    found = diagnostics(packed(batch), truncated=cut)
    lengths = [len(actives(s)) for s in batch.sequences]
    filled = [n for n in lengths if n]
    assert found["length_mean"] == pytest.approx(sum(filled) / len(filled))
    assert found["length_max"] == max(filled)
    assert found["length_p95"] == pytest.approx(float(np.percentile(filled, 95)))
    assert found["truncated_frac"] == pytest.approx(
        sum(bool(c) for c, n in zip(cut, lengths, strict=True) if n) / len(filled)
    )
    with pytest.raises(ShapeError, match="truncated must be"):
        diagnostics(packed(batch), truncated=cut[:3])


def test_rank_correlation_shares_ranks_between_ties() -> None:
    x = torch.tensor([1.0, 2.0, 2.0, 5.0])
    assert rank_correlation(x, x * x) == pytest.approx(1.0)
    assert rank_correlation(x, -x) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 4, 2, 3.
    assert rank_correlation(x, torch.tensor([0.0, 9.0, 1.0, 2.0])) == pytest.approx(3.0 / math.sqrt(4.5 * 5.0))
    assert math.isnan(rank_correlation(x, torch.ones(4)))
    assert math.isnan(rank_correlation(torch.zeros(0), torch.zeros(0)))


def test_quantiles_interpolate() -> None:
    values = torch.tensor([3.0, 1.0, 2.0, 10.0], dtype=torch.float64)
    assert quantiles(values, (0.0, 0.5, 1.0)).tolist() == [1.0, 2.5, 10.0]
    assert quantiles(values[:1]).tolist() == [3.0] * 4


def test_repetition_of_tokens_and_text() -> None:
    assert repetition_n([1, 2, 3, 4]) == 0.0
    assert repetition_n([1, 2, 3, 1, 2, 3, 1]) == pytest.approx(1 - 3 / 5)
    assert repetition_n([1, 2]) == 0.0
    assert repetition_n([7] * 5, n=1) == pytest.approx(0.8)
    with pytest.raises(ConfigError, match="n must be >= 1"):
        repetition_n([1], n=0)
    assert longest_run_share([1, 1, 2, 2, 2, 1]) == 0.5
    assert longest_run_share([]) == 0.0
    assert compression_ratio("ab" * 6000) > 10
    assert compression_ratio("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=2000))) < 3
    assert compression_ratio("") == 0.0
