"""Attention over packed segments, as several kernels compute it: how far they lie from float64, and what they take.

Legend: `T` packed tokens, `H` query heads, `J` key heads, `D` the width of a head.

Every choice gets the same q [1, H, T, D], k and v [1, J, T, D] and the segments' bounds, and returns [1, T, H, D].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch

from asyncrl.bench.gpu_device import Device
from asyncrl.bench.gpu_settings import Shape
from asyncrl.bench.learner_batches import ragged_lengths
from asyncrl.bench.timing import Report
from asyncrl.learner.attention_kinds import choose, implementation
from asyncrl.packing import AttentionBlock

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def compare_attention(device: Device, shape: Shape) -> Report:
    """Return, for each choice, its times and its differences from float64; or why it was left out."""
    lengths = ragged_lengths(0, shortest=shape.longest // 8, longest=shape.longest, total=shape.microbatch_tokens)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    chance = torch.Generator(device=device.torch).manual_seed(0)

    def numbers(heads: int) -> torch.Tensor:
        size = (1, heads, bounds[-1], shape.head_width)
        return torch.randn(size, device=device.torch, dtype=torch.bfloat16, generator=chance)

    q, k, v, grad = numbers(shape.heads), numbers(shape.key_heads), numbers(shape.key_heads), numbers(shape.heads)
    grad = grad.transpose(1, 2)
    wanted = _pass(partial(_one_by_one, bounds=bounds), q.double(), k.double(), v.double(), grad.double())
    report: Report = {"num_tokens": bounds[-1], "num_segments": len(lengths), "choices": {}}
    for name, (choice, missing) in _choices(device, bounds).items():
        if missing:
            report["choices"][name] = {"left_out": missing}
            continue
        figures = device.measure(lambda run=choice: _pass(run, q, k, v, grad))  # type: ignore[misc]
        if "seconds" in figures:
            figures["forward_seconds"] = device.measure(lambda run=choice: run(q, k, v)).get("seconds")  # type: ignore[misc]
            found = _pass(choice, q, k, v, grad)
            differences = {
                f"{part}_relative_difference": _distance(one, other)
                for part, one, other in zip(("result", "grad_q", "grad_k", "grad_v"), found, wanted, strict=True)
            }
            figures |= differences
        report["choices"][name] = figures
    return report


def _choices(device: Device, bounds: Sequence[int]) -> dict[str, tuple[Attention, str]]:
    """Return name -> (attention, why it cannot run here or "")."""
    only_gpu = "" if device.is_gpu else "its kernel needs a GPU"
    flash = only_gpu or ("" if importlib.util.find_spec("flash_attn") else "the package flash_attn is not installed")
    varlen = only_gpu or (
        "" if importlib.util.find_spec("torch.nn.attention.varlen") else "this torch does not have it"
    )
    return {
        "learner": (partial(_learner, bounds=bounds), ""),
        "sdpa_masked": (partial(_masked, mask=_mask(bounds, device.torch)), ""),
        "sdpa_one_by_one": (partial(_one_by_one, bounds=bounds), ""),
        "flex": (_flex(bounds, device), only_gpu),
        "torch_varlen": (partial(_varlen, bounds=bounds), varlen),
        "flash_attn": (partial(_flash, bounds=bounds), flash),
    }


def _pass(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the result and the three gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    result = attention(*leaves)
    return result.detach(), *torch.autograd.grad(result, leaves, grad)


def _learner(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bounds: Sequence[int]) -> torch.Tensor:
    """What the learner takes on this device."""
    blocks = tuple(AttentionBlock(queries=slice(*run), before=()) for run in pairwise(bounds))
    scale = q.shape[-1] ** -0.5
    attention = implementation(choose("auto", q.device, torch.bfloat16))
    return attention(torch.nn.Module(), q, k, v, None, scaling=scale, blocks=blocks)[0]


def _mask(bounds: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T, T] bool: token t sees those before it in its own segment, and itself."""
    lengths = torch.tensor(bounds, device=device).diff()
    segment = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    return (segment.unsqueeze(1) == segment).tril_()


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
    return _sdpa(q, k, v, attn_mask=mask).transpose(1, 2)


def _one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bounds: Sequence[int]) -> torch.Tensor:
    parts = (slice(*run) for run in pairwise(bounds))
    return torch.cat([_sdpa(q[:, :, p], k[:, :, p], v[:, :, p], is_causal=True) for p in parts], 2).transpose(1, 2)


_sdpa = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)


def _flex(bounds: Sequence[int], device: Device) -> Attention:
    """PyTorch's flex attention, compiled at its first call, with the mask made once."""

    def first_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not kept:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            lengths = torch.tensor(bounds, device=device.torch).diff()
            segment = torch.arange(len(lengths), device=device.torch).repeat_interleave(lengths)

            def sees(_b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return (segment[query] == segment[key]) & (query >= key)

            mask = create_block_mask(sees, None, None, bounds[-1], bounds[-1], device=device.torch)
            kept.append(partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=True))
        result: torch.Tensor = kept[0](q, k, v)
        return result.transpose(1, 2)

    kept: list[Callable[..., torch.Tensor]] = []
    return first_call


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bounds: Sequence[int]) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = _edges(bounds, q.device)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    result = varlen_attn(q, k, v, edges, edges, longest, longest, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(result, torch.Tensor)
    return result.unsqueeze(0)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bounds: Sequence[int]) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    edges, longest = _edges(bounds, q.device)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    result: torch.Tensor = flash_attn_varlen_func(q, k, v, edges, edges, longest, longest, causal=True)
    return result.unsqueeze(0)


def _edges(bounds: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
    edges = torch.tensor(bounds, device=device, dtype=torch.int32)
    return edges, max(end - start for start, end in pairwise(bounds))


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
