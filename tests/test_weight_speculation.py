"""Settings of requests, spread over the tokens that were guessed for each."""

from __future__ import annotations

import pytest
import torch

from asyncrl.weight_sync.vllm_speculation import spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_setting_is_spread_over_the_tokens_of_its_request(dtype: torch.dtype) -> None:
    counts = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    found = spread(torch.tensor([3, 9, 0, 7], dtype=dtype), counts, 6, replace_from=0, replace_to=1)
    assert found.tolist() == [3, 3, 1, 1, 1, 7]
    assert found.dtype == dtype
