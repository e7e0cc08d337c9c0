"""Linear weights whose elements can be written one by one: torch's packing for a CPU, in this process."""

from __future__ import annotations

import pytest
import torch

from asyncrl.weight_sync.vllm_packing import Layouts, PackedLinear, UnknownLayoutError, words_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(96, 64), (300, 70), (3, 1), (1, 64)])
def test_a_value_that_is_written_where_the_layout_says_is_the_weights_value(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Shapes that need padding, and more than 255 rows, whose indices take two digits."""
    generator = torch.Generator().manual_seed(0)
    weight, wanted = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    layout = Layouts().of(weight.shape, dtype)
    linear = PackedLinear(weight)
    words_of(linear.packed)[layout.rows[:, None] + layout.columns] = words_of(wanted).reshape(shape)
    x = torch.randn((5, shape[1]), generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    assert torch.equal(linear(x, None, bias), PackedLinear(wanted)(x, None, bias))
    torch.testing.assert_close(linear(x, None, None), x @ wanted.T, rtol=2e-2, atol=2e-2)


def exchange_two(weight: torch.Tensor) -> torch.Tensor:
    """Pack plainly, except that two elements away from first row and column change places."""
    packed = weight.clone()
    packed[1, 2], packed[2, 1] = weight[2, 1], weight[1, 2]
    return packed


def drop_a_row(weight: torch.Tensor) -> torch.Tensor:
    packed = weight.clone()
    packed[2] = 0
    return packed


def repeat_a_row(weight: torch.Tensor) -> torch.Tensor:
    packed = weight.clone()
    packed[2] = weight[1]
    return packed


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        (exchange_two, r"\[4, 3\].* is no sum of rows and columns"),
        (drop_a_row, "3 of 4 indices"),
        (repeat_a_row, "does not hold every index once"),
    ],
)
def test_a_layout_that_is_no_sum_of_rows_and_columns_is_not_taken_for_one(pack: object, words: str) -> None:
    with pytest.raises(UnknownLayoutError, match=words):
        Layouts(pack).of(torch.Size((4, 3)), torch.bfloat16)  # type: ignore[arg-type]
