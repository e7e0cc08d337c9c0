"""The critic's losses against plain floats with gradients derived by hand, and what must not change them."""

from __future__ import annotations

import math
import random
from statistics import pvariance

import pytest
import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.losses import clipped_value_loss, finalise, reduce, yes_no_loss, yes_no_value

EXACT = 1e-12


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(seed: int, number: int = 40) -> tuple[list[float], list[float], list[float], list[bool]]:
    """Return values, old values, returns and mask; old values lie on both sides of values, near and far."""
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) for _ in range(number)]
    old = [v + rng.choice([0.0, 0.1, -0.1, 0.6, -0.6]) for v in values]
    returns = [rng.choice([0.0, 1.0, rng.gauss(0, 1)]) for _ in range(number)]
    return values, old, returns, [rng.random() < 0.7 for _ in range(number)]


def expected_clipped(v: float, old: float, target: float, clip: float) -> tuple[float, float, bool]:
    """Return one prediction's loss, its derivative by v, and whether the clipped term was taken."""
    plain = 0.5 * (v - target) ** 2
    held = min(max(v, old - clip), old + clip)
    other = 0.5 * (held - target) ** 2
    if clip and other > plain:
        return other, 0.0, True  # v is outside [old - clip, old + clip], so the clipped term does not move with it
    return plain, v - target, False


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.5])
def test_the_clipped_value_loss_is_the_papers(clip: float) -> None:
    values, old, returns, mask = drawn(1)
    rows = [expected_clipped(*row, clip) for row in zip(values, old, returns, strict=True)]
    active = [i for i, m in enumerate(mask) if m]
    v = f64(values).requires_grad_()
    out = clipped_value_loss(v, f64(returns), torch.tensor(mask), old_values=f64(old), clip=clip)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.fsum(rows[i][0] for i in active) / len(active), rel=EXACT)
    assert v.grad is not None
    assert v.grad.tolist() == pytest.approx([rows[i][1] * mask[i] / len(active) for i in range(len(mask))], rel=EXACT)
    metrics = finalise(out.metrics)
    if clip:
        share = sum(rows[i][2] for i in active) / len(active)
        assert 0 < share < 1
        assert metrics["value_clip_fraction"] == pytest.approx(share)
    else:
        assert "value_clip_fraction" not in metrics
    assert out.token_loss.tolist() == pytest.approx([rows[i][0] * mask[i] for i in range(len(mask))], rel=EXACT)


def test_a_tie_of_both_terms_takes_the_one_with_a_gradient() -> None:
    v = f64([1.0]).requires_grad_()
    clipped_value_loss(v, f64([0.75]), torch.tensor([True]), old_values=f64([0.0]), clip=0.5).loss.backward()
    assert v.grad is not None
    assert v.grad.tolist() == [0.25]


def test_the_yes_no_loss_is_a_cross_entropy_with_the_plain_gradient() -> None:
    rng = random.Random(2)
    yes = [rng.gauss(0, 3) for _ in range(30)] + [40.0, -40.0]
    no = [rng.gauss(0, 3) for _ in range(30)] + [-40.0, 40.0]
    returns = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(30)] + [0.0, 1.0]
    y, n = f64(yes).requires_grad_(), f64(no).requires_grad_()
    out = yes_no_loss(y, n, f64(returns), torch.ones(32, dtype=torch.bool))
    out.loss.backward()
    wanted, slope = [], []
    for a, b, r in zip(yes, no, returns, strict=True):
        top = max(a, b)
        total = top + math.log(math.exp(a - top) + math.exp(b - top))
        wanted.append(-r * (a - total) - (1 - r) * (b - total))
        slope.append(math.exp(a - total) - r)
    assert out.token_loss.tolist() == pytest.approx(wanted, rel=1e-9, abs=EXACT)
    assert y.grad is not None
    assert n.grad is not None
    assert (y.grad * 32).tolist() == pytest.approx(slope, rel=1e-9, abs=EXACT)
    assert (n.grad + y.grad).abs().max() < EXACT
    assert abs(y.grad[30].item() * 32) == pytest.approx(1.0)  # confident and wrong: the gradient does not die
    assert yes_no_value(f64([1.0]), f64([-1.0])).item() == pytest.approx(1 / (1 + math.exp(-2)))


def test_both_losses_pass_gradcheck() -> None:
    values, old, returns, mask = drawn(3, 12)
    on = torch.tensor(mask)
    v, r, o = f64(values).requires_grad_(), f64(returns), f64(old)
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, r, on, old_values=o, clip=0.3).loss, (v,))
    soft, n = torch.sigmoid(r), f64(old).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: yes_no_loss(x, y, soft, on).loss, (v, n))


@pytest.mark.parametrize("kind", ["clipped", "yes_no"])
def test_microbatches_in_any_order_add_up_and_masked_slots_are_never_read(kind: str) -> None:
    values, old, returns, mask = drawn(4)
    returns = [1 / (1 + math.exp(-r)) for r in returns]
    blank = [x if m else math.nan for x, m in zip(values, mask, strict=True)]

    def part(places: list[int], number: int) -> tuple[float, dict[int, float], dict[str, object]]:
        v = f64([blank[i] for i in places]).requires_grad_()
        o, r = f64([old[i] if mask[i] else math.inf for i in places]), f64([returns[i] for i in places])
        r = torch.where(torch.tensor([mask[i] for i in places]), r, math.nan)
        on = torch.tensor([mask[i] for i in places])
        if kind == "clipped":
            out = clipped_value_loss(v, r, on, old_values=o, clip=0.2, num_loss_tokens=number)
        else:
            out = yes_no_loss(v, o, r, on, num_loss_tokens=number)
        out.loss.backward()
        assert v.grad is not None
        return out.loss.item(), dict(zip(places, v.grad.tolist(), strict=True)), dict(out.metrics)

    every = list(range(len(values)))
    off = [i for i in every if not mask[i]]
    order = every.copy()
    random.Random(5).shuffle(order)
    whole, gradient, metrics = part(every, sum(mask))
    cuts = [order[:7], off[:2], order[7:30], order[30:]]
    parts = [part(cut, sum(mask)) for cut in cuts]
    assert math.fsum(p[0] for p in parts) == pytest.approx(whole, rel=EXACT)
    found = {i: g for p in parts for i, g in p[1].items()}
    assert [found[i] for i in every] == pytest.approx([gradient[i] for i in every], rel=EXACT, abs=1e-15)
    assert all(gradient[i] == 0.0 for i in off)
    merged = finalise(reduce([p[2] for p in parts]))  # type: ignore[misc]
    assert merged == pytest.approx(finalise(metrics), rel=1e-10)  # type: ignore[arg-type]


def test_the_explained_variance_is_that_of_the_definition() -> None:
    values, _, returns, mask = drawn(6)
    metrics = finalise(clipped_value_loss(f64(values), f64(returns), torch.tensor(mask)).metrics)
    pairs = [(v, r) for v, r, m in zip(values, returns, mask, strict=True) if m]
    wanted = 1 - pvariance([r - v for v, r in pairs]) / pvariance([r for _, r in pairs])
    assert metrics["value_explained_variance"] == pytest.approx(wanted, rel=1e-10)
    assert metrics["value_mean"] == pytest.approx(math.fsum(v for v, _ in pairs) / len(pairs))
    assert metrics["return_mean"] == pytest.approx(math.fsum(r for _, r in pairs) / len(pairs))
    on = torch.tensor([True] * 3)
    perfect = finalise(clipped_value_loss(f64([1.0, 2.0, 4.0]), f64([1.0, 2.0, 4.0]), on).metrics)
    assert perfect["value_explained_variance"] == 1.0
    equal = finalise(clipped_value_loss(f64([1.0, 2.0, 4.0]), f64([0.1] * 3), on).metrics)
    assert math.isnan(equal["value_explained_variance"])


def test_with_nothing_active_the_loss_is_zero_with_a_graph() -> None:
    v, off = torch.full((3,), math.nan, requires_grad=True), torch.zeros(3, dtype=torch.bool)
    for out in (clipped_value_loss(v, v.detach(), off), yes_no_loss(v, v.detach(), v.detach(), off)):
        out.loss.backward()
        assert out.loss.item() == 0.0
        assert v.grad is not None
        assert v.grad.tolist() == [0.0] * 3
        assert math.isnan(finalise(out.metrics)["value_explained_variance"])


def test_what_cannot_be_used_is_refused() -> None:
    ones, on = torch.ones(2), torch.tensor([True, True])
    with pytest.raises(ShapeError, match=r"returns must be \[T\]"):
        clipped_value_loss(ones, torch.ones(3), on)
    with pytest.raises(ConfigError, match="clip must be >= 0"):
        clipped_value_loss(ones, ones, on, clip=-0.1)
    with pytest.raises(ConfigError, match="needs old_values"):
        clipped_value_loss(ones, ones, on, clip=0.1)
    with pytest.raises(ConfigError, match="returns must be finite where the loss is taken: entry 1 is nan"):
        clipped_value_loss(ones, torch.tensor([0.0, math.nan]), on)
    with pytest.raises(ConfigError, match="must be float32 or float64"):
        clipped_value_loss(ones.bfloat16(), ones, on)
    with pytest.raises(ConfigError, match=r"returns must be in \[0, 1\] for a yes/no value: entry 1 is 1.5"):
        yes_no_loss(ones, ones, torch.tensor([0.0, 1.5]), on)
    with pytest.raises(ShapeError, match="no_logits"):
        yes_no_loss(ones, torch.ones(1), ones, on)
