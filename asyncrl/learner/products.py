"""Matrix products that take float32 operands and multiply them as bfloat16, where the CPU has tiles for that (AMX).

Two bfloat16 numbers multiply exactly in float32. So for operands that hold bfloat16 values, such a product is the
float32 product with its additions in another order, several times faster. Any other operand is rounded to bfloat16
first, a relative error of up to 2^-9 an entry: whoever calls knows which of the two it is, and says so.

Elsewhere (other CPUs, CUDA) nothing is switched and float32 products stay float32 products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def has_fast_bfloat16() -> bool:
    """Whether products of bfloat16 run several times faster than those of float32 on this CPU.

    CPUs with AVX-512 BF16 alone gain less than the conversions cost, and keep float32.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("amx_bf16", False))


@contextlib.contextmanager
def bfloat16_products(model_dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 matrices as bfloat16 inside, for a model in bfloat16 on a CPU with tiles; sums stay float32.

    The setting belongs to the process and is put back on the way out.
    """
    if model_dtype != torch.bfloat16 or not has_fast_bfloat16():
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # added to the module when torch is imported
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
