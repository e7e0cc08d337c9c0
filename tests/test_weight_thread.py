"""The thread that loads weights beside a model that runs."""

from __future__ import annotations

import torch

from asyncrl.weight_sync.vllm_thread import staging_executor


def test_the_thread_beside_the_model_has_half_of_its_threads_and_the_model_keeps_all() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with staging_executor() as executor:
            assert executor.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 4
        torch.set_num_threads(1)
        with staging_executor() as executor:
            assert executor.submit(torch.get_num_threads).result() == 1
    finally:
        torch.set_num_threads(before)
