"""Matrix products of float32 operands by oneDNN, which multiplies them as bfloat16 where the CPU has tiles (AMX).

Two bfloat16 numbers multiply exactly in float32. So for operands that hold bfloat16 values, such a product is the
float32 product with its additions in another order, several times faster. Any other operand is rounded to bfloat16
first, a relative error of up to 2^-9 an entry: whoever calls knows which of the two it is, and says so.

With AVX-512 BF16 but no tiles, oneDNN multiplies them in float32 all the same, and on an AMD EPYC (Zen 4) in 0.75 to
0.9 of the time that MKL, PyTorch's own choice, takes. Elsewhere (other CPUs, CUDA) nothing is switched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def has_fast_bfloat16() -> bool:
    """Whether float32 operands are multiplied as bfloat16 on this CPU: with tiles, several times faster."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("amx_bf16", False))


@contextlib.contextmanager
def bfloat16_products(model_dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 matrices by oneDNN inside, for a model in bfloat16 on a CPU that gains by it; sums stay float32.

    The setting belongs to the process and is put back on the way out.
    """
    if model_dtype != torch.bfloat16 or not (has_fast_bfloat16() or _has_fast_float32()):
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # added to the module when torch is imported
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def with_columns(matrix: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """[..., C + 2] of a matrix [..., C]; a product of two such adds `added` [...] to each row (None: the other one).

    So the addition comes before the product's one rounding. Two bfloat16 numbers hold the addend with 16 bits, an error
    below that of the rounding.
    """
    if added is None:
        high = low = matrix.new_ones(matrix.shape[:-1])
    else:
        high = added.to(matrix.dtype)
        low = (added - high).to(matrix.dtype)
    return torch.cat([matrix, high.unsqueeze(-1), low.unsqueeze(-1)], -1)


def _has_fast_float32() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
