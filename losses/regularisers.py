"""Terms beside the policy loss: KL to the reference, preference pairs, the entropy coefficient. `T` packed tokens."""

from __future__ import annotations

import torch

from asyncrl.losses.inputs import Prepared
from asyncrl.losses.ratios import bounded_exp, log_ratio


def reference_kl(prepared: Prepared, estimator: str) -> torch.Tensor:
    """Return [T], a per-token estimate of the KL from policy to reference, with d = clamp(reference - policy).

    As a loss: "k1" (-d) has zero expected gradient on-policy; "k2" (d^2 / 2) has that of KL(policy || reference); "k3"
    (e^d - d - 1) that of KL(reference || policy); "k3_is" multiplies k3 by policy / behaviour and differentiates both,
    the gradient of KL(policy || reference) off-policy too; "k3_value_k2_grad" shows k3 and learns by k2.
    Source: joschu.net/blog/kl-approx; arXiv:2512.21852; arXiv:2512.02556 for the ratio.
    """
    assert prepared.reference is not None
    d = log_ratio(prepared.reference, prepared.policy, prepared.mask)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    k3 = torch.expm1(d) - d  # exp(d) - d - 1 has no correct digit left for small d
    if estimator == "k3_value_k2_grad":
        k2 = d * d / 2
        return k2 - k2.detach() + k3.detach()
    if estimator == "k3_is":
        assert prepared.behaviour is not None
        ratio = bounded_exp(log_ratio(prepared.policy, prepared.behaviour, prepared.usable))
        return torch.where(prepared.usable, ratio * k3, 0.0)
    return k3


def pair_losses(prepared: Prepared, pairs: torch.Tensor, beta: float) -> torch.Tensor:
    """Return [P] for `pairs` [P, 2] int64, -log sigmoid(beta ((pc - rc) - (pr - rr))).

    Sums over the active tokens of the chosen (c) and the rejected (r) sequence, under policy and reference.
    The gradient vanishes as the margin grows. Source: DPO, arXiv:2305.18290.
    """
    assert prepared.reference is not None
    # float64 and one subtraction per token: a difference of two long sums can flip its sign in float32.
    margin_S = prepared.segments.sum(torch.where(prepared.mask, prepared.policy - prepared.reference, 0.0))
    return -torch.nn.functional.logsigmoid(beta * (margin_S[pairs[:, 0]] - margin_S[pairs[:, 1]]))


def next_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float = 0.005, low: float = 0.0, high: float = 1.0
) -> float:
    """Return the entropy coefficient for the next step: `delta` higher while `entropy` (nats) is below `target`.

    `coef` moves by `delta` a step and stays in [low, high]; a NaN entropy (nothing measured) leaves it as it is.
    """
    if entropy != entropy:
        return coef
    return min(high, max(low, coef + delta if entropy < target else coef - delta))
