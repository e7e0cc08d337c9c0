"""Divergences from a teacher, against sums written out from their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses import (
    append_tail,
    divergence,
    forward_kl,
    generalised_jsd,
    keep_with_tail,
    reverse_kl,
    top_k_divergence,
)
from asyncrl.losses.presets import DIVERGENCES, SUPPORTS

_V = 9


def logits(seed: int, rows: int = 4, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, _V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def distributions(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.log_softmax(logits(2 * seed), -1), torch.log_softmax(logits(2 * seed + 1), -1)


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def by_definition(p: Sequence[float], q: Sequence[float], kind: str, beta: float) -> float:
    """Return the divergence of a teacher p and a student q, both probabilities."""
    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    mixed = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


def merged(p: Sequence[float], kept: Sequence[int]) -> list[float]:
    return [*(p[v] for v in kept), math.fsum(a for v, a in enumerate(p) if v not in kept)]


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_is_its_definition(kind: str, beta: float) -> None:
    teacher, student = distributions()
    wanted = [
        by_definition(p, q, kind, beta) for p, q in zip(teacher.exp().tolist(), student.exp().tolist(), strict=True)
    ]
    assert divergence(teacher, student, kind=kind, beta=beta).tolist() == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_over_k_and_a_tail_it_is_the_definition_of_the_merged_outcomes(kind: str, k: int, support: str) -> None:
    teacher, student = distributions(1)
    wanted = []
    for p, q in zip(teacher.exp().tolist(), student.exp().tolist(), strict=True):
        theirs = p if support == "teacher" else q
        kept = sorted(range(_V), key=lambda v: -theirs[v])[:k]
        wanted.append(by_definition(merged(p, kept), merged(q, kept), kind, 0.3))
    found = top_k_divergence(teacher, student, k=k, support=support, kind=kind, beta=0.3)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    whole = divergence(teacher, student, kind=kind, beta=0.3)
    assert bool((found >= 0).all())
    assert bool((found <= whole + 1e-15).all())  # merging outcomes loses information, and only that


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_k_of_the_whole_vocabulary_is_the_whole_divergence(kind: str) -> None:
    teacher, student = distributions(2)
    whole = divergence(teacher, student, kind=kind)
    assert torch.equal(top_k_divergence(teacher, student, k=_V, kind=kind), whole)
    # A tail of exactly nothing is one more outcome that neither has.
    assert divergence(append_tail(teacher), append_tail(student), kind=kind).tolist() == pytest.approx(
        whole.tolist(), rel=1e-12, abs=1e-13
    )


@pytest.mark.parametrize("k", [2, _V])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: str, k: int) -> None:
    z = logits(3).requires_grad_()
    student = torch.log_softmax(z, -1)
    found = top_k_divergence(student.detach(), student, k=k, kind=kind)
    assert found.abs().max() < 1e-15
    (gradient,) = torch.autograd.grad(found.sum(), z)
    assert gradient.abs().max() < 1e-15


@pytest.mark.slow
def test_the_gradients_by_the_logits_are_the_known_ones() -> None:
    z = logits(5).requires_grad_()
    teacher, student = torch.log_softmax(logits(4), -1), torch.log_softmax(z, -1)
    p, q = teacher.exp(), student.exp().detach()
    (forward,) = torch.autograd.grad(forward_kl(teacher, student).sum(), z, retain_graph=True)
    torch.testing.assert_close(forward, q - p, rtol=1e-12, atol=1e-15)
    (reverse,) = torch.autograd.grad(reverse_kl(teacher, student).sum(), z)
    log_ratio = (q / p).log()
    torch.testing.assert_close(reverse, q * (log_ratio - (q * log_ratio).sum(-1, keepdim=True)), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("form", ["whole", "top_k", "given"])
def test_gradients_agree_with_finite_differences(kind: str, form: str) -> None:
    def loss(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        teacher, student = torch.log_softmax(t, -1), torch.log_softmax(s, -1)
        if form == "whole":
            return divergence(teacher, student, kind=kind, beta=0.3)
        if form == "top_k":
            return top_k_divergence(teacher, student, k=3, kind=kind, beta=0.3)
        return divergence(append_tail(teacher[:, :3]), append_tail(student[:, :3]), kind=kind, beta=0.3)

    assert torch.autograd.gradcheck(loss, (logits(6, 2).requires_grad_(), logits(7, 2).requires_grad_()))


def test_the_jsd_tends_to_the_two_kls() -> None:
    teacher, student = distributions(4)
    small = 1e-7
    left = generalised_jsd(teacher, student, beta=small) / small
    right = generalised_jsd(teacher, student, beta=1 - small) / small
    torch.testing.assert_close(left, forward_kl(teacher, student), rtol=1e-5, atol=0)
    torch.testing.assert_close(right, reverse_kl(teacher, student), rtol=1e-5, atol=0)
    half = generalised_jsd(teacher, student, beta=0.5)
    torch.testing.assert_close(half, generalised_jsd(student, teacher, beta=0.5), rtol=1e-13, atol=0)
    assert bool((half < math.log(2)).all())


def test_both_forms_of_the_tail_agree_and_a_small_one_keeps_its_digits() -> None:
    teacher, _ = distributions(5)
    ids = teacher.topk(4).indices
    torch.testing.assert_close(append_tail(teacher.gather(-1, ids)), keep_with_tail(teacher, ids), rtol=1e-12, atol=0)
    known = torch.log1p(-torch.tensor([1e-3, 0.4, 0.5, 0.6, 1 - 1e-9], dtype=torch.float64)).unsqueeze(-1)
    wanted = [math.log(tail) for tail in (1e-3, 0.4, 0.5, 0.6, 1 - 1e-9)]
    assert append_tail(known)[:, 1].tolist() == pytest.approx(wanted, rel=1e-11)
    sharp = torch.tensor([0.0, -40.0, -40.0, -40.0], dtype=torch.float64)
    tail = keep_with_tail(sharp - sharp.logsumexp(-1), torch.tensor([0]))[1]
    assert tail.item() == pytest.approx(math.log(3) - 40, rel=1e-14)  # 1 - sum would be 0 here


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tail_of_nothing_counts_as_epsilon_and_has_no_gradient(dtype: torch.dtype) -> None:
    # Float32 log-probs of a sure teacher: they add up to a little more than 1.
    beyond = torch.tensor([1e-7, -20.0], dtype=dtype, requires_grad=True)
    tail = append_tail(beyond)[2]
    assert tail.item() == pytest.approx(math.log(torch.finfo(dtype).eps))
    (gradient,) = torch.autograd.grad(tail, beyond)
    assert gradient.tolist() == [0.0, 0.0]
    for kind in DIVERGENCES:
        spread = torch.log(torch.tensor([0.5, 0.25], dtype=dtype)).requires_grad_()
        found = divergence(append_tail(beyond.detach()), append_tail(spread), kind=kind)
        (gradient,) = torch.autograd.grad(found, spread)
        assert bool(found.isfinite())
        assert bool(gradient.isfinite().all())
        same = divergence(append_tail(beyond.detach()), append_tail(beyond), kind=kind)
        assert same.item() == pytest.approx(0.0, abs=torch.finfo(dtype).eps)


def test_outcomes_that_do_not_exist_add_nothing_and_an_excluded_one_is_infinite() -> None:
    teacher = torch.log(torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64))
    student = torch.log(torch.tensor([0.25, 0.5, 0.25, 0.0], dtype=torch.float64)).requires_grad_()
    assert forward_kl(teacher, student).item() == pytest.approx(0.5 * math.log(2))
    assert reverse_kl(teacher, student).item() == math.inf
    wanted = by_definition([0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0], "jsd", 0.5)
    found = generalised_jsd(teacher, student)
    assert found.item() == pytest.approx(wanted)
    for value in (forward_kl(teacher, student), found):
        (gradient,) = torch.autograd.grad(value, student)
        assert bool(gradient.isfinite().all())


def test_what_cannot_be_computed_is_refused() -> None:
    teacher, student = distributions()
    with pytest.raises(ConfigError, match=r"beta must be inside \(0, 1\), got 1"):
        generalised_jsd(teacher, student, beta=1.0)
    with pytest.raises(ConfigError, match="divergence must be one of forward_kl"):
        divergence(teacher, student, kind="kl")
    with pytest.raises(ConfigError, match="k must be >= 1"):
        top_k_divergence(teacher, student, k=0)
    with pytest.raises(ShapeError, match="student_logprobs"):
        divergence(teacher, student[:, 1:])
