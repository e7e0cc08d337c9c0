"""vLLM's NCCL trainer and worker engines in one process, over a communicator that hands tensors on in memory."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

_PATIENCE_S = 60.0  # a rank that waits for longer has lost a tensor


class FakeCommunicator:
    """What both sides take for vLLM's `PyNcclCommunicator`: rank 0 sends to one other rank."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.in_transit: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """What becomes of a tensor on its way."""

    def side(self, rank: int) -> FakeSide:
        """Return one rank's end."""
        return FakeSide(self, rank)


class FakeSide:
    """One rank's end of a `FakeCommunicator`."""

    def __init__(self, communicator: FakeCommunicator, rank: int) -> None:
        self._communicator, self._rank = communicator, rank

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        """Send on rank 0, receive on the other, as NCCL does in place."""
        if self._rank == src:
            self._communicator.sent.put(self._communicator.in_transit(tensor.clone()))
        else:
            received = self._communicator.sent.get(timeout=_PATIENCE_S)
            assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(received)

    def destroy(self) -> None:
        """Leave."""


class LocalEngines:
    """One engine in this process, as `asyncrl.weight_sync.nccl.EngineControl`; notes what is asked of it, in order."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls: list[str] = []
        self.label: str | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group."""
        self.calls.append("init")
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        """Begin."""
        self.calls.append("start")
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Receive."""
        self.calls.append("update")
        self.engine.receive_weights(self.engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End and take the label."""
        self.calls.append("finish")
        self.engine.finish_weight_update()
        self.label = weight_version

    def pause(self) -> None:
        """Note it."""
        self.calls.append("pause")

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Ask the engine."""
        self.calls.append("reports")
        return [self.engine.report()]

    def resume(self) -> None:
        """Note it."""
        self.calls.append("resume")


def without_cuda(patch: pytest.MonkeyPatch) -> FakeCommunicator:
    """Let vLLM's two engines meet in memory instead of on GPUs, and return where."""
    from vllm.distributed.weight_transfer import nccl_engine

    communicator = FakeCommunicator()
    patch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: communicator.side(0))
    patch.setattr(nccl_engine, "worker_init_process_group", lambda info, config: communicator.side(1))
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    return communicator
