"""Weights through shared memory: the learner writes a file into /dev/shm, engines on the same host map it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from asyncrl.types import Verification
from asyncrl.weight_sync.publisher import FilePublisher
from asyncrl.weight_sync.stale import SHARED_MEMORY_DIRECTORY

if TYPE_CHECKING:
    import torch


class SharedMemoryPublisher(FilePublisher):
    """The learner's half: one copy of the weights, in memory that engines on this host read without another copy.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with SharedMemoryPublisher(run_id="example", directory=directory) as publisher:
        ...         manifest = publisher.publish({"weight": torch.ones(2, 3)}, 1)
        >>> manifest.version, manifest.num_bytes
        (1, 24)
    """

    transport = "shared_memory"
    durable = False

    def __init__(
        self,
        *,
        run_id: str,
        directory: str | os.PathLike[str] = SHARED_MEMORY_DIRECTORY,
        delta: bool = False,
        verification: Verification = Verification.DIGEST,
        cast_to: torch.dtype | None = None,
    ) -> None:
        super().__init__(run_id=run_id, directory=directory, delta=delta, verification=verification, cast_to=cast_to)
