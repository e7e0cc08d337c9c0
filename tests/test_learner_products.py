"""What the learner computes in a way of its own, to be fast: products, norms and attention, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from synthetic_groups import random_groups
from tiny_model import build_tiny_model

from asyncrl.learner import norm
from asyncrl.learner.attention import cut, tree_attention
from asyncrl.learner.credit import select
from asyncrl.learner.head import logprobs_and_entropy
from asyncrl.learner.model import load_model
from asyncrl.learner.products import bfloat16_products, has_fast_bfloat16
from asyncrl.learner.settings import LearnerSettings
from asyncrl.packing import AttentionBlock, Microbatch, split


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_products_of_bfloat16_numbers_keep_float32_accuracy() -> None:
    left, right = (random(512, 576, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    wanted = left.double() @ right.double().T
    with bfloat16_products(torch.bfloat16):
        found = left.float() @ right.float().T
    assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert ((left @ right.T) - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_other_numbers_are_rounded_only_where_the_cpu_is_said_to_do_so() -> None:
    left, right = (random(512, 576, seed=seed, dtype=torch.float32) for seed in (0, 1))
    wanted = left.double() @ right.double().T
    with bfloat16_products(torch.bfloat16):
        error = ((left @ right.T) - wanted).abs().max() / wanted.abs().max()
    assert (error > 1e-4) if has_fast_bfloat16() else (error < 2e-6)


def test_the_setting_of_products_is_put_back() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    left = random(256, 256, dtype=torch.float32)
    exact = left @ left
    for dtype in (torch.float32, torch.float64):
        with bfloat16_products(dtype):
            assert settings.fp32_precision == before
            assert torch.equal(left @ left, exact)
    with pytest.raises(RuntimeError), bfloat16_products(torch.bfloat16):
        left @ left[1:]
    assert settings.fp32_precision == before
    assert torch.equal(left @ left, exact)


def test_the_heads_gradient_in_bfloat16_is_exact_but_for_its_own_rounding() -> None:
    """Logits of up to 40, whose rounding to bfloat16 would move a probability and the gradient by per cents."""
    hidden = random(96, 64, dtype=torch.bfloat16).requires_grad_()
    weight = random(1500, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
    target = torch.arange(96) * 15
    scale = random(96, seed=2)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, target)
    (logprobs * scale + 0.1 * entropy * scale).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    wanted = torch.log_softmax(exact[0] @ exact[1].T, -1)
    wanted_entropy = -(wanted.exp() * wanted).sum(-1)
    (wanted.gather(1, target[:, None])[:, 0] * scale + 0.1 * wanted_entropy * scale).sum().backward()
    assert (logprobs - wanted.gather(1, target[:, None])[:, 0]).abs().max() < 2e-5
    for found, exactly in zip((hidden, weight), exact, strict=True):
        assert found.grad is not None
        assert exactly.grad is not None
        assert (found.grad - exactly.grad).norm() < 0.006 * exactly.grad.norm()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_what_a_likely_target_still_pulls_is_not_lost_to_rounding(with_entropy: bool) -> None:
    """Probabilities from 0.98 on: 1 - p is what is left of the gradient, and a bfloat16 p is often 1."""
    hidden = random(64, 32, dtype=torch.bfloat16).requires_grad_()
    weight = torch.cat([hidden.detach() * 0.8, random(500, 32, seed=1, dtype=torch.bfloat16)])
    target = torch.arange(64)
    exact = hidden.detach().double().requires_grad_()
    wanted = torch.log_softmax(exact @ weight.double().T / 0.9, -1)[target, target]
    likely = (wanted > -0.02) & (wanted < -1e-4)
    wanted[likely].sum().backward()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, target, temperature=0.9)
    (logprobs[likely].sum() + (0.0 * entropy.sum() if with_entropy else 0.0)).backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    assert exact.grad.norm() > 0.0
    assert (hidden.grad - exact.grad).norm() < 0.05 * exact.grad.norm()


def microbatch(share: bool) -> Microbatch:
    batch = select(random_groups(3, num_groups=2, prompt_tokens=150), LearnerSettings()).batch
    return split(batch, max_tokens=1000, share_prefixes=share)[0]


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Microbatch, scaling: float
) -> torch.Tensor:
    """softmax(q k^T scaling) v over each slot's own past, from the blocks, with whole scores."""
    slots = q.shape[2]
    sees = torch.zeros(slots, slots, dtype=torch.bool)
    for block in where.blocks:
        sees[block.queries, block.queries] = torch.ones_like(sees[block.queries, block.queries]).tril()
        for part in block.before:
            sees[block.queries, part] = True
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~sees, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def test_the_tiles_of_long_blocks_hold_every_pair_of_query_and_key_once_and_stay_small() -> None:
    for queries, before in ((5000, 0), (893, 2500), (4000, 3)):
        block = AttentionBlock(queries=slice(7, 7 + queries), before=(slice(0, before),) if before else ())
        tiles = cut(block)
        assert [slot for tile in tiles for slot in range(7 + queries)[tile.queries]] == list(range(7, 7 + queries))
        for tile in tiles:
            assert tile.num_queries * tile.num_keys <= 200_000
            assert tile.num_keys == before + tile.queries.stop - 7


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("scaling", [0.125, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.008)])
def test_attention_is_the_dense_one_whatever_the_scale(
    dtype: torch.dtype, tolerance: float, scaling: float, share: bool
) -> None:
    """In bfloat16 the tolerance, on the norm of all entries, is 1.5 times what was seen."""
    where = microbatch(share)
    assert any(len(block.before) == 1 for block in where.blocks) == share
    given = [random(1, heads, where.num_slots, 16, seed=heads, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    result, _ = tree_attention(torch.nn.Module(), *given, None, scaling=scaling, blocks=where.blocks)
    wanted = dense_attention(*exact, where, scaling)
    result.backward(result.detach())
    wanted.backward(result.detach().double())
    if dtype == torch.bfloat16 and not has_fast_bfloat16():
        others = (result != wanted.to(dtype)).double().mean()
        assert others < 0.01, "only the result is rounded, however its keys are dealt out"
    pairs = [(result, wanted), *zip([t.grad for t in given], [t.grad for t in exact], strict=True)]
    for found, exactly in pairs:
        assert found is not None
        assert exactly is not None
        assert (found - exactly).norm() < tolerance * exactly.norm()


def test_the_norm_passes_gradcheck_and_is_torchs_own() -> None:
    ours = norm.RMSNorm(torch.nn.Parameter(random(7)), 0.1)
    rows = random(2, 3, 7, seed=1).requires_grad_()
    torch.testing.assert_close(ours(rows), torch.nn.functional.rms_norm(rows, (7,), ours.weight, 0.1))
    assert torch.autograd.gradcheck(lambda x, w: norm.RMSNorm(w, 0.1)(x), (rows, ours.weight))


def test_the_norm_in_bfloat16_rounds_its_results_only() -> None:
    ours = norm.RMSNorm(torch.nn.Parameter(random(64, dtype=torch.bfloat16)), 1e-5)
    rows = random(1300, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
    exact = rows.detach().double().requires_grad_()
    weight = ours.weight.detach().double().requires_grad_()
    wanted = torch.nn.functional.rms_norm(exact, (64,), weight, 1e-5)
    ours(rows).backward(rows.detach().flip(0))
    wanted.backward(rows.detach().flip(0).double())
    torch.testing.assert_close(ours(rows).double(), wanted, rtol=2**-8, atol=1e-30)
    assert rows.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(ours.weight.grad.double(), weight.grad, rtol=2**-8, atol=1e-4)  # type: ignore[union-attr]


class CentredRMSNorm(torch.nn.Module):
    """Named as one, and subtracts the mean first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-5

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden - hidden.mean(-1, keepdim=True), (8,), self.weight, 1e-5)


@pytest.mark.slow
def test_norms_are_replaced_in_bfloat16_under_their_names_and_foreign_ones_are_left(tmp_path: Path) -> None:
    directory = build_tiny_model(tmp_path, dtype=torch.bfloat16)
    device = torch.device("cpu")
    names = load_model(directory, dtype=torch.float32, device=device).tensors().keys()
    model = load_model(directory, dtype=torch.bfloat16, device=device)
    assert model.tensors().keys() == names
    assert sum(isinstance(module, norm.RMSNorm) for module in model.model.modules()) == 5
    wide = load_model(directory, dtype=torch.float32, device=device)
    assert not any(isinstance(module, norm.RMSNorm) for module in wide.model.modules())
    assert norm.install(torch.nn.ModuleDict({"norm": CentredRMSNorm()})) == 0
