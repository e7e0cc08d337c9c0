"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): makes our backend known by name.

Cheap and harmless for those who use vLLM for something else: it adds one name to a table, and the engine behind the
name, torch included, is imported only by a server that is started with that name. Streams are labelled
(`vllm_labels`) only where the environment asks for it.
"""

from __future__ import annotations

import os

from asyncrl.weight_sync import vllm_labels, vllm_speculation
from asyncrl.weight_sync.vllm_ranks import hear_every_rank

BACKEND = "asyncrl"
"""Chosen by `--weight-transfer-config '{"backend": "asyncrl"}'`."""

NCCL_BACKEND = "asyncrl_nccl"
"""For the transport `nccl`."""


def register() -> None:
    """Make the backend known to vLLM. vLLM may call this several times in one process."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM from before weight transfer: `asyncrl train` names the version it needs, others need nothing
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "asyncrl.weight_sync.vllm_engine", "FileTransferEngine")
        WeightTransferEngineFactory.register_engine(NCCL_BACKEND, "asyncrl.weight_sync.vllm_nccl", "NcclTransferEngine")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
    if os.environ.get(vllm_labels.SWITCH):
        vllm_labels.label_every_event()
        hear_every_rank()
    if os.environ.get(vllm_speculation.SWITCH):
        vllm_speculation.spread_on_cpu()
