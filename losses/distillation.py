"""Divergences between a teacher's and a student's next-token distributions. `...` any leading axes, `V` vocabulary.

All take log-probs in nats (float32 or wider), teacher first, and return one number a token, >= 0 but for rounding,
differentiable by both. An outcome of probability 0 counts as 0 log 0 = 0; where the divergence is infinite (the one
weighs what the other excludes) it is returned as infinite.

Only a few of the V log-probs may be known. Then what is left of the probability is one more outcome, the tail, and the
divergence is that of the k + 1 outcomes: never negative, never more than the whole one, 0 for equal distributions, and
its gradient moves probability in and out of the tail. A raw sum over k entries has none of these properties.
"""

from __future__ import annotations

import math

import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses.presets import DIVERGENCES, SUPPORTS


def divergence(
    teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor, *, kind: str = "forward_kl", beta: float = 0.5
) -> torch.Tensor:
    """Return [...], the divergence `kind` of `DIVERGENCES` over the last axis of two [..., V]; `beta` is of "jsd".

    Raises: ConfigError for an unknown kind or a beta outside (0, 1); ShapeError for shapes that differ.
    """
    if teacher_logprobs.shape != student_logprobs.shape:
        raise ShapeError(
            f"teacher_logprobs is {list(teacher_logprobs.shape)} and student_logprobs {list(student_logprobs.shape)}"
        )
    if kind == "forward_kl":
        return forward_kl(teacher_logprobs, student_logprobs)
    if kind == "reverse_kl":
        return reverse_kl(teacher_logprobs, student_logprobs)
    if kind == "jsd":
        return generalised_jsd(teacher_logprobs, student_logprobs, beta=beta)
    raise ConfigError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {kind!r}")


def forward_kl(teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor) -> torch.Tensor:
    """Return [...], KL(teacher || student) = sum_v p_T log(p_T / p_S); by the student's logits, p_S - p_T.

    The student covers all that the teacher does. Source: GKD, arXiv:2306.13649, equation 1.
    """
    return _kl(teacher_logprobs, student_logprobs)


def reverse_kl(teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor) -> torch.Tensor:
    """Return [...], KL(student || teacher); by the student's logits, p_S (log(p_S / p_T) - KL).

    The student keeps to what the teacher finds likely. Source: MiniLLM, arXiv:2306.08543.
    """
    return _kl(student_logprobs, teacher_logprobs)


def generalised_jsd(
    teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor, *, beta: float = 0.5
) -> torch.Tensor:
    """Return [...], beta KL(p_T || m) + (1 - beta) KL(p_S || m) with m = beta p_T + (1 - beta) p_S; at most log 2.

    Divided by beta it tends to KL(p_T || p_S) for beta to 0, divided by 1 - beta to KL(p_S || p_T) for beta to 1; at 0
    and 1 themselves it is 0 everywhere, so they are refused. Finite whatever the supports.
    Source: GKD, arXiv:2306.13649, equation 2.
    Raises: ConfigError for a beta outside (0, 1).
    """
    if not 0.0 < beta < 1.0:
        raise ConfigError(
            f"beta must be inside (0, 1), got {beta}: its limits are divergence = 'forward_kl' and 'reverse_kl'"
        )
    # Where both are -inf, logaddexp has no gradient; the outcome does not exist, so any finite number will do.
    exists = (teacher_logprobs > -math.inf) | (student_logprobs > -math.inf)
    teacher, student = torch.where(exists, teacher_logprobs, 0.0), torch.where(exists, student_logprobs, 0.0)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher_logprobs, mixed) + (1.0 - beta) * _kl(student_logprobs, mixed)


def top_k_divergence(
    teacher_logprobs: torch.Tensor,
    student_logprobs: torch.Tensor,
    *,
    k: int,
    support: str = "teacher",
    kind: str = "forward_kl",
    beta: float = 0.5,
) -> torch.Tensor:
    """Return [...], the divergence of two [..., V] over the k likeliest outcomes of one of them and the tail.

    `support` tells whose outcomes: "teacher" or "student". A `k` of V or more is the whole divergence.
    Raises: as `divergence`; ConfigError for k < 1 or an unknown support.
    """
    if k < 1 or support not in SUPPORTS:
        raise ConfigError(f"k must be >= 1 and support one of {', '.join(SUPPORTS)}, got {k} and {support!r}")
    if k >= teacher_logprobs.shape[-1]:
        return divergence(teacher_logprobs, student_logprobs, kind=kind, beta=beta)
    ids = (teacher_logprobs if support == "teacher" else student_logprobs).detach().topk(k).indices
    return divergence(
        keep_with_tail(teacher_logprobs, ids), keep_with_tail(student_logprobs, ids), kind=kind, beta=beta
    )


def keep_with_tail(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return [..., k + 1], the log-probs of `token_ids` [..., k] int64 (all different) and of all others together.

    From whole `logprobs` [..., V] with k < V. The tail is summed from the others themselves, so it is exact however
    small it is.
    """
    others = logprobs.scatter(-1, token_ids, -math.inf)
    return torch.cat([logprobs.gather(-1, token_ids), others.logsumexp(-1, keepdim=True)], -1)


def append_tail(logprobs: torch.Tensor) -> torch.Tensor:
    """Return [..., k + 1], `logprobs` [..., k] of different outcomes and the log-prob of what they leave, log(1 - sum).

    1 - sum has no correct digit where it is below the dtype's epsilon (1.2e-7 in float32), and rounding can bring it to
    0 or below: such a tail counts as epsilon, and passes no gradient on. So a tail of 0 costs a student that keeps
    probability there about 16 nats a unit under the reverse KL in float32, not infinitely many, and two tails of 0 are
    equal.
    """
    epsilon = torch.finfo(logprobs.dtype).eps
    known = logprobs.logsumexp(-1, keepdim=True).clamp(max=math.log1p(-epsilon))
    # Each form loses its digits where the other one has them.
    tail = torch.where(known > -math.log(2.0), torch.log(-torch.expm1(known)), torch.log1p(-known.exp()))
    return torch.cat([logprobs, tail], -1)


def _kl(p_logprobs: torch.Tensor, q_logprobs: torch.Tensor) -> torch.Tensor:
    p = p_logprobs.exp()
    return (p * torch.where(p > 0, p_logprobs - q_logprobs, 0.0)).sum(-1)
