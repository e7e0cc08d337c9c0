"""Divergences from hidden states, tile by tile, against whole arrays of log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.learner import teacher_head
from asyncrl.learner.teacher_head import divergence_from_states, divergence_from_top_k
from asyncrl.losses import append_tail, divergence, keep_with_tail, top_k_divergence
from asyncrl.losses.presets import DIVERGENCES

_TEMPERATURE = 0.7


def arrays(rows: int, words: int, *, widths: tuple[int, int] = (4, 5), dtype: torch.dtype = torch.float64) -> Any:
    """Return the student's and the teacher's hidden states and heads."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    student = normal(rows, widths[0]).requires_grad_(), normal(words, widths[0]).requires_grad_()
    return *student, normal(rows, widths[1]), normal(words, widths[1])


def logprobs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden @ weight.T / _TEMPERATURE, -1)


def assert_same_with_gradients(found: torch.Tensor, wanted: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
    weights = torch.randn(len(found), dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad((weights * found).sum(), inputs),
        torch.autograd.grad((weights * wanted).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "support"), [(0, "teacher"), (7, "teacher"), (7, "student")])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_many_tiles_give_the_numbers_and_gradients_of_the_whole(kind: str, top_k: int, support: str) -> None:
    hidden, weight, teacher_hidden, teacher_weight = arrays(150, 30_000)
    assert len(teacher_head._tiles(hidden, weight)) > 1
    found = divergence_from_states(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        kind=kind,
        beta=0.3,
        top_k=top_k,
        support=support,
        temperature=_TEMPERATURE,
    )
    teacher, student = logprobs(teacher_hidden, teacher_weight), logprobs(hidden, weight)
    if top_k:
        wanted = top_k_divergence(teacher, student, k=top_k, support=support, kind=kind, beta=0.3)
    else:
        wanted = divergence(teacher, student, kind=kind, beta=0.3)
    assert_same_with_gradients(found, wanted, hidden, weight)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_given_log_probs_and_their_tail_give_the_numbers_of_the_whole(kind: str) -> None:
    hidden, weight, teacher_hidden, teacher_weight = arrays(20, 50)
    teacher = logprobs(teacher_hidden, teacher_weight)
    values, ids = teacher.topk(6)
    found = divergence_from_top_k(hidden, weight, ids, values, kind=kind, beta=0.3, temperature=_TEMPERATURE)
    wanted = divergence(append_tail(values), keep_with_tail(logprobs(hidden, weight), ids), kind=kind, beta=0.3)
    assert_same_with_gradients(found, wanted, hidden, weight)


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient() -> None:
    hidden, weight, _, _ = arrays(20, 50)
    for top_k in (0, 5):
        found = divergence_from_states(hidden, weight, hidden, weight, kind="reverse_kl", top_k=top_k)
        assert found.abs().max() < 1e-14
        for gradient in torch.autograd.grad(found.sum(), (hidden, weight)):
            assert gradient.abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_states_give_float32_and_gradients_in_their_own_dtype(dtype: torch.dtype) -> None:
    narrow = arrays(20, 50, dtype=dtype)
    hidden, weight, *teacher = (tensor.detach().double() for tensor in narrow)
    found = divergence_from_states(*narrow, kind="forward_kl")
    assert found.dtype == torch.float32
    wanted = divergence_from_states(hidden.requires_grad_(), weight.requires_grad_(), *teacher, kind="forward_kl")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    exact = torch.autograd.grad(wanted.sum(), (hidden, weight))
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(torch.autograd.grad(found.sum(), narrow[:2]), exact, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=rounding)


@pytest.mark.slow
def test_no_array_grows_with_rows_times_vocabulary() -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    Watch.largest = max(Watch.largest, tensor.numel())
            return result

    rows, words = 200, 100_000
    hidden, weight, *teacher = arrays(rows, words, widths=(2, 2), dtype=torch.float32)
    with Watch():
        divergence_from_states(hidden, weight, *teacher, kind="jsd").sum().backward()
    assert 0 < Watch.largest <= teacher_head._TILE_ELEMENTS < rows * words / 4
