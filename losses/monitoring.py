"""What to watch of an off-policy step, before any clipping, truncation or masking. `T` packed tokens, `S` sequences.

L = clamp(policy - behaviour, -20, 20) and r = e^L over the active tokens. Records reduce exactly over microbatches and
ranks; quantiles are exact for the batch that was given, and bounds from a log-spaced histogram after a reduction.
Nothing here changes the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.inputs import LossInputs, Prepared, prepare
from asyncrl.losses.ratios import MAX_LOG_RATIO, action_position, bounded_exp, log_ratio
from asyncrl.losses.recording import Recorder
from asyncrl.losses.reduction import (
    LOG_EDGES,
    RATIO_EDGES,
    EffectiveSampleSize,
    Groups,
    Growth,
    Histogram,
    Record,
    finalise,
)
from asyncrl.losses.segments import prefix_sum
from asyncrl.losses.staleness import record_staleness
from asyncrl.losses.statistics import QUANTILES, quantiles, rank_correlation


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """What `diagnostics` returns.

    Example:
        >>> one = torch.tensor([-1.0])
        >>> inputs = LossInputs(policy_logprobs=one + 0.5, behaviour_logprobs=one, loss_mask=torch.tensor([True]),
        ...                     cu_seqlens=torch.tensor([0, 1]))
        >>> round(diagnostics(inputs)["token_weight_max"], 3)
        1.649
    """

    values: Mapping[str, float]
    """Exact for the batch that was given; NaN where nothing was measured."""
    records: Mapping[str, Record]
    """For `asyncrl.losses.reduce`."""

    def __getitem__(self, name: str) -> float:
        return self.values[name]


def diagnostics(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    success_reward: float = 0.5,
    max_reward: float = 1.0,
    truncated: torch.Tensor | None = None,
) -> Diagnostics:
    """Return what there is to see in one packed batch; `behaviour_logprobs` is the only extra need.

    Weights of tokens (`token_weight_*`), of sequences (`seq_weight_*`, the product) and their geometric mean
    (`geo_weight_*`): max, min, mean, p50, p95, p99, p999. Effective sample sizes `token_ess`, `seq_ess`,
    `token_ess_staleness_N`, `seq_ess_staleness_N` (by a sequence's oldest token), each with `_frac`.
    `token_weight_staleness_BUCKET` is a histogram of the tokens' weights for each of `STALENESS_BUCKETS`.
    `frac_ratio_below|above` against the clip bounds, and the part of them that loses gradient,
    `clip_frac_low|high|dual`. `kl_k1`, `kl_k3`, `chi2` from behaviour to policy. `mismatch_*` at staleness 0: proximal
    (policy where that is missing) against behaviour. Staleness by token and by sequence; `sqrt_t_*`; `zero_variance_*`
    by group (success: reward > `success_reward`; all-pass: reward >= `max_reward`); entropy in nats; lengths in active
    tokens; `truncated_frac` from `truncated` [S] bool. A NaN reward is no reward. What the inputs lack is left out.
    Raises: ConfigError without behaviour log-probs; ShapeError, ConfigError as `evaluate`.
    """
    if inputs.behaviour_logprobs is None:
        raise ConfigError("diagnostics need behaviour_logprobs [T], and LossInputs.behaviour_logprobs is None")
    with torch.no_grad():
        p = prepare(inputs)
        assert p.behaviour is not None
        record = Recorder()
        exact: dict[str, float] = {}
        raw = torch.where(p.usable, p.policy - p.behaviour, 0.0)
        L = log_ratio(p.policy, p.behaviour, p.usable)
        r = L.exp()
        for name, count in p.counts.items():
            record.sum(name, count)
        record.sum("log_ratio_clamped", (raw.abs() > MAX_LOG_RATIO).sum())
        record.sum("num_loss_tokens", p.mask.sum())
        exact |= _weights(record, "token", r, L, p.usable)
        filled = p.lengths > 0
        sums = p.segments.sum(L)
        product = bounded_exp(sums)
        exact |= _weights(record, "seq", product, sums, filled)
        means = sums / p.lengths.clamp(min=1.0)
        exact |= _weights(record, "geo", means.exp(), means, filled)
        record.mean("kl_k1", -L, p.usable)
        record.mean("kl_k3", torch.expm1(L) - L, p.usable)
        record.mean("chi2", r.square() - 1.0, p.usable)
        _clip_fractions(record, p, r, clip_low, clip_high, dual_clip)
        record.mean("sampled_entropy", -p.behaviour, p.usable)
        if p.entropy is not None:
            record.mean("entropy", p.entropy, p.mask)
        if inputs.versions is not None:
            record_staleness(record, inputs, p, L, r, product)
        _sqrt_t(record, p, L)
        exact |= _lengths(record, inputs, p)
        if inputs.rewards is not None and inputs.group_index is not None:
            _groups(record, inputs.rewards, inputs.group_index, success_reward, max_reward)
        if truncated is not None:
            if truncated.shape != filled.shape:
                raise ShapeError(f"truncated must be [S] = {list(filled.shape)}, got {list(truncated.shape)}")
            record.mean("truncated_frac", truncated.double(), filled)
        records = record.records()
    return Diagnostics(values={**finalise(records), **exact}, records=records)


def top_ratios(inputs: LossInputs, k: int = 64) -> list[dict[str, float]]:
    """Return the `k` active tokens with the largest policy / behaviour ratio, largest first, for attribution.

    Each has `token` (index into T), `sequence`, `position` (1-based among the sequence's active tokens), `ratio`,
    `policy_logprob`, `behaviour_logprob` (nats), and `version` and `advantage` where the inputs have them. A ratio is
    at most 1 / (behaviour probability), so a large one is a token that was sampled rarely.
    Raises: ConfigError without behaviour log-probs.
    """
    if inputs.behaviour_logprobs is None:
        raise ConfigError("top_ratios needs behaviour_logprobs [T], and LossInputs.behaviour_logprobs is None")
    with torch.no_grad():
        p = prepare(inputs)
        assert p.behaviour is not None
        L = torch.where(p.usable, log_ratio(p.policy, p.behaviour, p.usable), -torch.inf)
        chosen = L.topk(min(k, int(p.usable.sum()))).indices
        columns = {
            "token": chosen,
            "sequence": p.segments.index[chosen],
            "position": action_position(p)[chosen],
            "ratio": L[chosen].exp(),
            "policy_logprob": p.policy[chosen],
            "behaviour_logprob": p.behaviour[chosen],
        }
        if inputs.versions is not None:
            columns["version"] = inputs.versions[chosen]
        if p.advantages is not None:
            columns["advantage"] = p.advantages[chosen]
        rows = torch.stack([column.double() for column in columns.values()], dim=1).tolist()
    whole = {"token", "sequence", "position", "version"}
    return [{n: int(v) if n in whole else v for n, v in zip(columns, row, strict=True)} for row in rows]


def _weights(record: Recorder, kind: str, w: torch.Tensor, log_w: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Record one kind of importance weight and return its exact quantiles."""
    record.max(f"{kind}_weight_max", w, mask)
    record.min(f"{kind}_weight_min", w, mask)
    record.mean(f"{kind}_weight_mean", w, mask)
    active = torch.where(mask, w, 0.0)
    if kind != "geo":
        record.add(lambda v: {f"{kind}_ess": EffectiveSampleSize(*v)}, active.sum(), active.square().sum(), mask.sum())
    edges = torch.tensor(LOG_EDGES, dtype=torch.float64, device=w.device)
    bins = torch.bucketize(log_w, edges, right=True)[mask]
    counts = torch.bincount(bins, minlength=len(LOG_EDGES) + 1)
    record.add(lambda v: {f"{kind}_weight_histogram": Histogram(RATIO_EDGES, tuple(v))}, counts)
    found = quantiles(w[mask]).tolist()
    return {f"{kind}_weight_{name}": value for name, value in zip(QUANTILES, found, strict=True)}


def _clip_fractions(
    record: Recorder, p: Prepared, r: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> None:
    below, above = r < 1.0 - clip_low, r > 1.0 + clip_high
    record.mean("frac_ratio_below", below, p.usable)
    record.mean("frac_ratio_above", above, p.usable)
    if p.advantages is not None:
        record.mean("clip_frac_low", below & (p.advantages < 0), p.usable)
        record.mean("clip_frac_high", above & (p.advantages > 0), p.usable)
        record.mean("clip_frac_dual", (r > dual_clip) & (p.advantages < 0), p.usable)
        record.mean("zero_adv_token_frac", p.advantages == 0, p.mask)


def _sqrt_t(record: Recorder, p: Prepared, L: torch.Tensor) -> None:
    """Record the spread over sequences of the cumulative log ratio at t = 1, 2, 4, ... active tokens."""
    position = action_position(p)
    powers = max(1, int(p.lengths.max()).bit_length()) if p.lengths.numel() else 1
    power = position.clamp(min=1.0).log2()
    chosen = p.mask & (power == power.floor())
    at = power[chosen].long()
    cumulative = prefix_sum(L, p.segments)[chosen]

    def by_power(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(powers).index_add(0, at, values)

    record.add(
        lambda v: {"sqrt_t": _growth(v, powers)},
        by_power(torch.ones_like(cumulative)),
        by_power(cumulative),
        by_power(cumulative.square()),
        p.lengths.sum(),
    )


def _growth(v: Sequence[float], n: int) -> Growth:
    return Growth(tuple(v[:n]), tuple(v[n : 2 * n]), tuple(v[2 * n : 3 * n]), v[3 * n])


def _lengths(record: Recorder, inputs: LossInputs, p: Prepared) -> dict[str, float]:
    filled = p.lengths > 0
    record.mean("length_mean", p.lengths, filled)
    record.max("length_max", p.lengths, filled)
    median, p95 = quantiles(p.lengths[filled], (0.5, 0.95)).tolist()
    exact = {"length_p50": median, "length_p95": p95}
    if inputs.rewards is not None:
        scored = filled & ~inputs.rewards.isnan()
        exact["length_reward_rank_correlation"] = rank_correlation(p.lengths[scored], inputs.rewards[scored])
    return exact


def _groups(
    record: Recorder, rewards: torch.Tensor, group_index: torch.Tensor, success_reward: float, max_reward: float
) -> None:
    scored = ~rewards.isnan()
    reward = rewards[scored].double()
    groups, group = torch.unique(group_index[scored], return_inverse=True)
    num = len(groups)
    columns = [
        groups,
        torch.bincount(group, minlength=num),
        reward.new_full((num,), torch.inf).scatter_reduce(0, group, reward, "amin"),
        reward.new_full((num,), -torch.inf).scatter_reduce(0, group, reward, "amax"),
        torch.bincount(group, (reward > success_reward).double(), minlength=num),
    ]

    def make(v: Sequence[float]) -> dict[str, Record]:
        rows = zip(*(v[i * num : (i + 1) * num] for i in range(5)), strict=True)
        return {"zero_variance": Groups(tuple((int(r[0]), r[1], r[2], r[3], r[4]) for r in rows), max_reward)}

    record.add(make, *columns)
